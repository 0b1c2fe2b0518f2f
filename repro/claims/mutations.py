"""Changes of records: what must overturn a claim, and what would make a refuted one right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas

Change = Callable[[pandas.DataFrame], pandas.DataFrame]


def chosen(frame: pandas.DataFrame, where: dict[str, Any]) -> pandas.Series:
    """Which rows have these values; a callable judges a value itself."""
    mask = frame["value"].notna()
    for column, wanted in where.items():
        if column not in frame:
            return pandas.Series(False, index=frame.index)
        if callable(wanted):
            mask &= frame[column].map(lambda v, test=wanted: bool(test(v)))
        elif isinstance(wanted, tuple):
            mask &= frame[column].isin(wanted)
        else:
            mask &= frame[column] == wanted
    return mask


@dataclass(frozen=True)
class Scale:
    """Multiply a column of some rows by a factor, and divide: each must change the verdict.

    ``only``: "up" or "down" where the claim is a bound, which the other direction leaves alone.
    """

    where: dict[str, Any] = field(default_factory=dict)
    factor: float = 1.3
    source: str = "measured"
    column: str = "value"
    only: str = ""

    def both(self, frame: pandas.DataFrame) -> list[pandas.DataFrame]:
        """The frame with the rows scaled up, and with them scaled down."""
        mask = chosen(frame, {"source": self.source, **self.where})
        assert mask.any(), f"no {self.source} record with {self.where}"
        found = []
        ways = {"up": self.factor, "down": 1 / self.factor}
        for factor in [ways[self.only]] if self.only else ways.values():
            changed = frame.copy()
            changed.loc[mask, self.column] = changed.loc[mask, self.column].astype(float) * factor
            found.append(changed)
        return found


@dataclass(frozen=True)
class Mirror:
    """Turn a slope over: each value becomes (first value)² / value, over the sorted column."""

    over: str
    where: dict[str, Any] = field(default_factory=dict)

    def both(self, frame: pandas.DataFrame) -> list[pandas.DataFrame]:
        """The frame with the opposite slope."""
        mask = chosen(frame, {"source": "measured", **self.where})
        rows = frame[mask].sort_values(self.over)
        assert rows[self.over].nunique() > 1, f"no slope over {self.over} in {self.where}"
        changed = frame.copy()
        changed.loc[mask, "value"] = rows["value"].iloc[0] ** 2 / changed.loc[mask, "value"]
        return [changed]


def setting(value: Any, column: str = "value", **where: Any) -> Change:
    """Give the matching rows a value, or what a function of the row says."""

    def change(frame: pandas.DataFrame) -> pandas.DataFrame:
        mask = chosen(frame, where)
        assert mask.any(), f"no record with {where}"
        changed = frame.copy()
        new = changed[mask].apply(value, axis=1) if callable(value) else value
        changed.loc[mask, column] = new
        return changed

    return change


def times(factor: float, **where: Any) -> Change:
    """Scale the matching rows."""
    return setting(lambda row: row["value"] * factor, **where)


def every(*changes: Change) -> Change:
    """One change after the other."""

    def change(frame: pandas.DataFrame) -> pandas.DataFrame:
        for one in changes:
            frame = one(frame)
        return frame

    return change


def like(name: str, other: str, factor: float, **where: Any) -> Change:
    """One implementation's values as a multiple of another's at the same length."""

    def change(frame: pandas.DataFrame) -> pandas.DataFrame:
        base = frame[chosen(frame, {"implementation": other, **where})]
        at = base.groupby("seqlen_q")["value"].median()
        return setting(lambda row: factor * at.get(row["seqlen_q"], np.nan), implementation=name, **where)(frame)

    return change


RAN = {"source": "measured"}
PLAIN = {"source": "measured", "dropout": 0.0, "key_mask": False}
PEAK = {"source": "measured", "metric": "peak_bytes"}
