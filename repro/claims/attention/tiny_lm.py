"""A small language model trained three ways: K15."""

from __future__ import annotations

import pandas

from repro.claims.protocol import Evidence, Part
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.values import pick
from repro.claims.works import FLASH


def losses(frame: pandas.DataFrame) -> pandas.DataFrame:
    """A column per training, a row per step."""
    rows = pick(frame, metric="loss", source="measured")
    return rows.pivot_table(index="step", columns="implementation", values="value")


def differing(frame: pandas.DataFrame) -> float:
    """Most gradient elements that differ between flash and flash + checkpointing, at any step."""
    rows = pick(
        frame,
        metric="gradient_elements_differing",
        source="measured",
        implementation="flash+checkpoint",
        against="flash",
    )
    return float(rows["value"].max())


@claim(
    "K15",
    "recomputation may change gradients slightly",
    FLASH,
    experiments=("tiny-lm",),
    shown="tiny_lm",
    conditions="deterministic operations on a CPU",
    needs="operations whose order changes when they run again, as additions to memory on a card: "
    "deterministic ones repeat every bit, and flash beside standard attention is another order of "
    "sums, no recomputation",
)
def k15(frame: pandas.DataFrame) -> Finding:
    """K15: two ways of recomputing, and whether a gradient changes, slightly."""
    most, table = differing(frame), losses(frame)
    rows = pick(
        frame, metric="gradient_relative_difference", source="measured", implementation="flash", against="standard"
    )
    apart = float(rows["value"].max())
    known = most == most and apart == apart and {"flash", "flash+checkpoint"} <= set(table)
    changed = [most > 0, 0 < apart < 1e-3]
    return Finding(
        predicted="no bit, if every operation is deterministic; another order of sums: last bits",
        measured=f"{most:.0f} elements differ with a checkpoint; flash against standard {apart:.0e}"
        if known
        else NOT_MEASURED,
        parts=[
            Part(
                what="share of two ways of recomputing that change gradients slightly",
                value=sum(changed) / 2 if known else float("nan"),
                low=1.0,
                high=1.0,
                limits=(0.5, 1.0),
                why="flash, at rounding level; a checkpoint no bit",
                evidence=Evidence.COUNTED,
            )
        ],
    )
