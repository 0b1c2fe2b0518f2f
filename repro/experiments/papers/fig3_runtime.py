"""FlashAttention 2022, Fig. 3 left: run time of forward + backward against N.

Batch 16, 8 heads, d = 64, fp16. Published: Table 11 (A100, dropout and mask). Measured: PyTorch's
own attention on an H200. Predicted: rooflines, lower bounds of each set-up at the ceilings of its
card.
"""

from collections.abc import Callable, Iterator

from analysis.shapes import AttentionShape, Tile
from analysis.standard_passes import EAGER, PAPER_MASKED_DROPOUT
from analysis.time_model import attention_work, standard_work
from repro.experiments import Cell, Context, Experiment, Row
from repro.experiments.papers._roofline import CARDS, time_row
from repro.experiments.shared.attention import cell_of, shape_of
from repro.experiments.shared.pytorch_runs import SOURCES, fig3_cells, timed

SEQLENS = tuple(2**k for k in range(7, 17))
PAPER, OURS = CARDS
#: Implementation -> (card, dropout, key mask).
SETUPS = {
    "standard": (PAPER, 0.1, True),
    "flash1": (PAPER, 0.1, True),
    "standard-eager": (OURS, 0.0, False),
    "sdpa-flash2": (OURS, 0.0, False),
}
UNFUSED = {"standard": PAPER_MASKED_DROPOUT, "standard-eager": EAGER}
#: The released kernels of 2022 and of FlashAttention-2: algorithm and tile.
RELEASED = {"flash1": ("flash1-released", Tile(16, 256)), "sdpa-flash2": ("flash", Tile(128, 128))}


def points() -> list[Cell]:
    """Standard and fused attention on both cards, at every length."""
    return [
        cell_of(AttentionShape(16, 8, n, n, 64), name, "forward+backward", device=card, dropout=dropout, key_mask=mask)
        for n in SEQLENS
        for name, (card, dropout, mask) in SETUPS.items()
    ]


def predict(one: Cell) -> Iterator[Row]:
    """The roofline of its kernels, where the cell names the card."""
    if "device" not in one:
        return
    name, shape, gpu = str(one["implementation"]), shape_of(one), CARDS[str(one["device"])]
    if name in UNFUSED:
        works = standard_work(UNFUSED[name], shape)
    else:
        fused, tile = RELEASED[name]
        works = {}
        for pass_ in ("forward", "backward"):
            # The authors' kernels of 2022 multiply on tensor cores, the ones here on FMA units.
            works |= attention_work(fused, shape, tile, pass_, gpu, 2, fma=False)
    yield time_row(works, gpu)


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """Both passes apart and together, in turn; what has no backward of its own only together."""
    from repro.instruments.pytorch_attention import CHECKPOINTED, Attention

    attention = Attention(one)
    works: dict[str, Callable[[], object]] = {"forward": attention.forward, "forward+backward": attention.both}
    if one["implementation"] != CHECKPOINTED:
        out = attention.forward()
        works["backward"] = lambda: attention.backward(out)
    return timed(works)


EXPERIMENT = Experiment(
    "fig3-runtime", fig3_cells, predict, measure, device="cuda", also=points, sources=SOURCES, seconds=25
)
