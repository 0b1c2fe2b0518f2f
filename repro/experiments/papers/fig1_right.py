"""FlashAttention 2022, Fig. 1 right: where the forward pass of unfused attention spends its time.

The caption names neither batch nor heads nor the card. Predicted at the shape of Fig. 2 (batch 64,
16 heads, N = 1024, d = 64, fp16), at which the printed bars imply 0.95 to 1.2 TB/s, and at which
the H200 was measured.
"""

from collections.abc import Iterator

from analysis.shapes import AttentionShape, Tile
from analysis.standard_passes import PAPER_MASKED_DROPOUT
from analysis.time_model import attention_work, standard_work
from repro.experiments import Cell, Experiment, Row
from repro.experiments.papers._roofline import CARDS, time_row
from repro.experiments.shared.attention import cell_of

SHAPE = AttentionShape(64, 16, 1024, 1024, 64)
#: Kernel of the pass list -> the bar's name.
OPERATIONS = {
    "S = QKᵀ": "matmul QK^T",
    "mask": "mask",
    "softmax": "softmax",
    "dropout": "dropout",
    "O = PV": "matmul PV",
}
#: Card -> the fused kernel beside them, and its tile.
FUSED = {"A100-SXM4-40GB": ("flash1-released", Tile(16, 256)), "H200": ("flash", Tile(128, 128))}


def cards() -> list[Cell]:
    """The shape on both cards."""
    return [cell_of(SHAPE, None, "forward", device=card) for card in CARDS]


def predict(one: Cell) -> Iterator[Row]:
    """Roofline times of the five kernels and of a fused one; they are the implementations."""
    gpu = CARDS[str(one["device"])]
    for kernel, work in standard_work(PAPER_MASKED_DROPOUT, SHAPE, "forward").items():
        yield time_row({kernel: work}, gpu, implementation=OPERATIONS[kernel])
    fused, tile = FUSED[gpu.name]
    works = attention_work(fused, SHAPE, tile, "forward", gpu, blocks_per_sm=2)
    # The published rows call it flash1.
    yield time_row(works, gpu, implementation=f"fused {fused.removesuffix('-released')}")


EXPERIMENT = Experiment("fig1-right", predict=predict, also=cards)
