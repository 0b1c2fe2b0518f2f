"""The protocol of claims: a verdict follows from ranges and evidence, and from nothing else."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from repro import claims
from repro.claims import Claim, Evidence, Finding, Origin, Part, Verdict, agreement, rows, tolerances
from repro.experiments import names
from repro.experiments.checkpointing import study_note_faults as faults
from repro.measuring.records import load

NAN = math.nan


def part(value: float, evidence: Evidence = Evidence.COUNTED, **more: object) -> Part:
    return Part(what="x", value=value, evidence=evidence, **{"low": 1.0, "high": 2.0, **more})


def claim(name: str, *parts: Part) -> Claim:
    return rows()[name].found(Finding(parts=parts))


def test_a_part_is_judged_by_its_range_and_its_evidence() -> None:
    assert part(1.5).verdict is Verdict.REPRODUCED
    assert part(1.03).verdict is part(1.95).verdict is Verdict.REPRODUCED
    assert part(2.05).verdict is part(0.97).verdict is Verdict.REFUTED
    for edge in (0.99, 1.01, 1.97, 2.03):  # within 2 % of an end
        assert part(edge).verdict is Verdict.WITHIN_LIMITS
        assert part(edge).finding.endswith("(on the edge)")
        assert part(edge, Evidence.PUBLISHED).verdict is Verdict.CONSISTENT
    assert part(3.0, low=3.0, high=3.0).verdict is Verdict.REPRODUCED  # a count has no edge
    assert part(3.01, low=3.0, high=3.0).verdict is Verdict.REFUTED
    assert part(NAN).verdict is Verdict.NOT_TESTED
    wide = {"limits": (0.5, 3.0), "why": "on Sundays"}
    assert part(2.5, **wide).verdict is Verdict.WITHIN_LIMITS
    assert part(2.5, **wide).finding == "x 2.5 (on Sundays)"
    assert part(3.1, **wide).verdict is Verdict.REFUTED
    assert part(1.5, **wide).falsifier == "x outside 0.5 to 3"
    for evidence in (Evidence.PUBLISHED, Evidence.DERIVED):
        assert part(1.5, evidence).verdict is Verdict.CONSISTENT
        assert part(2.5, evidence, **wide).verdict is Verdict.CONSISTENT
        assert part(9.0, evidence).verdict is Verdict.REFUTED
    fallback = part(NAN, otherwise=part(1.5, Evidence.PUBLISHED))
    assert fallback.verdict is Verdict.CONSISTENT
    assert part(5.0, otherwise=part(1.5, Evidence.PUBLISHED)).verdict is Verdict.REFUTED
    near = agreement("y", 2.9, 2.0, tolerances.TIME, Evidence.COUNTED)
    assert near.verdict is Verdict.WITHIN_LIMITS
    assert near.value == 1.45
    assert agreement("y", 3.1, 2.0, tolerances.TIME, Evidence.COUNTED).verdict is Verdict.REFUTED
    printed = agreement("y", 2.9, 2.0, tolerances.HEADLINE, Evidence.PUBLISHED)
    assert printed.verdict is Verdict.REFUTED, "limits are for what was run"
    none = agreement("y", 1.0, 0.0, tolerances.TIME, Evidence.COUNTED)
    assert none.verdict is Verdict.NOT_TESTED
    with pytest.raises(ValueError, match="without saying why"):
        agreement("y", 1.0, 1.0, tolerances.TIME, Evidence.COUNTED, share=0.5)


def test_the_sentence_on_times_is_what_the_records_say() -> None:
    """Six in ten have every repetition within 15 %, 97 in 100 within half; none is of a card."""
    repeated = [r for r in load(list(names()), local=False) if r.source == "measured" and r.spread_min is not None]
    spread = [max(r.spread_max / r.value - 1, 1 - r.spread_min / r.value) for r in repeated]
    assert len(spread) > 200
    within = [sum(ends <= most for ends in spread) / len(spread) for most in (0.15, 0.5)]
    assert within == pytest.approx([0.6, 0.97], abs=0.02)
    assert not any("NVIDIA" in str(r.device) for r in repeated)


def test_a_part_that_nothing_can_overturn_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be overturned"):
        part(1.0, low=-math.inf, high=math.inf)
    with pytest.raises(ValueError, match="above high"):
        part(1.0, low=3.0)
    with pytest.raises(ValueError, match="narrower"):
        part(1.0, limits=(1.5, 3.0), why="z")
    with pytest.raises(ValueError, match="without saying"):
        part(1.0, limits=(0.5, 3.0))


def test_a_claim_is_as_good_as_its_weakest_part() -> None:
    good = claim("K5", part(1.5), part(1.6))
    assert good.verdict is Verdict.REPRODUCED
    assert claim("K5", part(1.5), part(9)).verdict is Verdict.REFUTED
    mixed = claim("K5", part(1.5), part(1.5, Evidence.DERIVED))
    assert mixed.verdict is Verdict.CONSISTENT
    assert mixed.evidence == f"{Evidence.COUNTED} + {Evidence.DERIVED}"
    assert mixed.findings == "x 1.5: reproduced; x 1.5: consistent"
    assert claim("K5", part(1.5), part(NAN)).verdict is Verdict.NOT_TESTED
    assert claim("K5").verdict is Verdict.NOT_TESTED


def test_conditions_keep_a_verdict_down() -> None:
    good = claim("K5", part(1.5))
    for field, most in (
        ("chosen", Verdict.CONSISTENT),
        ("other", Verdict.CONSISTENT),
        ("partial", Verdict.WITHIN_LIMITS),
        ("needs", Verdict.NOT_TESTED),
    ):
        assert dataclasses.replace(good, **{field: "why"}).verdict is most
    bad = claim("K5", part(9.0))
    assert dataclasses.replace(bad, partial="why").verdict is Verdict.REFUTED


def test_coefficients_chosen_to_match_are_consistent_at_most() -> None:
    assert rows()["FA-1 Fig. 2 middle"].chosen
    matched = claim("FA-1 Fig. 2 middle", part(1.5))
    assert matched.parts[0].verdict is Verdict.REPRODUCED
    assert matched.verdict is Verdict.CONSISTENT
    assert claim("FA-1 Fig. 2 middle", part(9)).verdict is Verdict.REFUTED


def test_a_verdict_cannot_be_typed() -> None:
    assert "verdict" not in {field.name for field in dataclasses.fields(Claim)}
    root = Path(claims.__file__).parents[2]
    texts = [*root.glob("figures/**/*.py"), *root.glob("repro/claims/**/*.py")]
    words = re.compile(r"\b(holds within|does not hold|Verdict\.(REPRODUCED|REFUTED))")
    said = [
        f.name
        for f in texts
        if f.name not in ("protocol.py", "verdict_table.py", "verdict_strip.py") and words.search(f.read_text())
    ]
    assert said == []


def test_every_claim_and_fault_of_the_notes_is_a_row_with_its_source() -> None:
    names = {part for name in rows() for part in re.findall(r"\b[KF]\d+\b", name)}
    assert {f"K{i}" for i in range(1, 17)} | {f"F{i}" for i in range(1, 8)} <= names
    for row in rows().values():
        assert row.statement
        assert (row.work.origin is Origin.OURS) == (row.source == "this package")


def test_two_claims_of_one_name_are_refused() -> None:
    known = rows()["K1"]
    with pytest.raises(ValueError, match="'K1' is claimed by"):
        claims.claim("K1", "twice", known.work, experiments=(), shown="")(known.judge)


def test_judging_needs_no_plotting_library() -> None:
    code = "import sys; from repro.claims import rows; rows(); print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_faults_are_shown_by_running_them() -> None:
    for name, run in faults.ERRORS.items():
        assert run(faults.NOTED) > 0.1, name
        assert run(faults.CORRECT) < 1e-12, name
    assert faults.f3(faults.NOTED) == 1.0  # twice the gradient
    states_alone = [faults.peak_states(n, faults.NOTED) for n in faults.LENGTHS]
    assert states_alone[-1] > faults.LENGTHS[-1] / 2
    assert faults.extra_forward(8, faults.CORRECT) == 7 / 8
    assert faults.tile_side(64, faults.NOTED) == 0
    assert faults.tile_side(64, faults.CORRECT) >= 128


def test_the_correct_online_update_is_exact_for_every_block() -> None:
    q, k, v, _ = faults.attention_inputs(3)
    exact = faults.softmax(q @ k.T / 4) @ v
    for block in (1, 7, 16, 64):
        ours = faults.online(q, k, v, block, keep_old_sum=True)
        np.testing.assert_allclose(ours, exact, rtol=1e-12, atol=1e-13)
        noted = faults.online(q, k, v, block, keep_old_sum=False)
        assert (abs(noted - exact).max() > 1e-3) == (block < 64), "right only with one block"
