"""The study notes on attention's time and memory (K2 to K4, K16), and the 9x of its paper."""

from __future__ import annotations

import math

import pandas

from analysis.flops import executed_flops
from analysis.shapes import AttentionShape, Tile
from analysis.standard_passes import IMPLEMENTATIONS, total_bytes
from analysis.traffic import ROW_STATISTICS, predict_traffic
from repro.claims.attention.fig3_memory import without_workspace
from repro.claims.attention.like import CHECKPOINTED, FLASH, STANDARD, by_length, ratio, share_of_octaves, span
from repro.claims.mutations import PLAIN, Scale, like
from repro.claims.protocol import Evidence, Part, agreement
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import HEADLINE, PRINTED
from repro.claims.values import pick
from repro.claims.works import AUTODIFF, FA1, H200, RECOMPUTE


@claim(
    "K2",
    "flash backward is only 30 to 50 % slower than standard, not 2x",
    RECOMPUTE,
    "section 6.2",
    experiments=("fig3-runtime",),
    shown="fa1_fig3_runtime",
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
    return Finding(
        predicted=f"{work:.2f}x the products, and fewer bytes",
        measured=f"{span(measured)} (H200)" if len(measured) else NOT_MEASURED,
        published=f"{span(paper)} (FlashAttention 2022, A100)" if len(paper) else "-",
        parts=[
            Part(
                what="median of flash's over standard's backward time, N >= 512",
                value=float(measured.median()),
                low=1.3,
                high=1.5,
                evidence=Evidence.HARDWARE,
            )
        ],
    )


@claim(
    "K3, memory",
    "flash attention takes 5 to 20 times less memory",
    RECOMPUTE,
    "section 9.2",
    experiments=("fig3-memory",),
    shown="fa1_fig3_memory",
    conditions=f"{H200}; the matrix library's workspace is taken off. The factor grows with N, so "
    "a range of 4x holds three lengths, each twice the one before",
    overturn=(Scale({"implementation": "sdpa-flash2", "metric": "peak_memory_bytes"}, 30),),
    compared=False,
)
def k3_memory(frame: pandas.DataFrame) -> Finding:
    """Peak memory of standard over flash by sequence length."""
    now = without_workspace(frame, "standard-eager", "measured") / without_workspace(frame, "sdpa-flash2", "measured")
    paper = ratio(frame, "peak_memory_bytes", "forward+backward", source="published", over="standard", under="flash1")
    model = ratio(frame, "peak_memory_bytes", "forward+backward", source="predicted")
    return Finding(
        predicted="grows with N: " + by_length(model),
        measured=by_length(now.dropna()) + " (H200)",
        published=by_length(paper) + " (A100)",
        parts=[share_of_octaves("5 to 20x", now.dropna(), 5, 20)],
    )


@claim(
    "K4",
    "recomputing attention pays from N > 2048; below 512 it may not be needed",
    RECOMPUTE,
    "section 8.1",
    experiments=("fig3-runtime",),
    shown="fa1_fig3_runtime",
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
            Part(what=f"{what}, N > 2048", value=float(above.max()), high=1.0, evidence=Evidence.HARDWARE),
            Part(what=f"{what}, N < 512", value=float(below.min()), low=1.0, evidence=Evidence.HARDWARE),
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
    table = pick(frame, experiment="apex-fmha", source="published", seqlen_q=512)
    wide = table.pivot_table(index="pass", columns="implementation", values="value")
    if not {"flash1", "apex-fmha"} <= set(wide) or not len(wide):
        wide = pandas.DataFrame(
            {"flash1": math.nan, "apex-fmha": math.nan}, index=["forward", "backward", "forward+backward"]
        )
    over = wide["flash1"] / wide["apex-fmha"]
    again = 1 / ratio(frame, "time_ms", "forward+backward", under=CHECKPOINTED)
    return Finding(
        predicted="inside one kernel reading N² elements costs more than the product; a checkpoint "
        "outside never removes a byte from the first forward",
        measured=f"a checkpoint around eager attention takes {span(again[again.index >= 512])} of its time (H200)",
        published=f"{over['backward']:.2f} of the time in the backward, "
        f"{over['forward+backward']:.2f} in both passes (Table 7, N = 512)"
        if over.notna().all()
        else "-",
        parts=[
            Part(
                what="time of both passes that recompute over those that store, N = 512",
                value=float(over["forward+backward"]),
                high=1.0,
                form=".3f",
                evidence=Evidence.PUBLISHED,
            )
        ],
    )


@claim(
    "FA-1 Table 7",
    "against Apex FMHA 4 % slower at N = 128, 8 % faster at 256, 5 % at 512",
    FA1,
    "section E.4, Table 7",
    experiments=("apex-fmha",),
    shown="fa1_fig3_runtime",
    conditions="nothing was run: the text against its own table",
    overturn=(Scale({"implementation": "flash1", "pass": "forward+backward"}, source="published"),),
    compared=False,
)
def fa_1_table_7(frame: pandas.DataFrame) -> Finding:
    rows = pick(frame, source="published", pass_="forward+backward")
    wide = rows.pivot_table(index="seqlen_q", columns="implementation", values="value")
    if not {"flash1", "apex-fmha"} <= set(wide):
        wide = pandas.DataFrame(columns=["flash1", "apex-fmha"], dtype=float)
    said = {128: 1.04, 256: 0.93, 512: 0.95}
    over = (wide["flash1"] / wide["apex-fmha"]).reindex(list(said))
    return Finding(
        published=", ".join(f"{v:.2f} at {n}" for n, v in over.dropna().items()) or "-",
        parts=[
            agreement(
                f"printed times at N = {n} over what the text says", float(over[n]), told, PRINTED, Evidence.PUBLISHED
            )
            for n, told in said.items()
        ],
    )


@claim(
    "FA-1 9x accesses",
    "up to 9x fewer HBM accesses",
    FA1,
    "section 1 and Fig. 2",
    experiments=("fig2-left", "fig2-left-traffic", "fig2-left-traffic-masked"),
    shown="fa1_fig2_left",
    conditions="the paper's standard attention has mask and dropout, and its FlashAttention is the "
    "first; PyTorch 2.11 runs more kernels for the one and FlashAttention-2 for the other",
    other="no card here has run FlashAttention 1",
    overturn=(Scale({"metric": "hbm_bytes", "implementation": "flash1"}, source="published"),),
    compared=False,
)
def fa_1_9x_accesses(frame: pandas.DataFrame) -> Finding:
    """HBM bytes of standard over flash: the paper's table, counters of a card, and sums."""
    published = frame[(frame["source"] == "published") & (frame["metric"] == "hbm_bytes")]
    paper = published.groupby("implementation")["value"].max()
    counters = frame[(frame["source"] == "measured") & frame["metric"].isin(["hbm_read_bytes", "hbm_write_bytes"])]
    total = counters.groupby(["experiment", "implementation"])["value"].sum()
    plain, masked = "fig2-left-traffic", "fig2-left-traffic-masked"
    flash = total.get((plain, FLASH), math.nan)
    now = [total.get((run, STANDARD), math.nan) / flash for run in (plain, masked)]
    shape, tile = AttentionShape(64, 16, 1024, 1024, 64), Tile(16, 256)
    standard = total_bytes(IMPLEMENTATIONS["paper-masked-dropout"], shape)
    sums = 0
    for pass_ in ("forward", "backward"):
        by_tensor = predict_traffic("flash1-skip-first", shape, tile, pass_).by_tensor()
        sums += sum(n for (tensor, _), n in by_tensor.items() if tensor not in ROW_STATISTICS)
    printed = paper.get("standard", math.nan) / paper.get("flash1", math.nan)
    return Finding(
        predicted=f"{standard / sums:.1f}x with 18 N² + 12 Nd against 33 Nd (both chosen to match)",
        measured=f"{now[0]:.1f}x without mask and dropout, {now[1]:.1f}x with both in the standard "
        "attention alone (H200's counters: PyTorch's eager attention, FlashAttention-2)"
        if math.isfinite(now[0])
        else NOT_MEASURED,
        published=f"9x; {printed:.1f}x in its table",
        parts=[agreement("its table's ratio over 9", printed, 9, HEADLINE, Evidence.PUBLISHED)],
    )
