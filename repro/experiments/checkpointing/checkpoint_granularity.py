"""What a transformer layer keeps when checkpoints are put around operations, attention or blocks.

Per layer, with e bytes an element and masks of one byte (Korthikanti et al. 2022, section 4; the
finest and the coarser forms by the same count). "each operation" keeps the inputs of QKᵀ, softmax,
dropout and PV: three N² maps where keeping the layer itself keeps two and a mask.
"""

from collections.abc import Iterator
from typing import Any

from analysis.parallel_activations import LayerShape, saved_bytes
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.checkpoint import SCALE, SOURCES, TOOL, device, measure_step, rows, scaled

#: A layer of GPT-2 small; half of its context, so that two cores take minutes.
SHAPE = {"batch": 1, "seqlen": 512, "hidden": 768, "heads": 12}
LAYERS = 4
ITEMSIZE = 4  # float32: a CPU's bfloat16 products are too slow to time
FORMS = (
    ("none", "new"),
    ("each operation", "new"),
    ("attention core", "new"),
    ("each attention", "new"),
    ("each block", "new"),
    ("each block", "reentrant"),
    ("every other block", "new"),
    ("every two blocks", "new"),
)
#: Forward runs of a layer beyond the first, in layers (the core counts by its share of the work).
AGAIN = {"none": 0.0, "each block": 1.0, "every other block": 0.5, "every two blocks": 1.0}


def cells() -> list[Cell]:
    """Every granularity; blocks in both modes of torch.utils.checkpoint."""
    return [Cell(implementation=name, mode=mode, layers=LAYERS, **_shape()) for name, mode in FORMS]


def _shape() -> dict[str, Any]:
    return {
        "batch": SHAPE["batch"],
        "heads": SHAPE["heads"],
        "seqlen_q": SHAPE["seqlen"],
        "seqlen_k": SHAPE["seqlen"],
        "head_dim": SHAPE["hidden"] // SHAPE["heads"],
    }


def layer_bytes(granularity: str) -> float:
    """Bytes a layer leaves for the backward pass, averaged over layers."""
    shape = LayerShape(SHAPE["seqlen"], SHAPE["batch"], SHAPE["hidden"], SHAPE["heads"])
    one = SHAPE["seqlen"] * SHAPE["batch"] * SHAPE["hidden"]
    scores = SHAPE["heads"] * SHAPE["batch"] * SHAPE["seqlen"] ** 2

    def saved(recompute: str) -> float:
        return float(saved_bytes(shape, itemsize=ITEMSIZE, recompute=recompute))

    whole, input_only = saved("none"), float(one * ITEMSIZE)
    mlp = one * (10 * ITEMSIZE + 1)  # norm's input and output, GELU's input and output, mask
    return {
        "none": whole,
        "each operation": whole + scores * (ITEMSIZE - 1),  # QKᵀ instead of a mask
        "attention core": saved("selective"),
        "each attention": input_only + mlp,
        "each block": input_only,
        "every other block": (whole + input_only) / 2,
        "every two blocks": input_only / 2,
    }[granularity]


def again(granularity: str) -> float:
    """Forward work repeated, as a share of one forward of all layers (24bsh² + 4bs²h each)."""
    s, h = SHAPE["seqlen"], SHAPE["hidden"]
    layer, core = 24 * h * h + 4 * s * h, 4 * s * h
    shares = {
        "each operation": core / layer,
        "attention core": core / layer,
        "each attention": (8 * h * h + core) / layer,
    }
    return AGAIN.get(granularity, shares.get(granularity, 0.0))


def predict(one: Cell) -> Iterator[Row]:
    """Bytes per layer and relative time."""
    name = str(one["implementation"])
    yield row("saved_bytes_per_layer", layer_bytes(name), tool="sum of saved tensors")
    yield row("relative_time", 1 + again(name) / 3, tool="sum of saved tensors")


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """Bytes alive after the forward of all layers less those of two, per layer; peak; seconds."""
    import torch

    from repro.models import GPT

    torch.set_num_threads(1)
    ids = torch.randint(256, (SHAPE["batch"], SHAPE["seqlen"]), device=device())

    def model(layers: int, granularity: str) -> GPT:
        torch.manual_seed(0)
        made = GPT(
            layers,
            hidden=SHAPE["hidden"],
            heads=SHAPE["heads"],
            seqlen=SHAPE["seqlen"],
            granularity=granularity,
            reentrant=one["mode"] == "reentrant",
        )
        return made.to(device())

    steps = []
    for layers in (2, LAYERS):
        found = model(layers, str(one["implementation"]))
        repeats = 5 if layers == LAYERS else 0
        plain = model(layers, "none")
        steps.append(measure_step(found, found, (ids,), baseline=plain, repeats=repeats, seconds=0.3))
    yield from rows(steps[1])
    yield row(
        "saved_bytes_per_layer", (steps[1].saved_bytes - steps[0].saved_bytes) / (LAYERS - 2), tool=TOOL[device()]
    )


EXPERIMENT = Experiment(
    "checkpoint-granularity",
    lambda: scaled(cells()),
    predict,
    measure,
    device=device(),
    scale=SCALE,
    sources=(*SOURCES, "analysis/parallel_activations.py"),
    seconds=150,
    on_demand=True,
)
