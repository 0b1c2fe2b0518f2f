"""Clocks that each unit of an SM needs for a round of our kernels."""

from __future__ import annotations

import math

import pandas

from analysis.hardware import H200
from analysis.sm_ceilings import SHARED_BYTES_PER_CLOCK_PER_SM
from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, exact, more
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.values import formula, pick, worst
from repro.claims.works import OURS
from repro.experiments import Cell
from repro.experiments.bytes.sm_ceilings import DIRECT, EXACT, OPTIMISTIC, SM80, round_of

#: Tiles that the best peer uses too, by the source of FlashAttention's Hopper path.
PEER = {("forward", 64, 192), ("forward", 128, 128), ("backward", 64, 128), ("backward", 128, 80)}
PEER_NAME, PEER_SEQLEN = "flash-attn-4 4.0.0b36 (Hopper path)", 16384


def forms(frame: pandas.DataFrame) -> pandas.DataFrame:
    """One row per form: clocks of each unit over the tensor cores', predicted and counted."""
    rows = []
    keys = ["implementation", "pass", "head_dim", "block_m", "block_n"]
    ours = pick(frame, experiment="sm-ceilings")
    for values, group in ours.groupby(keys, sort=False):
        name, pass_, head_dim, block_m, block_n = values
        cell = Cell(
            implementation=name, pass_=pass_, head_dim=int(head_dim), block_m=int(block_m), block_n=int(block_n)
        )
        found = round_of(cell)
        tensor = found.clocks()["tensor cores"]
        row = dict(zip(keys, values, strict=True))
        for unit, clocks in found.clocks().items():
            row[f"predicted {unit}"] = clocks / tensor
        counted = pick(group, source="measured", metric="shared_bytes")["value"]
        if len(counted):
            served = float(counted.iloc[-1]) - found.repeated_bytes
            row["counted shared memory"] = served / SHARED_BYTES_PER_CLOCK_PER_SM / tensor
        issued = pick(group, source="measured", kernel="issue slots")["value"]
        if len(issued):
            row["counted issue slots"] = float(issued.iloc[-1]) / tensor
        if name == EXACT and (pass_, head_dim, block_m) in PEER and block_n == 128:
            peer = pick(
                frame,
                experiment="throughput-peers",
                implementation=PEER_NAME,
                pass_=pass_,
                head_dim=head_dim,
                seqlen_q=PEER_SEQLEN,
                causal=False,
                source="measured",
            )["value"]
            if len(peer):
                row["peer's time"] = H200.fp16_tensor_flops / 1e12 / float(peer.iloc[-1])
        row["counted time"] = counted_time(frame, cell)
        rows.append(row)
    return pandas.DataFrame(rows, columns=None if rows else [*keys, "predicted shared memory"])


def counted_time(frame: pandas.DataFrame, cell: Cell) -> float:
    """Time of the main kernel over that of its products, by a card's counters: one over the share
    of time that the tensor cores were busy. NaN where no card has counted the form."""
    rows = pick(
        frame,
        experiment="gpu-sm-units",
        source="measured",
        pass_=cell["pass"],
        head_dim=cell["head_dim"],
        block_m=cell["block_m"],
        block_n=cell["block_n"],
    )
    if rows.empty or cell["implementation"] == OPTIMISTIC:
        return math.nan
    names = rows["implementation"].astype(str)
    sm80, direct = names == SM80, names.str.endswith("direct")
    wanted = {SM80: sm80, DIRECT: direct, EXACT: ~sm80 & ~direct}[str(cell["implementation"])]
    rows = rows[wanted & ~rows["kernel"].str.contains("process")]
    busy = rows[rows["counter"].str.contains("tensor")]["value"]
    return 100 / float(busy.max()) if len(busy) and busy.max() > 0 else math.nan


@claim(
    "SM ceilings",
    "Hopper backward: a round needs more clocks of shared memory than of the tensor cores",
    OURS,
    experiments=("sm-ceilings", "gpu-sm-units"),
    shown="sm_ceilings",
    conditions="clocks by datasheet from executed bytes; that this sets the pace was not timed",
    overturn=(Scale({"experiment": "sm-ceilings", "metric": "shared_bytes"}),),
)
def sm_ceilings(frame: pandas.DataFrame) -> Finding:
    """Bytes are as predicted where counted; that shared memory sets the pace is derived."""
    table = forms(frame)
    backward, direct, forward, before = (
        pick(table, **where)["predicted shared memory"]
        for where in (
            {"pass_": "backward", "implementation": EXACT},
            {"pass_": "backward", "implementation": DIRECT},
            {"pass_": "forward", "implementation": [EXACT, OPTIMISTIC]},
            {"implementation": SM80},
        )
    )
    counted = table.get("counted shared memory", pandas.Series(dtype=float))
    ratio = (counted / formula(table["predicted shared memory"])).dropna()
    what = "least clocks of shared memory over the tensor cores', backward"
    return Finding(
        predicted=f"clocks over the tensor cores': backward {backward.min():.2f} to "
        f"{backward.max():.2f}, {direct.min():.2f} to {direct.max():.2f} with dQ added from "
        f"registers; forward {forward.max():.2f} at most; sm_80 kernels {before.min():.2f} to {before.max():.2f}",
        measured=f"bytes of {len(ratio)} forms, executed; no time" if len(ratio) else NOT_MEASURED,
        parts=[
            exact("shared-memory bytes counted over predicted, worst form", worst(ratio)),
            more(what, float(backward.min()), Evidence.DERIVED),
        ],
    )
