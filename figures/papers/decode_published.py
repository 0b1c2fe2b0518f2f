"""Flash-Decoding 2023, micro-benchmarks: time of a step against the cache at HBM's bandwidth.

64k tokens are read in each row but the last, whatever sequences they belong to, so the roofline is
flat. FlashAttention, a thread block a head, and PyTorch's eager attention are far above it.
"""

import matplotlib.pyplot as plt
import pandas

from analysis.hardware import A100_40GB, A100_80GB
from figures.common import COLOURS, Drawing, End, curve, finish, key, note, pick, powers_of_two, series
from repro.claims.options.flash_decoding import with_bound
from repro.experiments.papers.decode_published import FLASH_DECODING, SHAPES, TOKENS

EXPERIMENTS = ("decode-published",)
CARDS = {A100_40GB.name: ("A100 40 GB", "#56B4E9"), A100_80GB.name: ("A100 80 GB", "#0072B2")}
PUBLISHED = {
    "pytorch-eager": ("PyTorch, eager", COLOURS["standard"]),
    "flash-attention-2.0.9": ("FlashAttention 2.0.9", COLOURS["flash1"]),
    FLASH_DECODING: ("Flash-Decoding", COLOURS["flash"]),
}
TICKS = [context for _, context in SHAPES][::3]


def draw(frame: pandas.DataFrame) -> Drawing:
    """Times with the rooflines, and the bandwidth that Flash-Decoding's times come to."""
    rows = pick(frame, metric="time_us")
    figure, (times, rates) = plt.subplots(1, 2, figsize=(11.5, 4.3), layout="constrained")
    ends: list[End] = []
    for name, (label, colour) in PUBLISHED.items():
        ends += curve(times, pick(rows, implementation=name), "seqlen_k", label, colour, sources=("published",))
    for card, (label, colour) in CARDS.items():
        ends += curve(times, pick(rows, device=card), "seqlen_k", label, colour, sources=("predicted",))
    finish(
        times,
        "Published times and the roofline of the cache",
        x=TICKS,
        log=True,
        ends=ends,
        xlabel=f"keys a sequence, {TOKENS // 1024}k tokens in all (last: 128k)",
        ylabel="a step (µs)",
        xlim=(200, 131072 * 30),
    )
    key(times, None, loc=(0.02, 0.64))

    found = with_bound(frame)
    colour = PUBLISHED[FLASH_DECODING][1]
    series(rates, found, "seqlen_k", "published bandwidth", y="rate", color=colour)
    for gpu in (A100_40GB, A100_80GB):
        label, line_colour = CARDS[gpu.name]
        rates.axhline(gpu.hbm_bandwidth_bytes_per_s / 1e12, color=line_colour, linewidth=1.2)
        rates.text(256, gpu.hbm_bandwidth_bytes_per_s / 1e12, label, color=line_colour, fontsize=8, va="bottom")
    powers_of_two(rates, TICKS)
    rates.set(xlabel="keys a sequence", ylabel="cache, q and out over the time (TB/s)", ylim=(0, 2.4))
    rates.set_title("Flash-Decoding's bandwidth")
    note(
        figure,
        "16 query heads of 128 columns on 2 heads of K and V, fp16, one query a sequence. "
        "Published: table of the Flash-Decoding post, which says A100 and not which.\nIts text "
        "says up to 50x faster than FlashAttention; the table's largest ratio is 43x. Rooflines "
        "from datasheets.",
    )
    kept = ["source", "implementation", "batch", "seqlen_k", "device", "metric", "value", "unit"]
    return Drawing(figure, frame.reindex(columns=kept))
