"""What a thread block executes in a round of its loop, counted from machine code that is not kept.

A record has a row an opcode, products with their shape: warp instructions of a block and round,
without those whose predicate was false.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from analysis.loop_model.program import Event, Program
from kernels.timing import records
from kernels.timing.records import Recorded

COLUMNS = ("pass", "head_dim", "causal", "opcode", "per_round")
Key = tuple[str, int, bool]


def peer_record(path: Path, key: Key) -> Recorded:
    """What is on record of a kernel of others. KeyError where that is nothing."""
    pass_, head_dim, causal = key
    row = records.find(path, **{"pass": pass_, "head_dim": head_dim, "causal": causal})
    if row is None:
        raise KeyError(key)
    return Recorded.read(row)


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
    records.write(path, COLUMNS, _counted(programs, between))


def _counted(programs: Mapping[Key, tuple[Program, Program]], between: int) -> Iterator[dict[str, object]]:
    for key, (few, more) in programs.items():
        found = executed(more)
        found.subtract(executed(few))
        for opcode, count in sorted(found.items()):
            if count:
                yield dict(zip(COLUMNS, (*key, opcode, count / between), strict=True))


@cache
def read_counts(path: Path) -> dict[Key, dict[str, float]]:
    """What ``write_counts`` wrote."""
    found: dict[Key, dict[str, float]] = {}
    for row in records.rows(path):
        key = (row["pass"], int(row["head_dim"]), row["causal"] == "True")
        found.setdefault(key, {})[row["opcode"]] = float(row["per_round"])
    return found
