"""Training in less memory: micro-batches, mixed precision, optimiser states on the host."""

from __future__ import annotations

from typing import Any

import pandas

from analysis.mixed_precision import autocast_break_even_tokens
from analysis.model_states import host_streamed_bytes
from analysis.parallel_activations import LayerShape
from repro.claims.mutations import RAN, Scale, setting
from repro.claims.protocol import Evidence, agreement, exact
from repro.claims.register import Finding, claim
from repro.claims.tolerances import MEMORY, TIME
from repro.claims.values import NAN, against_sums, by, formula, off, one, pick, worst
from repro.claims.works import OURS
from repro.experiments.checkpointing.training_memory import HEADS, HIDDEN, PARAMETERS, SEQLEN

SEEN: dict[str, Any] = {"experiments": ("training-memory",), "shown": "training_memory"}


@claim(
    "gradient accumulation",
    "activation memory falls as 1/n with n micro-batches",
    OURS,
    **SEEN,
    overturn=(Scale({"implementation": "accumulation"}),),
)
def gradient_accumulation(frame: pandas.DataFrame) -> Finding:
    rows = pick(frame, implementation="accumulation")
    peak = worst(against_sums(pick(rows, metric="peak_bytes"), ["pieces"]))
    alive = by(rows, "pieces", metric="activation_bytes", source="measured")
    falls = worst(alive * alive.index / alive.get(1, NAN))
    what = "activations of a micro-batch times n over those of n = 1, worst"
    return Finding(
        predicted="activations 4 rows x width x depth bytes; the peak has a weight's "
        "gradient beside them, which does not shrink",
        measured=f"activations {off(falls)} off 1/n; peak {off(peak)}",
        parts=[
            agreement(what, falls, 1, MEMORY, Evidence.OTHER),
            agreement("peak over the formula, worst", peak, 1, MEMORY, Evidence.OTHER),
        ],
    )


@claim(
    "mixed precision",
    "16-bit activations: a layer saves sbh (34 + 5as/h) bytes",
    OURS,
    **SEEN,
    conditions="PyTorch on a CPU, by its hooks",
    overturn=(Scale({"implementation": "mixed-precision"}),),
)
def mixed_precision(frame: pandas.DataFrame) -> Finding:
    saved = pick(frame, implementation="mixed-precision", metric="saved_bytes")
    far = worst(against_sums(saved, ["policy", "batch"]))
    even = autocast_break_even_tokens(LayerShape(SEQLEN, 1, HIDDEN, HEADS))
    return Finding(
        predicted=f"half of fp32; autocast only from {even} tokens (weight copies)",
        measured=off(far),
        parts=[agreement("saved bytes over the formula, worst", far, 1, MEMORY, Evidence.OTHER)],
    )


@claim(
    "optimiser on the host",
    "optimiser states leave the device: 4 bytes a parameter stay, 12 leave, 2 + 2 move a step",
    OURS,
    **SEEN,
    overturn=(Scale({"implementation": "host-optimizer", "unit": "B"}),),
)
def optimiser_on_the_host(frame: pandas.DataFrame) -> Finding:
    metrics = ["device_bytes", "host_bytes", "bytes_out", "bytes_in"]
    moved = worst(against_sums(pick(frame, implementation="host-optimizer", metric=metrics), ["metric"]))
    return Finding(
        predicted="4, 12, 2, 2 bytes a parameter",
        measured=off(moved),
        parts=[exact("bytes held and moved over the formula, worst", moved)],
    )


@claim(
    "optimiser on the host, time",
    "an optimiser step on the host takes the time of its bytes at the memory's bandwidth",
    OURS,
    **SEEN,
    conditions="one core; the bandwidth is that of y += x on the same core",
    overturn=(Scale({"metric": "step_s"}),),
    as_claimed=setting(lambda row: row["value"] / 1.6, metric="step_s", **RAN),
)
def optimiser_on_the_host_time(frame: pandas.DataFrame) -> Finding:
    step, bandwidth = (
        one(frame, implementation="host-optimizer", source="measured", metric=name)
        for name in ("step_s", "stream_bytes_per_s")
    )
    moved = host_streamed_bytes()
    bound = formula(PARAMETERS * moved / bandwidth)
    return Finding(
        predicted=f"{bound * 1e3:.0f} ms: {moved:.0f} bytes a parameter at {bandwidth / 1e9:.1f} GB/s",
        measured=f"{step * 1e3:.0f} ms (one core)",
        parts=[agreement("time over the bound", step, bound, TIME, Evidence.HARDWARE)],
    )
