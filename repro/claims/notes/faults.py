"""The notes' faults F1 to F5 and F7: what a note prints is the claim; both forms are run."""

from __future__ import annotations

from typing import Any

import pandas

from repro.claims.mutations import RAN, setting
from repro.claims.protocol import Evidence, Part
from repro.claims.register import Finding, claim
from repro.claims.values import NAN, known, pick
from repro.claims.works import CODE, RECOMPUTE, TILING, Work
from repro.experiments.checkpointing.study_note_faults import CORRECT, NOTED

#: A form with a larger error against float64 is not the same function.
TOLERANCE = 1e-3
SEEN: dict[str, Any] = {"experiments": ("study-note-faults",), "shown": "study-note-faults", "compared": False}


def _error(frame: pandas.DataFrame, fault: str, form: str) -> float:
    found = known(frame, fault=fault, implementation=form)["value"]
    return float(found.iloc[-1]) if len(found) else NAN


def _fault(name: str, statement: str, work: Work, where: str, right_form: str, **more: Any) -> None:
    """A numerical fault: the note's error decides, the correct form's stands beside it."""

    @claim(
        name,
        statement,
        work,
        where,
        **SEEN,
        as_claimed=setting(1e-15, fault=name, implementation="as noted", **RAN),
        **more,
    )
    def fault(frame: pandas.DataFrame) -> Finding:
        wrong, right = (_error(frame, name, form) for form in (NOTED, CORRECT))
        # The last bits differ from processor to processor, and the table must not.
        rounding = "below 1e-12" if right < 1e-12 else f"{right:.0e}"
        what, why = "error of the note's form against float64", "a larger error is another function"
        return Finding(
            predicted=f"correct: {right_form}",
            measured=f"error {wrong:.2g} as noted; correct form {rounding}",
            parts=[Part(what, wrong, Evidence.COUNTED, high=TOLERANCE, why=why, form=".2g")],
        )


_fault(
    "F1",
    "online softmax updates a normalised output without the old row sum",
    TILING,
    "section 1.4",
    "O ← (l_old e^(m_old - m_new) O + P̃V) / l_new",
)
_fault("F2", "the softmax gradient sums dP∘P over one block only", RECOMPUTE, "section 4.3", "D = rowsum(dO ∘ O)")
_fault(
    "F3",
    "an offload function's backward runs input * 2 again; its forward is the identity",
    CODE,
    "section 2.1",
    "dx = dy",
    conditions="the note itself marks the factor 2 as a placeholder",
)


@claim(
    "F7",
    "tile <= sqrt(SRAM / (3 d 4 B)), rounded down to a multiple of 32",
    TILING,
    "section 4.1",
    **SEEN,
    as_claimed=setting(96, fault="F7", implementation="as noted", **RAN),
)
def f7(frame: pandas.DataFrame) -> Finding:
    """The notes' tile rule on an A100, fp16 tiles of d = 64 and 128, against a usable tile."""
    noted, right = (pick(frame, fault="F7", implementation=form) for form in (NOTED, CORRECT))
    values, sides = (" and ".join(f"{v:.0f}" for v in some["value"]) for some in (noted, right))
    heads = " and ".join(str(int(d)) for d in noted.get("head_dim", ()))
    least = float(noted["value"].min())
    return Finding(
        predicted=f"without the root too many the rule gives {sides or 'a tile'}",
        measured=f"{values} for d = {heads} (A100)" if values else "nan",
        parts=[Part("side of the tile that the printed rule gives", least, Evidence.DERIVED, low=32, form=".0f")],
    )
