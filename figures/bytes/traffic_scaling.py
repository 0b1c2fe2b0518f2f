"""Traffic against N, d and M on log-log axes, with the exponents of the theorem.

FlashAttention 2022, Theorem 2: Θ(N d + N²) accesses for standard attention, Θ(N² d² / M) for
FlashAttention with d <= M <= N d. A straight line of that slope says that it holds.
"""

import matplotlib.pyplot as plt
import pandas
import seaborn

from figures.common import COLOURS, Drawing, key, label_ends, note, pick, powers_of_two, series
from repro.claims.attention.scaling import SWEEPS, fitted, totals
from repro.experiments.bytes.traffic_scaling import HEAD_DIM, LONG, ON_CHIP, SHORT, SUMMED

EXPERIMENTS = ("traffic-scaling",)
NAMES = {"standard": "standard", "flash1-literal": "FA-1, Alg. 1", "flash": "queries outside"}


def draw(frame: pandas.DataFrame) -> Drawing:
    """One panel per swept variable."""
    table = totals(frame)
    table["megabytes"] = table["value"] / 1e6
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.3), layout="constrained")
    for ax, (sweep, (x, title)) in zip(axes, SWEEPS.items(), strict=True):
        here = pick(table, sweep=sweep)
        # One long-form call for all predicted lines: colour by algorithm, a line per length.
        lines = pick(here, source="predicted", implementation=list(NAMES))
        if len(lines):
            lines = lines.assign(line=0 if sweep == "seqlen" else lines["seqlen_q"])
            seaborn.lineplot(
                lines,
                x=x,
                y="megabytes",
                hue="implementation",
                units="line",
                estimator=None,
                palette=COLOURS,
                linewidth=1.5,
                legend=False,
                ax=ax,
            )
        ends = []
        for algorithm, name in NAMES.items():
            rows = pick(here, implementation=algorithm)
            series(
                ax,
                pick(rows, source="measured"),
                x,
                f"counted {algorithm} against {sweep}",
                y="megabytes",
                color=COLOURS[algorithm],
            )
            far = pick(rows, source="predicted")
            far = far if sweep == "seqlen" else pick(far, seqlen_q=LONG)
            if len(far):
                end = far.sort_values(x).iloc[-1]
                power_law = algorithm != "standard" or sweep == "seqlen"
                exponent = f": slope {fitted(table, algorithm, sweep):.2f}"
                text = name + (exponent if power_law else "")
                ends.append((end[x], end["megabytes"], text, COLOURS[algorithm]))
        ax.set_yscale("log")
        ax.set(xlabel=title, ylabel="")
        ticks = sorted(SUMMED[sweep])
        powers_of_two(ax, ticks[:: 2 if len(ticks) > 5 else 1])
        ax.set_xlim(right=ticks[-1] * (ticks[-1] / ticks[0]) ** 0.85)
        low, high = ax.get_ylim()
        ax.set_ylim(low, high * (high / low) ** 0.2)
        label_ends(ax, ends)
    axes[0].set_ylabel("bytes across the SM boundary, forward, one head (MB)")
    axes[0].set_title(f"N: d = {HEAD_DIM}, M = {ON_CHIP >> 10}k elements")
    axes[1].set_title(f"d: M = {ON_CHIP >> 10}k elements")
    axes[2].set_title(f"M: d = {HEAD_DIM}")
    for ax in axes[1:]:
        ax.text(
            0.02,
            0.97,
            f"upper lines N = {LONG >> 10}k, lower lines N = {SHORT}",
            transform=ax.transAxes,
            va="top",
            fontsize=8,
            color="#555555",
        )
    key(axes[0], "counted, host backend", published=False, loc="upper left")
    note(
        figure,
        "fp16; tiles by the paper's rule Bc = M/4d, Br = min(Bc, d), the two swapped where queries "
        "are outside. Theorem 2: N² d² / M for FlashAttention, N d + N² for standard attention.",
    )
    return Drawing(figure, table.drop(columns="megabytes").assign(unit="B"))
