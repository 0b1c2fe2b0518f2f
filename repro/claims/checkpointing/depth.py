"""Memory and work against depth: K6, K7, K10, and the simulator's peak."""

from __future__ import annotations

import math
from typing import Any

import pandas

from analysis.checkpointing import chen_recursive, exponential, exponential_recursive, uniform_chain
from repro.claims.mutations import PEAK, Mirror, Scale, setting
from repro.claims.protocol import Evidence, Part, agreement, exact, exponent, share_of
from repro.claims.register import Finding, claim
from repro.claims.tolerances import COUNT, EXPONENT, MEMORY
from repro.claims.values import by, growth, known, logarithm, one, text
from repro.claims.works import AUTODIFF, OURS, PLAIN, TILING

#: Bytes that a small peak may be off by.
SMALL_BYTES = 2**16
#: What a stage more or less in a segment changes, where 257 do not divide by 16.
ONE_STAGE = 0.01
SEEN: dict[str, Any] = {"experiments": ("checkpoint-depth",), "shown": "checkpoint_depth"}
PLANS: dict[str, Any] = {**SEEN, "conditions": PLAIN, "compared": False}


@claim(
    "checkpoint peak",
    "the simulator's peak is the measured peak within 1 % or 64 KiB, whichever is more",
    OURS,
    **SEEN,
    conditions="PyTorch on a CPU, by its allocation trace",
    overturn=(Scale({"metric": "peak_bytes"}),),
    compared=False,
)
def checkpoint_peak(frame: pandas.DataFrame) -> Finding:
    """Peak of every planned step of checkpoint-depth against the simulator on its chain."""
    metrics = ["peak_bytes", "profiled_peak_bytes"]
    rows = known(frame, metric=metrics, source="measured")
    wide = rows.pivot_table(index=["model", "depth", "implementation"], columns="metric", values="value")
    wide = wide.reindex(columns=metrics).dropna()
    off = (wide["peak_bytes"] - wide["profiled_peak_bytes"]).abs()
    # 1 % or 64 KiB, whichever is more: the smallest peaks here are of 0.1 MiB
    worst = float((off / (0.01 * wide["profiled_peak_bytes"]).clip(lower=SMALL_BYTES)).max())
    share = (off / wide["profiled_peak_bytes"]).max()
    return Finding(
        predicted="simulator on the profiled chain",
        measured=f"worst of {len(wide)} steps: {off.max():,.0f} B, {share:.2%}",
        parts=[Part("worst deviation, in units of 1 % or 64 KiB", worst, Evidence.OTHER, high=1.0)],
    )


@claim(
    "K6",
    "memory O(L), O(√L), O(1) for storing all, sqrt(L), recomputing all; the last O(L²) time",
    TILING,
    "section 2.1",
    **PLANS,
    overturn=(
        Scale({"model": "mlp", "depth": 256, "metric": "peak_bytes"}),
        Scale({"model": "mlp", "metric": "stage_forwards"}),
        Mirror("depth", {"model": "mlp", "implementation": "store-all", "metric": "peak_bytes"}),
        Mirror("depth", {"model": "mlp", "implementation": "sqrt", "metric": "peak_bytes"}),
    ),
)
def k6(frame: pandas.DataFrame) -> Finding:
    """Growth of three strategies on the plain chain (checkpoint-depth)."""
    expected = {"store-all": 1.0, "sqrt": 0.5, "recompute-all": 0.0}
    found = {name: growth(frame, model="mlp", implementation=name) for name in expected}
    runs = one(frame, metric="stage_forwards", source="measured", model="mlp", implementation="recompute-all", depth=64)
    shown = ", ".join(f"{name} {text(value)}" for name, value in found.items())
    return Finding(
        predicted="slopes 1, 1/2, 0; 2,145 = L(L+1)/2 runs for 65 stages",
        measured=f"slopes {shown}; {text(runs, ',.0f')} runs",
        parts=[
            *(
                exponent(f"slope of the peak in depth, {name}", found[name], slope, Evidence.OTHER)
                for name, slope in expected.items()
            ),
            exact("runs of a stage, recompute-all, over 65 x 66 / 2", runs, 65 * 66 / 2),
        ],
    )


@claim(
    "K6, every k layers",
    "a checkpoint every k layers needs O(L / k) memory",
    TILING,
    "section 2.1",
    **PLANS,
    overturn=(
        Scale({"model": "mlp", "implementation": "every-2", "metric": "peak_bytes", "depth": 256}),
        Scale({"model": "mlp", "implementation": "every-4", "metric": "peak_bytes", "depth": 256}),
    ),
    chosen="what a layer adds took the place of the peaks, whose slope in k, -0.86 for 256 layers, holds the k layers "
    "of a segment too",
)
def every_k(frame: pandas.DataFrame) -> Finding:
    """What a layer adds to the peak at k = 2 and 4, and that it is the same for short chains."""
    adds = {}
    for k in (2, 4):
        where = {"metric": "peak_bytes", "source": "measured", "model": "mlp", "implementation": f"every-{k}"}
        peaks = by(frame, "depth", **where).reindex([16, 64, 256])
        adds[k] = (peaks.diff() / peaks.index.to_series().diff()).tolist()[1:]
    falls = math.log2(adds[4][1] / adds[2][1])
    return Finding(
        predicted="linear in L; exponent -1 in k",
        measured=f"a layer adds {adds[2][1]:,.0f} B at k = 2 and {adds[4][1]:,.0f} B at k = 4",
        parts=[
            exponent("exponent in k of the bytes that a layer adds, 64 to 256 layers", falls, -1, Evidence.OTHER),
            *(
                agreement(f"bytes a layer adds, long over short chains, k = {k}", long, short, MEMORY, Evidence.OTHER)
                for k, (short, long) in adds.items()
            ),
        ],
    )


@claim(
    "K7, F4",
    "states kept at 2^k alone give O(log L) memory for O(log L) compute",
    TILING,
    "section 2.2",
    **PLANS | {"conditions": f"{PLAIN}; spacing alone, as the note prints it: its last segment has L/2 stages"},
    as_claimed=setting(1e6, implementation="exponential", model="mlp", **PEAK),
)
def k7(frame: pandas.DataFrame) -> Finding:
    """Exponential spacing: the notes' O(log L) memory and compute (checkpoint-depth)."""
    grows, halving = (growth(frame, model="mlp", implementation=name) for name in ("exponential", "recursive"))
    chain = uniform_chain(1024)
    states = (exponential(chain), exponential_recursive(chain), chen_recursive(chain))
    return Finding(
        predicted=f"L = 1024: {states[0].peak_bytes} outputs alone, {states[1].peak_bytes} split "
        f"the same way (log²), {states[2].peak_bytes} by halving, for {states[2].advances:,} more "
        "runs (L log L)",
        measured=f"slope {text(grows)} alone, {text(halving)} by halving",
        parts=[
            Part(
                "slope of the peak in depth, spacing alone",
                grows,
                Evidence.OTHER,
                high=logarithm(64, 256) + EXPONENT.share,
                form=".2f",
                kind=EXPONENT,
            )
        ],
    )


@claim(
    "K10, F5",
    "checkpointing costs (1 + 1/k) forward",
    AUTODIFF,
    "section 2.3",
    experiments=("checkpoint-depth",),
    shown="checkpoint_time",
    conditions="the note does not say of what k there are: read as k segments, and as one layer in every k",
    other="one of the two readings; no run of it is on record",
    overturn=(Scale({"model": "mlp", "implementation": "sqrt", "metric": "stage_forwards"}),),
    compared=False,
)
def k10(frame: pandas.DataFrame) -> Finding:
    """Both readings: runs of a stage counted in k segments, and the formula of the other."""
    stages, segments = 257, 16
    runs = one(frame, metric="stage_forwards", source="measured", model="mlp", depth=256, implementation="sqrt")
    noted = 1 + 1 / segments
    one_in_k = (stages - 1 + (stages - 1) // segments) / (stages - 1)
    right = [abs(found / noted - 1) < ONE_STAGE for found in (runs / stages, one_in_k)] if math.isfinite(runs) else []
    return Finding(
        predicted=f"k segments: 1 + (k-1)/k = {2 - 1 / segments:.2f} for "
        f"k = {segments}, every segment but the last runs again; one layer in every k under a "
        f"checkpoint: 1 + 1/k = {one_in_k:.3f}",
        measured=f"{runs / stages:.2f} forward in {segments} segments",
        parts=[
            agreement(
                "forwards in 16 segments over 1 + 15/16",
                runs / stages,
                2 - 1 / segments,
                COUNT,
                Evidence.COUNTED,
                share=ONE_STAGE,
                why="257 stages do not divide by 16",
            ),
            share_of(
                "share of the two readings that cost 1 + 1/k",
                right,
                Evidence.DERIVED,
                "one layer in every k; k segments cost 1 + (k-1)/k",
            ),
        ],
    )
