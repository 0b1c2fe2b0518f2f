"""``python -m repro compare``: the records of two machines side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from repro.commands import output
from repro.commands.explain import POINT, QUANTITY
from repro.measuring import records
from repro.measuring.records import Record

KEY = ("experiment", *POINT, *QUANTITY)


def command(
    first: Annotated[str, typer.Argument(help="a folder under results/, or a path to one")],
    second: Annotated[str, typer.Argument(help="the other machine")],
    experiment: Annotated[list[str] | None, typer.Option("--experiment", "-e", help="only these")] = None,
    metric: Annotated[list[str] | None, typer.Option("--metric", "-m", help="only these")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    as_csv: Annotated[bool, typer.Option("--csv")] = False,
    all_rows: Annotated[bool, typer.Option("--all", help="every row, not only the first 40")] = False,
) -> None:
    """Compare two machines' records: ratio second / first, with the range its spreads allow.

    Cells are matched by experiment, implementation, pass, shape and tile. A ratio whose range
    includes 1 is no difference.
    """
    output.require_one_format(as_json, as_csv)
    there = {file.stem for name in (first, second) for file in files(name)}
    _require_known("experiment", experiment, there, (first, second))
    sides = [measured(files(name), experiment, metric) for name in (first, second)]
    for name, side in zip((first, second), sides, strict=True):
        if not side:
            raise ValueError(f"{name}: no measured rows" + _restriction(experiment, metric))
    there = {r.metric for side in sides for r in side.values()}
    _require_known("metric", metric, there, (first, second))
    rows = pairs(*sides)
    if not rows:
        have = [sorted({r.experiment for r in side.values()}) for side in sides]
        raise ValueError(f"no cell in common: {first} has {', '.join(have[0])}; {second} has {', '.join(have[1])}")
    if as_json:
        output.print_json(rows)
    elif as_csv:
        output.print_csv(rows)
    else:
        _tables(rows, (first, second), [len(side) for side in sides], all_rows)


def _require_known(option: str, asked: Sequence[str] | None, there: set[str], sides: tuple[str, str]) -> None:
    """ValueError for a name that neither side has: it would restrict nothing, unnoticed."""
    for name in asked or ():
        if name not in there:
            raise ValueError(f"--{option} {name!r}: neither {sides[0]} nor {sides[1]} has it")


def files(name: str) -> list[Path]:
    """Files of records: of a machine, or in a folder. ValueError lists the machines."""
    if name in records.machines():
        return records.files(name)
    if Path(name).is_dir() and name not in (".", ""):
        return sorted(Path(name).glob("*.jsonl"))
    known = ", ".join(records.machines())
    cure = "; make figures or python -m repro measure makes it" if name == "local" else ""
    raise ValueError(f"no machine and no folder {name!r}{cure}; on record: {known}")


def measured(
    files: Sequence[Path], experiments: Sequence[str] | None = None, metrics: Sequence[str] | None = None
) -> dict[tuple[Any, ...], Record]:
    """Measured rows with a value, by what they measure; of repeated ones the last in the first
    file that has it."""
    found: dict[tuple[Any, ...], Record] = {}
    for file in files:
        if experiments and file.stem not in experiments:
            continue
        here = {}
        for r in records.read(file):
            if r.source == "measured" and r.value is not None:
                if metrics and r.metric not in metrics:
                    continue
                row = r.to_json()
                here[tuple(row.get(name) for name in KEY)] = r
        found = here | found
    return found


def pairs(first: dict[tuple[Any, ...], Record], second: dict[tuple[Any, ...], Record]) -> list[dict[str, Any]]:
    """Cells of both sides, with the ratio and its range; a value of 0 on the first side has none.

    The range is from the least of one over the most of the other and the other way round; without a
    recorded spread a value stands for itself.
    """
    rows = []
    for key, a in first.items():
        b = second.get(key)
        if b is None:
            continue
        if a.unit != b.unit:
            raise ValueError(f"{a.experiment} {a.metric}: unit {a.unit!r} against {b.unit!r}")
        assert a.value is not None
        assert b.value is not None
        row = {name: value for name, value in zip(KEY, key, strict=True) if value is not None}
        row |= {"unit": a.unit, "first": a.value, "second": b.value}
        low_a, high_a = _spread(a)
        low_b, high_b = _spread(b)
        if a.value:
            row["ratio"] = b.value / a.value
        if low_a > 0:
            row |= {"ratio_min": low_b / high_a, "ratio_max": high_b / low_a}
        row |= {"first_n": a.spread_n, "second_n": b.spread_n}
        rows.append({k: v for k, v in row.items() if v is not None})
    return rows


def _spread(r: Record) -> tuple[float, float]:
    assert r.value is not None
    low = r.value if r.spread_min is None else r.spread_min
    high = r.value if r.spread_max is None else r.spread_max
    return low, high


def _tables(rows: list[dict[str, Any]], names: tuple[str, str], counts: Sequence[int], all_rows: bool) -> None:
    fixed = {n for n in KEY if len({row.get(n) for row in rows}) == 1}
    varying = [n for n in KEY if n not in fixed and n != "seqlen_k" and n != "kv_heads"]
    shown = rows if all_rows else rows[:40]
    output.print_table(
        [*varying, "unit", *names, "ratio", "range"],
        [
            [
                *(row.get(n) for n in varying),
                row["unit"],
                f"{row['first']:.5g}",
                f"{row['second']:.5g}",
                f"{row['ratio']:.3f}" if "ratio" in row else "",
                _range(row),
            ]
            for row in shown
        ],
    )
    if len(shown) < len(rows):
        print(f"... and {len(rows) - len(shown)} more (--all, --csv or --json shows them)")
    print(f"\n{len(rows)} cells in common of {counts[0]} and {counts[1]}. Geometric mean of ratios:")
    output.print_table(
        ["experiment", "metric", "cells", "ratio", "differ"],
        [
            [experiment, metric, len(group), f"{_mean(group):.3f}", sum(not same(row) for row in group)]
            for (experiment, metric), group in _grouped(rows)
        ],
    )


def same(row: dict[str, Any]) -> bool:
    """Whether the two values may be one: the range of their ratio includes 1."""
    if "ratio_min" not in row:
        return bool(row["first"] == row["second"])
    return bool(row["ratio_min"] <= 1 <= row["ratio_max"])


def _range(row: dict[str, Any]) -> str:
    if "ratio_min" not in row or row["ratio_min"] == row["ratio_max"]:
        return ""
    return f"{row['ratio_min']:.3f} to {row['ratio_max']:.3f}"


def _grouped(rows: Iterable[dict[str, Any]]) -> list[tuple[tuple[str, str], list[dict[str, Any]]]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["experiment"], row["metric"]), []).append(row)
    return list(groups.items())


def _mean(rows: Iterable[dict[str, Any]]) -> float:
    logs = [math.log(row["ratio"]) for row in rows if row.get("ratio", 0) > 0]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _restriction(experiment: Sequence[str] | None, metric: Sequence[str] | None) -> str:
    parts = [f"experiment {', '.join(map(repr, experiment))}"] if experiment else []
    parts += [f"metric {', '.join(map(repr, metric))}"] if metric else []
    return f" of {' and '.join(parts)}" if parts else ""
