"""How far measured attention is from the time model's bound, per shape, and what binds.

The bound is that of our Hopper kernels' tiles: tensor cores, exponentials, shared memory, the SM
boundary and HBM, by datasheet, kernel by kernel (``analysis.time_model``). Every measured point is
of the same card; peers stand for ours where ours have not been timed.
"""

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes

from figures.common import Drawing, End, curve, devices, label_ends, note, pick, powers_of_two
from figures.time.throughput import MEASURED, PANELS, TICKS
from repro.claims.machine.peers import SHAPE, distances

EXPERIMENTS = ("throughput", "throughput-peers", "gpu-throughput")
#: All but standard attention, which is an order of magnitude away.
DRAWN = tuple(name for name in MEASURED if name != "sdpa-math")


def draw(frame: pandas.DataFrame) -> Drawing:
    """Eight panels as in the throughput figure."""
    table = distances(frame)
    figure, axes = plt.subplots(2, 4, figsize=(13.5, 6.4), layout="constrained", sharex=True, sharey="row")
    for line, pass_ in zip(axes, ("forward", "backward"), strict=True):
        farthest = pick(table, pass_=pass_, implementation=DRAWN)["distance"].max()
        line[0].set_ylim(0.7, 1.06 * farthest if farthest > 1 else 3)
        for ax, (head_dim, causal) in zip(line, PANELS, strict=True):
            panel(ax, pick(table, pass_=pass_, head_dim=head_dim, causal=causal))
            mask = "causal" if causal else "no mask"
            ax.set_title(f"{pass_}, d = {head_dim}, {mask}")
        line[0].set_ylabel("measured time over bound")
    for ax in axes[1]:
        ax.set_xlabel("sequence length N")
    note(
        figure,
        f"16,384 tokens, hidden size 2,048, bf16, {devices(table)}. 1 is the bound: what binds is "
        "written below it. Ceilings by datasheet, at a clock that the card's power does not "
        "sustain under this load.",
    )
    columns = ["implementation", *SHAPE, "tflops", "bound_tflops", "binding", "distance", "distance_without_shared"]
    return Drawing(figure, table[columns])


def panel(ax: Axes, rows: pandas.DataFrame) -> None:
    """One pass, head dimension and mask."""
    ends: list[End] = []
    ax.axhline(1, color="black", linewidth=1.2)
    for name in DRAWN:
        label, colour, marker = MEASURED[name]
        points = pick(rows, implementation=name)
        if points.empty:
            continue
        looks = {"marker": marker}
        ends += curve(ax, points, "seqlen_q", label, colour, y="distance", sources=("measured",), points=looks)
    powers_of_two(ax, TICKS)
    ax.set_xlim(420, 16384 * 6)
    spans = rows.drop_duplicates("seqlen_q").sort_values("seqlen_q")
    for binding, group in spans.groupby("binding", sort=False):
        middle = (group["seqlen_q"].min() * group["seqlen_q"].max()) ** 0.5
        edge = group["seqlen_q"].max() == TICKS[0]
        ax.text(
            440 if edge else middle,
            0.93,
            str(binding),
            fontsize=7,
            va="top",
            ha="left" if edge else "center",
            color="#555555",
        )
    label_ends(ax, ends)
