"""Every recorded DRAM counter, split into compulsory, re-read, late and unexplained bytes.

Takes any measured rows that have both directions of HBM: PyTorch's kernels as recorded in
``l2-absorption`` and ``fig2-left-traffic``, and ours of ``gpu-traffic`` on whichever card.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

from analysis.hardware import GPUS, Gpu, find_gpu
from analysis.hbm import compulsory_hbm, predict_hbm
from analysis.hbm_residual import split
from analysis.shapes import AttentionShape, Tile
from analysis.standard_passes import EAGER, EAGER_MASKED_DROPOUT, KernelPasses
from analysis.traffic import predict_traffic
from repro.experiments.bytes import l2_absorption
from repro.experiments.shared.attention import sum_of

if TYPE_CHECKING:
    import pandas

log = logging.getLogger("figures")

EXPERIMENTS = ("l2-absorption", "fig2-left-traffic", "fig2-left-traffic-masked", "gpu-traffic")
#: Metric of PyTorch's records -> (level, direction); ours have these as fields.
METRICS = {
    "hbm_read_bytes": ("hbm", "read"),
    "hbm_write_bytes": ("hbm", "write"),
    "sram_read_bytes": ("sm", "read"),
    "sram_write_bytes": ("sm", "write"),
}
CELL = [
    "experiment",
    "device",
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
    "block_m",
    "block_n",
]
#: Unfused PyTorch, kernel by kernel in order of launch.
EAGER_KERNELS = {"fig2-left-traffic": EAGER, "fig2-left-traffic-masked": EAGER_MASKED_DROPOUT}
#: FlashAttention-2 as PyTorch launches it, d = 64: (pass, our kernel's name), or a copy (None).
FLASH2_KERNELS: tuple[tuple[str, str | None], ...] = (
    ("forward", "flash_forward"),
    ("backward", None),
    ("backward", None),
    ("backward", "flash_backward_preprocess"),
    ("backward", "flash_backward"),
    ("backward", "flash_backward_postprocess"),
)
FLASH2_TILE = Tile(128, 128)
FLASH2_BLOCKS_PER_SM = {"forward": 2, "backward": 1}

#: (direction -> tensor -> bytes) with every tensor once, and with what is moved again.
Expected = tuple[Mapping[str, Mapping[str, int]], Mapping[str, Mapping[str, int]]]
NOTHING: Expected = ({"read": {}, "write": {}}, {"read": {}, "write": {}})


def counters(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Measured bytes in one row per kernel: columns CELL, kernel, and (level, direction)."""
    rows = frame[(frame["source"] == "measured") & frame["value"].notna()].copy()
    named = rows["metric"].isin(METRICS)
    rows = rows[named | ((rows["metric"] == "traffic_bytes") & rows["level"].notna())]
    named = rows["metric"].isin(METRICS)
    for place, field in enumerate(("level", "direction")):
        told = rows.loc[named, "metric"].map(lambda metric, at=place: METRICS[metric][at])
        rows.loc[named, field] = told
    rows = rows[(rows["kernel"] != "all") & rows["device"].notna()]
    keys = [*CELL, "kernel"]
    for name in keys:
        rows[name] = rows[name].astype(object).where(rows[name].notna(), "-")
    # A kernel that a cell launches several times has a row for each.
    wide = rows.groupby([*keys, "level", "direction"], sort=False)["value"].sum()
    table = wide.unstack(["level", "direction"])
    wanted = [("hbm", "read"), ("hbm", "write")]
    if table.empty or not set(wanted) <= set(table.columns):
        return table.iloc[:0]
    return table.dropna(subset=wanted)


def residuals(frame: pandas.DataFrame) -> list[dict[str, Any]]:
    """One dict per kernel and direction: the cell's fields, kernel, direction, the parts (bytes).

    The parts add up to the counter; ``analysis.hbm_residual.Residual`` asserts it.
    """
    table = counters(frame)
    found = []
    for index, row in table.iterrows():
        cell = dict(zip([*CELL, "kernel"], index, strict=True))
        gpu = find_gpu(str(cell["device"]))
        if gpu is None:
            log.warning("%s: not in analysis/gpus.toml, its counters are not split", cell["device"])
            continue
        once, waved = expected(cell, gpu)
        for direction in ("read", "write"):
            boundary = row.get(("sm", direction))
            parts = split(
                direction,
                int(row["hbm", direction]),
                once[direction],
                waved[direction],
                gpu.l2_bytes,
                None if boundary is None or boundary != boundary else int(boundary),
            )
            found.append({**cell, "direction": direction, **asdict(parts)})
    return found


def expected(cell: Mapping[str, Any], gpu: Gpu) -> Expected:
    """What the formulas give for one kernel of a recorded cell."""
    shape = AttentionShape(
        int(cell["batch"]),
        int(cell["heads"]),
        int(cell["seqlen_q"]),
        int(cell["seqlen_k"]),
        int(cell["head_dim"]),
        kv_heads=int(cell["kv_heads"]),
        dtype=str(cell["dtype"]),
        causal=bool(cell["causal"]),
    )
    name, experiment = str(cell["implementation"]), str(cell["experiment"])
    kernel, pass_ = str(cell["kernel"]), str(cell["pass"])
    if name == "standard-eager":
        return _passes(EAGER_KERNELS[experiment][_place(kernel)], shape)
    if experiment == l2_absorption.EXPERIMENT.name:
        return _flash("flash", shape, l2_absorption.TILE, pass_, gpu.name, l2_absorption.BLOCKS_PER_SM, "flash_forward")
    if name == "sdpa-flash2":
        pass_, ours = FLASH2_KERNELS[_place(kernel)]
        if ours is None:  # PyTorch copies out and dout to the kernel's layout
            once = {"read": {"x": shape.query_bytes}, "write": {"copy": shape.query_bytes}}
            return once, once
        blocks = FLASH2_BLOCKS_PER_SM[pass_]
        return _flash("flash", shape, FLASH2_TILE, pass_, gpu.name, blocks, ours)
    tile = Tile(int(cell["block_m"]), int(cell["block_n"]))
    algorithm, options = sum_of(name)
    return _flash(algorithm, shape, tile, pass_, gpu.name, 1, kernel, **options)


def _place(kernel: str) -> int:
    """Place in order of launch: kernels of PyTorch are recorded as "3: void ..."."""
    return int(kernel.split(":")[0])


def _passes(kernel: KernelPasses, shape: AttentionShape) -> Expected:
    once = {"read": {"all": kernel.reads.bytes(shape)}, "write": {"all": kernel.writes.bytes(shape)}}
    return once, once


@cache
def _flash(
    algorithm: str,
    shape: AttentionShape,
    tile: Tile,
    pass_: str,
    gpu: str,
    blocks_per_sm: int,
    kernel: str,
    **options: Any,
) -> Expected:
    traffic = predict_traffic(algorithm, shape, tile, pass_, **options)
    if kernel not in traffic.kernels:
        return NOTHING
    once = compulsory_hbm(traffic, shape)
    waved = predict_hbm(algorithm, shape, tile, pass_, GPUS[gpu], blocks_per_sm, **options)
    return (
        {"read": once.reads[kernel], "write": once.writes[kernel]},
        {"read": waved.reads[kernel], "write": waved.writes[kernel]},
    )


def cells(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Kernels of a cell added up, one dict per cell and direction."""
    totals: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = (*(row[name] for name in CELL), row["direction"])
        total = totals.setdefault(key, {**row, "kernel": "all", **dict.fromkeys(SUMMED, 0)})
        for name in SUMMED:
            known = total[name] is not None and row[name] is not None
            total[name] = total[name] + row[name] if known else None
    yield from totals.values()


SUMMED = ("counter", "compulsory", "again", "padding", "late", "unexplained", "absorbed")
