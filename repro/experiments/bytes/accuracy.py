"""Error of the forward and of the gradients against float64, per data type and variant.

Two kinds of input: N(0, 1), and the outlier-heavy N(0, 1) + N(0, 100) · Bernoulli(0.001) of
FlashAttention-3 (2024), Table 3, whose published errors stand beside (it gives the distribution
but not the shape). The framework's eager attention in the same type is the yardstick.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.attention import cell
from repro.instruments.run_pass import run_pass

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("fp32", "bf16", "fp16")
INPUTS = ("normal", "outliers")
VARIANTS = ("standard", "chunked", "sdpa-flash", "flash")
#: The kernel ladder, which runs below torch: what rounding O in every step costs (Alg. 1).
LADDER = ("flash1-released",)
SEQLEN, HEAD_DIM = 512, 64
RESULTS = ("out", "dq", "dk", "dv")


def cells() -> list[Cell]:
    """Type × inputs × variant."""
    return [
        cell(name, "forward+backward", seqlen=SEQLEN, head_dim=HEAD_DIM, dtype=dtype, inputs=inputs)
        for dtype in DTYPES
        for inputs in INPUTS
        for name in VARIANTS + LADDER
    ]


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """Root-mean-square and largest error of out, dq, dk, dv."""
    import torch

    from repro.attention.reference import attention_reference

    q, k, v, dout = tensors(str(one["inputs"]), str(one["dtype"]))
    implementation = str(one["implementation"])
    if implementation in LADDER:
        given = {"q": q, "k": k, "v": v, "dout": dout}
        results = {
            name: result
            for pass_ in ("forward", "backward")
            for name, result in run_pass(implementation, pass_, given, context.host()).tensors.items()
        }
        ran = "kernels of the ladder on the host backend"
    else:
        from repro.attention.variants import VARIANTS as ALL
        from repro.attention.variants import ran_backend

        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = ALL[implementation](*leaves)
        results = dict(zip(RESULTS, (out.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))
        ran = ran_backend(implementation, *leaves)
    expected = attention_reference(q, k, v, dout)
    for name in RESULTS:
        want = getattr(expected, name)
        error = results[name].double() - want
        for metric, value in (
            ("rmse", error.pow(2).mean().sqrt()),
            ("max_abs_error", error.abs().max()),
            ("relative_rmse", (error.pow(2).mean() / want.pow(2).mean()).sqrt()),
        ):
            tool = "against float64 on the same rounded inputs"
            yield row(metric, float(value), tensor=name, note=f"ran {ran}", tool=tool)


def tensors(inputs: str, dtype: str) -> list[Tensor]:
    """q, k, v, dout (B, H, N, D), the same numbers for every variant."""
    import torch

    from repro.attention.views import TORCH_TYPES

    generator = torch.Generator().manual_seed(0)
    shape = (1, 1, SEQLEN, HEAD_DIM)
    made = []
    for _ in range(4):
        numbers = torch.randn(shape, generator=generator)
        if inputs == "outliers":
            chosen = torch.rand(shape, generator=generator) < 0.001
            numbers += 10.0 * torch.randn(shape, generator=generator) * chosen
        made.append(numbers)
    return [numbers.to(TORCH_TYPES[dtype]) for numbers in made]


EXPERIMENT = Experiment(
    "accuracy",
    cells,
    measure=measure,
    device="host",
    sources=("kernels", "repro/attention"),
    seconds=60,
    on_demand=True,
)
