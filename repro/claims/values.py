"""Values of a frame by the columns they are known by, as claims read them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pandas

from repro.claims.register import NOT_MEASURED

NAN = float("nan")
GB = 1e9
Number = TypeVar("Number", float, pandas.Series)


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


def known(frame: pandas.DataFrame, **wanted: Any) -> pandas.DataFrame:
    """Those of them that have a number."""
    return pick(frame, **wanted).dropna(subset=["value"])


def one(frame: pandas.DataFrame, **wanted: Any) -> float:
    """The first number of them, NaN where there is none."""
    found = known(frame, **wanted)["value"]
    return float(found.iloc[0]) if len(found) else NAN


def by(frame: pandas.DataFrame, column: str, **wanted: Any) -> pandas.Series:
    """Their numbers by a column."""
    return known(frame, **wanted).set_index(column)["value"].astype(float)


def over(frame: pandas.DataFrame, top: str, under: str, index: str | list[str], **wanted: Any) -> pandas.Series:
    """One implementation's numbers over another's, at every point that both have."""
    rows = known(frame, implementation=[top, under], **wanted)
    wide = rows.pivot_table(index=index, columns="implementation", values="value")
    if not {top, under} <= set(wide):
        return pandas.Series(dtype=float)
    return (wide[top] / wide[under]).dropna()


def against_sums(rows: pandas.DataFrame, keys: Sequence[str]) -> pandas.Series:
    """Measured over predicted at every point that both have: counts against the theory."""
    rows = rows.dropna(subset=["value"]).reindex(columns=["source", "value", *keys])
    rows = rows.assign(**{key: rows[key].astype(object).where(rows[key].notna(), "") for key in keys})
    wide = rows.pivot_table(index=list(keys), columns="source", values="value", aggfunc="sum", sort=False)
    if not {"measured", "predicted"} <= set(wide):
        return pandas.Series(dtype=float)
    return (wide["measured"] / wide["predicted"]).dropna()


def worst(ratio: pandas.Series) -> float:
    """The value farthest from 1, NaN if there is none: what a claim about many points hangs on."""
    found = ratio.dropna()
    return float(found.iloc[(found - 1).abs().argmax()]) if len(found) else NAN


def growth(frame: pandas.DataFrame, **wanted: Any) -> float:
    """Measured log-log slope of the peak between the two largest depths."""
    rows = known(frame, metric="peak_bytes", source="measured", **wanted).sort_values("depth")
    if len(rows) < 2:
        return NAN
    first, last = rows.iloc[-2], rows.iloc[-1]
    return math.log(last["value"] / first["value"]) / math.log(last["depth"] / first["depth"])


def logarithm(first: int, last: int) -> float:
    """The log-log slope of a logarithm between two depths."""
    return math.log(math.log(last) / math.log(first)) / math.log(last / first)


def text(value: float, form: str = ".2f") -> str:
    """A number, or that there is none."""
    return format(value, form) if math.isfinite(value) else NOT_MEASURED


def off(ratio: float, form: str = "+.2%") -> str:
    """How far a ratio that should be 1 is from it."""
    return f"worst {ratio - 1:{form}}" if math.isfinite(ratio) else NOT_MEASURED


def span(values: pandas.Series, form: str = ".2f") -> str:
    """Least to most; NaN as text where there are none."""
    return f"{values.min():{form}} to {values.max():{form}}x"


@dataclass
class _Mutation:
    """Which call of :func:`formula` is off, up (1) or down (-1), and how many there were."""

    place: int = -1
    direction: int = 0
    calls: int = 0


_mutation = _Mutation()


def formula(value: Number, factor: float = 1.3) -> Number:
    """A number that theory gives and a judge compares; a test multiplies and divides it by the
    factor, which is larger where the range is, and asks for another verdict."""
    place, _mutation.calls = _mutation.calls, _mutation.calls + 1
    return value * factor**_mutation.direction if place == _mutation.place else value


@contextmanager
def formula_off(place: int, direction: int) -> Iterator[_Mutation]:
    """Judge with the formula called at this place off; gives how many were called."""
    _mutation.place, _mutation.direction, _mutation.calls = place, direction, 0
    try:
        yield _mutation
    finally:
        _mutation.place, _mutation.direction = -1, 0
