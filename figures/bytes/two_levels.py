"""Two traffic levels: what thread blocks ask for, and what reaches HBM behind L2.

The papers count accesses on a machine with one fast and one slow memory. On a GPU that count
crosses the boundary between the SMs and L2; HBM sees it only where L2 cannot hold what is read
again.
"""

import matplotlib.pyplot as plt
import pandas

from analysis.hardware import H200
from figures.common import COLOURS, Drawing, curve, key, label_end, log_axis, note, pick, powers_of_two, say, series
from repro.claims.machine.two_levels import GB

EXPERIMENTS = ("l2-absorption",)
TICKS = (1024, 4096, 16384, 65536, 262144)
LABELS = {
    "sram_read_bytes": ("SM boundary", "#0072B2"),
    "hbm_read_bytes": ("HBM", "#D55E00"),
    "hbm_compulsory_bytes": ("each tensor once", COLOURS["bound"]),
}


def draw(frame: pandas.DataFrame) -> Drawing:
    """Reads at both levels against N, and how often HBM delivers K and V."""
    rows = frame.assign(gigabytes=frame["value"] / GB)
    one = pick(rows, heads=1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.0, 4.3), layout="constrained")
    for metric, (name, colour) in LABELS.items():
        these = pick(one, metric=metric)
        style = {"color": colour, "linestyle": "--" if "compulsory" in metric else "-"}
        line = series(left, pick(these, source="predicted"), "seqlen_q", f"predicted {name}", y="gigabytes", **style)
        if metric != "hbm_compulsory_bytes":
            series(left, pick(these, source="measured"), "seqlen_q", f"measured {name}", y="gigabytes", color=colour)
        if not line.empty:
            end = line.iloc[-1]
            label_end(left, end["seqlen_q"], end["gigabytes"], name, colour)
    left.set_yscale("log")
    left.set(ylabel="bytes read by the forward pass (GB)", ylim=(5e-4, 3e3))
    left.set_title("The re-reads cross the SM boundary, not HBM")
    key(left, "H200 counters", published=False, loc="upper left")

    reads = pick(one, metric="hbm_read_bytes").copy()
    reads["times"] = reads["value"] / (reads["seqlen_q"] * reads["head_dim"] * 2 * 2) - 0.5
    colour = LABELS["hbm_read_bytes"][1]
    curve(right, reads, "seqlen_q", "re-reads", colour, y="times")
    log_axis(right, "y", [1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"], base=2)
    right.set(ylabel="times K and V are read from HBM", ylim=(0.8, 24))
    right.set_title("Once while L2 holds them, then per wave and more")
    spread = pick(reads, source="predicted").dropna(subset=["spread_min"])
    one_walk = spread["seqlen_q"] * spread["head_dim"] * 2 * 2
    right.vlines(
        spread["seqlen_q"],
        spread["spread_min"] / one_walk - 0.5,
        spread["spread_max"] / one_walk - 0.5,
        color=colour,
        linewidth=4,
        alpha=0.3,
    )
    for ax in (left, right):
        powers_of_two(ax, TICKS)
        edge = capacity(ax)
        ax.set(xlabel="sequence length N")
    left.set_xlim(right=TICKS[-1] * 12)
    say(
        right,
        f"K and V fill half of\nthe {H200.l2_bytes >> 20} MiB L2",
        (edge, 9),
        (-6, 0),
        ha="right",
        color="#555555",
    )
    if len(spread):
        last = spread.sort_values("seqlen_q").iloc[-1]
        top = last["spread_max"] / (last["seqlen_q"] * last["head_dim"] * 4) - 0.5
        say(
            right,
            "band: other paces\nof the thread blocks",
            (last["seqlen_q"], top),
            (-30, 22),
            ha="center",
            color="#555555",
            arrowprops={"arrowstyle": "-", "color": "#999999"},
        )
    note(
        figure,
        "One head, d = 128, bf16, query tiles of 128, 2 x 132 thread blocks a wave. Measured: "
        "PyTorch's FlashAttention-2\nforward on an NVIDIA H200, Nsight Compute. HBM is predicted "
        "by a simulated L2 in which nothing is fitted.",
    )
    csv = rows.loc[rows["metric"].isin(LABELS), ["source", "heads", "seqlen_q", "metric", "value"]]
    return Drawing(figure, csv.sort_values(["metric", "heads", "seqlen_q", "source"]))


def capacity(ax: plt.Axes) -> float:
    """Mark the length where K and V of one head outgrow the usable L2; returns it."""
    edge = H200.usable_l2_bytes / (2 * 128 * 2)
    ax.axvline(edge, color="#999999", linewidth=0.8, linestyle=":")
    return edge
