"""Checkpointing meets attention: bytes a checkpoint around attention frees, and bytes it adds."""

from typing import Any

import matplotlib.pyplot as plt
import pandas

from figures.common import COLOURS, Drawing, End, curve, finish, key, note, pick
from repro.claims.checkpointing.around_attention import attention_step_bytes

EXPERIMENTS = ("checkpoint-attention",)
MIB = 2**20
AXES: dict[str, Any] = {
    "x": (256, 1024, 4096, 16384),
    "log": True,
    "xlabel": "sequence length N",
    "xlim": (220, 16384 * 8),
}


def draw(frame: pandas.DataFrame) -> Drawing:
    """Traffic left, memory kept right."""
    traffic = attention_step_bytes(frame)
    traffic["mib"] = traffic["value"] / MIB
    kept = pick(frame, metric="kept_bytes", source="predicted").copy()
    kept["mib"] = kept["value"] / MIB
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    ends: list[End] = []
    for name in ("standard", "flash"):
        for again, style in ((False, "-"), (True, "--")):
            some, text = pick(traffic, implementation=name, checkpointed=again), name + " + checkpoint" * again
            looks: dict[str, Any] = {"line": {"linestyle": style}, "points": {"marker": "s"} if again else None}
            ends += curve(left, some, "seqlen_q", text, COLOURS[name], y="mib", **looks)
    finish(
        left,
        "traffic: the checkpoint runs the forward again",
        ends=ends,
        ylabel="bytes loaded and stored a step and head (MiB)",
        **AXES,
    )
    key(left, "kernels executed, bytes counted", published=False, loc="upper left")
    ends = []
    for name, text in (("standard", "standard: P, 2 N² bytes"), ("flash", "flash: lse, 4 N bytes")):
        some = pick(kept, implementation=name, checkpointed=False)
        ends += curve(right, some, "seqlen_q", text, COLOURS[name], y="mib", sources=("predicted",))
    finish(
        right,
        "memory: what that checkpoint can free",
        ends=ends,
        ylabel="kept beside q, k, v and out, a head (MiB)",
        **AXES,
    )
    note(
        figure,
        "d = 64, fp16, not causal. Bytes between L2 and the multiprocessors, forward and "
        "backward. Tiles: standard 128 x 128; flash 128 x 64 forward, 64 x 128 backward. "
        "Squares: with the checkpoint.",
    )
    columns = ["implementation", "seqlen_q", "checkpointed", "source", "metric", "value", "mib"]
    return Drawing(figure, pandas.concat([traffic, kept])[columns])
