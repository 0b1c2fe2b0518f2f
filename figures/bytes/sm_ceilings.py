"""Clocks that each unit of an SM needs for a round of our kernels, beside its tensor cores.

Below 1 a unit hides behind the tensor cores, above 1 it sets the pace: on a Hopper SM shared memory
does in every backward, and in the forward where warps load their operands themselves instead of
letting one ``wgmma`` read them for four (``analysis/sm_ceilings.py``). The best peer's time on an
H200 is drawn where it uses the same tile.
"""

import math

import matplotlib.pyplot as plt
import pandas
from matplotlib.lines import Line2D

from analysis.hardware import H200
from analysis.sm_ceilings import SHARED_BYTES_PER_CLOCK_PER_SM, UNITS
from figures.common import FILLED, HOLLOW, Drawing, note, pick, worst
from repro.claims import NOT_MEASURED, Claim, Evidence, Part, agreement, claim
from repro.experiments import Cell
from repro.experiments.bytes.sm_ceilings import DIRECT, EXACT, OPTIMISTIC, SM80, round_of

EXPERIMENTS = ("sm-ceilings", "gpu-sm-units", "throughput-peers")
SHADES = dict(zip(UNITS[1:], ("#CC79A7", "#D55E00", "#0072B2"), strict=True))
#: Tiles that the best peer uses too, by the source of FlashAttention's Hopper path.
PEER = {("forward", 64, 192), ("forward", 128, 128), ("backward", 64, 128), ("backward", 128, 80)}
PEER_NAME, PEER_SEQLEN = "flash-attn-4 4.0.0b36 (Hopper path)", 16384
COMMAND = "make figures/out/sm_ceilings.svg"
KINDS = {SM80: "sm_80 ", EXACT: "", OPTIMISTIC: "optimistic ", DIRECT: "direct "}


def forms(frame: pandas.DataFrame) -> pandas.DataFrame:
    """One row per form: clocks of each unit over the tensor cores', predicted and counted."""
    rows = []
    keys = ["implementation", "pass", "head_dim", "block_m", "block_n"]
    ours = pick(frame, experiment="sm-ceilings")
    for values, group in ours.groupby(keys, sort=False):
        name, pass_, head_dim, block_m, block_n = values
        cell = Cell(implementation=name, pass_=pass_, head_dim=int(head_dim),
                    block_m=int(block_m), block_n=int(block_n))  # fmt: skip
        found = round_of(cell)
        tensor = found.clocks()["tensor cores"]
        row = dict(zip(keys, values, strict=True))
        for unit, clocks in found.clocks().items():
            row[f"predicted {unit}"] = clocks / tensor
        counted = pick(group, source="measured", metric="shared_bytes")["value"]
        if len(counted):
            served = float(counted.iloc[-1]) - found.repeated_bytes
            row["counted shared memory"] = served / SHARED_BYTES_PER_CLOCK_PER_SM / tensor
        issued = pick(group, source="measured", kernel="issue slots")["value"]
        if len(issued):
            row["counted issue slots"] = float(issued.iloc[-1]) / tensor
        if name == EXACT and (pass_, head_dim, block_m) in PEER and block_n == 128:
            peer = pick(frame, experiment="throughput-peers", implementation=PEER_NAME,
                        pass_=pass_, head_dim=head_dim, seqlen_q=PEER_SEQLEN, causal=False,
                        source="measured")["value"]  # fmt: skip
            if len(peer):
                row["peer's time"] = H200.fp16_tensor_flops / 1e12 / float(peer.iloc[-1])
        row["counted time"] = counted_time(frame, cell)
        rows.append(row)
    return pandas.DataFrame(rows)


def counted_time(frame: pandas.DataFrame, cell: Cell) -> float:
    """Time of the main kernel over that of its products, by a card's counters: one over the share
    of time that the tensor cores were busy. NaN where no card has counted the form."""
    rows = pick(frame, experiment="gpu-sm-units", source="measured", pass_=cell["pass"],
                head_dim=cell["head_dim"], block_m=cell["block_m"],
                block_n=cell["block_n"])  # fmt: skip
    if rows.empty or cell["implementation"] == OPTIMISTIC:
        return math.nan
    names = rows["implementation"].astype(str)
    sm80, direct = names == SM80, names.str.endswith("direct")
    wanted = {SM80: sm80, DIRECT: direct, EXACT: ~sm80 & ~direct}[str(cell["implementation"])]
    rows = rows[wanted & ~rows["kernel"].str.contains("process")]
    busy = rows[rows["counter"].str.contains("tensor")]["value"]
    return 100 / float(busy.max()) if len(busy) and busy.max() > 0 else math.nan


def draw(frame: pandas.DataFrame) -> Drawing:
    """A group of lines per form."""
    table = forms(frame)
    figure, ax = plt.subplots(figsize=(9.5, 7.6), layout="constrained")
    ticks = []
    for number, row in enumerate(table.to_dict("records")):
        kind = KINDS[row["implementation"]]
        ticks.append(
            f"{kind}{row['pass']}, d = {row['head_dim']:g}, {row['block_m']:g} × {row['block_n']:g}"
        )
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
    ax.set(ylim=(len(ticks) - 0.4, -1.0), xlim=(0, 3.0),
           xlabel="clocks of a round, relative to the tensor cores'")  # fmt: skip
    ax.grid(axis="y", visible=False)
    handles = [Line2D([], [], color=c, linewidth=3, label=u) for u, c in SHADES.items()]
    handles.append(Line2D([], [], color="black", label="counted", **FILLED | {"marker": "o"}))
    handles.append(
        Line2D([], [], color="#333333", label="FlashAttention's Hopper path, time on an H200",
               **HOLLOW | {"marker": "s"})
    )  # fmt: skip
    if table["counted time"].notna().any():
        handles.append(
            Line2D([], [], color="black", label="our kernel, time by the tensor cores' counter",
                   **FILLED | {"marker": "D"})
        )  # fmt: skip
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


def verdicts(frame: pandas.DataFrame) -> list[Claim]:
    """Bytes are as predicted where counted; that shared memory sets the pace is derived."""
    table = forms(frame)
    backward = pick(table, pass_="backward", implementation=EXACT)
    predicted = backward["predicted shared memory"]
    forward = pick(table, pass_="forward", implementation=[EXACT, OPTIMISTIC])
    before = pick(table, implementation=SM80)["predicted shared memory"]
    direct = pick(table, pass_="backward", implementation=DIRECT)["predicted shared memory"]
    ratio = pandas.Series(dtype=float)
    if "counted shared memory" in table:
        ratio = (table["counted shared memory"] / table["predicted shared memory"]).dropna()
    return [
        claim(
            "SM ceilings",
            predicted=f"clocks over the tensor cores': backward {predicted.min():.2f} to "
            f"{predicted.max():.2f}, {direct.min():.2f} to {direct.max():.2f} with dQ added from "
            f"registers; forward {forward['predicted shared memory'].max():.2f} at most; sm_80 "
            f"kernels {before.min():.2f} to {before.max():.2f}",
            measured=f"bytes of {len(ratio)} forms, executed; no time" if len(ratio)
            else NOT_MEASURED,
            parts=[
                agreement("shared-memory bytes counted over predicted, worst form", worst(ratio),
                          1, 1e-12, Evidence.COUNTED),
                Part(what="least clocks of shared memory over the tensor cores', backward",
                     value=float(predicted.min()), low=1.0, evidence=Evidence.DERIVED),
            ],
        )
    ]  # fmt: skip
