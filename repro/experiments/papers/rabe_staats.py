"""Memory of chunked attention beyond inputs and outputs (Rabe & Staats 2021, Tables 2 and 3).

One head of d = 64, chunks of 1024 queries and 4096 keys, forward alone and with the backward pass,
in which every summary of a chunk is recomputed; and the forward with chunks of √n keys, whose
overhead the paper says is O(√n). Bytes are the CPU allocator's, temporaries inside
an operation included, above q, k, v and the gradient of the output, less what is returned. Theirs
are of a TPU, whose compiler fuses scaling, subtraction and exponential; eager PyTorch keeps each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from repro.experiments import Cell, Context, Experiment, Row, row

LENGTHS = (1024, 4096, 16384)
PASSES = ("forward", "forward+backward")
VARIANTS = ("standard", "chunked")
#: Chunks of √n keys, for a fixed number of queries: the paper's practical algorithm.
ROOT = "chunked, √n keys"
HEAD_DIM, QUERIES, KEYS, FP32 = 64, 1024, 4096, 4


def cells() -> list[Cell]:
    """Both algorithms, both passes, three lengths of the paper; the forward of chunks of √n keys."""
    forms = [(name, pass_) for pass_ in PASSES for name in VARIANTS] + [(ROOT, "forward")]
    return [
        Cell(
            implementation=name, pass_=pass_, batch=1, heads=1, seqlen_q=n, seqlen_k=n, head_dim=HEAD_DIM, dtype="fp32"
        )
        for name, pass_ in forms
        for n in LENGTHS
    ]


def overhead_bytes(implementation: str, pass_: str, seqlen: int) -> int:
    """Tensors alive at once, fp32, in the largest moment of eager PyTorch.

    Standard: scores and weights, 2 N²; backward: P, dP and dS, 3 N². Chunked: three maps of a
    chunk in either pass: scores, scores less their maximum, exponential; the exponential, its
    gradient and that of the scores. Of √n chunks the summaries, of d + 2 numbers a query, outweigh
    the maps: each alone and stacked with the others.
    """
    full = seqlen * seqlen
    chunk = min(QUERIES, seqlen) * min(KEYS, seqlen)
    root = math.isqrt(seqlen)
    maps = {
        ("standard", "forward"): 2 * full,
        ("standard", "forward+backward"): 3 * full,
        ("chunked", "forward"): 3 * chunk,
        ("chunked", "forward+backward"): 3 * chunk,
        (ROOT, "forward"): min(QUERIES, seqlen) * root * 2 * (HEAD_DIM + 2),
    }
    return FP32 * maps[implementation, pass_]


def predict(cell: Cell) -> Iterator[Row]:
    """Score matrices alone: what N or the chunk adds of O(N d) is left out."""
    expected = overhead_bytes(str(cell["implementation"]), str(cell["pass"]), int(cell["seqlen_q"]))
    yield row("overhead_bytes", expected, tool="list of score maps")


def measure(cell: Cell, context: Context) -> Iterator[Row]:
    """Peak of one call above its inputs, less its outputs."""
    import torch

    from repro.attention.variants import chunked, standard
    from repro.checkpointing.memory import memory_meter

    root = partial(chunked, key_chunk=math.isqrt(int(cell["seqlen_k"])))
    variants: dict[str, Callable[..., torch.Tensor]] = {"standard": standard, "chunked": chunked, ROOT: root}
    call = variants[str(cell["implementation"])]
    shape = (1, 1, int(cell["seqlen_q"]), int(cell["head_dim"]))
    generator = torch.Generator().manual_seed(0)
    training = cell["pass"] == "forward+backward"
    q, k, v, dout = (torch.randn(shape, generator=generator) for _ in range(4))
    leaves = [t.requires_grad_(training) for t in (q, k, v)]
    with memory_meter("cpu") as meter, meter.region("step") as step:
        if training:
            out = call(*leaves)
            found = (out.detach(), *torch.autograd.grad(out, leaves, dout))
            del out
        else:
            with torch.no_grad():
                found = (call(*leaves),)
    outputs = sum(t.nbytes for t in found)
    yield row("overhead_bytes", step.peak_bytes - outputs, tool="profiler's allocation trace")


EXPERIMENT = Experiment(
    "rabe-staats",
    cells,
    predict,
    measure,
    device="cpu",
    sources=("repro/attention/variants.py", "repro/checkpointing/memory.py", "repro/checkpointing/allocation_trace.py"),
    seconds=90,
    timed=False,
    on_demand=True,
)
