"""FlashAttention 2022, Fig. 2 middle: memory accesses of the forward pass against Bc.

Hollow: digitised from the paper's figure. Lines: hypotheses about what was counted, exact sums over
the tile loop; points: the two of them that are executed, counted on the host backend. One list of
integers fits the printed points, (3 Tc + 1) N d, and two mechanisms have it: a first pass that
reads nothing back, and fp32 temporaries that cross memory one way only. The fit identifies neither.
The released code moves (5 Tc - 1) N d. The runtime is published only.
"""

import matplotlib.pyplot as plt
import pandas

from figures.common import COLOURS, Drawing, key, label_ends, note, pick, say, series
from repro.claims.attention.fig2_middle import GB, HYPOTHESES, counted, hypotheses, published

EXPERIMENTS = ("fig2-middle",)


HUES = (COLOURS["flash1"], COLOURS["flash1-skip-first"], COLOURS["flash1-literal"], "#CC79A7")


def draw(frame: pandas.DataFrame) -> Drawing:
    """Accesses above, published runtime below, on a common axis of Bc."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(5.8, 5.4), sharex=True, height_ratios=(3, 1.6), layout="constrained"
    )
    lines, points = hypotheses(), counted(frame)
    paper = published(frame, "hbm_bytes", GB)
    ends = []
    for name, colour in zip(HYPOTHESES, HUES, strict=True):
        line = series(top, pick(lines, hypothesis=name), "block_n", name, color=colour)
        series(top, pick(points, hypothesis=name), "block_n", f"counted {name}", color=colour)
        ends.append((512, float(line["value"].iloc[-1]), name, colour))
    series(top, paper, "block_n", "published", color=COLOURS["published"], markersize=11)
    top.set(xscale="log", yscale="log", ylabel="accesses, forward (GB)")
    top.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    top.set_ylim(0.7, 14)
    top.set_xlim(12, 2600)
    top.set_title("Accesses fall as 1/Bc; the released code would move more")
    label_ends(top, ends, gap=10)
    key(top, "counted on the host backend", loc="upper right")

    times = pick(frame, metric="time_ms")
    for bound, colour in (("accesses", COLOURS["flash1"]), ("products", COLOURS["bound"])):
        line = pick(times, source="predicted", bound=bound)
        series(bottom, line, "block_n", f"time of {bound}", color=colour)
    runtime = pick(times, source="published")
    series(bottom, runtime, "block_n", "published runtime", color=COLOURS["published"])
    say(bottom, "accesses at 1.555 TB/s", (64, 4.2), (-6, 0), ha="right", va="center", color=COLOURS["flash1"])
    say(bottom, "products at 312 TFLOP/s", (64, 0.9), (-6, 0), ha="right", va="center", color="#777777")
    bottom.set(xlabel="column block Bc (keys)", ylabel="runtime (ms)", ylim=(0, 10))
    bottom.set_xticks([64, 128, 256, 512], ["64", "128", "256", "512"])
    bottom.minorticks_off()
    say(bottom, "A100, published: past 256\nnot bound by accesses", (512, 3.2), (0, 24), ha="right")
    note(
        figure,
        "FlashAttention 2022, Fig. 2 middle: N = 1024, d = 64, 16 heads, batch 64, fp16. "
        "Lines in\nunits of N d elements; 3 Tc + 1 is also what fp32 temporaries crossing memory "
        "one way make.",
    )
    csv = pandas.concat([lines, points, paper.assign(hypothesis="as printed")])
    csv = csv.assign(quantity="accesses", unit="GB")
    clock = times.assign(quantity="runtime", hypothesis=times["bound"].fillna("as printed"))
    columns = ["quantity", "source", "hypothesis", "block_n", "value", "unit"]
    return Drawing(figure, pandas.concat([csv[columns], clock[columns]]))
