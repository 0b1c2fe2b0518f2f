"""What a thread block executes in a round of its loop, counted from machine code that is not kept.

A record has a row an opcode, products with their shape: warp instructions of a block and round,
without those whose predicate was false.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from analysis.loop_model.program import Event, Program

COLUMNS = ("pass", "head_dim", "causal", "opcode", "per_round")
Key = tuple[str, int, bool]


def executed(program: Program) -> Counter[str]:
    """Instructions of all warps by opcode, ``HMMA.16816`` and the like by shape."""
    names = [_name(step.text.split(" ")[0].split(".")) for step in program.table]
    return Counter(
        names[step]
        for way in program.ways
        for step, kind in zip(way.steps, way.kinds, strict=True)
        if kind != Event.OFF
    )


def _name(parts: list[str]) -> str:
    return ".".join(parts[: 2 if parts[0] in ("HMMA", "HGMMA") else 1])


def write_counts(path: Path, programs: Mapping[Key, tuple[Program, Program]], between: int) -> None:
    """programs: of each kernel a block, and one with ``between`` rounds more."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for key, (few, more) in programs.items():
            found = executed(more)
            found.subtract(executed(few))
            for opcode, count in sorted(found.items()):
                if count:
                    writer.writerow((*key, opcode, count / between))


@cache
def read_counts(path: Path) -> dict[Key, dict[str, float]]:
    """What ``write_counts`` wrote."""
    found: dict[Key, dict[str, float]] = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = (row["pass"], int(row["head_dim"]), row["causal"] == "True")
            found.setdefault(key, {})[row["opcode"]] = float(row["per_round"])
    return found
