"""FlashAttention 2022, Figs. 5 to 8: speed-up over standard attention, card by card.

Predicted: the ratio of two rooflines on the card's datasheet, standard attention as the list of
kernels that each variant needs and FlashAttention as released (Br = 16, Bc = 256). A ratio of lower
bounds is no bound itself: it says what the bytes and FLOPs alone would give.
"""

from collections.abc import Iterator
from typing import Any

from analysis.hardware import A100_40GB, H200, RTX_3090, T4, Gpu
from analysis.shapes import AttentionShape, Tile
from analysis.standard_passes import ALGORITHM_0_AND_3, EAGER, PAPER_MASKED_DROPOUT, PAPER_MASKED_FILL, KernelPasses
from analysis.time_model import Work, attention_work, datasheet_ceilings, predict_time, standard_work
from repro.experiments import Cell, Experiment, Row, row
from repro.experiments.shared.attention import cell_of, shape_of

SEQLENS = tuple(2**k for k in range(7, 14))
TILE = Tile(16, 256)
#: (dropout, key mask) -> what standard attention launched in 2022.
VARIANTS: dict[tuple[float, bool], tuple[KernelPasses, ...]] = {
    (0.1, True): PAPER_MASKED_DROPOUT,
    (0.0, True): PAPER_MASKED_FILL,
    (0.0, False): ALGORITHM_0_AND_3,
}
#: Card, batch, heads, head_dim of the figures; the last is where our records are from.
PANELS: tuple[tuple[Gpu, int, int, int], ...] = (
    (A100_40GB, 8, 12, 64),
    (A100_40GB, 16, 12, 128),
    (RTX_3090, 12, 12, 64),
    (T4, 12, 12, 64),
    (H200, 16, 8, 64),
)


def device(gpu: Gpu) -> str:
    """The card as the published records call it: without form factor and memory size."""
    return "NVIDIA " + next(n for n in ("A100", "RTX 3090", "T4", "H200") if n in gpu.name)


def points() -> Iterator[Cell]:
    """Every card, variant and length."""
    for gpu, batch, heads, head_dim in PANELS:
        # Our records are of today's eager path without mask or dropout.
        for dropout, key_mask in ((0.0, False),) if gpu is H200 else VARIANTS:
            for n in SEQLENS:
                shape = AttentionShape(batch, heads, n, n, head_dim)
                setup: dict[str, Any] = {"device": device(gpu), "dropout": dropout, "key_mask": key_mask}
                yield cell_of(shape, "flash1", "forward+backward", **setup)


def predict(one: Cell) -> Iterator[Row]:
    """The ratio of the two rooflines."""
    shape = shape_of(one)
    gpu = next(gpu for gpu, *_ in PANELS if device(gpu) == one["device"])
    kernels = EAGER if gpu is H200 else VARIANTS[float(one["dropout"]), bool(one["key_mask"])]
    ceilings = datasheet_ceilings(gpu)
    works: dict[str, Work] = {}
    for pass_ in ("forward", "backward"):
        works |= attention_work("flash1-released", shape, TILE, pass_, gpu, fma=False)
    unfused = predict_time(standard_work(kernels, shape), ceilings).seconds
    ratio = unfused / predict_time(works, ceilings).seconds
    yield row("speedup", ratio, unit="x", tool="ratio of rooflines, datasheet")


EXPERIMENT = Experiment("speedup", predict=predict, also=points)
