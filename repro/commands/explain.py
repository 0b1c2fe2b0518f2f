"""``python -m repro explain``: one cell, predicted, measured and published, and why they differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from repro import experiments
from repro.commands import output
from repro.commands.causes import reasons
from repro.measuring import records

if TYPE_CHECKING:
    import pandas

#: What tells one point of an experiment from another.
POINT = (
    "implementation",
    "pass",
    "batch",
    "heads",
    "kv_heads",
    "seqlen_q",
    "seqlen_k",
    "head_dim",
    "dtype",
    "causal",
    "dropout",
    "key_mask",
    "block_m",
    "block_n",
    "scores",
    "sharing",
    "splits",
    "way",
    "window_left",
)
#: Where a row comes from, which does not say what it is of.
ORIGIN = (
    "value",
    "unit",
    "source",
    "tool",
    "device",
    "origin",
    "confidence",
    "machine",
    "cell",
    "date",
    "commit",
    "sources",
    "spread",
    "error",
)
#: What tells the numbers of a point apart.
QUANTITY = ("metric", "level", "kernel", "tensor", "direction", "variant")
SHOWN = 40


def command(
    experiment: Annotated[str, typer.Argument(help="an experiment; see `list`")],
    choice: Annotated[
        list[str] | None, typer.Argument(help="the cell: its number in the list, or field=value, e.g. pass=forward")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            "-w",
            help="the same as CHOICE field=value; may be repeated. implementation=a,b sets a "
            "prediction of a beside a measurement of b",
        ),
    ] = None,
    cell: Annotated[str | None, typer.Option(help="the cell's id, as records carry it")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Explain one cell: predicted, measured, published, and where the difference comes from.

    Without a choice the experiment's cells are listed with their numbers.
    """
    known = {*experiments.names(), *(path.stem for path in records.files())}
    if experiment not in known:
        raise ValueError(f"no experiment {experiment!r}; known: {', '.join(sorted(known))}")
    frame = experiments.tidy([experiment])
    numbers = [text for text in choice or () if text.isdecimal()]
    asked = [text for text in choice or () if not text.isdecimal()]
    conditions = [condition(text, frame) for text in [*asked, *(where or ())]]
    if len(numbers) > 1:
        raise ValueError(f"cells {' and '.join(numbers)}: one at a time")
    if cell:
        conditions.append(("cell", cell))
    rows = select(frame, conditions)
    if rows.empty:
        raise ValueError(f"{experiment}: no cell with {_shown(conditions) or 'any rows'}")
    together = any(name == "implementation" and "," in value for name, value in conditions)
    identity = tuple(n for n in POINT if not (together and n == "implementation"))
    points = find_points(rows, identity)
    if numbers:
        number = int(numbers[0])
        if not 1 <= number <= len(points):
            raise ValueError(f"cell {number} is not one of 1 to {len(points)}")
        points = [points[number - 1]]
    if len(points) > 1:
        if as_json:
            output.print_json([dict(p) for p in points])
            return
        _list(points, rows, identity)
        again = " ".join([experiment, *(f"{name}={value}" for name, value in conditions)])
        print(f"\n{len(points)} cells; choose one by its number: explain {again} 1")
        return
    point = points[0]
    rows = rows[[compatible(point, key) for key in _keys(rows, identity)]]
    lines = side_by_side(rows)
    causes = list(reasons(rows, lines, dict(point)))
    if as_json:
        output.print_json({"cell": dict(point), "quantities": lines, "reasons": causes})
        return
    output.print_text(", ".join(f"{name}={value}" for name, value in point))
    print()
    output.print_table(
        ["quantity", "from", "predicted", "measured", "published", "/ predicted"],
        [
            [
                line["quantity"],
                line["machine"] or _abbreviated(line["origin"]),
                *(_number(line[source], line["unit"]) for source in ("predicted", "measured", "published")),
                _ratio(line["ratio"]),
            ]
            for line in lines
        ],
    )
    print()
    for cause in causes or ["nothing to explain: only one source has this cell"]:
        output.print_text(f"- {cause}", "  ")


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
    full = [key for key in keys if not any(len(other) > len(key) and set(key) <= set(other) for other in keys)]
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


def _list(points: Sequence[Point], rows: pandas.DataFrame, identity: Sequence[str]) -> None:
    names = [n for n in identity if len({dict(p).get(n) for p in points}) > 1]
    keys = _keys(rows, identity)
    sources = list(rows["source"])
    lines = []
    for number, point in enumerate(points[:SHOWN], start=1):
        have = {s for s, key in zip(sources, keys, strict=True) if compatible(point, key)}
        lines.append([number, *(dict(point).get(n) for n in names), ", ".join(sorted(have))])
    output.print_table(["#", *names, "sources"], lines)
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
    """A line per machine that measured it and per publication that prints it.

    Repeated measurements of one machine are one value, their median; publications and predictions
    that differ are never put together.
    """
    by_source = {str(source): rows for source, rows in group.groupby("source")}
    predictions = _predictions(by_source.get("predicted"))
    line: dict[str, Any] = {
        "quantity": name,
        "unit": group["unit"].iloc[0],
        "machine": "",
        "origin": "",
        "device": None,
        "predicted": None,
        "measured": None,
        "published": None,
        "ratio": None,
    }
    lines: list[dict[str, Any]] = []

    def add(source: str, value: float, device: Any, **where: str) -> None:
        predicted = _of_device(predictions, device)
        ratio = value / predicted if predicted else None
        lines.append(line | where | {"device": device, "predicted": predicted, source: value, "ratio": ratio})

    measured = by_source.get("measured")
    if measured is not None:
        for (machine, device), rows in measured.groupby(["machine", "device"], dropna=False):
            add("measured", float(rows["value"].median()), device, machine=str(machine))
    published = by_source.get("published")
    if published is not None:
        for _, row in published.drop_duplicates(["origin", "value"]).iterrows():
            add("published", float(row["value"]), row.get("device"), origin=str(row["origin"]))
    shown = {entry["predicted"] for entry in lines}
    values = {each.value for each in predictions}
    if len(values) == 1:
        return lines or [line | {"predicted": values.pop()}]
    for each in predictions:
        if each.value not in shown:
            origin = ", ".join(filter(None, (each.device, each.told, each.tool)))
            lines.append(line | {"predicted": each.value, "origin": origin})
    return lines


class _Predicted(NamedTuple):
    """A prediction; absent texts are empty. told: the fields by which rows of one name differ."""

    tool: str
    device: str
    value: float
    told: str


def _predictions(rows: pandas.DataFrame | None) -> list[_Predicted]:
    """Those of one quantity, each value of a tool and a device once."""
    if rows is None:
        return []
    telling = [name for name in rows.columns if name not in ORIGIN and rows[name].map(str).nunique() > 1]
    found: dict[tuple[str, str, float], _Predicted] = {}
    for _, row in rows.iterrows():
        tool, device = (str(row[name]) if isinstance(row.get(name), str) else "" for name in ("tool", "device"))
        value = float(row["value"])
        told = ", ".join(f"{name}={_plain(row[name])}" for name in telling if _known(row[name]))
        found.setdefault((tool, device, value), _Predicted(tool, device, value, told))
    return list(found.values())


def _known(value: Any) -> bool:
    return value is not None and value == value


def _of_device(predictions: Sequence[_Predicted], device: Any) -> float | None:
    """The prediction for a device, or the only one there is."""
    same = {each.value for each in predictions if each.device and each.device == device}
    values = same or {each.value for each in predictions}
    return values.pop() if len(values) == 1 else None


def _abbreviated(origin: str, width: int = 44) -> str:
    """An origin without what is between its parentheses; the reasons have it in full."""
    short = re.sub(r"\s*\([^()]*(19|20)\d\d\)", "", origin)
    return short if len(short) <= width else short[: width - 1] + "…"


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "FLOP":
        return output.of_flops(value)
    return output.of_bytes(value) if unit == "B" else f"{value:.5g} {unit}"


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return "exact" if ratio == 1 else f"{ratio:.4f}"


def _shown(conditions: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name}={value}" for name, value in conditions)
