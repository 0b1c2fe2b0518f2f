"""Memory against time of one transformer under every plan (after Checkmate 2020, Fig. 5).

Left: predicted and counted, no clock involved. Right: the same plans measured, with the framework's
checkpoints and its compiler's memory budget. The black line is the optimum under each budget.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas
from matplotlib.axes import Axes

from figures.checkpointing._checkpoint import COLOURS, MIB
from figures.common import Drawing, devices, log_axis, note, pick, say
from repro.experiments.checkpointing.checkpoint_pareto import HEURISTICS, LAYERS, STAGES

EXPERIMENTS = ("checkpoint-pareto",)
LABELLED = {
    "store-all": "store all",
    "sqrt": "sqrt(L)",
    "recursive": "halving",
    "recompute-all": "recompute all",
    "revolve-3": "revolve, 3",
}


def table(frame: pandas.DataFrame) -> pandas.DataFrame:
    """One row per plan and source: MiB, and time relative to autograd or to storing all."""
    keys = ["implementation", "budget_share", "stages", "percent", "source"]
    rows = frame.copy()
    for column in keys[1:4]:
        rows[column] = rows[column].fillna(-1) if column in rows else -1.0
    wide = rows.pivot_table(index=keys, columns="metric", values="value").reset_index()
    for column in ("peak_bytes", "relative_time"):
        if column not in wide:
            wide[column] = float("nan")
    compiled = wide["implementation"] == "torch-memory-budget"
    own = pick(wide, implementation="torch-memory-budget", percent=100)["relative_time"]
    wide["relative"] = wide["relative_time"].where(~compiled, wide["relative_time"] / own.max())
    wide["mib"] = wide["peak_bytes"] / MIB
    return wide


def draw(frame: pandas.DataFrame) -> Drawing:
    """Predicted left, measured right."""
    wide = table(frame)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), sharex=True, sharey=True, layout="constrained")
    for ax, source in ((left, "predicted"), (right, "measured")):
        plans(ax, pick(wide, source=source), source)
        log_axis(ax, "x", [2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"], base=2)
        log_axis(ax, "y", [1, 4 / 3, 2, 4, 8], ["1", "1⅓", "2", "4", "8"], base=2)
        ax.set(xlabel="peak memory of a step (MiB)", ylim=(0.8, 5), xlim=(3.2, 34))
    framework(right, pick(wide, source="measured"))
    left.set_ylabel("time relative to storing everything")
    left.set_title("predicted from shapes and FLOPs")
    right.set_title("measured")
    note(
        figure,
        f"GPT, {LAYERS} layers ({STAGES} stages), h = 64, 4 heads, N = 128, batch 4, fp32, no "
        f"dropout. Measured on {devices(frame)}, one thread, steps\nalternating with autograd's; "
        "the compiler's times are relative to its own budget of 100 %.",
    )
    columns = ["implementation", "budget_share", "stages", "percent", "source", "mib", "relative"]
    return Drawing(figure, wide[columns])


def plans(ax: Axes, rows: pandas.DataFrame, source: str) -> None:
    """Our plans in one panel."""
    best = pick(rows, implementation=("optimal", "store-all")).sort_values("mib")
    marker = {"marker": "o", "markersize": 5} if source == "measured" else {"marker": "."}
    ax.plot(
        best["mib"],
        best["relative"],
        color="black",
        linewidth=1.5,
        drawstyle="steps-post",
        label="optimum, budget sweep",
        **marker,
    )
    some = pick(rows, implementation=HEURISTICS)
    ax.plot(
        some["mib"],
        some["relative"],
        marker="o",
        markersize=5,
        linestyle="none",
        color=COLOURS["sqrt"],
        label="heuristics",
    )
    for _, row in some.iterrows():
        if row["implementation"] in LABELLED:
            # Halving lies right below revolve; sqrt(L) has others at its height.
            up = {"recursive": -8, "sqrt": 8}.get(row["implementation"], 4)
            say(
                ax,
                LABELLED[row["implementation"]],
                (row["mib"], row["relative"]),
                (5, up),
                color=COLOURS["sqrt"],
                fontsize=7.5,
            )
    greedy = pick(rows, implementation="greedy")
    ax.plot(
        greedy["mib"],
        greedy["relative"],
        marker="v",
        markersize=6,
        linestyle="none",
        color=COLOURS["greedy"],
        label="greedy by ratio",
    )
    ax.legend(loc="upper right")


def framework(ax: Axes, rows: pandas.DataFrame) -> None:
    """What the framework offers, and the lower envelope of all measured points."""
    for name, text, marker in (
        ("torch-checkpoint", "torch.utils.checkpoint, 1, 2, 4 stages", "s"),
        ("torch-memory-budget", "compiler's memory budget, 100 to 30 %", "D"),
    ):
        some = pick(rows, implementation=name).sort_values("mib")
        ax.plot(
            some["mib"],
            some["relative"],
            marker=marker,
            markersize=6,
            color=COLOURS[name],
            linestyle=":",
            linewidth=0.8,
            label=text,
        )
    ordered = rows[rows["implementation"] != "torch-memory-budget"].sort_values("mib")
    ordered = ordered.dropna(subset=["mib", "relative"])
    if len(ordered):
        envelope = np.minimum.accumulate(ordered["relative"].to_numpy())
        ax.step(
            ordered["mib"],
            envelope,
            where="post",
            color="#999999",
            linewidth=5,
            alpha=0.35,
            zorder=0,
            label="lower envelope",
        )
    ax.legend(loc="upper right")
