"""What the checkpointing figures share: colours and names of strategies, slopes, machine."""

from __future__ import annotations

import math

import pandas

MIB = 2**20
COLOURS = {
    "autograd": "#777777",
    "store-all": "#D55E00",
    "exponential": "#CC79A7",
    "sqrt": "#0072B2",
    "chen-search": "#0072B2",
    "recursive": "#009E73",
    "recompute-all": "#E69F00",
    "optimal": "#000000",
    "optimal-at-sqrt": "#000000",
    "greedy": "#E69F00",
    "torch-checkpoint": "#56B4E9",
    "torch-memory-budget": "#CC79A7",
}
NAMES = {
    "autograd": "autograd",
    "store-all": "store all",
    "exponential": "exponential spacing",
    "sqrt": "sqrt(L) segments",
    "chen-search": "sublinear plan (Chen)",
    "recursive": "halving, recursive",
    "recompute-all": "recompute all",
    "optimal-at-sqrt": "optimum in sqrt(L)'s memory",
}


def slope(rows: pandas.DataFrame, x: str = "depth") -> float:
    """Log-log slope of value against x over the last quadrupling (or what there is)."""
    line = rows.dropna(subset=["value"]).sort_values(x)
    last = line.iloc[-1]
    first = line[line[x] <= last[x] / 4]
    if first.empty:
        return float("nan")
    start = first.iloc[-1]
    return math.log(last["value"] / start["value"]) / math.log(last[x] / start[x])
