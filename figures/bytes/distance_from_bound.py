"""How far measured attention is from the time model's bound, per shape, and what binds.

The bound is that of our Hopper kernels' tiles: tensor cores, exponentials, shared memory, the SM
boundary and HBM, by datasheet, kernel by kernel (``analysis.time_model``). Every measured point is
of the same card; peers stand for ours where ours have not been timed.
"""

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes

from analysis.flops import paper_flops
from analysis.hardware import find_gpu
from analysis.time_model import SHARED_MEMORY
from figures.common import Drawing, devices, label_ends, note, pick, powers_of_two, series
from figures.time.throughput import MEASURED, PANELS, TICKS, of_one_card, tflops
from repro.claims import NOT_MEASURED, Claim, Evidence, Part, claim
from repro.experiments.gpu.gpu_throughput import cells, time_bound
from repro.experiments.shared.attention import shape_of

EXPERIMENTS = ("throughput", "throughput-peers", "gpu-throughput")
OURS = "flash-sm90"
#: The best of these a shape is the peer to be measured against.
PEERS = tuple(name for name in MEASURED if not name.startswith("flash") or "attn" in name)
#: All but standard attention, which is an order of magnitude away.
DRAWN = tuple(name for name in MEASURED if name != "sdpa-math")
COMMAND = "make figures/out/distance_from_bound.svg"
SHAPE = ["pass", "head_dim", "causal", "seqlen_q"]
#: What our kernels are to reach: geometric mean over all shapes, beside the best peer.
GOAL = 1.0


def bounds(card: str) -> pandas.DataFrame:
    """A row per shape: TFLOP/s at the bound and at that without shared memory, and what binds."""
    gpu = find_gpu(card)
    assert gpu is not None
    rows = []
    for cell in cells():
        bound, _ = time_bound(cell, OURS, gpu)
        without, _ = time_bound(cell, OURS, gpu, without=(SHARED_MEMORY,))
        flops = paper_flops(shape_of(cell), str(cell["pass"]))
        rows.append({k: cell[k] for k in SHAPE} | {
            "bound_tflops": flops / bound.seconds / 1e12,
            "without_shared_tflops": flops / without.seconds / 1e12,
            "binding": bound.binding,
        })  # fmt: skip
    return pandas.DataFrame(rows)


def distances(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Measured rows with their time over the bound's, with and without shared memory in it."""
    rows = of_one_card(tflops(frame))
    rows = rows[(rows["source"] == "measured") & rows["tflops"].notna()]
    rows = rows[rows["implementation"].isin(MEASURED) & (rows["dtype"] == "bf16")]
    if rows.empty:
        return rows.assign(bound_tflops=[], binding=[], distance=[], distance_without_shared=[])
    keys = ["implementation", *SHAPE]
    rows = rows.groupby(keys, as_index=False).agg({"tflops": "median", "source": "first",
                                                   "device": "first"})  # fmt: skip
    rows["causal"] = rows["causal"].astype(bool)
    found = rows.merge(bounds(str(rows["device"].iloc[0])), on=SHAPE)
    found["distance"] = found["bound_tflops"] / found["tflops"]
    found["distance_without_shared"] = found["without_shared_tflops"] / found["tflops"]
    return found.sort_values(keys)


def draw(frame: pandas.DataFrame) -> Drawing:
    """Eight panels as in the throughput figure."""
    table = distances(frame)
    figure, axes = plt.subplots(
        2, 4, figsize=(13.5, 6.4), layout="constrained", sharex=True, sharey="row"
    )
    for line, pass_ in zip(axes, ("forward", "backward"), strict=True):
        farthest = pick(table, pass_=pass_, implementation=DRAWN)["distance"].max()
        line[0].set_ylim(0.7, 1.06 * farthest if farthest > 1 else 3)
        for ax, (head_dim, causal) in zip(line, PANELS, strict=True):
            panel(ax, pick(table, pass_=pass_, head_dim=head_dim, causal=causal))
            mask = "causal" if causal else "no mask"
            ax.set_title(f"{pass_}, d = {head_dim}, {mask}")
        line[0].set_ylabel("measured time over bound")
    for ax in axes[1]:
        ax.set_xlabel("sequence length N")
    note(
        figure,
        f"16,384 tokens, hidden size 2,048, bf16, {devices(table)}. 1 is the bound: what binds is "
        "written below it. Ceilings by datasheet, at a clock that the card's power does not "
        "sustain under this load.",
    )
    columns = ["implementation", *SHAPE, "tflops", "bound_tflops", "binding", "distance",
               "distance_without_shared"]  # fmt: skip
    return Drawing(figure, table[columns])


def panel(ax: Axes, rows: pandas.DataFrame) -> None:
    """One pass, head dimension and mask."""
    ends: list[tuple[float, float, str, str]] = []
    ax.axhline(1, color="black", linewidth=1.2)
    for name in DRAWN:
        label, colour, marker = MEASURED[name]
        points = pick(rows, implementation=name)
        if points.empty:
            continue
        drawn = series(ax, points, "seqlen_q", label, y="distance", marker=marker, color=colour)
        last = drawn.iloc[-1]
        ends.append((float(last["seqlen_q"]), float(last["distance"]), label, colour))
    powers_of_two(ax, TICKS)
    ax.set_xlim(420, 16384 * 6)
    spans = rows.drop_duplicates("seqlen_q").sort_values("seqlen_q")
    for binding, group in spans.groupby("binding", sort=False):
        middle = (group["seqlen_q"].min() * group["seqlen_q"].max()) ** 0.5
        edge = group["seqlen_q"].max() == TICKS[0]
        ax.text(440 if edge else middle, 0.93, str(binding), fontsize=7, va="top",
                ha="left" if edge else "center", color="#555555")  # fmt: skip
    label_ends(ax, ends)


def verdicts(frame: pandas.DataFrame) -> list[Claim]:
    """Ours beside the best peer, in the geometric mean over all shapes of a pass."""
    table = distances(frame)
    found = []
    for pass_ in ("forward", "backward"):
        rows = pick(table, pass_=pass_)
        best = pick(rows, implementation=list(PEERS)).groupby(SHAPE)["tflops"].max()
        ours = pick(rows, implementation=OURS).set_index(SHAPE)["tflops"]
        ratio = (ours / best).dropna()
        mean = float(ratio.prod() ** (1 / len(ratio))) if len(ratio) else float("nan")
        peers = pick(rows, implementation=list(PEERS)).groupby(SHAPE)["distance"].min()
        away = f"best peer {peers.min():.1f} to {peers.max():.1f}x our tiles' bound" if len(
            peers) else ""  # fmt: skip
        shown = f"ours not timed yet; {away}" if away else NOT_MEASURED
        if len(ratio):
            distance = pick(rows, implementation=OURS)["distance"]
            shown = (
                f"{mean:.2f}x over {len(ratio)} shapes ({ratio.min():.2f} to {ratio.max():.2f}); "
                f"ours {distance.min():.1f} to {distance.max():.1f}x the bound, {away}"
            )
        found.append(
            claim(
                f"Hopper {pass_}",
                predicted=f"{GOAL:.2f}x or more",
                measured=shown,
                parts=[Part(what="our TFLOP/s over the best peer's, geometric mean", value=mean,
                            low=GOAL, evidence=Evidence.HARDWARE, form=".2f")],
            )
        )  # fmt: skip
    return found
