"""Error of attention against float64: forward and gradients, three types, two kinds of input.

FlashAttention-3 (2024), Table 3, prints the forward error in fp16 on outlier-heavy inputs: 3.2e-4
for the baseline, 1.9e-4 for FlashAttention-2, without the shape. The ratio of the two compares.
"""

import matplotlib.pyplot as plt
import pandas
from matplotlib.lines import Line2D

from figures.common import COLOURS, FILLED, HOLLOW, Drawing, devices, note, pick, say
from repro.experiments.bytes.accuracy import DTYPES, HEAD_DIM, INPUTS, RESULTS, SEQLEN

EXPERIMENTS = ("accuracy", "numerical-error")
VARIANTS = {
    "standard": ("standard, eager", COLOURS["standard"], "o"),
    "chunked": ("chunked (Rabe & Staats)", "#E69F00", "s"),
    "sdpa-flash": ("torch's fused back end", "#7A7A7A", "D"),
    "flash1-released": ("FA-1 kernels, ours", COLOURS["flash1-released"], "v"),
    "flash": ("flash, ours", COLOURS["flash"], "o"),
}
PUBLISHED = {"fp16 baseline": "standard", "flash2": "flash"}
TITLES = {"normal": "inputs N(0, 1)", "outliers": "inputs with outliers"}


def draw(frame: pandas.DataFrame) -> Drawing:
    """A column per type, a row per kind of input; one group of points per result."""
    rows = pick(frame, metric="rmse")
    measured = pick(rows, source="measured")
    figure, axes = plt.subplots(
        len(INPUTS), len(DTYPES), figsize=(11.5, 5.8), layout="constrained", sharex=True, sharey="col"
    )
    # The formulas at the axis are wider in an SVG than in the pixels that the layout measures.
    figure.set_layout_engine("constrained", w_pad=0.15)
    for line, inputs in zip(axes, INPUTS, strict=True):
        for ax, dtype in zip(line, DTYPES, strict=True):
            here = pick(measured, dtype=dtype, inputs=inputs)
            for place, name in enumerate(VARIANTS):
                _, colour, marker = VARIANTS[name]
                some = pick(here, implementation=name).set_index("tensor")["value"]
                known = [(i + 0.14 * (place - 2), some[r]) for i, r in enumerate(RESULTS) if r in some]
                ax.plot(*zip(*known, strict=True) if known else ([], []), color=colour, **{**FILLED, "marker": marker})
            if (inputs, dtype) == ("outliers", "fp16"):
                for label, name in PUBLISHED.items():
                    value = pick(rows, source="published", implementation=label)["value"]
                    ax.plot([-0.02] * len(value), value, color=VARIANTS[name][1], **{**HOLLOW, "marker": "o"})
                    for y in value:
                        say(ax, f"{y:.1e}", (0, y), (6, 0), va="center", color=VARIANTS[name][1])
            ax.set_yscale("log")
            ax.set_xticks(range(len(RESULTS)), RESULTS)
            ax.set_xlim(-0.55, len(RESULTS) - 0.45)
            ax.grid(axis="x", visible=False)
            if inputs == INPUTS[0]:
                ax.set_title(dtype)
        line[0].set_ylabel(f"{TITLES[inputs]}\nRMSE against float64", fontsize=8.5)
    handles = [
        Line2D([], [], color=colour, label=label, **{**FILLED, "marker": marker})
        for label, colour, marker in VARIANTS.values()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(VARIANTS))
    note(
        figure,
        f"N = {SEQLEN}, d = {HEAD_DIM}, one head, not causal; every variant gets the same rounded "
        f"inputs; outliers: + N(0, 100) · Bernoulli(0.001).\n{devices(measured)}, our kernels on "
        "the host backend. Hollow: published, FlashAttention-3, Table 3 (shape not given).",
    )
    kept = ["source", "implementation", "dtype", "inputs", "tensor", "metric", "value", "note"]
    return Drawing(figure, frame[frame["value"].notna()][[k for k in kept if k in frame]])
