"""The study notes' faults F1 to F5 and F7: what they print, run beside the correct form.

Numerical faults are errors against the exact result in float64; the others are the number that the
note claims to be small (an exponent, a share of a forward, a tile). Every row says which of the two
forms it is of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from analysis.checkpointing.chain import uniform_chain
from analysis.checkpointing.heuristics import exponential, exponential_recursive, uniform
from analysis.tiles import study_note_tile, study_note_tile_corrected
from repro.experiments import Cell, Context, Experiment, Row, row

NOTED, CORRECT = "as noted", "correct"
LENGTHS = (64, 256, 1024)
SEGMENTS = (2, 4, 8)
HEAD_DIMS = (64, 128)
#: Shared memory of an A100's multiprocessor, which the notes' rule is evaluated with.
SRAM_BYTES = 192 * 1024
Floats = NDArray[np.float64]


def attention_inputs(seed: int = 0) -> tuple[Floats, Floats, Floats, Floats]:
    """q, k, v, dout of (64, 16)."""
    random = np.random.default_rng(seed)
    q, k, v, dout = random.standard_normal((4, 64, 16))
    return q, k, v, dout


def softmax(s: Floats) -> Floats:
    """Softmax of each row."""
    e = np.exp(s - s.max(-1, keepdims=True))
    result: Floats = e / e.sum(-1, keepdims=True)
    return result


def online(q: Floats, k: Floats, v: Floats, block: int, *, keep_old_sum: bool) -> Floats:
    """FlashAttention 2022, Alg. 1, output kept normalised; ``keep_old_sum=False`` is the note's."""
    rows = len(q)
    out, total = np.zeros_like(q), np.zeros((rows, 1))
    top = np.full((rows, 1), -np.inf)
    for first in range(0, len(k), block):
        s = q @ k[first : first + block].T / math.sqrt(q.shape[1])
        new_top = np.maximum(top, s.max(-1, keepdims=True))
        p = np.exp(s - new_top)
        shrink = np.exp(top - new_top)
        new_total = shrink * total + p.sum(-1, keepdims=True)
        old = total if keep_old_sum else 1.0
        out = (shrink * old * out + p @ v[first : first + block]) / new_total
        top, total = new_top, new_total
    return out


def f1(form: str) -> float:
    """Error of the online update of a normalised output, by blocks of 16 keys."""
    q, k, v, _ = attention_inputs()
    exact = softmax(q @ k.T / 4) @ v
    return float(abs(online(q, k, v, 16, keep_old_sum=form == CORRECT) - exact).max())


def f2(form: str) -> float:
    """Error of dS: the row sum over one block of 16 keys, or D = rowsum(dO ∘ O)."""
    q, k, v, dout = attention_inputs()
    p = softmax(q @ k.T / 4)
    dp = dout @ v.T
    exact = p * (dp - (p * dp).sum(-1, keepdims=True))
    if form == CORRECT:
        found = p * (dp - (dout * (p @ v)).sum(-1, keepdims=True))
    else:
        parts = [(p[:, i : i + 16], dp[:, i : i + 16]) for i in range(0, 64, 16)]
        found = np.concatenate([a * (b - (a * b).sum(-1, keepdims=True)) for a, b in parts], 1)
    return float(abs(found - exact).max())


def f3(form: str) -> float:
    """Error of the gradient of a function whose forward is the identity, run through autograd."""
    import torch

    class Offload(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x.detach().cpu())
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            (kept,) = ctx.saved_tensors
            again = kept.to(grad.device).requires_grad_()
            with torch.enable_grad():  # the note's example: forward "again", but as input * 2
                (again * 2 if form == NOTED else again.clone()).backward(grad)
            return again.grad

    x = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    seed = torch.arange(1.0, 8.0, dtype=torch.float64)
    Offload.apply(x).backward(seed)
    assert x.grad is not None
    return float((x.grad - seed).abs().max() / seed.abs().max())


def peak_states(length: int, form: str) -> float:
    """F4: peak of 2^k spacing, alone or split recursively, in states of one stage."""
    chain = uniform_chain(length)
    unit = max(stage.activation_bytes for stage in chain.stages)
    planner = exponential if form == NOTED else exponential_recursive
    return planner(chain).peak_bytes / unit


def extra_forward(segments: int, form: str) -> float:
    """F5: the note's share of a forward, or the simulated plan's."""
    if form == NOTED:
        return 1 / segments
    length = 64
    return uniform(uniform_chain(length), segments).forwards / length - 1


def tile_side(head_dim: int, form: str) -> float:
    """F7: the side of the tile; 0 where the printed rule gives none."""
    rule = study_note_tile if form == NOTED else study_note_tile_corrected
    try:
        return float(rule(head_dim, SRAM_BYTES).block_n)
    except ValueError:
        return 0.0


ERRORS = {"F1": f1, "F2": f2, "F3": f3}


def cells() -> list[Cell]:
    """Every fault in both forms."""
    faults = ("F1", "F2", "F3", "F4", "F5", "F7")
    return [Cell(implementation=form, fault=f) for f in faults for form in (NOTED, CORRECT)]


def measure(cell: Cell, context: Context) -> Iterator[Row]:
    """Run the form; the tool says what was run."""
    fault, form = str(cell["fault"]), str(cell["implementation"])
    if fault in ERRORS:
        tool = "autograd, float64" if fault == "F3" else "NumPy, float64"
        yield row("error", ERRORS[fault](form), tool=tool)
    elif fault == "F4":
        for length in LENGTHS:
            yield row("peak_states", peak_states(length, form), depth=length, tool="simulator")
    elif fault == "F5":
        for segments in SEGMENTS:
            tool = "simulator" if form == CORRECT else "as printed"
            yield row("extra_forward", extra_forward(segments, form), segments=segments, tool=tool)
    else:
        for head_dim in HEAD_DIMS:
            yield row("tile_side", tile_side(head_dim, form), head_dim=head_dim, tool="the rule")


EXPERIMENT = Experiment(
    "study-note-faults",
    cells,
    measure=measure,
    device="cpu",
    sources=("analysis/checkpointing", "analysis/tiles.py", "repro/experiments/checkpointing/study_note_faults.py"),
    seconds=3,
    timed=False,
)
