"""Values of a frame by the columns they are known by, as claims read them."""

from __future__ import annotations

import math
from typing import Any

import pandas

from repro.claims.register import NOT_MEASURED

NAN = float("nan")


def picked(frame: pandas.DataFrame, **wanted: object) -> pandas.DataFrame:
    """The rows with these values, those without a number left out."""
    for column, value in wanted.items():
        if column not in frame:
            return frame.iloc[:0]
        frame = frame[frame[column] == value]
    return frame.dropna(subset=["value"])


def one(frame: pandas.DataFrame, **wanted: object) -> float:
    """The first of them, NaN where there is none."""
    found = picked(frame, **wanted)["value"]
    return float(found.iloc[0]) if len(found) else NAN


def growth(frame: pandas.DataFrame, **wanted: object) -> float:
    """Measured log-log slope between the two largest depths."""
    rows = picked(frame, metric="peak_bytes", source="measured", **wanted).sort_values("depth")
    if len(rows) < 2:
        return NAN
    first, last = rows.iloc[-2], rows.iloc[-1]
    return math.log(last["value"] / first["value"]) / math.log(last["depth"] / first["depth"])


def text(value: float, form: str = ".2f") -> str:
    return format(value, form) if math.isfinite(value) else NOT_MEASURED


def pick(frame: pandas.DataFrame, **wanted: Any) -> pandas.DataFrame:
    """Rows whose columns have the wanted value (or one of a list of values).

    A column that no record has yet is the same as one without the value: no rows.
    """
    rows = frame
    for column, value in wanted.items():
        key = "pass" if column == "pass_" else column
        if key not in rows:
            return rows.iloc[:0]
        values = value if isinstance(value, list | tuple | set) else [value]
        rows = rows[rows[key].isin(values)]
    return rows


def worst(ratio: pandas.Series) -> float:
    """The value farthest from 1, NaN if there is none: what a claim about many points hangs on."""
    known = ratio.dropna()
    return float(known.iloc[(known - 1).abs().argmax()]) if len(known) else NAN
