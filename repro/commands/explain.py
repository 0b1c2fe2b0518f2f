"""``python -m repro explain``: one cell, predicted, measured and published, and why they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repro import experiments
from repro.commands import output
from repro.records import RESULTS

if TYPE_CHECKING:
    import pandas

#: What tells one point of an experiment from another.
POINT = (
    "implementation", "pass", "batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim",
    "dtype", "causal", "dropout", "key_mask", "block_m", "block_n",
)  # fmt: skip
#: What tells the numbers of a point apart.
QUANTITY = ("metric", "level", "kernel", "tensor", "direction", "variant")
SHOWN = 40


def command(
    experiment: Annotated[str, typer.Argument(help="an experiment; see `list`")],
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            "-w",
            help="field=value that picks the cell; may be repeated. implementation=a,b sets a "
            "prediction of a beside a measurement of b",
        ),
    ] = None,
    cell: Annotated[str | None, typer.Option(help="the cell's id, as records carry it")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Explain one cell: predicted, measured, published, and where the difference comes from.

    Without --where the experiment's cells are listed.
    """
    known = {*experiments.names(), *(path.stem for path in RESULTS.glob("*/*.jsonl"))}
    if experiment not in known:
        raise ValueError(f"no experiment {experiment!r}; known: {', '.join(sorted(known))}")
    frame = experiments.tidy([experiment])
    conditions = [condition(text, frame) for text in where or ()]
    if cell:
        conditions.append(("cell", cell))
    rows = select(frame, conditions)
    if rows.empty:
        raise ValueError(f"{experiment}: no cell with {_shown(conditions) or 'any rows'}")
    together = any(name == "implementation" and "," in value for name, value in conditions)
    identity = tuple(n for n in POINT if not (together and n == "implementation"))
    points = find_points(rows, identity)
    if len(points) > 1:
        if as_json:
            output.print_json([dict(p) for p in points])
            return
        _list(points, rows, identity)
        print(f"\n{len(points)} cells; choose one, e.g. --where {_telling(points)}")
        return
    point = points[0]
    rows = rows[[compatible(point, key) for key in _keys(rows, identity)]]
    lines = side_by_side(rows)
    causes = list(reasons(rows, lines))
    if as_json:
        output.print_json({"cell": dict(point), "quantities": lines, "reasons": causes})
        return
    print(", ".join(f"{name}={value}" for name, value in point))
    print()
    output.print_table(
        ["quantity", "machine", "predicted", "measured", "published", "measured / predicted"],
        [
            [
                line["quantity"], line["machine"],
                *(_number(line[source], line["unit"]) for source in
                  ("predicted", "measured", "published")),
                _ratio(line["ratio"]),
            ]
            for line in lines
        ],
    )  # fmt: skip
    print()
    for cause in causes or ["nothing to explain: only one source has this cell"]:
        print(f"- {cause}")


Point = tuple[tuple[str, Any], ...]


def condition(text: str, frame: pandas.DataFrame) -> tuple[str, str]:
    """``field=value``. ValueError for another spelling or an unknown field."""
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise ValueError(f"--where {text!r}: expected field=value")
    if name not in frame.columns:
        raise ValueError(f"--where {text!r}: no field {name!r}; known: {', '.join(POINT)}")
    return name, value


def select(frame: pandas.DataFrame, conditions: Sequence[tuple[str, str]]) -> pandas.DataFrame:
    """Rows that have the wanted values; an absent value is no contradiction, except in ``cell``."""
    for name, value in conditions:
        column = frame[name]
        wanted = value.split(",")
        same = column.map(lambda found, wanted=wanted: any(_same(found, w) for w in wanted))
        frame = frame[same if name in ("cell", "implementation") else same | column.isna()]
    return frame


def _same(found: Any, wanted: str) -> bool:
    if isinstance(found, bool):
        return wanted.lower() in (str(found).lower(), str(int(found)))
    if isinstance(found, int | float):
        try:
            return float(wanted) == float(found)
        except ValueError:
            return False
    return str(found) == wanted


def _keys(rows: pandas.DataFrame, identity: Sequence[str]) -> list[Point]:
    import pandas

    names = [name for name in identity if name in rows.columns]
    return [
        tuple((n, _plain(v)) for n, v in zip(names, values, strict=True) if not pandas.isna(v))
        for values in rows[names].itertuples(index=False)
    ]


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def find_points(rows: pandas.DataFrame, identity: Sequence[str] = POINT) -> list[Point]:
    """The distinct cells.

    A row that says less (no tile in a paper's table) is no cell of its own where another one agrees
    with all it says. Two that each know something the other does not (a tile, a dropout rate) are
    one cell where neither agrees with any third.
    """
    keys = list(dict.fromkeys(_keys(rows, identity)))
    full = [
        key for key in keys
        if not any(len(other) > len(key) and set(key) <= set(other) for other in keys)
    ]  # fmt: skip
    agreeing = {key: [o for o in full if o != key and compatible(o, key)] for key in full}
    points: list[Point] = []
    for key, others in agreeing.items():
        if len(others) == 1 and agreeing[others[0]] == [key]:
            both = dict(others[0]) | dict(key)
            key = tuple((name, both[name]) for name in identity if name in both)
        if key not in points:
            points.append(key)
    return points


def compatible(point: Point, key: Point) -> bool:
    """Whether a row can be of the point: no field of both differs."""
    wanted = dict(point)
    return all(wanted.get(name, value) == value for name, value in key)


def _telling(points: Sequence[Point]) -> str:
    """Conditions that tell the first point from the others, as few as it takes."""
    first, rest, chosen = points[0], list(points[1:]), []
    for name, value in first:
        left = [p for p in rest if dict(p).get(name) == value]
        if len(left) < len(rest):
            chosen.append(f"{name}={value}")
            rest = left
    return " --where ".join(chosen)


def _list(points: Sequence[Point], rows: pandas.DataFrame, identity: Sequence[str]) -> None:
    names = [n for n in identity if len({dict(p).get(n) for p in points}) > 1]
    keys = _keys(rows, identity)
    sources = list(rows["source"])
    lines = []
    for point in points[:SHOWN]:
        have = {s for s, key in zip(sources, keys, strict=True) if compatible(point, key)}
        lines.append([*(dict(point).get(n) for n in names), ", ".join(sorted(have))])
    output.print_table([*names, "sources"], lines)
    if len(points) > SHOWN:
        print(f"... and {len(points) - SHOWN} more")


def side_by_side(rows: pandas.DataFrame) -> list[dict[str, Any]]:
    """One line per quantity and measuring machine, with sums where a quantity has parts."""
    import pandas

    rows = rows.copy()
    if "machine" not in rows:
        rows["machine"] = None
    names = [name for name in QUANTITY if name in rows.columns]
    rows = rows[rows["value"].notna()]
    lines: list[dict[str, Any]] = []
    order = list(dict.fromkeys(rows["metric"]))
    for metric in order:
        of_metric = rows[rows["metric"] == metric]
        groups = list(of_metric.groupby(names, dropna=False, sort=False))
        for key, group in groups:
            parts = [str(k) for k in key if not pandas.isna(k)]
            lines += _lines_of(" ".join(parts), group)
        sm = of_metric[of_metric["tensor"].notna()]
        if metric == "traffic_bytes" and sm["tensor"].nunique() > 1:
            total = sm.groupby(["source", "machine", "device"], dropna=False, as_index=False).agg(
                {"value": "sum", "unit": "first"}
            )
            total["confidence"] = None
            lines += _lines_of("traffic_bytes, all tensors", total)
    return lines


def _lines_of(name: str, group: pandas.DataFrame) -> list[dict[str, Any]]:
    by_source = {str(source): rows for source, rows in group.groupby("source")}
    predicted = _only(by_source.get("predicted"))
    published = _only(by_source.get("published"))
    line = {
        "quantity": name, "unit": group["unit"].iloc[0], "machine": "", "device": None,
        "predicted": predicted, "measured": None, "published": published, "ratio": None,
    }  # fmt: skip
    measured = by_source.get("measured")
    if measured is None:
        return [line]
    lines = []
    for machine, of_machine in measured.groupby("machine", dropna=False):
        value = _only(of_machine)
        ratio = value / predicted if value is not None and predicted else None
        device = of_machine["device"].iloc[0]
        lines.append(line | {"machine": str(machine), "device": device, "measured": value,
                             "ratio": ratio})  # fmt: skip
    return lines


def _only(rows: pandas.DataFrame | None) -> float | None:
    """The median where a quantity was measured or published more than once."""
    return None if rows is None or rows.empty else float(rows["value"].median())


def reasons(rows: pandas.DataFrame, lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Where measured and predicted differ, and what is known about such differences."""
    judged = [line for line in lines if line["ratio"] is not None]
    traffic = [line for line in judged if line["quantity"].startswith("traffic_bytes")]
    exact = [line for line in traffic if line["measured"] == line["predicted"]]
    if traffic and len(exact) == len(traffic):
        yield f"all {len(exact)} byte counts equal the sum over the tile loop, to the byte"
    off = [line for line in judged if line["measured"] != line["predicted"]]
    largest = sorted(off, key=lambda x: -abs(x["measured"] - x["predicted"]))
    for line in largest[:5]:
        difference = line["measured"] - line["predicted"]
        yield (
            f"{line['quantity']} ({line['machine']}): {difference:+.4g} {line['unit']}, "
            f"{line['ratio'] - 1:+.2%}; {_known_cause(line)}"
        )
    for line in lines:
        if line["published"] and line["predicted"]:
            yield (
                f"{line['quantity']}: published {line['published'] / line['predicted'] - 1:+.2%} "
                "of the prediction"
            )
    counted_once = rows["scale_factor"].dropna()
    if len(counted_once):
        yield (
            f"counted on one head and multiplied by {counted_once.iloc[0]:g} = batch x heads "
            "(no block works on more than one)"
        )
    for _, row in rows[rows["error"].notna()].drop_duplicates("error").iterrows():
        yield f"not measured on {row.get('machine')}: {row['error']}"
    published = rows[rows["source"] == "published"]
    for _, row in published.drop_duplicates(["origin", "confidence"]).head(4).iterrows():
        note = row.get("note")
        yield f"published: {row['origin']}, read as {row['confidence']}" + (
            f"; {note}" if isinstance(note, str) else ""
        )


def _known_cause(line: dict[str, Any]) -> str:
    quantity, ratio = line["quantity"], line["ratio"]
    if "hbm" in quantity and "write" in quantity:
        return "lines still dirty in L2 when the kernel ends are not counted: reported, not judged"
    if "hbm" in quantity:
        return (
            "which blocks run ahead of which decides what is fetched again; the simulated L2 lets "
            "the blocks of an SM share it equally and SMs keep step (spread_min, spread_max: "
            "other paces)"
        )
    if quantity.startswith(("traffic_bytes", "sram")):
        return (
            "within the 2 % that counters may be off"
            if abs(ratio - 1) <= 0.02
            else "beyond the 2 % that counters may be off; spilled registers show here as writes"
        )
    if "time" in quantity:
        return (
            "the prediction is a bound, no ceiling overlaps perfectly with the others"
            if ratio >= 1
            else "below the bound, so a ceiling or the work is taken wrongly"
        )
    if "memory" in quantity or "peak" in quantity:
        return "the matrix library's workspace and allocator rounding are not in the prediction"
    return "no known cause"


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return output.of_bytes(value) if unit == "B" else f"{value:.5g} {unit}"


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return "exact" if ratio == 1 else f"{ratio:.4f}"


def _shown(conditions: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name}={value}" for name, value in conditions)
