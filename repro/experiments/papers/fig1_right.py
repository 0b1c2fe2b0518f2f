"""FlashAttention 2022, Fig. 1 right: where the forward pass of unfused attention spends its time.

The caption names neither batch nor heads nor the card. Predicted at the shape of Fig. 2 (batch 64,
16 heads, N = 1024, d = 64, fp16), at which the printed bars imply 0.95 to 1.2 TB/s, and at which
the H200 was measured.
"""

from collections.abc import Callable, Iterator

from analysis.shapes import AttentionShape, Tile
from analysis.standard_passes import PAPER_MASKED_DROPOUT
from analysis.time_model import attention_work, standard_work
from repro.experiments import Cell, Context, Experiment, Row
from repro.experiments.papers._roofline import CARDS, time_row
from repro.experiments.shared.attention import cell_of
from repro.experiments.shared.pytorch_runs import SOURCES, timed

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
#: Card -> the fused kernel beside them, and its tile.
FUSED = {"A100-SXM4-40GB": ("flash1-released", Tile(16, 256)), "H200": ("flash", Tile(128, 128))}


def cards() -> list[Cell]:
    """The shape on both cards."""
    return [cell_of(SHAPE, None, "forward", device=card) for card in CARDS]


def predict(one: Cell) -> Iterator[Row]:
    """Roofline times of the five kernels and of a fused one; they are the implementations."""
    if "device" not in one:
        return
    gpu = CARDS[str(one["device"])]
    for kernel, work in standard_work(PAPER_MASKED_DROPOUT, SHAPE, "forward").items():
        yield time_row({kernel: work}, gpu, implementation=OPERATIONS[kernel])
    fused, tile = FUSED[gpu.name]
    works = attention_work(fused, SHAPE, tile, "forward", gpu, blocks_per_sm=2, fma=False)
    # The published rows call it flash1. The authors' kernels multiply on tensor cores, ours on FMA units.
    yield time_row(works, gpu, implementation=f"fused {fused.removesuffix('-released')}")


def cells() -> list[Cell]:
    """The five operations, and three fused kernels."""
    return [cell_of(SHAPE, name, "forward") for name in (*OPERATIONS.values(), *FUSED_TODAY)]


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """One operation on what the others leave, or a fused kernel with its dropout."""
    from repro.instruments import pytorch_attention

    name = str(one["implementation"])
    if name in FUSED_TODAY:
        kernel, dropout = FUSED_TODAY[name]
        work: Callable[[], object] = pytorch_attention.whole(
            Cell(**one | {"implementation": kernel, "dropout": dropout})
        )
    else:
        eager = Cell(**one | {"implementation": pytorch_attention.EAGER, "dropout": 0.1, "key_mask": True})
        work = pytorch_attention.single(eager, name)
    return timed({"forward": work})


EXPERIMENT = Experiment("fig1-right", cells, predict, measure, device="cuda", also=cards, sources=SOURCES, seconds=10)
