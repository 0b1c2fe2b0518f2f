"""A matrix product in four forms: bytes at each level against the tile, and misses on a CPU."""

import matplotlib.pyplot as plt
import numpy as np
import pandas

from analysis.cache_model import closed_form
from analysis.gemm import GemmShape, lower_bound_bytes
from figures.common import FILLED, Drawing, devices, key, note, pick
from repro.claims.machine.gemm import elements
from repro.experiments.chains.gemm_cache import BLOCK, FIRST, LAST
from repro.experiments.chains.gemm_ladder import SIDE

EXPERIMENTS = ("gemm-ladder", "gemm-cache")
COLOURS = {"naive": "#D55E00", "tiled": "#E69F00", "three-level": "#0072B2", "tensor-core": "#009E73"}


def draw(frame: pandas.DataFrame) -> Drawing:
    """Global level, shared level, cache misses."""
    table = elements(frame)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12.5, 4.3), layout="constrained")
    for ax, metric in ((left, "global_bytes"), (middle, "shared_bytes")):
        for form, colour in COLOURS.items():
            rows = pick(table, implementation=form, metric=metric)
            rows = rows[rows["value"] > 0]
            for source in ("predicted", "measured"):
                some = pick(rows, source=source).sort_values("block_m")
                style = FILLED | {"marker": "o"} if source == "measured" else {"linewidth": 1.5}
                if form == "three-level":  # its block tiles move what the tensor cores' do
                    style |= {"linewidth": 4} if source == "predicted" else {"markersize": 10}
                if source == "predicted" and len(some) == 1:
                    style |= {"marker": "_", "markersize": 14}
                ax.plot(
                    some["block_m"],
                    some["value"],
                    color=colour,
                    **style,
                    label=form if source == "predicted" and len(some) else None,
                )
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ticks = [1, 8, 16, 32, 64, 96]
        ax.set_xticks(ticks, [str(t) for t in ticks])
        ax.minorticks_off()
        ax.set_xlabel("side of the block tile")
    sides = 2 ** np.linspace(0, 7, 50)
    shape = GemmShape(SIDE, SIDE, SIDE)
    bound = [lower_bound_bytes(shape, side**2 + 2 * side * 16) / 4 / SIDE**3 for side in sides]
    left.plot(sides, bound, ":", color="#777777", label="lower bound 2N³/√S")
    left.set_ylabel("elements moved a multiply-add")
    left.set_title("across the SM boundary")
    left.legend(loc="lower left", fontsize=7)
    middle.set_title("in and out of shared memory")
    key(middle, "host backend", published=False, loc="lower left")

    misses = pick(frame, experiment="gemm-cache", metric=["first_level_misses", "last_level_misses"])
    grid = np.arange(72, 120, 2)
    for form, block in (("naive", None), ("tiled", BLOCK)):
        for metric, cache, line in (("first_level_misses", FIRST, "-"), ("last_level_misses", LAST, "--")):
            level = "first" if metric.startswith("first") else "last"
            right.plot(
                grid,
                [closed_form(int(n), block, cache) for n in grid],
                line,
                color=COLOURS[form],
                label=f"{form}, {level} level",
            )
            rows = pick(misses, implementation=form, metric=metric, source="measured")
            right.plot(rows["side"], rows["value"], marker="o", color=COLOURS[form], **FILLED)
    right.set_yscale("log")
    right.set(xlabel="matrix side N", ylabel="cache misses")
    right.set_title("C on a CPU: naive and in blocks of 16")
    right.legend(loc="center left", fontsize=7, bbox_to_anchor=(0, 0.55))
    tools = ", ".join(sorted(set(pick(misses, source="measured")["tool"].dropna())))
    note(
        figure,
        f"N = {SIDE}; three-level and tensor-core tiles grow with their thread and warp tiles. "
        f"Bound: S = what a block keeps on chip.\nRight: {FIRST.nbytes // 1024} kB and "
        f"{LAST.nbytes // 1024} kB LRU caches, lines: fully associative model, points: "
        f"{tools or 'none'}. At N = 96 a row is 384 bytes and columns meet in few sets. "
        f"{devices(frame)}.",
    )
    return Drawing(figure, pandas.concat([table, misses[["source", "implementation", "side", "metric", "value"]]]))
