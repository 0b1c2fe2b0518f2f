"""Traffic against tile size, what shared memory allows, and what each rule picks.

Nothing here is measured time: the exhaustive timing over tiles is the GPU experiment "gpu-ladder",
whose points are drawn as soon as a card has recorded them.
"""

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes

from figures.common import COLOURS, Drawing, note, pick, powers_of_two, series

EXPERIMENTS = ("tile-rules", "gpu-ladder")
SIDE = {"flash1-released": "block_n", "flash": "block_m"}
TITLES = {"flash1-released": "keys outside (2022)", "flash": "queries outside"}
MARKERS = ("o", "s", "D", "^")
TICKS = (16, 32, 64, 128, 256, 512)


def draw(frame: pandas.DataFrame) -> Drawing:
    """One panel per loop order and head dimension."""
    rows = pick(frame, experiment="tile-rules").copy()
    rows["megabytes"] = rows["value"] / 1e6
    figure, axes = plt.subplots(1, 4, figsize=(14.5, 4.4), layout="constrained", sharey=True)
    panels = [(algorithm, d) for algorithm in SIDE for d in (64, 128)]
    for ax, (algorithm, head_dim) in zip(axes, panels, strict=True):
        panel(ax, pick(rows, implementation=algorithm, head_dim=head_dim), algorithm)
        ax.set_title(f"{TITLES[algorithm]}, d = {head_dim}")
    axes[0].set_ylabel("predicted bytes across the SM boundary (MB)")
    note(
        figure,
        "One head, N = 4096, forward, fp16. The line ends where no card here has the shared "
        "memory; dotted: the largest power of two that fits each card. Rules with M of an H200; "
        "the study notes' rule as printed gives no tile.",
    )
    columns = ["implementation", "head_dim", "note", "block_m", "block_n", "megabytes"]
    return Drawing(figure, rows[columns])


def panel(ax: Axes, rows: pandas.DataFrame, algorithm: str) -> None:
    """The curve, the cards' limits, the rules' choices."""
    side, colour = SIDE[algorithm], COLOURS[algorithm]
    limits = rows[rows["note"].str.startswith("limit")]
    furthest = limits[side].max()
    curve = rows[(rows["note"] == "curve") & (rows[side] <= furthest)]
    series(ax, curve, side, f"{algorithm} curve", y="megabytes", color=colour)
    heights: dict[float, int] = {}
    for _, limit in limits.sort_values("note").iterrows():
        name = limit["note"].removeprefix("limit: ").split("-")[0]
        at = heights.setdefault(limit[side], 0)
        heights[limit[side]] += 1
        ax.axvline(limit[side], color="#BBBBBB", linewidth=0.8, linestyle=":", zorder=0)
        ax.annotate(
            name,
            (limit[side], 1),
            xycoords=("data", "axes fraction"),
            fontsize=7.5,
            xytext=(3, -9 - 10 * at),
            textcoords="offset points",
            color="#777777",
        )
    for marker, (_, choice) in zip(MARKERS, rows[rows["note"].str.startswith("rule")].iterrows(), strict=False):
        ax.plot(
            choice[side],
            choice["megabytes"],
            marker=marker,
            color="black",
            linestyle="none",
            markerfacecolor="white",
            markersize=7,
            label=choice["note"].removeprefix("rule: "),
        )
    powers_of_two(ax, TICKS)
    ax.set(yscale="log", xlabel="block of keys Bc" if side == "block_n" else "block of queries Br")
    ax.legend(loc="lower left", fontsize=7.5)
