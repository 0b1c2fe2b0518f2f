"""A matrix product in four forms: bytes at each level against the tile, and misses on a CPU."""

import math

import matplotlib.pyplot as plt
import numpy as np
import pandas

from analysis.cache_model import closed_form
from analysis.gemm import GemmShape, lower_bound_bytes
from figures.common import FILLED, Drawing, devices, key, note, pick, worst
from repro.claims import NOT_MEASURED, Claim, Evidence, Part, agreement, claim
from repro.experiments.chains.gemm_cache import BLOCK, FIRST, HARDWARE_SIDE, LAST
from repro.experiments.chains.gemm_ladder import SIDE

EXPERIMENTS = ("gemm-ladder", "gemm-cache")
COLOURS = {
    "naive": "#D55E00",
    "tiled": "#E69F00",
    "three-level": "#0072B2",
    "tensor-core": "#009E73",
}
COMMAND = "make figures/out/gemm_levels.svg"


def elements(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Elements moved a multiply-add: a row per source, form, tile and level."""
    rows = pick(frame, experiment="gemm-ladder", metric=["global_bytes", "shared_bytes"]).copy()
    rows["block_m"] = rows["block_m"].fillna(1)
    keys = ["source", "implementation", "block_m", "dtype", "metric"]
    table = rows.groupby(keys, as_index=False)["value"].sum()
    itemsize = table["dtype"].map({"fp16": 2, "fp32": 4})
    table["value"] = table["value"] / itemsize / SIDE**3
    return table


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
                ax.plot(some["block_m"], some["value"], color=colour, **style,
                        label=form if source == "predicted" and len(some) else None)  # fmt: skip
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

    misses = pick(frame, experiment="gemm-cache",
                  metric=["first_level_misses", "last_level_misses"])  # fmt: skip
    grid = np.arange(72, 120, 2)
    for form, block in (("naive", None), ("tiled", BLOCK)):
        for metric, cache, line in (
            ("first_level_misses", FIRST, "-"),
            ("last_level_misses", LAST, "--"),
        ):
            level = "first" if metric.startswith("first") else "last"
            right.plot(grid, [closed_form(int(n), block, cache) for n in grid], line,
                       color=COLOURS[form], label=f"{form}, {level} level")  # fmt: skip
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
    return Drawing(figure, pandas.concat([table, misses[["source", "implementation", "side",
                                                         "metric", "value"]]]))  # fmt: skip


def verdicts(frame: pandas.DataFrame) -> list[Claim]:
    """Bytes at both levels; misses."""
    table = elements(frame)
    keys = ["implementation", "block_m", "metric"]
    wide = table[table["value"] > 0].pivot_table(index=keys, columns="source", values="value")
    counted = "measured" in wide and not wide["measured"].isna().any()
    count = worst(wide["measured"] / wide["predicted"]) if counted else float("nan")
    misses = pick(frame, experiment="gemm-cache",
                  metric=["first_level_misses", "last_level_misses"])  # fmt: skip
    if "tool" in misses:  # the model's own count, where valgrind is missing, measures nothing
        misses = misses[~misses["tool"].astype(str).str.startswith("LRU model")]
    sides = misses[misses["side"] != 96]  # rows of 384 bytes meet in few sets: no LRU law there
    pairs = sides.pivot_table(index=["implementation", "side", "metric"], columns="source",
                              values="value")  # fmt: skip
    missed, seen = float("nan"), NOT_MEASURED
    if "measured" in pairs and not pairs["measured"].isna().any():
        missed = worst(pairs["measured"] / pairs["predicted"])
        naive, tiled = (pairs.loc[(f, 112, "first_level_misses"), "measured"]
                        for f in ("naive", "tiled"))  # fmt: skip
        seen = f"{naive / tiled:.0f}x fewer at N = 112, worst {missed - 1:+.1%}"
    hardware = pick(frame, experiment="gemm-cache", metric="hardware_first_level_misses",
                    source="measured").groupby("implementation")["value"].first()  # fmt: skip
    fewer = float("nan")
    if {"naive", "tiled"} <= set(hardware.index):
        fewer = hardware["naive"] / hardware["tiled"]
        seen += f"; {fewer:.0f}x by the processor's counter, N = {HARDWARE_SIDE}"
    elif seen != NOT_MEASURED:
        seen += "; this machine hides the processor's counter"
    simulated = agreement("the simulator's misses over the LRU law's, worst", missed, 1, 0.12,
                          Evidence.OTHER)  # fmt: skip
    n = 112
    model = closed_form(n, None, FIRST) / closed_form(n, BLOCK, FIRST)
    return [
        claim(
            "matrix product levels",
            predicted=f"{len(wide)} counts",
            measured=f"worst {count - 1:+.2%}" if counted else NOT_MEASURED,
            parts=[agreement("elements counted over the formula, worst", count, 1, 0.0,
                             Evidence.COUNTED)],
        ),
        claim(
            "matrix product misses",
            predicted=f"{model:.0f}x fewer first-level misses at N = {n}",
            measured=seen,
            parts=[simulated, *([] if math.isnan(fewer) else [
                Part(what="first-level misses naive over tiled, processor's counter", value=fewer,
                     low=2.0, evidence=Evidence.HARDWARE)])],
        ),
    ]  # fmt: skip
