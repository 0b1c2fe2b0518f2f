"""Peak memory and seconds of a training step against depth (Chen et al. 2016, Figs. 5, 6 and 7).

A plain chain, a pre-activation ResNet to 1,024 layers, an LSTM to 2,048 steps; small widths, so
that two CPU cores finish. Published are only the headline numbers: no curve point of these figures
is printed anywhere.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from repro.experiments import Cell, Context, Experiment, Row
from repro.experiments.shared.checkpoint import (
    SCALE,
    SOURCES,
    case,
    device,
    formula,
    measure_step,
    plan_for,
    planned_rows,
    predicted_rows,
    rows,
    scaled,
)

DEPTHS = {"mlp": (16, 64, 256), "resnet": (128, 256, 1024), "lstm": (64, 256, 2048)}
STRATEGIES = {
    "mlp": ("store-all", "sqrt", "every-2", "every-4", "exponential", "recursive", "recompute-all", "optimal-at-sqrt"),
    "resnet": ("store-all", "chen-search", "recursive"),
    "lstm": ("store-all", "chen-search", "recursive"),
}
#: Running forward from the input for every stage takes L²/2 runs, halving (L/2) log2 L; storing
#: everything is what autograd does anyway. None of them for the longest chains here.
LONGEST = {"recompute-all": 64, "recursive": 256, "store-all": 256}
#: Depths at which formulas are evaluated beside the measured ones.
MORE_DEPTHS = {"mlp": (8, 32, 128, 512, 1024), "resnet": (64, 512, 2048), "lstm": (32, 128, 512, 1024, 4096)}


def cells() -> list[Cell]:
    """Every strategy at every depth, and the model as autograd runs it."""
    return [
        Cell(implementation=strategy, model=model, depth=depth)
        for model, depths in DEPTHS.items()
        for depth in depths
        for strategy in ("autograd", *STRATEGIES[model])
        if depth <= LONGEST.get(strategy, depth)
    ]


def predict(one: Cell) -> Iterable[Row]:
    """The plan's peak, stage forwards and relative time on the formula chain."""
    strategy = str(one["implementation"])
    if strategy == "autograd":
        return ()
    chain = formula(str(one["model"]), int(one["depth"]))
    return predicted_rows(one, chain, plan_for(chain, strategy))


def also() -> Iterator[Cell]:
    """The same where nothing is measured."""
    for model, depths in MORE_DEPTHS.items():
        for depth in depths:
            for strategy in STRATEGIES[model]:
                yield Cell(implementation=strategy, model=model, depth=depth)
    yield Cell(implementation="recompute-all", model="mlp", depth=256)


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """A metered step and timed ones."""
    found = case(str(one["model"]), int(one["depth"]))
    how: dict[str, Any] = {"repeats": 5 if int(one["depth"]) < 1000 else 3, "seconds": 0.3}
    if one["implementation"] == "autograd":
        return rows(measure_step(found.model, found.model, found.state, **how))
    chain, strategy = found.profiled.chain, str(one["implementation"])
    # Stages here are a fraction of a millisecond, so the executor's own cost shows: every plan,
    # storing everything too, is timed in turns with autograd, which is what a user has otherwise.
    return planned_rows(found, plan_for(chain, strategy), **how)


EXPERIMENT = Experiment(
    "checkpoint-depth",
    lambda: scaled(cells()),
    predict,
    measure,
    device=device(),
    also=also,
    scale=SCALE,
    sources=SOURCES,
    seconds=45,
    on_demand=True,
)
