"""What autograd keeps between forward and backward, against N: claim K1 of the study notes.

Standard attention keeps P, N² numbers; FlashAttention keeps Q, K, V, O and one number a row. The
notes say 2 N² more for standard and 2 N statistics for flash: S need not be kept beside P, and
m and l fold into one log-sum-exp. Counted with saved-tensor hooks on the CPU.
"""

import matplotlib.pyplot as plt
import pandas

from figures.common import COLOURS, Drawing, End, curve, devices, key, label_ends, log_axis, note, pick, powers_of_two

EXPERIMENTS = ("attention-variants",)
MIB = 2**20
NAMES = {
    "standard": ("standard: 3 Nd + N²", COLOURS["standard"]),
    "chunked": ("chunked, checkpointed", "#E69F00"),
    "flash": ("flash: 4 Nd + N", COLOURS["flash"]),
    "standard-checkpointed": ("standard, checkpointed: 3 Nd", "#CC79A7"),
}


def saved(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Saved bytes in MiB; one head, d = 64, fp32."""
    rows = pick(frame, metric="saved_bytes", implementation=list(NAMES)).copy()
    return rows.assign(mib=rows["value"] / MIB)


def draw(frame: pandas.DataFrame) -> Drawing:
    """One curve per variant."""
    rows = saved(frame)
    figure, ax = plt.subplots(figsize=(6.6, 4.2), layout="constrained")
    ends: list[End] = []
    for name, (text, colour) in NAMES.items():
        sources = ("measured",) if name == "chunked" else ("predicted", "measured")  # which has no formula
        ends += curve(ax, pick(rows, implementation=name), "seqlen_q", text, colour, y="mib", sources=sources)
    log_axis(ax, "y", [0.25, 1, 4, 16, 64], ["0.25", "1", "4", "16", "64"], base=2)
    powers_of_two(ax, [256, 512, 1024, 2048, 4096])
    ax.set(xlabel="sequence length N", ylabel="kept for the backward pass, one head (MiB)")
    ax.set_xlim(220, 4096 * 6.5)
    ax.set_title("Standard attention keeps N² numbers, flash keeps N")
    key(ax, "saved-tensor hooks", published=False, loc="upper left")
    label_ends(ax, ends)
    note(figure, f"d = 64, fp32, forward pass on: {devices(rows)}.")
    kept = ["source", "implementation", "seqlen_q", "value", "unit", "device"]
    return Drawing(figure, rows[kept].sort_values(["implementation", "seqlen_q", "source"]))
