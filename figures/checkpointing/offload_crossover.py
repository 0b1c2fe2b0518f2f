"""Store, recompute or offload: step time against link bandwidth, and the crossover by layer width.

Left: a chain of layers on this CPU with a paced link; lines replay the measured layer costs
(``analysis.offload.step_timeline``). Right: the link bandwidth above which moving a transformer
layer's saved tensors beats computing them again, from formulas.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas

from analysis.offload import crossover_bandwidth, free_bandwidth, transformer_layer_cost
from figures.common import Drawing, curve, devices, key, label_ends, note, pick, say
from repro.claims.training.offload import steps
from repro.experiments.checkpointing.offload import ACTIONS, DEPTH

EXPERIMENTS = ("offload",)
COLOURS = {"store": "#555555", "recompute": "#D55E00", "offload": "#009E73"}
#: Host links, bytes per second each way (datasheets: PCIe x16 of generations 4 and 5 after coding,
#: NVLink-C2C of a Grace Hopper superchip).
LINKS = {"PCIe 4 x16": 31.5e9, "PCIe 5 x16": 63e9, "NVLink-C2C": 450e9}
#: Dense 16-bit rate that the right panel assumes: half of an H100's peak (989 TFLOP/s).
RATE_FLOPS_PER_S = 0.5 * 989e12
SEQLEN = 4096
HIDDEN = 128 * np.unique(np.round(2 ** np.linspace(3, 8, 41)))


def draw(frame: pandas.DataFrame) -> Drawing:
    """Two panels."""
    table = steps(frame)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.3), layout="constrained")
    ends: list[tuple[float, float, str, str]] = []
    for action in ACTIONS:
        ends += curve(left, pick(table, action=action), "link_mb_s", action, COLOURS[action])
    left.set_xscale("log")
    ticks = sorted(table["link_mb_s"].unique())
    left.set_xticks(ticks, [f"{t:g}" for t in ticks])
    left.minorticks_off()
    if ticks:
        left.set_xlim(ticks[0] * 0.85, ticks[-1] * 2.2)
    left.set(xlabel="link bandwidth each way (MB/s)", ylabel="step time (store = 1)")
    left.set_title(f"{DEPTH} linear + GELU layers on a CPU, emulated link")
    left.set_ylim(bottom=0.8)
    label_ends(left, ends)
    key(left, "CPU, paced link", published=False, loc="upper right")

    for matrix, style, name in (
        (False, "-", "34 sbh saved (flash attention)"),
        (True, "--", "sbh (34 + 5as/h) saved (standard)"),
    ):
        costs = [
            transformer_layer_cost(
                1, SEQLEN, int(h), RATE_FLOPS_PER_S, attention_matrix=matrix, heads=max(1, round(h / 128))
            )
            for h in HIDDEN
        ]
        edge = np.array([crossover_bandwidth(c) for c in costs]) / 1e9
        free = np.array([free_bandwidth(c) for c in costs]) / 1e9
        right.plot(HIDDEN, edge, style, color="#009E73", label=f"crossover, {name}")
        if not matrix:
            right.plot(HIDDEN, free, ":", color="#0072B2", label="transfer hidden entirely, 34 sbh")
            right.fill_between(HIDDEN, edge, 3000, color="#009E73", alpha=0.10, linewidth=0)
            right.fill_between(HIDDEN, 1.5, edge, color="#D55E00", alpha=0.10, linewidth=0)
    for name, rate in LINKS.items():
        right.axhline(rate / 1e9, color="#777777", linewidth=0.8)
        say(right, name, (HIDDEN[0], rate / 1e9), (3, 3), color="#555555", fontsize=7.5)
    right.text(20000, 900, "offload faster", color="#007A57", fontsize=9, ha="center")
    right.text(1900, 14, "recompute faster", color="#B34A00", fontsize=9, ha="center")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_ylim(1.5, 2000)
    hidden = [1024, 2048, 4096, 8192, 16384, 32768]
    right.set_xticks(hidden, [f"{h // 1024}k" for h in hidden])
    right.minorticks_off()
    right.set(xlabel="hidden size h", ylabel="host link bandwidth each way (GB/s)")
    right.set_title(f"Transformer layer, s = {SEQLEN}, {RATE_FLOPS_PER_S / 1e12:.0f} TFLOP/s")
    right.legend(loc="lower left", fontsize=7)
    note(
        figure,
        f"Left: {devices(frame)}; fastest of several steps, lines replayed from measured layer "
        "costs.\nRight: t = bytes / bandwidth; offload costs max(f, t) + max(b, t), recompute "
        "2f + b, b = 2f. Storing is fastest wherever it fits.",
    )
    return Drawing(figure, table)
