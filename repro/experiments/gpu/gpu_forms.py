"""The forms of the Hopper kernels in turn, each against the others.

They say whether the rules that pick one (``kernels.hopper.forward_form``, ``backward_form``) pick
the right one on a card. Shapes are those of ``gpu-throughput``, and head_dim 256 of the forward.
"""

from __future__ import annotations

from kernels import hopper
from repro.experiments import Cell, Context, Experiment, Row
from repro.experiments.gpu.gpu_throughput import measure_in_turn, of_tokens, seconds_of


def cells() -> list[Cell]:
    """The ends of the rules first."""
    return [
        of_tokens(None, pass_, seqlen, head_dim, causal=causal)
        for seqlen in (2048, 16384, 4096, 8192)
        for pass_, head_dims in (("backward", (128, 64)), ("forward", (128, 64, 256)))
        for head_dim in head_dims
        for causal in (False, True)
    ]


def implementations(one: Cell) -> tuple[str, ...]:
    """The forms of the cell's pass and head dimension, by name."""
    kind = hopper.ForwardForm if one["pass"] == "forward" else hopper.BackwardForm
    return tuple(
        name for name, form in hopper.FORMS.items() if isinstance(form, kind) and form.head_dim == one["head_dim"]
    )


def measure(one: Cell, context: Context) -> list[Row]:
    """Time and throughput of every form that runs and is right; the others' reasons."""
    return measure_in_turn(one, implementations(one))


EXPERIMENT = Experiment(
    "gpu-forms",
    cells,
    measure=measure,
    device="cuda",
    seconds=seconds_of(cells(), lambda one: len(implementations(one))),
)
