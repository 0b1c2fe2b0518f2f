"""Rows as a table for people, as JSON or as CSV for programs; numbers with units people read."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def require_one_format(as_json: bool, as_csv: bool) -> None:
    """ValueError when both are asked for, before any work."""
    if as_json and as_csv:
        raise ValueError("--json and --csv exclude each other")


def print_json(value: object) -> None:
    """Indented JSON; what it does not know (a path, a tile) is written as text."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_csv(rows: Sequence[Row]) -> None:
    """A header of all fields, in order of first appearance, and a line per row."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    sys.stdout.write(text.getvalue())


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Aligned columns: text to the left, numbers to the right."""
    from tabulate import tabulate

    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    align = [
        "right" if all(_numeric(row[i]) for row in cells) and cells else "left"
        for i in range(len(headers))
    ]
    print(tabulate(cells, headers, tablefmt="simple", disable_numparse=True, colalign=align))


def _numeric(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] in "+-" or cell == "exact"


def of_bytes(count: float) -> str:
    """1.5 MB: decimal units, as datasheets and the papers use."""
    return _scaled(count, "B")


def of_flops(count: float) -> str:
    """275 GFLOP."""
    return _scaled(count, "FLOP")


def _scaled(count: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(count) < 1000 or prefix == "P":
            return f"{count:.4g} {prefix}{unit}"
        count /= 1000
    raise AssertionError("unreachable")


def of_seconds(seconds: float) -> str:
    """0.215 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
