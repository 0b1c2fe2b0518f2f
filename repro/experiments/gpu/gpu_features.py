"""Windows, a softcap, ALiBi and packed sequences on a Hopper card: its kernels beside sm_80's.

Dispatch takes the Hopper kernels for all of them by predicted times alone; here both take turns,
L2 is flushed before each, and results are held to float64 first.
``results/registered/gpu-features.jsonl`` holds the predicted times of the Hopper kernels, from
machine code, with date and commit (``repro.gpu.register``): for all but the backward of packed
sequences, of which the model has none. Cells with a softcap name its tanh: rows without are of the
kernels before, whose tanh took two special-function operations and a dozen others a score; no card
had run them. Lengths of packed sequences are drawn from the histograms of
``packed-sequences``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from analysis.hardware import Gpu
from analysis.packed import Lengths
from analysis.shapes import AttentionShape
from kernels import hopper
from repro.experiments import Cell, Context, Experiment
from repro.experiments.bytes.packed_sequences import LIMITS, drawn
from repro.experiments.gpu.gpu_throughput import BUDGET_MS, CARDS, TOKENS, seconds_of
from repro.experiments.shared.attention import shape_of
from repro.measuring.records import Record, record
from repro.prediction import Prediction
from repro.prediction import predict as of_kernels

NAME = "gpu-features"
#: In the order of their turns.
IMPLEMENTATIONS = HOPPER, SM80 = ("flash-sm90", "flash")
HEADS, DTYPE = 16, "bf16"
HEAD_DIMS, PASSES = (128, 64), ("forward", "backward")
#: Gemma 2's cap.
SOFTCAP = 30.0
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window_left": 1024},
    "softcap": {"softcap": SOFTCAP, "tanh": "approximate"},
    "alibi": {"alibi": True},
}
SEQUENCES = 64


def cells() -> list[Cell]:
    """A length that persistent forms take without features, packed sequences, a long one."""
    return [*_of_length(4096), *_packed(), *_of_length(TOKENS)]


def _cell(feature: str, pass_: str, head_dim: int, batch: int, seqlen: int, **more: Any) -> Cell:
    return Cell(
        feature=feature,
        pass_=pass_,
        batch=batch,
        heads=HEADS,
        kv_heads=HEADS,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        dtype=DTYPE,
        causal=True,
        **more,
    )


def _of_length(seqlen: int) -> list[Cell]:
    """What the Hopper kernels cover."""
    return [
        _cell(feature, pass_, head_dim, TOKENS // seqlen, seqlen, **more)
        for pass_ in PASSES
        for feature, more in FEATURES.items()
        for head_dim in HEAD_DIMS
        if hopper.unsupported_reason(DTYPE, head_dim, [feature], pass_=pass_) is None
    ]


def _packed() -> list[Cell]:
    """A batch of each dataset: ``batch`` sequences of at most ``seqlen_q`` rows."""
    return [
        _cell("packed", pass_, head_dim, SEQUENCES, limit, dataset=dataset)
        for pass_ in PASSES
        for dataset, limit in LIMITS.items()
        for head_dim in HEAD_DIMS
    ]


def problem(one: Cell) -> tuple[AttentionShape, Lengths | None]:
    """The arrays of a cell, with its window, and the lengths of packed sequences."""
    shape = shape_of(one)
    if "dataset" not in one:
        return shape, None
    lengths = Lengths.equal(drawn(str(one["dataset"]), shape.batch))
    return lengths.packed_shape(shape), lengths


def prediction(one: Cell, name: str, gpu: Gpu) -> Prediction:
    """What the models say of an implementation on a card."""
    shape, lengths = problem(one)
    return of_kernels(
        name, shape, str(one["pass"]), gpu, softcap="softcap" in one, alibi="alibi" in one, lengths=lengths
    )


def _predicted(one: Cell, name: str, gpu: Gpu, seconds: float, tool: str) -> Record:
    return record(
        one,
        experiment=NAME,
        implementation=name,
        source="predicted",
        metric="time_ms",
        unit="ms",
        device=gpu.name,
        value=seconds * 1e3,
        tool=tool,
        cell=one.id,
    )


def registered() -> Iterator[Record]:
    """Times of the Hopper kernels from machine code, written once (``repro.gpu.register``)."""
    for one in cells():
        for gpu in CARDS:
            found = prediction(one, HOPPER, gpu)
            if found.predicted_s is not None:
                tool = f"machine code at {found.clock.hz / 1e9:.2f} GHz, registered"
                yield _predicted(one, HOPPER, gpu, found.predicted_s, tool)


def predict(one: Cell) -> list[Record]:
    """The bound of the sm_80 kernels; of the Hopper kernels counts what was registered."""
    return [
        _predicted(one, SM80, gpu, found.time.seconds, f"ceilings, {found.ceilings.origin}")
        for gpu in CARDS
        for found in (prediction(one, SM80, gpu),)
    ]


def measure(one: Cell, context: Context) -> list[Record]:
    """Milliseconds of both in turn; what does not run or is wrong is a row that says so."""
    from repro.instruments.feature_work import FeatureOperands
    from repro.instruments.timing import TorchDevice, time_interleaved

    shape, lengths = problem(one)
    pass_, softcap = str(one["pass"]), SOFTCAP if "softcap" in one else None
    operands = FeatureOperands(shape, softcap=softcap, alibi="alibi" in one, lengths=lengths)

    def row(name: str, metric: str, **values: Any) -> Record:
        return record(one, experiment=NAME, implementation=name, source="measured", metric=metric, **values)

    calls, rows = {}, []
    for name in IMPLEMENTATIONS:
        try:
            call = operands.call(name, pass_)
            ours, stored = operands.errors(pass_)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            rows.append(row(name, "time_ms", error=reason))
            continue
        wrong = ours.beyond([stored])
        if wrong is not None:
            rows.append(row(name, "time_ms", error=f"wrong: {wrong}"))
            continue
        calls[name] = call
        if all(map(math.isfinite, ours.worst.values())):
            rows.append(
                row(
                    name,
                    "max_error",
                    value=max(ours.worst.values()),
                    unit="1",
                    tool="two heads, or all sequences, against float64",
                )
            )
    for name, timing in time_interleaved(calls, TorchDevice(), budget_ms=BUDGET_MS).items():
        rows.append(
            row(
                name,
                "time_ms",
                value=timing.median_ms,
                unit="ms",
                spread_min=timing.min_ms,
                spread_max=timing.max_ms,
                spread_n=timing.repeats,
                tool="CUDA events, median, in turn, L2 flushed",
            )
        )
    return rows


EXPERIMENT = Experiment(
    name=NAME,
    title="windows, caps, ALiBi and packed sequences, Hopper's kernels and sm_80's in turn",
    cells=cells,
    predict=predict,
    measure=measure,
    device="cuda",
    seconds=seconds_of(cells(), lambda one: len(IMPLEMENTATIONS)),
)
