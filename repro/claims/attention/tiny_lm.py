"""A small language model trained three ways: K15."""

from __future__ import annotations

import math

import pandas

from repro.claims.protocol import Evidence, share_of
from repro.claims.register import Finding, claim
from repro.claims.values import known, pick
from repro.claims.works import FLASH

#: A relative change of a gradient below this is slight.
SLIGHT = 1e-3


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
    """Two ways of recomputing, and whether a gradient changes, slightly."""
    most = differing(frame)
    where = {"metric": "gradient_relative_difference", "implementation": "flash", "against": "standard"}
    apart = float(known(frame, source="measured", **where)["value"].max())
    cases = [most > 0, 0 < apart < SLIGHT] if math.isfinite(most + apart) else []
    return Finding(
        predicted="no bit, if every operation is deterministic; another order of sums: last bits",
        measured=f"{most:.0f} elements differ with a checkpoint; flash against standard {apart:.0e}",
        parts=[
            share_of(
                "share of two ways of recomputing that change gradients slightly",
                cases,
                Evidence.COUNTED,
                "flash, at rounding level; a checkpoint no bit",
            )
        ],
    )
