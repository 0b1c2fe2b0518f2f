"""FlashAttention 2022, Fig. 1 right: where the forward pass of unfused attention spends its time.

The caption names neither batch nor heads nor the card. Predicted at the shape of Fig. 2 (batch 64,
16 heads, N = 1024, d = 64, fp16), at which the printed bars imply 0.95 to 1.2 TB/s, and at which
the H200 was measured.
"""

from collections.abc import Iterator

from analysis.hardware import A100_40GB, H200, Gpu
from analysis.shapes import AttentionShape, Tile
from analysis.standard_passes import PAPER_MASKED_DROPOUT
from analysis.time_model import Ceilings, Work, attention_work, predict_time, standard_work
from repro.experiments import Cell, Context, Experiment
from repro.experiments.papers._roofline import a100, h200
from repro.experiments.shared.pytorch_runs import SOURCES, cell, timed
from repro.measuring.records import Record, record

NAME = "fig1-right"
SHAPE = AttentionShape(64, 16, 1024, 1024, 64)
#: Kernel of the pass list -> the bar's name.
OPERATIONS = {
    "S = QKᵀ": "matmul QK^T",
    "mask": "mask",
    "softmax": "softmax",
    "dropout": "dropout",
    "O = PV": "matmul PV",
}
#: Fused kernels of today -> their name here, and dropout.
FUSED_TODAY = {
    "fused sdpa-flash2 (dropout 0.1)": ("sdpa-flash2", 0.1),
    "fused sdpa-flash2": ("sdpa-flash2", 0.0),
    "fused sdpa-cudnn": ("sdpa-cudnn", 0.0),
}
FUSED = {"flash1-released": Tile(16, 256), "flash": Tile(128, 128)}


def also() -> Iterator[Record]:
    """Roofline times of the five kernels and of a fused one, for both cards."""
    for gpu, ceilings, fused in ((A100_40GB, a100(), "flash1-released"), (H200, h200(), "flash")):
        for kernel, work in standard_work(PAPER_MASKED_DROPOUT, SHAPE, "forward").items():
            yield row(gpu, ceilings, OPERATIONS[kernel], {kernel: work})
        # The authors' kernels of 2022 multiply on tensor cores, the ones here on FMA units.
        works = attention_work(fused, SHAPE, FUSED[fused], "forward", gpu, blocks_per_sm=2, fma=False)
        # The published rows call it flash1.
        yield row(gpu, ceilings, f"fused {fused.removesuffix('-released')}", works)


def row(gpu: Gpu, ceilings: Ceilings, implementation: str, works: dict[str, Work]) -> Record:
    """One predicted time, with the ceiling that sets it."""
    time = predict_time(works, ceilings)
    return record(
        {},
        experiment=NAME,
        implementation=implementation,
        pass_="forward",
        source="predicted",
        batch=SHAPE.batch,
        heads=SHAPE.heads,
        kv_heads=SHAPE.kv_heads,
        seqlen_q=SHAPE.seqlen_q,
        seqlen_k=SHAPE.seqlen_k,
        head_dim=SHAPE.head_dim,
        dtype=SHAPE.dtype,
        causal=False,
        metric="time_ms",
        unit="ms",
        value=time.seconds * 1e3,
        device=f"NVIDIA {gpu.name}",
        tool=f"roofline, {ceilings.origin}",
        note=f"bound by {time.binding}",
    )


def cells() -> list[Cell]:
    """The five operations, and three fused kernels."""
    every = (*OPERATIONS.values(), *FUSED_TODAY)
    shape = {"batch": SHAPE.batch, "heads": SHAPE.heads, "seqlen": SHAPE.seqlen_q}
    return [Cell(**cell(name, "forward", **shape) | {"dropout": None, "key_mask": None}) for name in every]


def measure(one: Cell, context: Context) -> list[Record]:
    """One operation on what the others leave, or a fused kernel with its dropout."""
    from repro.instruments import pytorch_attention

    name = str(one["implementation"])
    if name in FUSED_TODAY:
        kernel, dropout = FUSED_TODAY[name]
        work = pytorch_attention.whole(Cell(**one | {"implementation": kernel, "dropout": dropout}))
    else:
        eager = Cell(**one | {"implementation": pytorch_attention.EAGER, "dropout": 0.1, "key_mask": True})
        work = pytorch_attention.single(eager, name)
    return timed(NAME, one, {"forward": work})


EXPERIMENT = Experiment(
    name=NAME,
    title="time of unfused operations, forward",
    cells=cells,
    predict=lambda cell: list[Record](),
    measure=measure,
    device="cuda",
    also=also,
    sources=SOURCES,
    seconds=10,
)
