"""Every cell that has both a prediction and a measurement, on one diagonal.

Four kinds of quantity, from exact to a bound: bytes counted while our kernels run on the host
backend, bytes of hardware counters, peak memory, and time. The first three should lie on the line;
a roofline is a lower bound, so times should lie above it, and how far is what the kernel leaves.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas
from matplotlib.axes import Axes

from figures.common import FILLED, Drawing, devices, note, pick
from figures.papers.fa1_fig3_memory import MIB, prepared

EXPERIMENTS = ("traffic-scaling", "l2-absorption", "fig3-memory", "fig3-runtime", "gpu-traffic")
SHAPE = ["experiment", "pass", "batch", "heads", "seqlen_q", "seqlen_k", "head_dim", "causal"]
TRAFFIC = [*SHAPE, "implementation", "block_m", "block_n", "kernel", "tensor", "direction", "level"]
COLOURS = {
    "standard": "#D55E00",
    "standard-eager": "#D55E00",
    "flash1-released": "#0072B2",
    "flash1-skip-first": "#8AA9C9",
    "flash1-literal": "#56B4E9",
    "flash": "#009E73",
    "sdpa-flash2": "#CC79A7",
}
GB = 1e9


def paired(frame: pandas.DataFrame, keys: list[str]) -> pandas.DataFrame:
    """Rows with a predicted and a measured value for the same keys; missing keys are equal too."""
    filled = frame.copy()
    for name in keys:
        filled[name] = filled[name].astype(object).where(filled[name].notna(), "-")
    # The last row of a key counts: a newer measurement of the same cell.
    wide = filled.groupby([*keys, "source"], sort=False)["value"].last().unstack("source")
    if not {"predicted", "measured"} <= set(wide.columns):
        return pandas.DataFrame(columns=[*keys, "predicted", "measured"])
    return wide.dropna(subset=["predicted", "measured"]).reset_index()


def panels(frame: pandas.DataFrame) -> dict[str, pandas.DataFrame]:
    """The pairs of each panel, in the unit drawn."""
    host = pick(frame, metric="traffic_bytes", level="sm", experiment="traffic-scaling")
    counted = paired(host, TRAFFIC)

    cards = pick(frame, experiment="l2-absorption", metric=["sram_read_bytes", "hbm_read_bytes"])
    # The formula of the loop order is set beside the peer that has it.
    cards = cards.assign(implementation="sdpa-flash2")
    ours = pick(frame, experiment="gpu-traffic", metric="traffic_bytes")
    counters = pandas.concat([paired(cards, [*SHAPE, "implementation", "metric"]), paired(ours, TRAFFIC)])

    memory = prepared(pick(frame, experiment="fig3-memory"))
    memory = memory[memory["source"] != "published"]
    memory = memory.assign(value=memory["mib"] * MIB)
    peak = paired(memory, ["seqlen_q", "implementation"])

    time = pick(frame, experiment="fig3-runtime", metric="time_ms", pass_="forward+backward")
    time = time[(time["dropout"] == 0.0) & (time["source"] != "published")]
    times = paired(time, ["seqlen_q", "implementation"])
    scaled = {
        "bytes counted on the host (GB)": (counted, GB),
        "bytes by hardware counters (GB)": (counters, GB),
        "peak memory (MiB)": (peak, MIB),
        "time against roofline (ms)": (times, 1.0),
    }
    return {
        name: rows.assign(predicted=rows["predicted"] / unit, measured=rows["measured"] / unit)
        for name, (rows, unit) in scaled.items()
    }


def draw(frame: pandas.DataFrame) -> Drawing:
    """One panel a kind of quantity; the distribution of measured / predicted in each."""
    figure, axes = plt.subplots(1, 4, figsize=(14.5, 4.2), layout="constrained")
    tables = []
    for ax, (name, rows) in zip(axes, panels(frame).items(), strict=True):
        panel(ax, name, rows)
        columns = [c for c in (*TRAFFIC, "metric", "predicted", "measured") if c in rows]
        tables.append(rows[columns].assign(quantity=name))
    axes[0].set_ylabel("measured")
    card = devices(pick(frame, experiment="fig3-runtime"))
    note(
        figure,
        f"Counters, memory and time: {card}. Memory less the matrix library's fixed workspace. "
        "Roofline: four ceilings, measured where our records have them; forward + backward.",
    )
    return Drawing(figure, pandas.concat(tables))


def panel(ax: Axes, name: str, rows: pandas.DataFrame) -> None:
    """Points of one quantity, the diagonal, and quantiles of the ratio."""
    ax.set(title=name.split(" (")[0], xlabel=f"predicted{name[name.index(' (') :]}")
    if rows.empty:
        ax.text(0.5, 0.5, "nothing on record", transform=ax.transAxes, ha="center")
        return
    both = rows[["predicted", "measured"]].to_numpy(float)
    low, high = both.min() / 2, both.max() * 2
    ax.plot([low, high], [low, high], color="#999999", linewidth=1, zorder=0)
    for implementation, these in rows.groupby("implementation", sort=True):
        colour = COLOURS.get(str(implementation), "#333333")
        style = {"color": colour, "markersize": 4.5, "markeredgewidth": 0.4}
        label = str(implementation)
        ax.plot(these["predicted"], these["measured"], **{**FILLED, **style}, marker="o", label=label)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    ax.set_aspect("equal")
    ratio = rows["measured"].to_numpy(float) / rows["predicted"].to_numpy(float)
    if np.all(ratio == 1.0):
        told = f"{len(ratio)} cells, all equal\nto the byte"
    else:
        quartiles = np.quantile(ratio, [0, 0.5, 1])
        told = "{} cells, measured / predicted:\nleast {:.3f}, median {:.3f}, most {:.3f}".format(
            len(ratio), *quartiles
        )
    ax.text(0.97, 0.04, told, transform=ax.transAxes, ha="right", fontsize=8, color="#333333")
    ax.legend(loc="upper left", handletextpad=0.2, borderpad=0.2)
