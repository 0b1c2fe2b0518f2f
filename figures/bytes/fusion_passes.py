"""Operator fusion: passes over memory of three chains, unfused, fused, in torch and compiled."""

import matplotlib.pyplot as plt
import pandas

from analysis.fusion import CHAINS
from figures.common import FILLED, Drawing, devices, note, pick, say
from repro.claims.machine.fusion import passes
from repro.experiments.chains.fusion import IMPLEMENTATIONS

EXPERIMENTS = ("fusion",)
COLOURS = {"unfused": "#D55E00", "fused": "#009E73", "torch-eager": "#E69F00", "torch-compile": "#0072B2"}


def draw(frame: pandas.DataFrame) -> Drawing:
    """Bars predicted, points measured."""
    table = passes(frame)
    figure, ax = plt.subplots(figsize=(8.2, 4.2), layout="constrained")
    for group, chain in enumerate(CHAINS):
        for slot, how in enumerate(IMPLEMENTATIONS):
            row = pick(table, chain=chain, implementation=how).iloc[0]
            x = group + (slot - 1.5) * 0.2
            ax.bar(x, row["predicted"], 0.18, color=COLOURS[how], alpha=0.45, label=how if group == 0 else None)
            ax.plot(x, row["measured"], marker="o", color=COLOURS[how], **FILLED)
            if row["measured"] == row["measured"]:
                say(
                    ax,
                    f"{row['measured']:.2f}",
                    (x, max(row["measured"], row["predicted"])),
                    (0, 6),
                    ha="center",
                    fontsize=7,
                )
    ax.set_xticks(range(len(CHAINS)), ["x s + b", "r + dropout(gelu(x + bias))", "layer norm"])
    ax.set(ylabel="bytes moved / bytes of one pass", ylim=(0, 11))
    ax.legend(title="bars predicted, points counted", title_fontsize=8)
    note(
        figure,
        "Our kernels: counted by the host backend; eager: operands of dispatched operations\n(its "
        "dropout also writes a mask); compiled: the compiler's own account. "
        f"Layer norm is one operation in eager torch. {devices(frame)}.",
    )
    return Drawing(figure, table.assign(unit="passes"))
