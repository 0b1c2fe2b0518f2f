"""FlashAttention 2022, Figs. 5 to 8: speed-up over standard attention on five cards.

Published points are digitised from the authors' plots (their T4 plot of the forward alone is left
out: it repeats the RTX 3090's). Measured points are of PyTorch's FlashAttention-2 on an H200.
"""

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from figures.common import Drawing, key, note, pick, powers_of_two, series
from repro.claims.attention.like import ratio

EXPERIMENTS = ("speedup", "fig3-runtime")
TICKS = (128, 512, 2048, 8192)
#: (dropout, key mask) -> (label, colour).
VARIANTS = {
    (0.1, True): ("dropout and mask", "#0072B2"),
    (0.0, True): ("mask", "#E69F00"),
    (0.0, False): ("neither", "#009E73"),
}
PANELS = (
    ("NVIDIA A100", 64, "A100, d = 64 (Fig. 5)"),
    ("NVIDIA A100", 128, "A100, d = 128 (Fig. 6)"),
    ("NVIDIA RTX 3090", 64, "RTX 3090, d = 64 (Fig. 7)"),
    ("NVIDIA T4", 64, "T4, d = 64 (Fig. 8)"),
    ("NVIDIA H200", 64, "H200, d = 64 (ours)"),
)


def draw(frame: pandas.DataFrame) -> Drawing:
    """One panel a card."""
    rows = pick(frame, experiment="speedup", metric="speedup")
    rows = rows[rows["causal"] != True].copy()  # noqa: E712  object column
    rows["head_dim"] = rows["head_dim"].fillna(64)  # Fig. 8 does not say; 64 as in Fig. 7
    ours = ratio(frame, "time_ms", "forward+backward").rename("value").reset_index()
    ours = ours.reindex(columns=["seqlen_q", "value"]).assign(
        source="measured", device="NVIDIA H200", head_dim=64, dropout=0.0, key_mask=False
    )
    figure, axes = plt.subplots(1, 5, figsize=(14.5, 3.9), layout="constrained", sharey=True)
    for ax, (device, head_dim, title) in zip(axes, PANELS, strict=True):
        panel(ax, pick(rows, device=device, head_dim=head_dim), title)
        if device == "NVIDIA H200":
            series(ax, ours, "seqlen_q", "measured H200", color=VARIANTS[0.0, False][1])
    axes[0].set_ylabel("speed-up, forward + backward")
    colours = [Line2D([], [], color=c, label=label) for label, c in VARIANTS.values()]
    axes[0].add_artist(axes[0].legend(handles=colours, loc="upper left"))
    key(axes[4], "H200", loc="upper left")
    note(
        figure,
        "Standard attention over FlashAttention, fp16. Lines: ratio of two rooflines on the card's "
        "datasheet: what bytes and FLOPs alone give. The 2022 kernels reached a fifth to a third "
        "of the tensor cores' peak, so most points lie below. Hollow: digitised ±0.02, 12 heads.",
    )
    columns = ["source", "device", "head_dim", "dropout", "key_mask", "seqlen_q", "value"]
    table = pandas.concat([some[columns] for some in (rows, ours) if len(some)])
    return Drawing(figure, table.sort_values(columns[:-1]))


def panel(ax: Axes, rows: pandas.DataFrame, title: str) -> None:
    """Predicted and published ratios of one card."""
    for (dropout, key_mask), (label, colour) in VARIANTS.items():
        these = pick(rows, dropout=dropout, key_mask=key_mask)
        what = f"{title}, {label}"
        for source in ("predicted", "published"):
            points = pick(these, source=source)
            if not points.empty:  # the H200 has one variant and nothing published
                series(ax, points, "seqlen_q", f"{what} {source}", color=colour)
    ax.axhline(1, color="#999999", linewidth=0.8, linestyle=":")
    powers_of_two(ax, TICKS)
    ax.set(xlabel="sequence length N", title=title, yscale="log")
    ax.set_ylim(0.9, 20)
    ax.set_yticks([1, 2, 4, 8, 16], ["1x", "2x", "4x", "8x", "16x"])
    ax.minorticks_off()
