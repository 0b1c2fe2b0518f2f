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
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.bytes.packed_sequences import LIMITS, drawn
from repro.experiments.gpu.gpu_throughput import BUDGET_MS, CARDS, TOKENS, seconds_of
from repro.experiments.shared.attention import cell, shape_of
from repro.prediction import Prediction
from repro.prediction import predict as of_kernels

#: In the order of their turns.
IMPLEMENTATIONS = HOPPER, SM80 = ("flash-sm90", "flash")
DTYPE = "bf16"
SHARED: dict[str, Any] = {"heads": 16, "dtype": DTYPE, "causal": True}
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


def _of_length(seqlen: int) -> list[Cell]:
    """What the Hopper kernels cover."""
    return [
        cell(None, pass_, seqlen=seqlen, head_dim=head_dim, batch=TOKENS // seqlen, feature=feature, **SHARED, **more)
        for pass_ in PASSES
        for feature, more in FEATURES.items()
        for head_dim in HEAD_DIMS
        if hopper.unsupported_reason(DTYPE, head_dim, [feature], pass_=pass_) is None
    ]


def _packed() -> list[Cell]:
    """A batch of each dataset: ``batch`` sequences of at most ``seqlen_q`` rows."""
    return [
        cell(None, pass_, seqlen=limit, head_dim=d, batch=SEQUENCES, feature="packed", dataset=dataset, **SHARED)
        for pass_ in PASSES
        for dataset, limit in LIMITS.items()
        for d in HEAD_DIMS
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


def registered(one: Cell) -> Iterator[Row]:
    """Times of the Hopper kernels from machine code, written once (``repro.gpu.register``)."""
    for gpu in CARDS:
        found = prediction(one, HOPPER, gpu)
        if found.predicted_s is not None:
            tool = f"machine code at {found.clock.hz / 1e9:.2f} GHz, registered"
            yield row("time_ms", found.predicted_s * 1e3, implementation=HOPPER, device=gpu.name, tool=tool)


def predict(one: Cell) -> Iterator[Row]:
    """The bound of the sm_80 kernels; of the Hopper kernels counts what was registered."""
    for gpu in CARDS:
        found = prediction(one, SM80, gpu)
        tool = f"ceilings, {found.ceilings.origin}"
        yield row("time_ms", found.time.seconds * 1e3, implementation=SM80, device=gpu.name, tool=tool)


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """Milliseconds of both in turn; what does not run or is wrong is a row that says so."""
    from repro.instruments.feature_work import FeatureOperands
    from repro.instruments.timing import IN_TURN, TorchDevice, time_interleaved

    shape, lengths = problem(one)
    pass_, softcap = str(one["pass"]), SOFTCAP if "softcap" in one else None
    operands = FeatureOperands(shape, softcap=softcap, alibi="alibi" in one, lengths=lengths)
    calls = {}
    for name in IMPLEMENTATIONS:
        try:
            call = operands.call(name, pass_)
            ours, stored = operands.errors(pass_)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            yield row("time_ms", error=reason, implementation=name)
            continue
        wrong = ours.beyond([stored])
        if wrong is not None:
            yield row("time_ms", error=f"wrong: {wrong}", implementation=name)
            continue
        calls[name] = call
        if all(map(math.isfinite, ours.worst.values())):
            tool = "two heads, or all sequences, against float64"
            yield row("max_error", max(ours.worst.values()), implementation=name, tool=tool)
    for name, timing in time_interleaved(calls, TorchDevice(), budget_ms=BUDGET_MS).items():
        yield timing.row(IN_TURN, implementation=name)


EXPERIMENT = Experiment(
    "gpu-features",
    cells,
    predict,
    measure,
    device="cuda",
    seconds=seconds_of(cells(), lambda one: len(IMPLEMENTATIONS)),
)
