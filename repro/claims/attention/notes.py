"""The study notes on attention's time (K2 to K4, K16), and Apex FMHA's table."""

from __future__ import annotations

from typing import Any

import pandas

from analysis.flops import executed_flops
from analysis.shapes import AttentionShape, Tile
from repro.claims.attention.like import CHECKPOINTED, by_length, ratio, span
from repro.claims.mutations import PLAIN, Scale, like
from repro.claims.protocol import Evidence, agreement, between, less, more, share_of
from repro.claims.register import Finding, claim
from repro.claims.tolerances import PRINTED
from repro.claims.values import NAN, known, over
from repro.claims.works import AUTODIFF, FA1, H200, RECOMPUTE

SEEN: dict[str, Any] = {"experiments": ("fig3-runtime",), "shown": "fa1_fig3_runtime"}


@claim(
    "K2",
    "flash backward is only 30 to 50 % slower than standard, not 2x",
    RECOMPUTE,
    "section 6.2",
    **SEEN,
    conditions=H200,
    as_claimed=like("sdpa-flash2", "standard-eager", 1.4, **{"pass": "backward"}, **PLAIN),
    overturn=(Scale({"implementation": "sdpa-flash2", "pass": "backward"}),),
    compared=False,
)
def k2(frame: pandas.DataFrame) -> Finding:
    """Backward time of flash over standard, N >= 512."""
    measured = 1 / ratio(frame, "time_ms", "backward")
    paper = 1 / ratio(frame, "time_ms", "backward", source="published", over="standard", under="flash1")
    measured, paper = measured[measured.index >= 512], paper[paper.index >= 512]
    shape, tile = AttentionShape(1, 1, 2048, 2048, 64), Tile(128, 128)
    work = executed_flops(shape, tile, "backward") / executed_flops(shape, tile, "backward", recompute=False)
    what = "median of flash's over standard's backward time, N >= 512"
    return Finding(
        predicted=f"{work:.2f}x the products, and fewer bytes",
        measured=f"{span(measured)} (H200)",
        published=f"{span(paper)} (FlashAttention 2022, A100)",
        parts=[between(what, float(measured.median()), 1.3, 1.5, Evidence.HARDWARE)],
    )


@claim(
    "K3, speed",
    "flash attention is 2 to 4 times faster overall",
    RECOMPUTE,
    "section 9.2",
    experiments=("speedup", "fig3-runtime"),
    shown="fa1_fig5_8_speedup",
    conditions=H200,
    overturn=(Scale({"implementation": "sdpa-flash2"}, 2.2),),
    compared=False,
)
def k3_speed(frame: pandas.DataFrame) -> Finding:
    printed = known(
        frame, experiment="speedup", source="published", metric="speedup", device="NVIDIA A100", head_dim=64
    )["value"]
    ours = ratio(frame, "time_ms", "forward+backward")
    why = "not at every length"
    return Finding(
        predicted="see the lines of the figure",
        measured=f"{ours.min():.1f} to {ours.max():.1f}x, N = {ours.index.min():.0f} to {ours.index.max():.0f} (H200)",
        published=f"{printed.min():.1f} to {printed.max():.1f}x (A100)",
        parts=[share_of("share of measured lengths with 2 to 4x", ours.between(2, 4), Evidence.HARDWARE, why)],
    )


@claim(
    "K4",
    "recomputing attention pays from N > 2048; below 512 it may not be needed",
    RECOMPUTE,
    "section 8.1",
    **SEEN,
    conditions=f"{H200}; a checkpoint around attention, by the clock",
    needs="a number: the note recommends recomputing for its memory and gives no time that it pays",
)
def k4(frame: pandas.DataFrame) -> Finding:
    """Checkpointed eager attention beside eager attention: the direct record of recomputing."""
    slower = 1 / ratio(frame, "time_ms", "forward+backward", under=CHECKPOINTED)
    inside = ratio(frame, "time_ms", "forward+backward")
    above, below = slower[slower.index > 2048], slower[slower.index < 512]
    what = "time of checkpointed over plain eager attention"
    return Finding(
        predicted="a checkpoint around attention adds a forward at every N; recomputing inside one "
        "kernel saves more reads than it costs",
        measured=f"checkpointed eager takes {span(slower)} of eager's time; flash, which "
        f"recomputes inside, is faster: {by_length(inside)} (H200)",
        parts=[
            less(f"{what}, N > 2048", float(above.max()), Evidence.HARDWARE),
            more(f"{what}, N < 512", float(below.min()), Evidence.HARDWARE),
        ],
    )


@claim(
    "K16",
    "recomputing can be faster than storing when memory-bound",
    RECOMPUTE,
    f"section 2.2, and {AUTODIFF}, section 4.2",
    experiments=("fig3-runtime", "apex-fmha"),
    shown="fa1_fig3_runtime",
    conditions="two fused kernels of 2022 on an A100, one that stores the score matrix (Apex FMHA) "
    "and one that recomputes it; PyTorch's eager attention on an H200 is unfused besides",
    overturn=(Scale({"experiment": "apex-fmha", "implementation": "flash1"}, source="published", only="up"),),
    compared=False,
)
def k16(frame: pandas.DataFrame) -> Finding:
    """FlashAttention's Table 7, the longest sequence of both; eager attention beside it."""
    table = over(frame, "flash1", "apex-fmha", "pass", experiment="apex-fmha", source="published", seqlen_q=512)
    back, both = (float(table.get(name, NAN)) for name in ("backward", "forward+backward"))
    again = 1 / ratio(frame, "time_ms", "forward+backward", under=CHECKPOINTED)
    what = "time of both passes that recompute over those that store, N = 512"
    return Finding(
        predicted="inside one kernel reading N² elements costs more than the product; a checkpoint "
        "outside never removes a byte from the first forward",
        measured=f"a checkpoint around eager attention takes {span(again[again.index >= 512])} of its time (H200)",
        published=f"{back:.2f} of the time in the backward, {both:.2f} in both passes (Table 7, N = 512)",
        parts=[less(what, both, Evidence.PUBLISHED, ".3f")],
    )


@claim(
    "FA-1 Table 7",
    "against Apex FMHA 4 % slower at N = 128, 8 % faster at 256, 5 % at 512",
    FA1,
    "section E.4, Table 7",
    experiments=("apex-fmha",),
    shown="fa1_fig3_runtime",
    conditions="nothing was run: the text against its own table; 8 % faster is 1 / 1.08 of the time",
    overturn=(Scale({"implementation": "flash1", "pass": "forward+backward"}, source="published"),),
    compared=False,
)
def fa_1_table_7(frame: pandas.DataFrame) -> Finding:
    times = over(frame, "flash1", "apex-fmha", "seqlen_q", source="published", pass_="forward+backward")
    said = {128: 1.04, 256: 1 / 1.08, 512: 1 / 1.05}
    what = "printed times over what the text says"
    return Finding(
        published=", ".join(f"{v:.2f} at {n}" for n, v in times.items()) or "-",
        parts=[
            agreement(f"{what}, N = {n}", float(times.get(n, NAN)), told, PRINTED, Evidence.PUBLISHED)
            for n, told in said.items()
        ],
    )
