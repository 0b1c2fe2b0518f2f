"""What padding costs for the lengths of two datasets, and what packing them without it moves.

Lengths are drawn from published histograms (``repro.measuring.lengths``) and put together in
batches of B:

packed   the sequences one after another, with tables of where each starts
longest  each padded to the longest of its batch, a key mask over the padding
limit    each padded to the dataset's limit, a key mask over the padding

All three run the kernels of step 3 in their own tiles. Bytes at the SM boundary of one head, both
passes, are summed over all batches of DRAWN sequences; of EXECUTED sequences they are counted too,
with the same numbers in the real rows. Times are rooflines of an A100, 16 heads, each tensor once
in HBM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from analysis.hardware import A100_80GB
from analysis.lower_bounds import compulsory_packed_bytes
from analysis.packed import Lengths
from analysis.padding import batches, padded_share
from analysis.shapes import AttentionShape
from analysis.traffic import Traffic, predict_traffic
from kernels.attention import default_tile
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.attention import traffic_rows
from repro.experiments.shared.packed_run import run_packed, run_padded
from repro.measuring.lengths import DRAWN, LIMITS, drawn, histogram

WAYS = ("packed", "longest", "limit")
PASSES = ("forward", "backward")
HEAD_DIM, DTYPE, HEADS = 64, "fp16", 16
EXECUTED = 16
SIZES = (1, 4, 16)
ALL_SIZES = (1, 2, 4, 8, 16, 32, 64)
TIMED, TIMED_SIZES = 256, (4, 16, 64)
TILES = {pass_: default_tile(HEAD_DIM, DTYPE, pass_) for pass_ in PASSES}


def point(dataset: str, way: str, pass_: str, size: int, sequences: int) -> Cell:
    """A pass over all batches of ``size``, of as many sequences."""
    return Cell(
        implementation="flash",
        pass_=pass_,
        batch=size,
        heads=1,
        kv_heads=1,
        head_dim=HEAD_DIM,
        dtype=DTYPE,
        causal=False,
        key_mask=way != "packed",
        way=way,
        dataset=dataset,
        sequences=sequences,
    )


def cells() -> list[Cell]:
    """What is executed."""
    return [
        point(dataset, way, pass_, size, EXECUTED)
        for dataset in LIMITS
        for pass_ in PASSES
        for way in ("packed", "longest")
        for size in SIZES
    ]


def batches_of(one: Cell) -> tuple[Lengths, ...]:
    """The lengths of each batch of a cell."""
    return _batches(str(one["dataset"]), int(one["sequences"]), int(one["batch"]))


@cache
def _batches(dataset: str, sequences: int, size: int) -> tuple[Lengths, ...]:
    return tuple(batches(drawn(dataset, sequences), size))


def one_head(lengths: Lengths, way: str, dataset: str) -> AttentionShape:
    """The arrays of a batch: packed, or padded."""
    some = AttentionShape(1, 1, 1, 1, HEAD_DIM, dtype=DTYPE)
    if way == "packed":
        return lengths.packed_shape(some)
    padded = LIMITS[dataset] if way == "limit" else lengths.longest_q
    return AttentionShape(lengths.sequences, 1, padded, padded, HEAD_DIM, dtype=DTYPE)


def traffic_of(one: Cell) -> Traffic:
    """The exact sums of a cell."""
    way, dataset, pass_ = str(one["way"]), str(one["dataset"]), str(one["pass"])
    total = Traffic({})
    for lengths in batches_of(one):
        shape = one_head(lengths, way, dataset)
        total = total + (_packed(shape, lengths, pass_) if way == "packed" else _padded(shape, pass_))
    return total


# Batches repeat: small ones among the drawn, and padded ones wherever the longest is the same.
@cache
def _packed(shape: AttentionShape, lengths: Lengths, pass_: str) -> Traffic:
    return predict_traffic("flash", shape, TILES[pass_], pass_, lengths=lengths)


@cache
def _padded(shape: AttentionShape, pass_: str) -> Traffic:
    return predict_traffic("flash", shape, TILES[pass_], pass_, key_mask=True)


def predict(one: Cell) -> Iterator[Row]:
    """The sums by tensor, the lower bound, and the tokens that are no padding; of some a time."""
    dataset = str(one["dataset"])
    if one["implementation"] == "padding":
        share = padded_share(histogram(dataset), LIMITS[dataset])
        yield row("padded_share", share, tool="sum over the histogram")
    elif one["heads"] == HEADS:
        yield row("time_ms", 1e3 * seconds(one), device=A100_80GB.name, tool="roofline")
    else:
        yield from traffic_rows(traffic_of(one).kernels)
        yield row("compulsory_bytes", _least(batches_of(one), str(one["pass"])), tool="closed form")
        yield row("tokens", sum(lengths.total_q for lengths in batches_of(one)), tool="closed form")


@cache  # the ways of a batch differ in their padding alone, which no bound holds
def _least(of: tuple[Lengths, ...], pass_: str) -> int:
    some = AttentionShape(1, 1, 1, 1, HEAD_DIM, dtype=DTYPE)
    return sum(compulsory_packed_bytes(some, lengths, pass_) for lengths in of)


def also() -> Iterator[Cell]:
    """The share of padding, all batches of many sequences, and rooflines of some."""
    for dataset in LIMITS:
        yield Cell(implementation="padding", dataset=dataset)
        for size, pass_, way in product(ALL_SIZES, PASSES, WAYS):
            yield point(dataset, way, pass_, size, DRAWN)
        for size, way in product(TIMED_SIZES, WAYS):
            yield Cell(**{**point(dataset, way, "forward+backward", size, TIMED), "heads": HEADS})


def seconds(one: Cell) -> float:
    """The roofline of both passes of the first batches, on an A100."""
    way, total = str(one["way"]), 0.0
    for lengths in batches_of(one):
        shape = replace(one_head(lengths, way, str(one["dataset"])), heads=HEADS, kv_heads=HEADS)
        total += sum(_seconds(shape, p, lengths if way == "packed" else None) for p in PASSES)
    return total


@cache
def _seconds(shape: AttentionShape, pass_: str, lengths: Lengths | None) -> float:
    from repro.prediction import predict as of_kernels

    mask = lengths is None
    found = of_kernels("flash", shape, pass_, A100_80GB, once=True, key_mask=mask, lengths=lengths)
    return found.time.seconds


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """Execute every batch: bytes by tensor, and the largest error of the real rows."""
    run = run_packed if one["way"] == "packed" else run_padded
    total, error = Traffic({}), 0.0
    for at, lengths in enumerate(batches_of(one)):
        counted, off = run(lengths, HEAD_DIM, str(one["pass"]), seed=at, context=context)
        total, error = total + counted, max(error, off)
    yield from traffic_rows(total.kernels, tool="host backend: executed, bytes counted")
    yield row("max_abs_error", error, tool="against float64 on the same rounded inputs")


EXPERIMENT = Experiment(
    "packed-sequences",
    cells,
    predict,
    measure,
    device="host",
    also=also,
    sources=(
        "kernels/flash_forward.cu",
        "kernels/flash_backward.cu",
        "kernels/flash_backward_rows.cu",
        "kernels/flash.py",
        "kernels/packed.py",
        "kernels/flash_config.py",
        "kernels/include",
        "kernels/host",
        "repro/experiments/bytes/packed_sequences.py",
        "repro/experiments/shared/packed_run.py",
    ),
    seconds=60,
    on_demand=True,
)
