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
from analysis.shapes import AttentionShape, BiasShape
from analysis.traffic import Traffic, predict_traffic
from kernels import attention
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.attention import cell, shape_of, tile_of, traffic_rows
from repro.instruments.run_pass import run_pass

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
    return cell(implementation, pass_, tile, seqlen=seqlen, head_dim=HEAD_DIM, heads=HEADS, dtype=DTYPE, scores=scores)


def cells() -> list[Cell]:
    """The points that are executed."""
    return [point("flash", scores, pass_, seqlen) for pass_ in PASSES for scores in SCORES for seqlen in EXECUTED]


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


def predict(one: Cell) -> Iterator[Row]:
    """The exact sums, and each tensor of each kernel once."""
    traffic = traffic_of(one)
    yield from traffic_rows(traffic.kernels)
    once = compulsory_hbm(traffic, shape_of(one), BIAS)
    yield row("compulsory_bytes", once.read_bytes + once.write_bytes, tool="each tensor once")


def also() -> Iterator[Cell]:
    """Sequences too long to execute, and standard attention."""
    for pass_ in PASSES:
        for seqlen in SUMMED:
            for scores in SCORES:
                if seqlen not in EXECUTED:
                    yield point("flash", scores, pass_, seqlen)
            yield point("standard", "bias", pass_, seqlen)


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """Execute the kernels: bytes by tensor, and the largest error of the results."""
    import torch

    from repro.attention.reference import attention_reference

    shape = shape_of(one)
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(1, HEADS, *size, generator=generator).half()

    tensors = {name: draw(shape.seqlen_q, HEAD_DIM) for name in ("q", "k", "v", "dout")}
    bias = draw(shape.seqlen_q, shape.seqlen_k)
    slopes = 2.0 ** -torch.arange(1.0, HEADS + 1)
    changes: dict[str, Any] = {}
    known: dict[str, Any] = {}
    if one["scores"] == "alibi":
        known, changes = {"alibi_slopes": slopes}, {"alibi_slopes": slopes[None, :, None]}
    elif one["scores"] == "bias":
        known = changes = {"bias": bias}
    ran = run_pass("flash", str(one["pass"]), tensors, context.host(), tile=tile_of(one), **changes)
    yield from traffic_rows(ran.traffic.kernels, tool="host backend: executed, bytes counted")
    exact = attention_reference(*tensors.values(), **known)
    yield row("max_abs_error", max(ran.errors(exact).values()), tool="against float64 on the same rounded inputs")


EXPERIMENT = Experiment(
    "bias-bytes",
    cells,
    predict,
    measure,
    device="host",
    also=also,
    sources=(
        "kernels/flash_forward.cu",
        "kernels/flash_backward.cu",
        "kernels/flash_backward_rows.cu",
        "kernels/flash_bias_gradient.cu",
        "kernels/flash.py",
        "kernels/scores.py",
        "kernels/bias_gradient.py",
        "kernels/flash_config.py",
        "kernels/include",
        "kernels/host",
        "repro/experiments/bytes/bias_bytes.py",
    ),
    seconds=60,
    on_demand=True,
)
