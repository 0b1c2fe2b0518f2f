"""HBM reads predicted before any card ran the launches, orders that need fewer, and a GB10.

Left, every registered prediction with its spread over what is not published about the pace of
thread blocks; the counters join them when a card has run ``make gpu-run``. Right, what the order of
walking saves, and FlashAttention's misses on a GB10 as others published them.
"""

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes

from figures.common import COLOURS, FILLED, HOLLOW, Drawing, devices, log_axis, note, pick, say

EXPERIMENTS = ("gpu-l2-registered", "l2-orders", "gb10-misses")
MB = 1e6
COLOUR, SAWTOOTH = "#0072B2", "#D55E00"
KERNELS = {"sdpa-flash": "FA-2", "flash": "ours", "flash-sm90": "ours, Hopper"}
QUANTITIES = {
    ("l2_requests", "rows"): ("sectors L1 asks of L2, N = 32k", 1e6, "M"),
    ("l2_misses", "rows"): ("misses, batch 8, N = 128k", 1e6, "M"),
    ("l2_misses", "sawtooth"): ("the same, sawtooth", 1e6, "M"),
    ("kv_bytes_at_onset", "rows"): ("K and V where misses begin", 2**20, "MiB"),
}


def draw(frame: pandas.DataFrame) -> Drawing:
    """Three panels."""
    figure = plt.figure(figsize=(12.5, 7.4))
    figure.set_layout_engine("constrained", w_pad=0.16)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.25, 1), height_ratios=(1.25, 1))
    left, top, bottom = (figure.add_subplot(grid[where]) for where in ((slice(None), 0), (0, 1), (1, 1)))
    registered = pick(frame, experiment="gpu-l2-registered")
    predictions(left, registered)
    orders(top, pick(frame, experiment="l2-orders"))
    published(bottom, pick(frame, experiment="gb10-misses"))
    made = registered.loc[registered["source"] == "predicted", ["date", "commit"]]
    when = made.drop_duplicates().to_numpy().tolist()
    told = ", ".join(f"{date} at {str(commit)[:7]}" for date, commit in when) or "not yet"
    measured = pick(registered, source="measured")
    note(
        figure,
        f"FA-2: PyTorch's FlashAttention-2. d = 128, bf16, for an NVIDIA H200; registered {told}; "
        f"measured: {devices(measured) if len(measured) else 'not yet'}. GB10: d = 64, fp16, one "
        "block\non each of 48 SMs, 24 MiB of L2; published: arXiv 2601.16032, second hand. "
        "Simulated L2, nothing fitted; spread over five paces of blocks (analysis/l2/machine.py).",
    )
    columns = [
        "experiment",
        "source",
        "implementation",
        "pass",
        "causal",
        "order",
        "heads",
        "kv_heads",
        "seqlen_q",
        "metric",
        "value",
        "spread_min",
        "spread_max",
        "unit",
    ]
    return Drawing(figure, frame.reindex(columns=columns))


def label(row: pandas.Series) -> str:
    """Kernel, heads and length of a registered launch."""
    n = int(row["seqlen_q"])
    length = f"{n // 1024}k" if n % 1024 == 0 else f"{n // 1024}k + {n % 1024}"
    heads = f"{row['heads']:.0f} x " if row["heads"] > 1 else ""
    order = ", sawtooth" if row.get("order") == "sawtooth" else ""
    group = f" on {row['kv_heads']:.0f}" if row["kv_heads"] != row["heads"] else ""
    pass_ = "" if row["pass"] == "forward" else ", backward"
    pass_ += ", causal" if row["causal"] else ""
    waves = n / 128 / 264
    peer = row["implementation"] == "sdpa-flash" and row["heads"] == 1
    whole = f" ({waves:.0f} waves)" if peer and waves == int(waves) else ""
    return f"{KERNELS[row['implementation']]}{pass_}{order}, {heads}{length}{group}{whole}"


def once(row: pandas.Series) -> float:
    """Bytes of the tensors that the main kernel reads, each once."""
    rows, keys = row["heads"] * row["seqlen_q"], row["kv_heads"] * row["seqlen_k"]
    if row["pass"] == "backward":  # q, dout, k, v; lse, delta; the fp32 sum of dq
        return float(2 * 256 * (rows + keys) + rows * (8 + 512))
    return float(256 * (rows + 2 * keys))


def predictions(ax: Axes, rows: pandas.DataFrame) -> None:
    """A line for each registered prediction."""
    predicted = pick(rows, source="predicted").reset_index(drop=True)
    measured = pick(rows, source="measured").set_index("cell")["value"]
    for place, row in predicted.iterrows():
        unit, y = once(row), -int(place)
        ax.plot(
            [row["spread_min"] / unit, row["spread_max"] / unit],
            [y, y],
            color=COLOUR,
            linewidth=4,
            alpha=0.35,
            solid_capstyle="butt",
        )
        ax.plot(row["value"] / unit, y, "|", color=COLOUR, markersize=9, markeredgewidth=1.8)
        if row["cell"] in measured.index:
            ax.plot(measured[row["cell"]] / unit, y, "o", color="black", **FILLED)
        say(ax, f"{row['value'] / MB:.0f} MB", (row["spread_max"] / unit, y), (8, 0), va="center", fontsize=7)
    ax.set_yticks([-i for i in range(len(predicted))], [label(r) for _, r in predicted.iterrows()])
    ax.tick_params(axis="y", labelsize=7.5)
    log_axis(ax, "x", [2**i for i in range(7)], [str(2**i) for i in range(7)], base=2)
    ax.set(xlabel="bytes read from HBM / each tensor once", xlim=(0.8, 160))
    ax.set_title("Registered: HBM reads before any card ran them")
    ax.plot([], [], "|", color=COLOUR, markersize=9, markeredgewidth=1.8, label="predicted")
    ax.plot([], [], color=COLOUR, linewidth=4, alpha=0.35, label="other paces of blocks")
    ax.plot([], [], "o", color="black", label="measured", **FILLED)
    ax.legend(loc="upper right")


def orders(ax: Axes, rows: pandas.DataFrame) -> None:
    """Reads of each order, relative to head after head and the walk upwards."""
    keys = ["pass", "heads", "kv_heads", "seqlen_q"]
    lines = rows.drop_duplicates(keys).sort_values("pass", ascending=False, kind="stable")
    names = []
    for place, (_, line) in enumerate(lines.iterrows()):
        these = pick(rows, **{key: line[key] for key in keys}).set_index("implementation")["value"]
        whole = these["rows"]
        for name, value in these.drop("rows").items():
            colour = SAWTOOTH if name == "sawtooth" else COLOURS["bound"]
            ax.plot([1, value / whole], [-place, -place], color=colour, linewidth=1.5)
            ax.plot(value / whole, -place, "|", color=colour, markersize=8, markeredgewidth=1.8)
            if value > 1.2 * whole:
                say(ax, str(name).split()[0], (value / whole, -place), (0, 4), ha="center", color="#777777", fontsize=6)
        saved = these["sawtooth"] / whole - 1
        say(
            ax,
            f"{saved:+.0%}",
            (min(these["sawtooth"] / whole, 1), -place),
            (-6, 0),
            ha="right",
            va="center",
            color=SAWTOOTH,
            fontsize=7,
        )
        group = f" on {line['kv_heads']:.0f}" if line["kv_heads"] != line["heads"] else ""
        pass_ = "" if line["pass"] == "forward" else ", backward"
        names.append(f"{line['heads']:.0f}{group} x {line['seqlen_q'] // 1024:.0f}k{pass_}")
    ax.axvline(1, color="#999999", linewidth=0.8, linestyle=":")
    ax.set_yticks([-i for i in range(len(names))], names)
    ax.tick_params(axis="y", labelsize=7)
    log_axis(ax, "x", [0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"], base=2)
    ax.set(
        xlim=(0.25, 9),
        ylim=(-len(names) + 0.4, 0.8),
        xlabel="HBM reads / those of rows: head after head, one direction",
    )
    ax.set_title("A sawtooth saves; heads side by side cost")
    ax.plot([], [], color=SAWTOOTH, label="sawtooth")
    ax.plot([], [], color=COLOURS["bound"], label="2, 4 or 8 heads side by side")
    ax.legend(loc="lower right", fontsize=7)


def published(ax: Axes, rows: pandas.DataFrame) -> None:
    """What others counted on a GB10, beside the prediction."""
    wide = rows.pivot_table(index=["metric", "implementation"], columns="source", values="value")
    wide = wide.reindex(columns=["predicted", "published"])
    named = []
    for place, (which, (name, unit, symbol)) in enumerate(QUANTITIES.items()):
        if which not in wide.index or wide.loc[which].isna().any():
            named.append(f"{name}\nnot on record")
            continue
        found = wide.loc[which]
        ratio = found["published"] / found["predicted"]
        ax.plot(ratio, -place, "o", color=COLOURS["published"], **HOLLOW)
        say(ax, f"{ratio - 1:+.1%}", (ratio, -place), (8, 0), va="center")
        named.append(
            f"{name}\npredicted {found['predicted'] / unit:.4g} {symbol}, "
            f"published {found['published'] / unit:.4g} {symbol}"
        )
    ax.axvline(1, color=COLOUR, linewidth=1.8)
    ax.set_yticks([-i for i in range(len(named))], named)
    ax.set(xlim=(0.88, 1.12), ylim=(-len(QUANTITIES) + 0.4, 0.6), xlabel="published / predicted")
    ax.set_title("GB10: published misses")
