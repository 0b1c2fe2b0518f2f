"""Torch's compiled kernels, executed without a GPU, beside an H200's counters of the same kernels.

FlashAttention-2's four kernels and torch's kernels of unfused attention are read from torch's CUDA
library (``repro.shipped``) and run by ``kernels.machine``: the sectors that cross between L1 and L2,
by tensor, and what a kernel spills. The counters are those of ``fig2-left-traffic``, its masked form
and ``l2-absorption``. Predicted: the sum over the tile loop, and passes over whole tensors.

A run is smaller than the record and scaled exactly: one head of all, since heads do the same; for the
long sequences one tile of queries at 512 and 1,024 keys, since every round of its loop does the same,
which a third run at 2,048 keys checks. Nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.shapes import AttentionShape
from analysis.standard_passes import EAGER, EAGER_MASKED_DROPOUT
from analysis.traffic import predict_traffic
from kernels.machine import Counts
from repro.experiments import Cell, Context, Experiment, Row, UnavailableError, row
from repro.experiments.bytes import l2_absorption
from repro.experiments.shared.attention import cell, shape_of, tile_of, traffic_rows
from repro.shipped import flash2, library, tensor_kernels

if TYPE_CHECKING:
    import pandas

NAME = "machine-sectors"
ARCHITECTURE = 90
SECTOR = 32
TOOL = "machine code executed, sectors counted"
SPILLS = "spilled registers"
FIG2, MASKED, LONG = "fig2-left-traffic", "fig2-left-traffic-masked", l2_absorption.EXPERIMENT.name

#: The experiments that belong together: this one, and those with a card's counters.
WITH_COUNTERS = (NAME, FIG2, MASKED, LONG)
COLUMNS = (
    *("implementation", "counters", "kernel", "place", "heads", "seqlen"),
    *("direction", "formula", "machine_code", "spilled", "counter"),
)

#: Kernel -> its place in the order of launch that the record names, and our kernel's name.
FLASH2 = {
    "forward": (0, "flash_forward"),
    "dot_do_o": (3, "flash_backward_preprocess"),
    "backward": (4, "flash_backward"),
    "convert_dq": (5, "flash_backward_postprocess"),
}
#: (record, place) -> torch's kernel of unfused attention.
UNFUSED = {
    (FIG2, 1): "scale",
    (FIG2, 2): "softmax",
    (FIG2, 6): "product",
    (FIG2, 7): "softmax backward",
    (MASKED, 1): "scale",
    (MASKED, 3): "softmax",
    (MASKED, 8): "masked scale",
    (MASKED, 9): "product",
    (MASKED, 10): "softmax backward",
    (MASKED, 11): "scale",
}
#: Names of a kernel's arrays in the order of its arguments, or of its struct's fields.
_ARRAYS = {
    "scale": ("out", "x"),
    "product": ("out", "x", "y"),
    "masked scale": ("out", "x", "mask"),
    "softmax": ("out", "x"),
    "softmax backward": ("dx", "dout", "out"),
}
LONG_KEYS = (512, 1024, 2048)


def cells() -> list[Cell]:
    """A kernel of a record each; ``place`` is its number in the order of launch."""
    figure2: dict[str, Any] = {"seqlen": 1024, "head_dim": 64, "batch": 64, "heads": 16}
    tile = flash2.form_of("forward", 64).tile
    found = [
        cell("sdpa-flash2", _pass(name), tile, counters=FIG2, place=place, kernel=name, **figure2)
        for name, (place, _) in FLASH2.items()
    ]
    found += [
        cell("standard-eager", _unfused(at).pass_, tile, counters=at[0], place=at[1], kernel=name, **figure2)
        for at, name in UNFUSED.items()
    ]
    for heads, seqlen in l2_absorption.MEASURED:
        long: dict[str, Any] = {"seqlen": seqlen, "head_dim": 128, "heads": heads, "dtype": "bf16"}
        tile = flash2.form_of("forward", 128).tile
        found.append(cell("sdpa-flash2", "forward", tile, counters=LONG, place=0, kernel="forward", **long))
    return found


def _pass(kernel: str) -> str:
    return "forward" if kernel == "forward" else "backward"


def _unfused(at: tuple[str, int]) -> Any:
    return (EAGER if at[0] == FIG2 else EAGER_MASKED_DROPOUT)[at[1]]


def predict(one: Cell) -> Iterator[Row]:
    """What the formulas give for the kernel."""
    shape, kernel = shape_of(one), str(one["kernel"])
    if one["implementation"] == "sdpa-flash2":
        traffic = predict_traffic("flash", shape, tile_of(one), str(one["pass"])).kernels[FLASH2[kernel][1]]
        return traffic_rows({kernel: traffic})
    passes = _unfused((str(one["counters"]), int(one["place"])))
    moved = {("all", "read"): passes.reads.bytes(shape), ("all", "write"): passes.writes.bytes(shape)}
    return traffic_rows({kernel: moved}, tool="passes over whole tensors")


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """Runs the kernel's machine code: bytes that cross to L2, and those that warps ask for."""
    if library.library() is None:
        raise UnavailableError(library.MISSING)
    if one["counters"] == LONG:
        return _rows(*_long(shape_of(one)))
    if one["implementation"] == "sdpa-flash2":
        return _rows(_flash2(shape_of(one), str(one["kernel"])), shape_of(one).batch * shape_of(one).heads)
    return _rows(_tensors(shape_of(one), str(one["kernel"])), shape_of(one).batch * shape_of(one).heads)


#: (tensor, direction) -> sectors that cross to L2, and that warps ask for.
Sectors = dict[tuple[str, str], tuple[int, int]]


def _rows(sectors: Sectors, times: int) -> Iterator[Row]:
    for (tensor, direction), (crossing, asked) in sectors.items():
        more = {"level": "sm", "tensor": tensor, "direction": direction, "scale_factor": times, "tool": TOOL}
        yield row("traffic_bytes", crossing * SECTOR * times, **more)
        yield row("requested_bytes", asked * SECTOR * times, **more)


def sectors_of(counts: Counts, names: tuple[str, ...] = ()) -> Sectors:
    """By name of a struct's field, or of ``names`` by number; atomics count as writes."""
    named = {(field, direction): t for (_, field, direction), t in counts.fields.items()}
    if not named:
        named = {(str(number), direction): t for (number, direction), t in counts.traffic.items()}
    found: Sectors = {}
    local = {(SPILLS, direction): t for direction, t in counts.local.items()}
    for (name, direction), traffic in {**named, **local}.items():
        tensor = names[int(name)] if names and name.isdigit() else name
        key = (tensor, "read" if direction == "read" else "write")
        before = found.get(key, (0, 0))
        found[key] = (before[0] + traffic.misses, before[1] + traffic.sectors)
    return found


def _operands(shape: AttentionShape) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    rows = {"q": shape.seqlen_q, "k": shape.seqlen_k, "v": shape.seqlen_k, "dout": shape.seqlen_q}
    sizes = {name: (shape.batch, n, shape.heads, shape.head_dim) for name, n in rows.items()}
    numbers = {name: draw.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    if shape.dtype == "fp16":
        return {name: x.astype(np.float16) for name, x in numbers.items()}
    return {name: (x.view(np.uint32) >> 16).astype(np.uint16) for name, x in numbers.items()}


def _flash2(shape: AttentionShape, kernel: str) -> Sectors:
    """All blocks of one head, after the kernels before it."""
    one = AttentionShape(1, 1, shape.seqlen_q, shape.seqlen_k, shape.head_dim, dtype=shape.dtype)
    given = flash2.arrays(one, _operands(one))
    for name in flash2.KERNELS:
        counts = flash2.launch(name, ARCHITECTURE, one, given, products="fast")
        if name == kernel:
            break
    return sectors_of(counts)


def _long(shape: AttentionShape) -> tuple[Sectors, int]:
    """One tile of queries at the record's number of keys, and how many there are."""
    found: list[Sectors] = []
    for keys in LONG_KEYS:
        tile = flash2.form_of("forward", shape.head_dim).tile
        one = AttentionShape(1, 1, tile.block_m, keys, shape.head_dim, dtype=shape.dtype)
        given = flash2.arrays(one, _operands(one))
        found.append(sectors_of(flash2.launch("forward", ARCHITECTURE, one, given, products="fast")))
    first, second, third = found
    scaled: Sectors = {}
    rounds = shape.seqlen_k // LONG_KEYS[0] - 1
    for key, start in first.items():
        steps = [after - before for before, after in zip(start, second[key], strict=True)]
        if third[key] != tuple(n + 3 * step for n, step in zip(start, steps, strict=True)):
            raise ValueError(f"sectors of {key} do not grow with the keys: {start}, {second[key]}, {third[key]}")
        crossing, asked = (n + rounds * step for n, step in zip(start, steps, strict=True))
        scaled[key] = (crossing, asked)
    return scaled, shape.heads * (shape.seqlen_q // tile.block_m)


def _tensors(shape: AttentionShape, kernel: str) -> Sectors:
    """Scores of one head."""
    draw = np.random.default_rng(0)
    size = (shape.seqlen_q, shape.seqlen_k)
    out, x, y = (draw.standard_normal(size).astype(np.float16) for _ in range(3))
    if kernel == "softmax":
        counts = tensor_kernels.softmax(ARCHITECTURE, out, x)
    elif kernel == "softmax backward":
        counts = tensor_kernels.softmax_backward(ARCHITECTURE, out, x, y)
    else:
        reads = {"scale": (x,), "product": (x, y), "masked scale": (x, y > 0)}[kernel]
        counts = tensor_kernels.elementwise(kernel, ARCHITECTURE, 0.125, out, *reads)
    return sectors_of(counts, _ARRAYS[kernel])


def beside(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Formula, machine code, of it spilled, and counter, in bytes, by kernel and direction.

    frame: of :data:`WITH_COUNTERS`.
    """
    ours = frame[frame["experiment"] == NAME]
    counters = frame[frame["experiment"] != NAME]
    rows = []
    for one in cells():
        mine = ours
        for name in ("implementation", "counters", "place", "heads", "seqlen_q"):
            mine = mine[mine[name] == one[name]]
        mine = mine[mine["metric"] == "traffic_bytes"]
        for direction in ("read", "write"):
            here = mine[mine["direction"].replace("atomic", "write") == direction]
            ran = here[here["source"] == "measured"]
            if ran.empty:
                continue
            rows.append(
                {
                    "implementation": one["implementation"],
                    "counters": one["counters"],
                    "kernel": one["kernel"],
                    "place": one["place"],
                    "heads": int(one["batch"]) * int(one["heads"]),
                    "seqlen": one["seqlen_q"],
                    "direction": direction,
                    "formula": here.loc[here["source"] == "predicted", "value"].sum(),
                    "machine_code": ran["value"].sum(),
                    "spilled": ran.loc[ran["tensor"] == SPILLS, "value"].sum(),
                    "counter": counter(counters, one, direction),
                }
            )
    import pandas

    return pandas.DataFrame(rows, columns=COLUMNS)


def counter(counters: pandas.DataFrame, one: Cell, direction: str) -> float:
    """The H200's counter of a cell's kernel."""
    found = counters[(counters["experiment"] == one["counters"]) & (counters["metric"] == f"sram_{direction}_bytes")]
    for name in ("implementation", "heads", "seqlen_q"):
        found = found[found[name] == one[name]]
    if one["counters"] != LONG:
        found = found[found["kernel"].str.startswith(f"{one['place']}: ")]
    values = found.loc[found["source"] == "measured", "value"]
    return float(values.iloc[0]) if len(values) else float("nan")


EXPERIMENT = Experiment(
    name=NAME,
    cells=cells,
    predict=predict,
    measure=measure,
    device="cpu",
    sources=("kernels/machine", "repro/shipped"),
    on_demand=True,
    seconds=120.0,
    timed=False,
)
