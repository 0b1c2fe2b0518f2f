"""Bytes of attention with a stored bias, with the same distances computed, and without either.

ALiBi takes a distance times a slope off each score. Stored, that is a bias of Nq x Nk a head, read
in both passes, and written once more where it has a gradient. Computed, it is 4 bytes a tile. Of
standard attention, which has S in memory anyway, the bias is one pass more over N² in the forward;
its gradient is the dS that the backward writes.

Counted: the sm_80 kernels executed on the host backend, random numbers; the error against float64
beside it, so that what is counted is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from analysis.hbm import compulsory_hbm
from analysis.lower_bounds import compulsory_bias_bytes
from analysis.shapes import AttentionShape
from analysis.sums.flash import BiasShape
from analysis.traffic import Traffic, predict_traffic
from kernels import attention
from repro.experiments import Cell, Context, Experiment
from repro.experiments.shared.attention import TRAFFIC, cell, shape_of, tile_of
from repro.measuring.records import Record, record

NAME = "bias-bytes"
HEADS, HEAD_DIM, DTYPE = 2, 64, "fp16"
#: What is done to the scores.
SCORES = ("plain", "alibi", "bias")
EXECUTED = (128, 256, 512, 1024)
SUMMED = (*EXECUTED, 2048, 4096, 8192, 16384, 32768)
PASSES = ("forward", "backward")
BIAS: BiasShape = (1, HEADS)
"""(items, heads): every head has a bias of its own."""


def point(implementation: str, scores: str, pass_: str, seqlen: int) -> Cell:
    """One pass over one item, in the kernels' own tile."""
    tile = attention.default_tile(HEAD_DIM, DTYPE, pass_)
    return cell(
        implementation, pass_, tile, seqlen=seqlen, head_dim=HEAD_DIM, heads=HEADS, dtype=DTYPE,
        scores=scores,
    )  # fmt: skip


def cells() -> list[Cell]:
    """The points that are executed."""
    return [
        point("flash", scores, pass_, seqlen)
        for pass_ in PASSES
        for scores in SCORES
        for seqlen in EXECUTED
    ]


def traffic_of(one: Cell) -> Traffic:
    """The exact sums of a cell."""
    shape, tile, pass_ = shape_of(one), tile_of(one), str(one["pass"])
    if one["implementation"] == "standard":
        return _standard(shape, one, predict_traffic("standard", shape, tile, pass_))
    options: dict[str, Any] = {}
    if one["scores"] == "alibi":
        options["alibi"] = True
    elif one["scores"] == "bias":
        options["bias"] = BIAS
        if pass_ == "backward":
            options["bias_gradient"] = True
    return predict_traffic("flash", shape, tile, pass_, **options)


def _standard(shape: AttentionShape, one: Cell, plain: Traffic) -> Traffic:
    """Standard attention reads a bias where S is made; the dS of its backward is the gradient."""
    if one["scores"] != "bias" or one["pass"] != "forward":
        return plain
    bias = {("bias", "read"): compulsory_bias_bytes(shape, BIAS)}
    return plain + Traffic({"standard_scores": bias})


def predict(one: Cell) -> Iterator[Record]:
    """The exact sums, and each tensor of each kernel once."""
    traffic = traffic_of(one)
    yield from _rows(one, traffic, "predicted", "sum over the tile loop")
    once = compulsory_hbm(traffic, shape_of(one), BIAS)
    yield record(
        one, experiment=NAME, source="predicted", tool="each tensor once", cell=one.id,
        metric="compulsory_bytes", unit="B", value=once.read_bytes + once.write_bytes,
    )  # fmt: skip


def also() -> Iterator[Record]:
    """Sequences too long to execute, and standard attention."""
    for pass_ in PASSES:
        for seqlen in SUMMED:
            for scores in SCORES:
                if seqlen not in EXECUTED:
                    yield from predict(point("flash", scores, pass_, seqlen))
            yield from predict(point("standard", "bias", pass_, seqlen))


def _rows(one: Cell, traffic: Traffic, source: str, tool: str) -> Iterator[Record]:
    """A row per kernel, tensor and direction."""
    for kernel, entries in traffic.kernels.items():
        for (tensor, direction), count in entries.items():
            yield record(
                one, experiment=NAME, source=source, tool=tool, kernel=kernel, tensor=tensor,
                direction=direction, value=count, cell=one.id, **TRAFFIC,
            )  # fmt: skip


def measure(one: Cell, context: Context) -> Iterator[Record]:
    """Execute the kernels: bytes by tensor, and the largest error of the results."""
    import torch

    from repro.attention.reference import attention_reference, max_error
    from repro.attention.views import array_of

    shape = shape_of(one)
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(1, HEADS, *size, generator=generator).half()

    q, k, v, dout = (draw(shape.seqlen_q, HEAD_DIM) for _ in range(4))
    bias = draw(shape.seqlen_q, shape.seqlen_k)
    slopes = 2.0 ** -torch.arange(1.0, HEADS + 1)
    results = {name: torch.empty_like(q) for name in ("out", "dq", "dk", "dv")}
    lse = torch.empty(q.shape[:3])
    arrays = {"q": q, "k": k, "v": v, **results}
    at = {name: array_of(name, tensor) for name, tensor in arrays.items()}
    stats = {"lse": array_of("lse", lse)}
    changes: dict[str, Any] = {}
    known: dict[str, Any] = {}
    gradients: dict[str, Any] = {}
    if one["scores"] == "alibi":
        known["alibi_slopes"] = slopes
        changes["alibi_slopes"] = array_of("alibi_slopes", slopes[None, :, None])
    elif one["scores"] == "bias":
        known["bias"] = bias
        changes["bias"] = array_of("bias", bias)
        results["dbias"] = torch.empty_like(bias)
        gradients["dbias"] = array_of("dbias", results["dbias"])

    backend = context.host()
    options: dict[str, Any] = {"scale": HEAD_DIM**-0.5, **changes}
    names: tuple[str, ...] = ("out",)
    backwards = one["pass"] == "backward"
    attention.forward(
        backend, "flash", at["q"], at["k"], at["v"], at["out"], stats,
        tile=None if backwards else tile_of(one), **options,
    )  # fmt: skip
    if backwards:
        backend.reset()
        attention.backward(
            backend, "flash", at["q"], at["k"], at["v"], at["out"], array_of("dout", dout), stats,
            at["dq"], at["dk"], at["dv"], tile=tile_of(one), **gradients, **options,
        )  # fmt: skip
        names = tuple(name for name in results if name != "out")
    counted = Traffic({kernel: dict(entries) for kernel, entries in backend.traffic.items()})
    yield from _rows(one, counted, "measured", "host backend: executed, bytes counted")
    exact = attention_reference(q, k, v, dout, **known)
    yield record(
        one, experiment=NAME, source="measured", metric="max_abs_error", unit="1",
        value=max(max_error(results[name], getattr(exact, name)) for name in names),
        tool="against float64 on the same rounded inputs", cell=one.id,
    )  # fmt: skip


EXPERIMENT = Experiment(
    name=NAME,
    title="bytes of a stored bias, and of a computed one",
    cells=cells,
    predict=predict,
    measure=measure,
    device="host",
    also=also,
    sources=(
        "kernels/flash_forward.cu", "kernels/flash_backward.cu", "kernels/flash_backward_rows.cu",
        "kernels/flash_bias_gradient.cu", "kernels/flash.py", "kernels/scores.py",
        "kernels/bias_gradient.py", "kernels/flash_config.py", "kernels/include", "kernels/host",
        "repro/experiments/bytes/bias_bytes.py",
    ),
    seconds=60,
    on_demand=True,
)  # fmt: skip
