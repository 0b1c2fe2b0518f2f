"""Clocks that each unit of an SM needs for a round of our kernels, beside its tensor cores.

Below 1 a unit hides behind the tensor cores, above 1 it sets the pace: on a Hopper SM shared memory
does in every backward, and in the forward where warps load their operands themselves instead of
letting one ``wgmma`` read them for four (``analysis/sm_ceilings.py``). The best peer's time on an
H200 is drawn where it uses the same tile.
"""

import matplotlib.pyplot as plt
import pandas
from matplotlib.lines import Line2D

from analysis.hardware import H200
from analysis.sm_ceilings import UNITS
from figures.common import FILLED, HOLLOW, Drawing, note
from repro.claims.machine.sm_ceilings import PEER_SEQLEN, forms
from repro.experiments.bytes.sm_ceilings import DIRECT, EXACT, OPTIMISTIC, SM80

EXPERIMENTS = ("sm-ceilings", "gpu-sm-units", "throughput-peers")
SHADES = dict(zip(UNITS[1:], ("#CC79A7", "#D55E00", "#0072B2"), strict=True))
KINDS = {SM80: "sm_80 ", EXACT: "", OPTIMISTIC: "optimistic ", DIRECT: "direct "}


def draw(frame: pandas.DataFrame) -> Drawing:
    """A group of lines per form."""
    table = forms(frame)
    figure, ax = plt.subplots(figsize=(9.5, 7.6), layout="constrained")
    ticks = []
    for number, row in enumerate(table.to_dict("records")):
        kind = KINDS[row["implementation"]]
        ticks.append(f"{kind}{row['pass']}, d = {row['head_dim']:g}, {row['block_m']:g} × {row['block_n']:g}")
        for offset, (unit, colour) in zip((-0.22, 0, 0.22), SHADES.items(), strict=True):
            y = number + offset
            predicted, counted = row.get(f"predicted {unit}"), row.get(f"counted {unit}")
            reach = predicted if predicted is not None else counted
            if reach is not None and reach == reach:
                width = 3 if predicted is not None else 0.8
                ax.plot([0, reach], [y, y], color=colour, linewidth=width, solid_capstyle="butt")
            if counted is not None and counted == counted:
                ax.plot(counted, y, color=colour, **FILLED | {"marker": "o"})
        ours = row.get("counted time")
        if ours is not None and ours == ours:
            ax.plot(ours, number, color="black", **FILLED | {"marker": "D"})
        peer = row.get("peer's time")
        if peer is not None and peer == peer:
            ax.plot(peer, number, color="#333333", **HOLLOW | {"marker": "s"})
    ax.axvline(1, color="black", linewidth=1.2)
    ax.text(1.02, -0.75, "tensor cores", fontsize=8, va="center")
    ax.set_yticks(range(len(ticks)), ticks)
    ax.set(ylim=(len(ticks) - 0.4, -1.0), xlim=(0, 3.0), xlabel="clocks of a round, relative to the tensor cores'")
    ax.grid(axis="y", visible=False)
    handles = [Line2D([], [], color=c, linewidth=3, label=u) for u, c in SHADES.items()]
    handles.append(Line2D([], [], color="black", label="counted", **FILLED | {"marker": "o"}))
    handles.append(
        Line2D(
            [], [], color="#333333", label="FlashAttention's Hopper path, time on an H200", **HOLLOW | {"marker": "s"}
        )
    )
    if table["counted time"].notna().any():
        handles.append(
            Line2D(
                [], [], color="black", label="our kernel, time by the tensor cores' counter", **FILLED | {"marker": "D"}
            )
        )
    ax.legend(handles=handles, loc="center right", bbox_to_anchor=(1, 0.5))
    note(
        figure,
        "Lines: from the shapes; exponentials are not counted apart. Points: shared-memory bytes "
        "by the host backend at 128 bytes a clock, instructions in the code for sm_90a.\n"
        f"Peer: {PEER_SEQLEN} tokens and queries, hidden size 2048, no mask, over the datasheet's "
        f"{H200.fp16_tensor_flops / 1e12:.0f} TFLOP/s, which the card's power does not sustain.\n"
        "Direct: dQ is added to memory from registers; what that costs on its way is not counted. "
        "sm_80: against the rate of wgmma; an A100's tensor cores\nneed twice the clocks, which "
        "halves these four rows.",
    )
    return Drawing(figure, table)
