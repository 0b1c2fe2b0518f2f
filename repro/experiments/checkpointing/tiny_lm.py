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

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from repro.experiments import Cell, Context, Experiment
from repro.experiments.shared import tiny_lm_sizes as sizes
from repro.measuring.records import Record, record

if TYPE_CHECKING:
    from torch import Tensor

    from repro.experiments.shared.tiny_lm import TinyLM

NAME = "tiny-lm"
IMPLEMENTATIONS = ("standard", "flash", "flash+checkpoint")
STEPS, PROBE, LOG = 200, 20, 4


def cells() -> list[Cell]:
    """One training each."""
    shape = {
        "batch": sizes.BATCH,
        "heads": sizes.HEADS,
        "kv_heads": sizes.HEADS,
        "seqlen_q": sizes.CONTEXT,
        "seqlen_k": sizes.CONTEXT,
        "head_dim": sizes.WIDTH // sizes.HEADS,
    }
    return [
        Cell(implementation=name, pass_="forward+backward", **shape, dtype="fp32", causal=True, steps=STEPS)
        for name in IMPLEMENTATIONS
    ]


def predict(cell: Cell) -> Iterator[Record]:
    """Recomputation repeats the same operations: no gradient element differs."""
    if cell["implementation"] == "flash+checkpoint":
        for step in range(0, STEPS, PROBE):
            yield record(
                cell,
                experiment=NAME,
                source="predicted",
                tool="same operations, same order",
                metric="gradient_elements_differing",
                unit="1",
                value=0,
                against="flash",
                step=step,
                cell=cell.id,
            )


def measure(cell: Cell, context: Context) -> Iterator[Record]:
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

    def row(**values: object) -> Record:
        return record(cell, experiment=NAME, source="measured", **values)

    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(batch(step))
            loss.backward()
            if step % PROBE == 0:
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                found = torch.cat([grad.flatten() for grad in grads])
                yield from _differences(model, batch(step), found, implementation, step, row)
            if step % LOG == 0 or step == STEPS - 1:
                yield row(
                    metric="loss",
                    unit="nat",
                    value=loss.item(),
                    step=step,
                    tool="training on this CPU, kernels on the host backend",
                )
            optimizer.step()
    finally:
        torch.set_num_threads(threads)


def _differences(
    model: TinyLM, batch: Tensor, found: Tensor, implementation: str, step: int, row: Callable[..., Record]
) -> Iterator[Record]:
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
        yield row(
            metric="gradient_relative_difference",
            unit="1",
            value=float(difference),
            against=against,
            step=step,
            tool="2-norm over all parameters",
        )
        if against != "float64":
            yield row(
                metric="gradient_elements_differing",
                unit="1",
                value=int((found != expected).sum()),
                against=against,
                step=step,
                tool=f"of {found.numel()} elements",
            )


EXPERIMENT = Experiment(
    name=NAME,
    title="a small language model trained with and without recomputation",
    cells=cells,
    predict=predict,
    measure=measure,
    device="host",
    sources=(
        "kernels",
        "repro/attention",
        "repro/experiments/shared/tiny_lm.py",
        "repro/experiments/shared/tiny_lm_sizes.py",
    ),
    on_demand=True,
    seconds=45,
)
