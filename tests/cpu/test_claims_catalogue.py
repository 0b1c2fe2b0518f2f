"""Claims: every one has a row, every verdict is computed, and data that disagree change it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pytest

from analysis.model_states import model_state_bytes
from repro import claims
from repro.claims import attention, faults, states
from repro.experiments import tidy
from repro.records import Record, frame

WORDS = ("holds", "does not hold", "open")


@pytest.fixture(scope="module")
def empty() -> pandas.DataFrame:
    """A frame with every column and no row."""
    return frame([]).reindex(columns=[*frame([]).columns, "part", "policy", "mode", "ranks"])


def test_the_catalogue_has_every_claim_and_fault() -> None:
    names = {name.split(",")[0] for name in claims.CATALOGUE}
    assert {f"K{i}" for i in range(1, 17)} | {f"F{i}" for i in range(1, 8)} <= names
    judged = [source.claim for source in claims.sources()]
    assert len(judged) == len(set(judged))
    assert set(judged) <= set(claims.CATALOGUE)


@pytest.mark.parametrize("source", claims.sources(), ids=lambda s: s.claim)
def test_without_records_a_verdict_is_open_or_needs_none(source, empty) -> None:
    judged = source.judge(empty)
    assert judged.claim == source.claim
    if source.experiments:
        assert not judged.verdict.startswith("holds"), "nothing measured, nothing holds"
    else:
        assert judged.verdict.startswith(WORDS)


def test_missing_claims_are_rows() -> None:
    rows = claims.missing(["K1", "K3, speed", "F1"])
    names = {row.claim for row in rows}
    assert "K1" not in names
    assert "K3, memory" in names
    assert "K2" in names
    assert all(row.verdict.startswith("open") for row in rows)
    assert claims.missing(list(claims.CATALOGUE)) == []
    with pytest.raises(ValueError, match="'K99' is not in the catalogue"):
        claims.claim("K99", predicted="", measured="", verdict="")


def timed(standard: float, flash: float, pass_: str) -> pandas.DataFrame:
    """Times of both implementations at three lengths on one card."""
    return frame(
        Record(
            experiment="fig3-runtime", implementation=name, metric="time_ms", source="measured",
            pass_=pass_, seqlen_q=n, seqlen_k=n, value=value, unit="ms", dropout=0.0,
            key_mask=False,
        )
        for n in (256, 1024, 4096)
        for name, value in (("standard-eager", standard), ("sdpa-flash2", flash))
    )  # fmt: skip


def test_k2_follows_the_times() -> None:
    assert attention.k2(timed(1.0, 1.4, "backward")).verdict == "holds"
    assert "faster" in attention.k2(timed(1.0, 0.5, "backward")).verdict
    assert attention.k2(timed(1.0, 2.0, "backward")).verdict == "does not hold (2.00x)"


def test_k4_follows_the_times() -> None:
    both = timed(2.0, 1.0, "forward+backward")
    assert "below 512 too" in attention.k4(both).verdict
    slow_below = both.copy()
    short = (slow_below["seqlen_q"] == 256) & (slow_below["implementation"] == "sdpa-flash2")
    slow_below.loc[short, "value"] = 5.0
    assert attention.k4(slow_below).verdict == "holds"
    assert "does not pay above" in attention.k4(timed(1.0, 2.0, "forward+backward")).verdict


def test_zero_table_follows_the_engines() -> None:
    rows = tidy(("several-ranks",))
    rows = rows[rows["source"] == "predicted"]
    measured = rows.assign(source="measured")
    good = pandas.concat([rows, measured])
    assert states.zero_table(good).verdict == "holds"
    measured = measured.assign(value=measured["value"] * 1.03)
    assert states.zero_table(pandas.concat([rows, measured])).verdict == "does not hold"


def test_k12_numbers() -> None:
    standard = states.dominating_length(attention_matrix=True)
    flash = states.dominating_length(attention_matrix=False)
    assert 4096 < standard < flash
    held = model_state_bytes(states.LLAMA_PARAMETERS).total
    below = states.decoder_model_bytes(batch=1, seqlen=flash - 256, attention_matrix=False,
                                       **states.LLAMA)  # fmt: skip
    assert below <= held < below * flash / (flash - 256)


@pytest.mark.parametrize("name", ["F1", "F2", "F3", "F4", "F5", "F7"])
def test_faults_are_shown_by_running_them(name: str, empty) -> None:
    judge = next(source.judge for source in faults.SOURCES if source.claim == name)
    assert judge(empty).verdict.startswith("does not hold")


def test_the_correct_online_update_is_exact_for_every_block() -> None:
    q, k, v, _ = faults._attention(3)
    exact = faults._softmax(q @ k.T / 4) @ v
    for block in (1, 7, 16, 64):
        ours = faults.online(q, k, v, block, keep_old_sum=True)
        np.testing.assert_allclose(ours, exact, rtol=1e-12, atol=1e-13)
        noted = faults.online(q, k, v, block, keep_old_sum=False)
        assert (abs(noted - exact).max() > 1e-3) == (block < 64), "right only with one block"


def test_every_claim_is_judged_somewhere() -> None:
    """Here, or by name in a figure or in the checkpointing claims that figures show."""
    root = Path(claims.__file__).parents[2]
    files = [*root.glob("figures/*.py"), *root.glob("repro/claims/checkpointing.py")]
    text = "".join(file.read_text() for file in files)
    here = {source.claim for source in claims.sources()}
    assert [n for n in claims.CATALOGUE if n not in here and f'"{n}"' not in text] == []
