"""Checkpointing meets attention: bytes a checkpoint around attention frees, and bytes it adds."""

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes

from figures.common import COLOURS, Drawing, key, label_ends, note, pick, powers_of_two, series
from repro.claims.checkpointing.around_attention import attention_step_bytes

EXPERIMENTS = ("checkpoint-attention",)
MIB = 2**20


def draw(frame: pandas.DataFrame) -> Drawing:
    """Traffic left, memory kept right."""
    traffic = attention_step_bytes(frame)
    traffic["mib"] = traffic["value"] / MIB
    kept = pick(frame, metric="kept_bytes", source="predicted").copy()
    kept["mib"] = kept["value"] / MIB
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    ends = []
    for name in ("standard", "flash"):
        for again, style in ((False, "-"), (True, "--")):
            some = pick(traffic, implementation=name, checkpointed=again)
            line = series(
                left,
                pick(some, source="predicted"),
                "seqlen_q",
                f"predicted {name} {again}",
                y="mib",
                color=COLOURS[name],
                linestyle=style,
            )
            points = {} if not again else {"marker": "s"}
            series(
                left,
                pick(some, source="measured"),
                "seqlen_q",
                f"measured {name} {again}",
                y="mib",
                color=COLOURS[name],
                **points,
            )
            last = line.iloc[-1]
            text = name + (" + checkpoint" if again else "")
            ends.append((float(last["seqlen_q"]), float(last["mib"]), text, COLOURS[name]))
    finish(left, ends)
    left.set(ylabel="bytes loaded and stored a step and head (MiB)")
    left.set_title("traffic: the checkpoint runs the forward again")
    key(left, "kernels executed, bytes counted", published=False, loc="upper left")
    ends = []
    for name in ("standard", "flash"):
        line = series(
            right,
            pick(kept, implementation=name, checkpointed=False),
            "seqlen_q",
            f"kept by {name}",
            y="mib",
            color=COLOURS[name],
        )
        last = line.iloc[-1]
        text = {"standard": "standard: P, 2 N² bytes", "flash": "flash: lse, 4 N bytes"}[name]
        ends.append((float(last["seqlen_q"]), float(last["mib"]), text, COLOURS[name]))
    finish(right, ends)
    right.set(ylabel="kept beside q, k, v and out, a head (MiB)")
    right.set_title("memory: what that checkpoint can free")
    note(
        figure,
        "d = 64, fp16, not causal. Bytes between L2 and the multiprocessors, forward and "
        "backward. Tiles: standard 128 x 128; flash 128 x 64 forward, 64 x 128 backward. "
        "Squares: with the checkpoint.",
    )
    columns = ["implementation", "seqlen_q", "checkpointed", "source", "metric", "value", "mib"]
    return Drawing(figure, pandas.concat([traffic, kept])[columns])


def finish(ax: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Axes and labels of a panel."""
    powers_of_two(ax, [256, 1024, 4096, 16384])
    ax.set_yscale("log")
    ax.set(xlabel="sequence length N", xlim=(220, 16384 * 8))
    label_ends(ax, ends)
