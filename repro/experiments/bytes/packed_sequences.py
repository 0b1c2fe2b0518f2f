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

from analysis.hardware import A100_80GB
from analysis.lower_bounds import compulsory_packed_bytes
from analysis.packed import Lengths
from analysis.padding import batches, padded_share
from analysis.shapes import AttentionShape
from analysis.traffic import Traffic, predict_traffic
from kernels.attention import default_tile
from repro.experiments import Cell, Context, Experiment
from repro.experiments.shared.attention import traffic_rows
from repro.experiments.shared.packed_run import run_packed, run_padded
from repro.measuring.lengths import DRAWN, LIMITS, drawn, histogram
from repro.measuring.records import Record, record

NAME = "packed-sequences"
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


def predict(one: Cell) -> Iterator[Record]:
    """The sums by tensor, the lower bound, and the tokens that are no padding."""
    yield from traffic_rows(one, traffic_of(one).kernels, experiment=NAME)
    for metric, unit, value in (
        ("compulsory_bytes", "B", _least(batches_of(one), str(one["pass"]))),
        ("tokens", "1", sum(lengths.total_q for lengths in batches_of(one))),
    ):
        yield record(
            one,
            experiment=NAME,
            source="predicted",
            tool="closed form",
            metric=metric,
            unit=unit,
            value=value,
            cell=one.id,
        )


@cache  # the ways of a batch differ in their padding alone, which no bound holds
def _least(of: tuple[Lengths, ...], pass_: str) -> int:
    some = AttentionShape(1, 1, 1, 1, HEAD_DIM, dtype=DTYPE)
    return sum(compulsory_packed_bytes(some, lengths, pass_) for lengths in of)


def also() -> Iterator[Record]:
    """All batches of many sequences, rooflines of some, and the share of padding."""
    for dataset, limit in LIMITS.items():
        yield record(
            {},
            experiment=NAME,
            source="predicted",
            implementation="padding",
            dataset=dataset,
            metric="padded_share",
            unit="1",
            value=padded_share(histogram(dataset), limit),
            tool="sum over the histogram",
        )
        for size in ALL_SIZES:
            for pass_ in PASSES:
                for way in WAYS:
                    one = point(dataset, way, pass_, size, DRAWN)
                    yield from predict(one)
        for size in TIMED_SIZES:
            for way in WAYS:
                yield from times(dataset, way, size)


def times(dataset: str, way: str, size: int) -> Iterator[Record]:
    """The roofline of both passes of the first batches, on an A100."""
    seconds = 0.0
    for lengths in batches(drawn(dataset, TIMED), size):
        shape = replace(one_head(lengths, way, dataset), heads=HEADS, kv_heads=HEADS)
        seconds += sum(_seconds(shape, p, lengths if way == "packed" else None) for p in PASSES)
    one = {**point(dataset, way, "forward+backward", size, TIMED), "heads": HEADS}
    yield record(
        one,
        experiment=NAME,
        source="predicted",
        metric="time_ms",
        unit="ms",
        value=1e3 * seconds,
        device=A100_80GB.name,
        tool="roofline",
    )


@cache
def _seconds(shape: AttentionShape, pass_: str, lengths: Lengths | None) -> float:
    from repro.prediction import predict as of_kernels

    mask = lengths is None
    found = of_kernels("flash", shape, pass_, A100_80GB, once=True, key_mask=mask, lengths=lengths)
    return found.time.seconds


def measure(one: Cell, context: Context) -> Iterator[Record]:
    """Execute every batch: bytes by tensor, and the largest error of the real rows."""
    run = run_packed if one["way"] == "packed" else run_padded
    total, error = Traffic({}), 0.0
    for at, lengths in enumerate(batches_of(one)):
        counted, off = run(lengths, HEAD_DIM, str(one["pass"]), seed=at, context=context)
        total, error = total + counted, max(error, off)
    yield from traffic_rows(
        one, total.kernels, experiment=NAME, source="measured", tool="host backend: executed, bytes counted"
    )
    yield record(
        one,
        experiment=NAME,
        source="measured",
        metric="max_abs_error",
        unit="1",
        value=error,
        tool="against float64 on the same rounded inputs",
        cell=one.id,
    )


EXPERIMENT = Experiment(
    name=NAME,
    title="what padding costs, and packing without it",
    cells=cells,
    predict=predict,
    measure=measure,
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
