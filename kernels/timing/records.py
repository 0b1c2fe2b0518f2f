"""What is on record of kernels that were followed through the model of an SM.

A record is a CSV with a row a kernel: what it is, a digest of what its machine code follows from,
and the clocks of a block by the rounds of its loop (``clocks_8``). Every record of the package,
of our kernels and of others', is read and written here.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from analysis.loop_model import card
from analysis.shapes import Tile
from kernels.building.cache import digest, headers
from kernels.launch import Kernel

COLUMN = "clocks_"
EMPTY = -1
"""In the place of the rounds of a block without rows."""

Line = Callable[[float], float]


@dataclass(frozen=True)
class Recorded:
    """What is on record of a kernel.

    line: clocks of a tile by its rounds, alone on an SM.
    tile: of the kernel, None where the record does not name it.
    blocks_per_sm, slowdown: how many an SM holds, and how many times as long one takes beside the
        others.
    beside: what a launch costs once beside its tiles. empty: a block without rows.
    repair, repair_tile: the second launch of an optimistic softmax, for one tile an SM and for each
        more.
    """

    line: Line
    tile: Tile | None = None
    blocks_per_sm: int = 1
    slowdown: float = 1.0
    beside: float = 0.0
    empty: float = 0.0
    repair: float = 0.0
    repair_tile: float = 0.0

    @classmethod
    def read(cls, row: Mapping[str, str]) -> Recorded:
        """A row of a record, which has some of the columns."""
        points = [
            (float(name.removeprefix(COLUMN)), float(value))
            for name, value in row.items()
            if name.startswith(COLUMN) and value
        ]
        tile = Tile(int(row["block_m"]), int(row["block_n"])) if "block_m" in row else None
        numbers = ("slowdown", "beside", "empty", "repair", "repair_tile")
        return cls(
            card.through(points),
            tile,
            int(row.get("blocks_per_sm", 1)),
            **{name: float(row[name]) for name in numbers if name in row},
        )

    def clocks(self, rounds: Iterable[int], sms: int) -> float:
        """Of a launch on ``sms`` multiprocessors: rounds of its blocks in the order they start."""
        blocks = (self.empty if n == EMPTY else self.line(max(1, n)) for n in rounds)
        if self.blocks_per_sm == 1:
            return self.beside + card.fill(blocks, sms)
        return self.beside + card.fill_shared(blocks, sms, self.blocks_per_sm, self.slowdown)


@cache
def rows(path: Path) -> tuple[dict[str, str], ...]:
    """All rows of a record."""
    with path.open(encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def find(path: Path, **wanted: object) -> dict[str, str] | None:
    """The row whose columns have these values, or None."""
    texts = {name: str(value) for name, value in wanted.items()}
    return next((row for row in rows(path) if texts.items() <= row.items()), None)


def write(path: Path, columns: Sequence[str], found: Iterable[Mapping[str, object]]) -> None:
    """Writes a record, row by row as they are found."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in found:
            writer.writerow(row)
            file.flush()
    rows.cache_clear()


def clock_columns(rounds: Iterable[int]) -> tuple[str, ...]:
    """Names of the columns of clocks."""
    return tuple(f"{COLUMN}{n}" for n in rounds)


def digest_of_source(kernel: Kernel, macros: Mapping[str, object] | None = None) -> str:
    """Of all that a kernel's machine code follows from, but for the compiler: its source and its
    headers without comments, and macros, by default its own."""
    given = dict(kernel.macros) if macros is None else macros
    text = kernel.text()
    return digest(_code(text), _code(headers(text)), repr(tuple(given.items())))[:16]


@cache
def _code(text: str) -> str:
    """Without comments and empty lines."""
    bare = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in bare.splitlines() if line.strip())
