"""The study notes' faults F1 to F7: what a note prints is the claim, so "refuted" is the finding.

The numbers are records of the experiment study-note-faults, where both forms are run.
"""

from __future__ import annotations

import math

import pandas

from repro.claims.protocol import Claim, Evidence, Part
from repro.claims.rows import NOT_MEASURED, Source, claim
from repro.experiments.checkpointing.study_note_faults import (
    CORRECT,
    LENGTHS,
    NAME,
    NOTED,
    SEGMENTS,
)

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


def _numerical(frame: pandas.DataFrame, name: str, right_form: str) -> Claim:
    """A numerical fault: the note's error decides, the correct form's stands beside it."""
    wrong, right = (_error(frame, name, form) for form in (NOTED, CORRECT))
    # The last bits differ from processor to processor, and the table must not.
    rounding = "below 1e-12" if right < 1e-12 else f"{right:.0e}"
    return claim(
        name,
        predicted=f"correct: {right_form}",
        measured=NOT_MEASURED if math.isnan(wrong) else
        f"error {wrong:.2g} as noted; correct form {rounding}",
        parts=[Part(what="error of the note's form against float64", value=wrong, high=TOLERANCE,
                    form=".2g", evidence=Evidence.COUNTED)],
    )  # fmt: skip


def f1(frame: pandas.DataFrame) -> Claim:
    """The note's update of a normalised output against softmax."""
    return _numerical(frame, "F1", "O ← (l_old e^(m_old - m_new) O + P̃V) / l_new")


def f2(frame: pandas.DataFrame) -> Claim:
    """dS with the row sum over one block against the softmax Jacobian."""
    return _numerical(frame, "F2", "D = rowsum(dO ∘ O)")


def f3(frame: pandas.DataFrame) -> Claim:
    """The note's autograd function, whose forward is the identity, against dx = dy."""
    return _numerical(frame, "F3", "dx = dy")


def f4(frame: pandas.DataFrame) -> Claim:
    """Growth of the peak of 2^k spacing alone; recursive splitting beside it."""
    alone, split = (values(frame, "F4", form, "depth") for form in (NOTED, CORRECT))
    growth, shown = math.nan, NOT_MEASURED
    if set(LENGTHS) <= set(alone.index) and set(LENGTHS) <= set(split.index):
        first, last = LENGTHS[0], LENGTHS[-1]
        growth = math.log(alone[last] / alone[first]) / math.log(last / first)
        shown = (
            f"peak {', '.join(f'{alone[n]:.0f}' for n in LENGTHS)} states at L = "
            f"{', '.join(map(str, LENGTHS))}; split recursively "
            f"{', '.join(f'{split[n]:.0f}' for n in LENGTHS)}"
        )
    return claim(
        "F4",
        predicted="the last segment has L/2 layers: O(L); split recursively O(log² L)",
        measured=shown,
        parts=[Part(what="exponent of the peak in L", value=growth, high=0.5, form=".2f",
                    evidence=Evidence.DERIVED)],
    )  # fmt: skip


def f5(frame: pandas.DataFrame) -> Claim:
    """Extra forwards of segment-wise recomputation, simulated, against 1/k."""
    noted, found = (values(frame, "F5", form, "segments") for form in (NOTED, CORRECT))
    known = set(SEGMENTS) <= set(noted.index) and set(SEGMENTS) <= set(found.index)
    times = max(found[k] / noted[k] for k in SEGMENTS) if known else math.nan
    return claim(
        "F5",
        predicted="(k - 1)/k of a forward when the last segment is kept, not 1/k",
        measured=", ".join(f"k = {k}: {found[k]:.3f} for {noted[k]:.3f}" for k in SEGMENTS)
        if known else NOT_MEASURED,
        parts=[Part(what="extra forward over the note's 1/k, worst k", value=times, low=0.9,
                    high=1.1, form=".2f", evidence=Evidence.DERIVED)],
    )  # fmt: skip


def f6(frame: pandas.DataFrame) -> Claim:
    """Saved bytes of both checkpoint modes, as measured for each block."""
    rows = frame[
        (frame["metric"] == "saved_bytes_per_layer")
        & (frame["source"] == "measured")
        & (frame["implementation"] == "each block")
    ]
    by_mode = rows.groupby("mode")["value"].max() if "mode" in rows else pandas.Series(dtype=float)
    known = {"new", "reentrant"} <= set(by_mode.index)
    return claim(
        "F6",
        predicted="both modes keep the inputs of a checkpointed part only",
        measured=", ".join(f"{mode}: {value:,.0f} B a block" for mode, value in by_mode.items())
        if known else NOT_MEASURED,
        parts=[Part(what="bytes a block, reentrant over non-reentrant",
                    value=float(by_mode["reentrant"] / by_mode["new"]) if known else math.nan,
                    low=1.5, evidence=Evidence.OTHER)],
    )  # fmt: skip


def f7(frame: pandas.DataFrame) -> Claim:
    """The notes' tile rule on an A100, fp16 tiles of d = 64 and 128, against a usable tile."""
    noted, corrected = (values(frame, "F7", form, "head_dim") for form in (NOTED, CORRECT))
    return claim(
        "F7",
        predicted="without the root too many the rule gives "
        + (" and ".join(f"{v:.0f}" for v in corrected) or "a tile"),
        measured=f"{' and '.join(f'{v:.0f}' for v in noted)} for d = "
        f"{' and '.join(str(int(d)) for d in noted.index)} (A100)" if len(noted) else NOT_MEASURED,
        parts=[Part(what="side of the tile that the printed rule gives", low=32, form=".0f",
                    value=float(noted.min()) if len(noted) else math.nan,
                    evidence=Evidence.DERIVED)],
    )  # fmt: skip


SOURCES = (
    Source("F1", (NAME,), f1),
    Source("F2", (NAME,), f2),
    Source("F3", (NAME,), f3),
    Source("F4", (NAME,), f4),
    Source("F5", (NAME,), f5),
    Source("F6", ("checkpoint-granularity",), f6),
    Source("F7", (NAME,), f7),
)
