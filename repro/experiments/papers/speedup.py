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
from repro.experiments import Cell, Experiment
from repro.measuring.records import Record, record

NAME = "speedup"
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


def also() -> Iterator[Record]:
    """The predicted ratio of every card, variant and length."""
    for gpu, batch, heads, head_dim in PANELS:
        # Our records are of today's eager path without mask or dropout.
        variants = {(0.0, False): EAGER} if gpu is H200 else VARIANTS
        for (dropout, key_mask), kernels in variants.items():
            for seqlen in SEQLENS:
                shape = AttentionShape(batch, heads, seqlen, seqlen, head_dim)
                yield _row(shape, gpu, dropout, key_mask, _ratio(shape, gpu, kernels))


def _ratio(shape: AttentionShape, gpu: Gpu, kernels: tuple[KernelPasses, ...]) -> float:
    ceilings = datasheet_ceilings(gpu)
    works: dict[str, Work] = {}
    for pass_ in ("forward", "backward"):
        works |= attention_work("flash1-released", shape, TILE, pass_, gpu, fma=False)
    unfused = predict_time(standard_work(kernels, shape), ceilings).seconds
    return unfused / predict_time(works, ceilings).seconds


def _row(shape: AttentionShape, gpu: Gpu, dropout: float, key_mask: bool, value: float) -> Record:
    fields: dict[str, Any] = {"device": device(gpu), "dropout": dropout, "key_mask": key_mask}
    return record(
        {},
        experiment=NAME,
        implementation="flash1",
        pass_="forward+backward",
        source="predicted",
        batch=shape.batch,
        heads=shape.heads,
        kv_heads=shape.heads,
        seqlen_q=shape.seqlen_q,
        seqlen_k=shape.seqlen_k,
        head_dim=shape.head_dim,
        dtype="fp16",
        causal=False,
        metric="speedup",
        value=value,
        unit="x",
        tool="ratio of rooflines, datasheet",
        **fields,
    )


EXPERIMENT = Experiment(
    name=NAME, title="speed-up per card", cells=lambda: list[Cell](), predict=lambda cell: list[Record](), also=also
)
