"""Korthikanti et al. 2022, Eq. 1 and Table 2: bytes a transformer layer saves against length."""

import matplotlib.pyplot as plt
import pandas

from figures.common import Drawing, End, curve, devices, key, label_ends, log_axis, note, pick, powers_of_two
from repro.experiments.checkpointing.checkpoint_layer_bytes import BATCH, HEADS, HIDDEN

EXPERIMENTS = ("checkpoint-layer-bytes",)
NAMES = {
    "none": ("everything, 34 + 5as/h", "#D55E00"),
    "selective": ("selective, 34", "#0072B2"),
    "full": ("full recomputation, 2", "#009E73"),
}


def draw(frame: pandas.DataFrame) -> Drawing:
    """Bytes a layer in units of sbh."""
    rows = pick(frame, metric="saved_bytes_per_layer").copy()
    rows["per_sbh"] = rows["value"] / (rows["seqlen_q"] * BATCH * HIDDEN)
    figure, ax = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
    ends: list[End] = []
    for name, (text, colour) in NAMES.items():
        some = pick(rows, implementation=name)
        ends += curve(ax, some, "seqlen_q", text, colour, y="per_sbh")
    powers_of_two(ax, [16, 64, 256, 1024])
    log_axis(ax, "y", [2, 4, 8, 16, 32, 64, 128, 256, 512], [str(2**k) for k in range(1, 10)], base=2)
    ax.set(xlabel="sequence length s", ylabel="saved bytes a layer / (s b h)", xlim=(14, 2048 * 12))
    ax.set_title("what a transformer layer keeps for the backward pass")
    label_ends(ax, ends)
    key(ax, "CPU", published=False, loc="upper left")
    note(
        figure,
        f"h = {HIDDEN}, a = {HEADS} heads, b = {BATCH}, bf16, one-byte dropout masks.\n"
        f"Measured on {devices(rows)}: allocator, three layers less one.\n"
        "Full recomputation also keeps the random generator's 5,056 bytes a layer.",
    )
    columns = ["implementation", "seqlen_q", "source", "value", "per_sbh"]
    return Drawing(figure, rows[columns])
