"""Traffic against N, d and M on log-log axes, with the exponents of the theorem.

FlashAttention 2022, Theorem 2: Θ(N d + N²) accesses for standard attention, Θ(N² d² / M) for
FlashAttention with d <= M <= N d. A straight line of that slope says that it holds.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas
import seaborn

from figures.common import (
    COLOURS,
    Drawing,
    key,
    label_ends,
    note,
    pick,
    powers_of_two,
    series,
)
from repro.claims import NOT_MEASURED, Claim, Evidence, agreement, claim
from repro.experiments.bytes.traffic_scaling import HEAD_DIM, LONG, ON_CHIP, SHORT, SUMMED

EXPERIMENTS = ("traffic-scaling",)
NAMES = {"standard": "standard", "flash1-literal": "FA-1, Alg. 1", "flash": "queries outside"}
SWEEPS = {
    "seqlen": ("seqlen_q", "sequence length N"),
    "head_dim": ("head_dim", "head dimension d"),
    "on_chip": ("on_chip", "on-chip memory M (elements)"),
}
#: Key tiles from which the count, proportional to Tc + 1, is judged.
MANY = 16
#: Theorem 2's exponents of FlashAttention, per sweep.
EXPONENTS = {"seqlen": 2, "head_dim": 2, "on_chip": -1}


def totals(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Bytes per point: one row per source, algorithm, sweep and value."""
    rows = pick(frame, metric="traffic_bytes").dropna(subset=["value"])
    keys = ["source", "implementation", "sweep", "seqlen_q", "head_dim", "on_chip"]
    return rows.groupby(keys, as_index=False)["value"].sum()


def slope(rows: pandas.DataFrame, x: str) -> float:
    """Least-squares slope of log value against log x; NaN with fewer than two points."""
    if len(rows) < 2:
        return float("nan")
    return float(np.polyfit(np.log(rows[x]), np.log(rows["value"]), 1)[0])


def asymptotic(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Points with MANY key tiles or more, where the theorem's exponents are to be seen."""
    tiles = 4 * rows["seqlen_q"] * rows["head_dim"] / rows["on_chip"]
    return rows[tiles >= MANY]


def fitted(table: pandas.DataFrame, algorithm: str, sweep: str) -> float:
    """Slope of the exact sums where the theorem's asymptotics apply."""
    x = SWEEPS[sweep][0]
    rows = pick(table, source="predicted", implementation=algorithm, sweep=sweep)
    far = rows[rows["seqlen_q"] >= 4096] if sweep == "seqlen" else pick(rows, seqlen_q=LONG)
    return slope(far, x)


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
                lines, x=x, y="megabytes", hue="implementation", units="line", estimator=None,
                palette=COLOURS, linewidth=1.5, legend=False, ax=ax,
            )  # fmt: skip
        ends = []
        for algorithm, name in NAMES.items():
            rows = pick(here, implementation=algorithm)
            series(ax, pick(rows, source="measured"), x, f"counted {algorithm} against {sweep}",
                   y="megabytes", color=COLOURS[algorithm])  # fmt: skip
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
        ax.text(0.02, 0.97, f"upper lines N = {LONG >> 10}k, lower lines N = {SHORT}",
                transform=ax.transAxes, va="top", fontsize=8, color="#555555")  # fmt: skip
    key(axes[0], "counted, host backend", published=False, loc="upper left")
    note(
        figure,
        "fp16; tiles by the paper's rule Bc = M/4d, Br = min(Bc, d), the two swapped where queries "
        "are outside. Theorem 2: N² d² / M for FlashAttention, N d + N² for standard attention.",
    )
    return Drawing(figure, table.drop(columns="megabytes").assign(unit="B"))


def verdicts(frame: pandas.DataFrame) -> list[Claim]:
    """The theorem's three exponents, of what was counted; the sums' far out beside them."""
    table = totals(frame)
    algorithm = "flash1-literal"
    sums = {sweep: fitted(table, algorithm, sweep) for sweep in EXPONENTS}
    executed = {
        sweep: slope(asymptotic(pick(table, source="measured", implementation=algorithm,
                                     sweep=sweep)), SWEEPS[sweep][0])
        for sweep in EXPONENTS
    }  # fmt: skip
    counted = [f"{v:.2f}" for v in executed.values() if np.isfinite(v)]
    return [
        claim(
            "FA-1 Theorem 2",
            predicted=", ".join(f"{v:.2f}" for v in sums.values()) + " (sums, far out)",
            measured=f"{', '.join(counted)} (counted up to N = {SHORT})" if counted
            else NOT_MEASURED,
            published=", ".join(str(p) for p in EXPONENTS.values()),
            parts=[
                agreement(f"exponent counted over the theorem's, {SWEEPS[sweep][1]}",
                          executed[sweep], EXPONENTS[sweep], 0.05, Evidence.COUNTED)
                for sweep in EXPONENTS
            ],
        )
    ]  # fmt: skip
