"""Bytes that a transformer layer saves: sbh(34 + 5as/h), 34sbh selective, 2sbh full recomputation.

Korthikanti et al. 2022 (2205.05198), Eq. 1 and Table 2, in bfloat16 with one-byte dropout masks,
against the allocator. The norms' statistics, which the paper leaves out, are in the measurement.
Products of matrices are left out: they take most of the time and none of the bytes.
"""

from collections.abc import Iterator

from analysis.checkpointing.networks import gpt_layer_bytes
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.checkpoint import SCALE, SOURCES, TOOL, device, scaled

BATCH, HIDDEN, HEADS = 1, 768, 12  # GPT-2 small
MEASURED = (64, 128, 256, 512, 1024)
SUMMED = (32, 2048)
GRANULARITY = {"none": "none", "selective": "attention core", "full": "each block"}


def _cell(seqlen: int, recompute: str) -> Cell:
    return Cell(
        implementation=recompute,
        batch=BATCH,
        heads=HEADS,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=HIDDEN // HEADS,
        dtype="bf16",
    )


def cells() -> list[Cell]:
    """Sequence lengths by kind of recomputation."""
    return [_cell(seqlen, recompute) for seqlen in MEASURED for recompute in GRANULARITY]


def predict(one: Cell) -> Iterator[Row]:
    """Table 2 without parallelism."""
    value = gpt_layer_bytes(
        batch=BATCH, seqlen=int(one["seqlen_q"]), hidden=HIDDEN, heads=HEADS, recompute=str(one["implementation"])
    )
    yield row("saved_bytes_per_layer", value, tool="Korthikanti 2022, Table 2")


def also() -> Iterator[Cell]:
    """The formula where nothing is measured."""
    for seqlen in SUMMED:
        for recompute in GRANULARITY:
            yield _cell(seqlen, recompute)


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """What is alive after the forward of three layers less that of one, by two."""
    import torch

    from repro.checkpointing import memory_meter
    from repro.instruments.without_products import WithoutProducts
    from repro.models import GPT

    torch.set_num_threads(1)
    alive = []
    for layers in (1, 3):
        torch.manual_seed(0)
        seqlen = int(one["seqlen_q"])
        model = GPT(
            layers, hidden=HIDDEN, heads=HEADS, seqlen=seqlen, granularity=GRANULARITY[str(one["implementation"])]
        ).to(device(), torch.bfloat16)
        ids = torch.randint(256, (BATCH, seqlen), device=device())
        with WithoutProducts(), memory_meter(device()) as meter, meter.region("forward") as forward:
            loss = model(ids)
        del loss
        alive.append(forward.end_bytes)
    yield row("saved_bytes_per_layer", (alive[1] - alive[0]) / 2, tool=TOOL[device()])


EXPERIMENT = Experiment(
    "checkpoint-layer-bytes",
    lambda: scaled(cells()),
    predict,
    measure,
    device=device(),
    also=also,
    scale=SCALE,
    sources=(*SOURCES, "analysis/parallel_activations.py", "repro/instruments/without_products.py"),
    seconds=15,
    timed=False,
)
