"""The notes' faults F1 to F5 and F7: what a note prints is the claim; both forms are run."""

from __future__ import annotations

import math

import pandas

from repro.claims.mutations import RAN, setting
from repro.claims.protocol import Evidence, Part
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.works import CODE, RECOMPUTE, TILING
from repro.experiments.checkpointing.study_note_faults import CORRECT, NOTED

#: A form with a larger error against float64 is not the same function.
TOLERANCE = 1e-3


def values(frame: pandas.DataFrame, fault: str, form: str, key: str | None = None) -> pandas.Series:
    """The recorded values of one form, by ``key`` (a length, segments, head_dim) or alone."""
    if "fault" not in frame:
        return pandas.Series(dtype=float)
    rows = frame[(frame["fault"] == fault) & (frame["implementation"] == form)]
    rows = rows.dropna(subset=["value"])
    return rows.set_index(key)["value"] if key else rows["value"]


def _error(frame: pandas.DataFrame, fault: str, form: str) -> float:
    found = values(frame, fault, form)
    return float(found.iloc[-1]) if len(found) else math.nan


def _numerical(frame: pandas.DataFrame, fault: str, right_form: str) -> Finding:
    """A numerical fault: the note's error decides, the correct form's stands beside it."""
    wrong, right = (_error(frame, fault, form) for form in (NOTED, CORRECT))
    # The last bits differ from processor to processor, and the table must not.
    rounding = "below 1e-12" if right < 1e-12 else f"{right:.0e}"
    shown = f"error {wrong:.2g} as noted; correct form {rounding}"
    part = Part(
        what="error of the note's form against float64",
        value=wrong,
        high=TOLERANCE,
        form=".2g",
        evidence=Evidence.COUNTED,
    )
    return Finding(
        predicted=f"correct: {right_form}", measured=NOT_MEASURED if math.isnan(wrong) else shown, parts=[part]
    )


@claim(
    "F1",
    "online softmax updates a normalised output without the old row sum",
    TILING,
    "section 1.4",
    experiments=("study-note-faults",),
    shown="study-note-faults",
    as_claimed=setting(1e-15, fault="F1", implementation="as noted", **RAN),
    compared=False,
)
def f1(frame: pandas.DataFrame) -> Finding:
    """The note's update of a normalised output against softmax."""
    return _numerical(frame, "F1", "O ← (l_old e^(m_old - m_new) O + P̃V) / l_new")


@claim(
    "F2",
    "the softmax gradient sums dP∘P over one block only",
    RECOMPUTE,
    "section 4.3",
    experiments=("study-note-faults",),
    shown="study-note-faults",
    as_claimed=setting(1e-15, fault="F2", implementation="as noted", **RAN),
    compared=False,
)
def f2(frame: pandas.DataFrame) -> Finding:
    """dS with the row sum over one block against the softmax Jacobian."""
    return _numerical(frame, "F2", "D = rowsum(dO ∘ O)")


@claim(
    "F3",
    "an offload function's backward runs input * 2 again; its forward is the identity",
    CODE,
    "section 2.1",
    experiments=("study-note-faults",),
    shown="study-note-faults",
    as_claimed=setting(0.0, fault="F3", implementation="as noted", **RAN),
    conditions="the note itself marks the factor 2 as a placeholder",
    compared=False,
)
def f3(frame: pandas.DataFrame) -> Finding:
    """The note's autograd function, whose forward is the identity, against dx = dy."""
    return _numerical(frame, "F3", "dx = dy")


@claim(
    "F7",
    "tile <= sqrt(SRAM / (3 d 4 B)), rounded down to a multiple of 32",
    TILING,
    "section 4.1",
    experiments=("study-note-faults",),
    shown="study-note-faults",
    as_claimed=setting(96, fault="F7", implementation="as noted", **RAN),
    compared=False,
)
def f7(frame: pandas.DataFrame) -> Finding:
    """The notes' tile rule on an A100, fp16 tiles of d = 64 and 128, against a usable tile."""
    noted, corrected = (values(frame, "F7", form, "head_dim") for form in (NOTED, CORRECT))
    return Finding(
        predicted="without the root too many the rule gives "
        + (" and ".join(f"{v:.0f}" for v in corrected) or "a tile"),
        measured=f"{' and '.join(f'{v:.0f}' for v in noted)} for d = "
        f"{' and '.join(str(int(d)) for d in noted.index)} (A100)"
        if len(noted)
        else NOT_MEASURED,
        parts=[
            Part(
                what="side of the tile that the printed rule gives",
                low=32,
                form=".0f",
                value=float(noted.min()) if len(noted) else math.nan,
                evidence=Evidence.DERIVED,
            )
        ],
    )
