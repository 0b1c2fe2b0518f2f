"""Which kernels take which option of ``repro.flash_attention``: a table, from the drivers.

For each option and algorithm the driver is run on a recorder (``kernels.launches``) for a Hopper
card; what it refuses it does not take. ``python -m repro dev coverage`` writes the table of
``docs/pages/coverage.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tabulate import tabulate

from analysis.algorithms import ALGORITHMS
from analysis.packed import Lengths
from analysis.shapes import AttentionShape, Tile
from kernels.launches import AUTO, Device, launches_of
from kernels.pages import Block

BLOCK = Block("coverage.md", "coverage", "repro dev coverage")
SHAPE = AttentionShape(2, 4, 1024, 1024, 128, dtype="bf16")
HOPPER = Device("90")
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Option:
    """A line of the table.

    shape: what is changed in it. asked: of ``launches_of``. backward: of the backward alone.
    passes: that the option is of.
    """

    name: str
    shape: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)
    backward: Mapping[str, Any] = field(default_factory=dict)
    passes: tuple[str, ...] = PASSES


OPTIONS = (
    Option("bf16, head dimension 64 or 128"),
    Option("fp16", {"dtype": "fp16"}),
    Option("fp32", {"dtype": "fp32"}),
    Option("head dimension 256", {"head_dim": 256}),
    Option("head dimension 40, or another up to 256", {"head_dim": 40}),
    Option("fewer key heads than query heads", {"kv_heads": 2}),
    Option("e4m3 k and v: `k_scale`, `v_scale`", {"fp8": True}, passes=("forward",)),
    Option("e4m3 k and v: `scale_block`", {"fp8": True, "scale_block": 64}, passes=("forward",)),
    Option("`causal`", {"causal": True}),
    Option("`window`", {"window": (128, 0)}),
    Option("`window` and `sinks`", {"window": (128, 0), "sinks": 4}),
    Option("`key_mask`", asked={"key_mask": True}),
    Option("`block_mask`", asked={"block_mask": np.ones((1, 1, 1, 1), bool), "tile": Tile(64, 64)}),
    Option("`dropout_p`", asked={"dropout_p": 0.5}),
    Option("`softcap`", asked={"softcap": True}),
    Option("`alibi_slopes`", asked={"alibi": True}),
    Option("`softcap` at head dimension 64", {"head_dim": 64}, {"softcap": True}),
    Option("the same in fp16", {"head_dim": 64, "dtype": "fp16"}, {"softcap": True}),
    Option("`softcap` and `window` at head dimension 64", {"head_dim": 64, "window": (128, 0)}, {"softcap": True}),
    Option("`softcap` and `alibi_slopes` at head dimension 64", {"head_dim": 64}, {"softcap": True, "alibi": True}),
    Option("`bias`, and its gradient", asked={"bias": (1, 4)}, backward={"bias_gradient": True}),
    Option("`cu_seqlens_q`, `cu_seqlens_k`", {"batch": 1}, {"lengths": Lengths.equal((1000, 0, 24))}),
    Option("`tile`", asked={"tile": Tile(64, 64)}),
    Option('`order="sawtooth"`', asked={"order": "sawtooth"}),
    Option("`return_lse`, with a gradient of lse", backward={"lse_gradient": True}),
)
DETERMINISTIC = Option("`deterministic`: dq in a fixed order", backward={"deterministic": True})
"""Asked of dispatch alone: an algorithm by its name has a fixed order or has none."""


def takes(algorithm: str, option: Option, pass_: str) -> str | None:
    """The algorithm that runs a pass with the option, on a Hopper card; None if it is refused."""
    shape = replace(SHAPE, **option.shape)
    asked = {**option.asked, **(option.backward if pass_ == "backward" else {})}
    try:
        return launches_of(algorithm, shape, pass_, HOPPER, **asked).algorithm
    except (TypeError, ValueError):
        return None


def mark(algorithm: str, option: Option) -> str:
    """ "yes", the one pass that takes the option, or a dash."""
    found = [pass_ for pass_ in PASSES if takes(algorithm, option, pass_)]
    return {0: "–", 1: f"{''.join(found)} only", 2: "yes"}[len(found)]


def table() -> str:
    """A line an option: what the operator runs for it on a Hopper card, and what takes it."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for name in ALGORITHMS:
        columns.setdefault(tuple(mark(name, option) for option in OPTIONS), []).append(name)
    rows = []
    for place, option in enumerate((*OPTIONS, DETERMINISTIC)):
        picked = dict.fromkeys(takes(AUTO, option, pass_) or "nothing" for pass_ in option.passes)
        own = ["by name" if option is DETERMINISTIC else marks[place] for marks in columns]
        rows.append((option.name, ", ".join(f"`{name}`" for name in picked), *own))
    names = (", ".join(f"`{name}`" for name in found) for found in columns.values())
    headers = ("option", "the operator on Hopper", *names)
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True)


def main() -> None:
    """Writes the page's table."""
    BLOCK.write(table())
