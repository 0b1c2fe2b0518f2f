"""Model states on several ranks: bytes held and sent by engine, against ZeRO's formulas."""

import matplotlib.pyplot as plt
import pandas
from matplotlib.patches import Patch

from figures.common import FILLED, Drawing, devices, note, pick, say
from repro.claims.training.sharded_states import per_parameter
from repro.experiments.shared.sharded_states import ENGINES, RANKS

EXPERIMENTS = ("several-ranks",)
KINDS = {
    "parameter_bytes": ("parameters", "#0072B2"),
    "gradient_bytes": ("gradients", "#E69F00"),
    "optimizer_bytes": ("optimiser", "#009E73"),
}
LABELS = {
    "data-parallel": "data parallel\n(DDP)",
    "torch-zero-1": "P_os\n(torch ZeRO)",
    "zero-2-by-parameter": "P_os+g\n(reduce to owner)",
    "fsdp2-zero-2": "FSDP2, kept\nafter forward",
    "fsdp2-zero-3": "P_os+g+p\n(FSDP2)",
}


def draw(frame: pandas.DataFrame) -> Drawing:
    """Held bytes for each number of ranks, and sent bytes."""
    table = per_parameter(frame)
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained", width_ratios=[1, 1, 1])
    for ax, ranks in zip(axes, RANKS, strict=False):
        for x, engine in enumerate(ENGINES):
            base = seen = 0.0
            for metric, (_, colour) in KINDS.items():
                row = pick(table, implementation=engine, ranks=ranks, metric=metric).iloc[0]
                ax.bar(x, row["predicted"], 0.62, bottom=base, color=colour, alpha=0.45)
                base += row["predicted"]
                seen += row["measured"]
                ax.plot(x, seen, marker="D", color=colour, **FILLED)
            say(ax, f"{base:.1f}", (x, base), (0, 6), ha="center")
        ax.set_xticks(range(len(ENGINES)), LABELS.values(), fontsize=6.5)
        ax.set_ylim(0, 18.5)
        ax.set_title(f"held by a rank, {ranks} ranks")
        ax.set_ylabel("bytes a parameter")
    patches = [Patch(color=c, alpha=0.45, label=f"{n}, predicted") for n, c in KINDS.values()]
    axes[0].legend(handles=patches, loc="upper right", fontsize=7)

    ax = axes[2]
    for offset, ranks in zip((-0.16, 0.16), RANKS, strict=True):
        rows = pick(table, ranks=ranks, metric="sent_bytes").set_index("implementation")
        for x, engine in enumerate(ENGINES):
            # in units of Ψ elements of 2 bytes, times N/(N-1): what the paper counts
            scale = ranks / (ranks - 1) / 2
            ax.bar(
                x + offset,
                rows.loc[engine, "predicted"] * scale,
                0.3,
                color="#999999",
                alpha=0.3 + 0.25 * (ranks == RANKS[1]),
            )
            ax.plot(x + offset, rows.loc[engine, "measured"] * scale, marker="o", color="#D55E00", **FILLED)
    for volume in (2, 3):
        ax.axhline(volume, color="#555555", linewidth=0.8, linestyle=":")
    ax.set_xticks(range(len(ENGINES)), LABELS.values(), fontsize=6.5)
    ax.set(ylim=(0, 3.6), ylabel="sent a step, in Ψ x N / (N - 1) elements")
    ax.set_title("sent by a rank, 2 and 4 ranks")
    note(
        figure,
        "Bars: formulas of ZeRO (Rajbhandari et al. 2020); points: storages and collectives "
        f"counted on gloo ranks, {devices(frame)}. FSDP2 keeps fp32 parameters, 4 + 4 + 8 bytes; "
        "the others 2 + 2 + 12.",
    )
    return Drawing(figure, table)
