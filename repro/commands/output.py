"""Rows as a table for people, as JSON or as CSV for programs; numbers with units people read."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


#: Option -> format of tabulate.
STYLES = {"--markdown": "github", "--latex": "latex_booktabs"}


def require_one_format(as_json: bool, as_csv: bool, markdown: bool = False, latex: bool = False) -> None:
    """ValueError when two are asked for, before any work."""
    asked = {"--json": as_json, "--csv": as_csv, "--markdown": markdown, "--latex": latex}
    chosen = [name for name, wanted in asked.items() if wanted]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} exclude each other")


def style_of(markdown: bool, latex: bool) -> str:
    """The style of tables: for a terminal, or as asked."""
    return STYLES["--markdown"] if markdown else STYLES["--latex"] if latex else "simple"


def print_json(value: object) -> None:
    """Indented JSON; what it does not know (a path, a tile) is written as text."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def require_a_point(points: Sequence[object]) -> None:
    """ValueError with the reason where every point of a sweep is a row with an "error"."""
    refused = [point["error"] for point in points if isinstance(point, dict) and "error" in point]
    if len(refused) == len(points):
        same = len(set(refused)) == 1
        raise ValueError(refused[0] if same else f"no point can be; the first: {refused[0]}")


def print_csv(rows: Sequence[Row]) -> None:
    """A header of all fields, in order of first appearance, and a line per row."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    sys.stdout.write(text.getvalue())


def print_table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], *, style: str = "simple", keys: int = 1
) -> None:
    """Aligned columns: text to the left, numbers to the right.

    A table for a terminal that is wider than that is printed in parts, each of which repeats the
    first ``keys`` columns.
    """
    from tabulate import tabulate

    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    align = ["right" if all(_numeric(row[i]) for row in cells) and cells else "left" for i in range(len(headers))]
    if style == STYLES["--latex"]:  # signs that LaTeX has no glyph for
        headers = [_worded(h) for h in headers]
    parts = _parts(headers, cells, keys) if style == "simple" else [list(range(len(headers)))]
    for number, part in enumerate(parts):
        if number:
            print()
        print(
            tabulate(
                [[row[i] for i in part] for row in cells],
                [headers[i] for i in part],
                tablefmt=style,
                disable_numparse=True,
                colalign=[align[i] for i in part],
            )
        )


def _worded(header: str) -> str:
    """A header without signs for which LaTeX's fonts have no glyph."""
    for sign, word in (("≥", "at least"), ("≤", "at most"), ("≈", "predicted")):
        header = header.replace(sign, word)
    return header


def _parts(headers: Sequence[str], cells: Sequence[Sequence[str]], keys: int) -> list[list[int]]:
    """Columns that fit side by side into the terminal."""
    width = terminal_width()
    sizes = [max([len(headers[i]) + 2, *(len(row[i]) for row in cells)]) + 2 for i in range(len(headers))]
    if width is None or sum(sizes) - 2 <= width:
        return [list(range(len(headers)))]
    first = list(range(min(keys, len(headers))))
    parts: list[list[int]] = []
    for column in range(len(first), len(headers)):
        fits = parts and sum(sizes[i] for i in [*parts[-1], column]) - 2 <= width
        if fits:
            parts[-1].append(column)
        else:
            parts.append([*first, column])
    return parts or [first]


def print_text(text: str, indent: str = "") -> None:
    """A line, broken between words where the terminal ends; ``indent``: before all but the first
    of its parts."""
    width = terminal_width()
    if width is None:
        print(text)
        return
    print(textwrap.fill(text, max(width, 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))


def terminal_width() -> int | None:
    """Columns of the terminal; None where output goes elsewhere and ``COLUMNS`` is not set."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return None
    return shutil.get_terminal_size().columns


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


def of_rate(flops_per_s: float) -> str:
    """312 TFLOP/s."""
    return f"{flops_per_s / 1e12:.4g}"


def between(of: Callable[[float], str], low: float, high: float) -> str:
    """ "0.21 – 0.25 ms": two ends of a range, the unit once where it is the same."""
    first, last = of(low), of(high)
    number, _, unit = first.partition(" ")
    return f"{number if unit == last.partition(' ')[2] else first} – {last}"


def of_seconds(seconds: float) -> str:
    """0.215 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
