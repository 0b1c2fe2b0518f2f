"""Which kernels take which option of ``repro.flash_attention``: a table, from the drivers.

For each line of an option's row (``analysis.features``) and each algorithm the driver is run on a
recorder (``kernels.launches``) for a Hopper card; what it refuses it does not take. ``python -m
repro dev coverage`` writes the table of ``docs/pages/coverage.md``.
"""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from analysis.algorithms import ALGORITHMS
from analysis.feature import PASSES, Feature, changed
from analysis.features import FEATURES
from analysis.problem import Problem
from analysis.shapes import AttentionShape, Tile
from kernels.launches import AUTO, Device, launches_of
from kernels.pages import Block

BLOCK = Block("coverage.md", "coverage", "repro dev coverage")
PLAIN = Problem(AttentionShape(2, 4, 1024, 1024, 128, dtype="bf16"))
HOPPER = Device("90")


#: Beside the options: types and sizes.
OTHERS: dict[str, dict[str, Any]] = {
    "bf16, head dimension 64 or 128": {},
    "fp16": {"dtype": "fp16"},
    "fp32": {"dtype": "fp32"},
    "head dimension 256": {"head_dim": 256},
    "head dimension 40, or another up to 256": {"head_dim": 40},
    "fewer key heads than query heads": {"kv_heads": 2},
    "`tile`": {"tile": Tile(64, 64)},
}


def lines() -> list[tuple[str, Problem, Feature | None]]:
    """Name, problem and option of each line; of a kind of :data:`OTHERS` no option."""
    listed: list[tuple[str, Problem, Feature | None]] = [
        (name, changed(PLAIN, fields), None) for name, fields in OTHERS.items()
    ]
    for option in FEATURES.values():
        listed += [(name, changed(PLAIN, fields), option) for name, fields in option.shown.items()]
    return listed


def takes(algorithm: str, problem: Problem, pass_: str) -> str | None:
    """The algorithm that runs a pass of the problem on a Hopper card; None if it is refused."""
    try:
        return launches_of(algorithm, problem, pass_, HOPPER).algorithm
    except (TypeError, ValueError):
        return None


def mark(algorithm: str, problem: Problem) -> str:
    """ "yes", the one pass that takes the problem, or a dash."""
    found = [pass_ for pass_ in PASSES if takes(algorithm, problem, pass_)]
    return {0: "–", 1: f"{''.join(found)} only", 2: "yes"}[len(found)]


def table() -> str:
    """A line an option: what the operator runs for it on a Hopper card, and what takes it."""
    listed = lines()
    # An algorithm by its name has a fixed order of dq or has none: that is asked of dispatch alone.
    by_name = [option is FEATURES["deterministic"] for _, _, option in listed]
    columns: dict[tuple[str, ...], list[str]] = {}
    for algorithm in ALGORITHMS:
        marks = (
            "by name" if named else mark(algorithm, problem)
            for named, (_, problem, _) in zip(by_name, listed, strict=True)
        )
        columns.setdefault(tuple(marks), []).append(algorithm)
    rows = []
    for place, (name, problem, option) in enumerate(listed):
        passes = PASSES if option is None or "backward" in option.passes else PASSES[:1]
        picked = dict.fromkeys(takes(AUTO, problem, pass_) or "nothing" for pass_ in passes)
        rows.append((name, ", ".join(f"`{algorithm}`" for algorithm in picked), *(marks[place] for marks in columns)))
    names = (", ".join(f"`{name}`" for name in found) for found in columns.values())
    headers = ("option", "the operator on Hopper", *names)
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True)


def main() -> None:
    """Writes the page's table."""
    BLOCK.write(table())
