"""Model states on several ranks: bytes held and sent by engine, against ZeRO's formulas."""

import matplotlib.pyplot as plt
import pandas
from matplotlib.patches import Patch

from analysis.model_states import SCHEDULES, communication_volume
from figures.common import FILLED, Drawing, devices, note, pick, worst
from repro.claims import NOT_MEASURED, Claim, Evidence, Part, agreement, claim
from repro.experiments.shared.sharded_states import ENGINES, PART, RANKS

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
COMMAND = "make figures/out/sharded_states.svg"


def per_parameter(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Bytes a parameter, predicted and measured, a row per engine, ranks and metric."""
    rows = pick(frame, part=PART, metric=[*KINDS, "sent_bytes"]).copy()
    rows["value"] = rows["value"] / rows["parameters"]
    keys = ["implementation", "ranks", "metric"]
    table = rows.pivot_table(index=keys, columns="source", values="value").reset_index()
    return table.reindex(columns=[*keys, "predicted", "measured"])


def draw(frame: pandas.DataFrame) -> Drawing:
    """Held bytes for each number of ranks, and sent bytes."""
    table = per_parameter(frame)
    figure, axes = plt.subplots(
        1, 3, figsize=(13, 4.4), layout="constrained", width_ratios=[1, 1, 1]
    )
    for ax, ranks in zip(axes, RANKS, strict=False):
        for x, engine in enumerate(ENGINES):
            base = seen = 0.0
            for metric, (_, colour) in KINDS.items():
                row = pick(table, implementation=engine, ranks=ranks, metric=metric).iloc[0]
                ax.bar(x, row["predicted"], 0.62, bottom=base, color=colour, alpha=0.45)
                base += row["predicted"]
                seen += row["measured"]
                ax.plot(x, seen, marker="D", color=colour, **FILLED)
            ax.annotate(f"{base:.1f}", (x, base), xytext=(0, 6), textcoords="offset points",
                        ha="center", fontsize=8)  # fmt: skip
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
            ax.bar(x + offset, rows.loc[engine, "predicted"] * scale, 0.3, color="#999999",
                   alpha=0.3 + 0.25 * (ranks == RANKS[1]))  # fmt: skip
            ax.plot(x + offset, rows.loc[engine, "measured"] * scale, marker="o", color="#D55E00",
                    **FILLED)  # fmt: skip
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


def verdicts(frame: pandas.DataFrame) -> list[Claim]:
    """Bytes per rank and volumes."""
    table = per_parameter(frame)
    held, sent = pick(table, metric=list(KINDS)), pick(table, metric="sent_bytes")
    known = len(table) and not held["measured"].isna().any()
    holds = worst(held["measured"] / held["predicted"]) if known else float("nan")
    below = pick(frame, part=PART, metric="transport_bytes", source="measured")
    # the paper's unit: elements of 2 bytes a parameter, times N / (N - 1)
    volume = below["value"] / below["parameters"] / 2 * below["ranks"] / (below["ranks"] - 1)
    moved = volume.groupby(below["implementation"]).max()
    claimed = {"data-parallel": 2, "fsdp2-zero-2": 2, "fsdp2-zero-3": 3}

    tensors = worst(sent["measured"] / sent["predicted"]) if known else float("nan")

    def of(engine: str) -> float:
        return float(moved.get(engine, float("nan")))

    tool = "at the sockets of gloo, headers included"
    torch_volume = communication_volume("torch-zero-1")
    return [
        claim(
            "ZeRO states",
            predicted="bytes of 5 engines",
            measured=f"{len(held)} values on {RANKS[0]} and {RANKS[1]} ranks, worst "
            f"{holds - 1:+.3%}" if known else NOT_MEASURED,
            published="Fig. 1, Table 1",
            parts=[agreement("bytes held over the formula, worst", holds, 1, 0.02,
                             Evidence.OTHER)],
        ),
        claim(
            "ZeRO volume",
            predicted=", ".join(f"{communication_volume(name)}Ψ" for name in
                                ("data-parallel", "zero-2", "zero-3")),
            measured=", ".join(f"{of(e):.2f}Ψ" for e in claimed) + f" ({tool}); tensors given to "
            f"collectives, sent as rings: {tensors - 1:+.2%} off" if known else NOT_MEASURED,
            published="2Ψ, 2Ψ, 3Ψ",
            parts=[
                agreement("tensors given to collectives, sent as rings, over the formula, worst",
                          tensors, 1, 0.02, Evidence.OTHER),
                *(agreement(f"{engine}: elements at the sockets over {count}Ψ", of(engine), count,
                            0.02, Evidence.OTHER,
                            limits=1.6 if engine.startswith("fsdp") else None,
                            why="gloo's reduce-scatter sends twice a ring's bytes")
                  for engine, count in claimed.items()),
            ],
        ),
        claim(
            "ZeRO volume, torch P_os",
            predicted=f"{torch_volume}Ψ: {' + '.join(SCHEDULES['torch-zero-1'])}",
            measured=f"{of('torch-zero-1'):.2f}Ψ ({tool})" if known else NOT_MEASURED,
            published="2Ψ",
            parts=[Part(what="elements sent over Ψ, ZeroRedundancyOptimizer",
                        value=of("torch-zero-1"), high=2.05, evidence=Evidence.OTHER,
                        form=".2f")],
        ),
    ]  # fmt: skip
