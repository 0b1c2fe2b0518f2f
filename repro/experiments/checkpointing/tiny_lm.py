"""A small language model trained with standard attention, flash, and flash + checkpointing.

Claim K15 of the study notes: recomputation may change gradients slightly. Three trainings start
from the same weights and see the same batches. At every probed step the gradient is also taken,
at the very same weights, by standard attention in fp32 and in float64, and for the checkpointed
run by the same kernels without checkpointing.

What to expect: checkpointing repeats the same operations on the same numbers, so its gradients
are bitwise those of the run without it, as long as each operation is deterministic: dq is therefore
summed in a fixed order (atomic additions on a GPU come in any order). Flash sums in another order
than standard attention, so their gradients differ in the last bits; neither is nearer to float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from analysis.shapes import AttentionShape
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared import tiny_lm_sizes as sizes
from repro.experiments.shared.attention import cell_of

if TYPE_CHECKING:
    from torch import Tensor

    from repro.experiments.shared.tiny_lm import TinyLM

IMPLEMENTATIONS = ("standard", "flash", "flash+checkpoint")
STEPS, PROBE, LOG = 200, 20, 4


def cells() -> list[Cell]:
    """One training each."""
    tokens, width = sizes.CONTEXT, sizes.WIDTH // sizes.HEADS
    shape = AttentionShape(sizes.BATCH, sizes.HEADS, tokens, tokens, width, dtype="fp32", causal=True)
    return [cell_of(shape, name, "forward+backward", steps=STEPS) for name in IMPLEMENTATIONS]


def predict(cell: Cell) -> Iterator[Row]:
    """Recomputation repeats the same operations: no gradient element differs."""
    if cell["implementation"] == "flash+checkpoint":
        for step in range(0, STEPS, PROBE):
            yield row("gradient_elements_differing", 0, tool="same operations, same order", against="flash", step=step)


def measure(cell: Cell, context: Context) -> Iterator[Row]:
    """Train; the loss every few steps, gradient differences at the probed steps."""
    import torch

    from repro.experiments.shared import tiny_lm as lm

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fixed order of the framework's own sums
    implementation = str(cell["implementation"])
    attention = lm.attention_of(implementation)
    model = lm.TinyLM(attention, checkpointed=implementation.endswith("+checkpoint"))
    optimizer = lm.optimizer(model)
    batch = lm.batches(lm.text(seed=0, sentences=2000), seed=1)

    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(batch(step))
            loss.backward()
            if step % PROBE == 0:
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                found = torch.cat([grad.flatten() for grad in grads])
                yield from _differences(model, batch(step), found, implementation, step)
            if step % LOG == 0 or step == STEPS - 1:
                tool = "training on this CPU, kernels on the host backend"
                yield row("loss", loss.item(), unit="nat", step=step, tool=tool)
            optimizer.step()
    finally:
        torch.set_num_threads(threads)


def _differences(model: TinyLM, batch: Tensor, found: Tensor, implementation: str, step: int) -> Iterator[Row]:
    """The gradient at these weights against other ways to compute it."""
    from repro.experiments.shared import tiny_lm as lm

    standard = lm.attention_of("standard")
    others = {"float64": lm.same_weights(model, standard, double=True)}
    if implementation != "standard":
        others["standard"] = lm.same_weights(model, standard)
    if implementation == "flash+checkpoint":
        others["flash"] = lm.same_weights(model, lm.attention_of("flash"))
    for against, other in others.items():
        expected = lm.gradient(other, batch)
        difference = (found.double() - expected.double()).norm() / expected.double().norm()
        at = {"against": against, "step": step}
        yield row("gradient_relative_difference", float(difference), tool="2-norm over all parameters", **at)
        if against != "float64":
            differing = int((found != expected).sum())
            yield row("gradient_elements_differing", differing, tool=f"of {found.numel()} elements", **at)


EXPERIMENT = Experiment(
    "tiny-lm",
    cells,
    predict,
    measure,
    device="host",
    sources=(
        "kernels",
        "repro/attention",
        "repro/experiments/shared/tiny_lm.py",
        "repro/experiments/shared/tiny_lm_sizes.py",
    ),
    seconds=45,
    on_demand=True,
)
