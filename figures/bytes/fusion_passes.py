"""Operator fusion: passes over memory of three chains, unfused, fused, in torch and compiled."""

import matplotlib.pyplot as plt
import pandas

from analysis.fusion import CHAINS
from figures.common import FILLED, Drawing, devices, note, pick, worst
from repro.claims import NOT_MEASURED, Claim, Evidence, agreement, claim
from repro.experiments.chains.fusion import FULL_BYTES, IMPLEMENTATIONS

EXPERIMENTS = ("fusion",)
COLOURS = {
    "unfused": "#D55E00",
    "fused": "#009E73",
    "torch-eager": "#E69F00",
    "torch-compile": "#0072B2",
}
COMMAND = "make figures/out/fusion_passes.svg"


def passes(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Bytes over the bytes of one pass: a row per chain and implementation."""
    rows = pick(frame, metric="moved_bytes").copy()
    rows["value"] = rows["value"] / FULL_BYTES
    table = rows.pivot_table(index=["chain", "implementation"], columns="source", values="value")
    return table.reindex(columns=["predicted", "measured"]).reset_index()


def draw(frame: pandas.DataFrame) -> Drawing:
    """Bars predicted, points measured."""
    table = passes(frame)
    figure, ax = plt.subplots(figsize=(8.2, 4.2), layout="constrained")
    for group, chain in enumerate(CHAINS):
        for slot, how in enumerate(IMPLEMENTATIONS):
            row = pick(table, chain=chain, implementation=how).iloc[0]
            x = group + (slot - 1.5) * 0.2
            ax.bar(x, row["predicted"], 0.18, color=COLOURS[how], alpha=0.45,
                   label=how if group == 0 else None)  # fmt: skip
            ax.plot(x, row["measured"], marker="o", color=COLOURS[how], **FILLED)
            if row["measured"] == row["measured"]:
                ax.annotate(f"{row['measured']:.2f}", (x, max(row["measured"], row["predicted"])),
                            xytext=(0, 6), textcoords="offset points", ha="center",
                            fontsize=7)  # fmt: skip
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


def verdicts(frame: pandas.DataFrame) -> list[Claim]:
    """K13 and the other chains."""
    table = passes(frame).set_index(["chain", "implementation"])
    one = table.loc["scale-shift"]
    ratio = {s: float(one.loc["unfused", s] / one.loc["fused", s]) for s in table.columns}
    ours = table.loc[(slice(None), ["unfused", "fused"]), :]
    counts = worst(ours["measured"] / ours["predicted"])
    longest = table.loc["bias-gelu-dropout-residual"]
    gain = {s: float(longest.loc["unfused", s] / longest.loc["fused", s]) for s in table.columns}
    compiled = table.loc[(slice(None), "torch-compile"), :]
    reach = worst(compiled["measured"] / compiled["predicted"])

    def times(value: float) -> str:
        return f"{value:.2f}x (host backend)" if value == value else NOT_MEASURED

    return [
        claim(
            "K13", predicted=f"{ratio['predicted']:.2f}x", measured=times(ratio["measured"]),
            parts=[agreement("bytes unfused over fused, counted, over 2", ratio["measured"], 2, 0.0,
                             Evidence.COUNTED)],
        ),
        claim(
            "fusion of longer chains", predicted=f"{gain['predicted']:.2f}x fewer bytes",
            measured=times(gain["measured"]),
            parts=[agreement("bytes counted over passes, worst chain", counts, 1, 0.0,
                             Evidence.COUNTED)],
        ),
        claim(
            "fusion by torch.compile", predicted="2, 3, 2 passes",
            measured=f"at most {reach:.3f} of that (Inductor's count)" if reach == reach
            else NOT_MEASURED,
            parts=[agreement("the compiler's bytes over the fused passes, worst", reach, 1, 0.01,
                             Evidence.OTHER)],
        ),
    ]  # fmt: skip
