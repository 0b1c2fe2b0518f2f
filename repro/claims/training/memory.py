"""Training in less memory: micro-batches, mixed precision, optimiser states on the host."""

from __future__ import annotations

import pandas

from analysis.mixed_precision import autocast_break_even_tokens
from analysis.model_states import host_streamed_bytes
from analysis.parallel_activations import LayerShape
from repro.claims.mutations import RAN, Scale, setting
from repro.claims.protocol import Evidence, agreement, exact
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import MEMORY, TIME
from repro.claims.values import pick, worst
from repro.claims.works import OURS
from repro.experiments.checkpointing.training_memory import HEADS, HIDDEN, PARAMETERS, SEQLEN


@claim(
    "gradient accumulation",
    "activation memory falls as 1/n with n micro-batches",
    OURS,
    experiments=("training-memory",),
    shown="training_memory",
    overturn=(Scale(),),
)
def gradient_accumulation(frame: pandas.DataFrame) -> Finding:
    def deviation(name: str, metrics: list[str], keys: list[str]) -> float:
        rows = pick(frame, implementation=name, metric=metrics)
        table = rows.pivot_table(index=[*keys, "metric"], columns="source", values="value")
        if "measured" not in table or table["measured"].isna().any():
            return float("nan")
        return worst(table["measured"] / table["predicted"])

    def shown(value: float) -> str:
        return NOT_MEASURED if value != value else f"worst {value - 1:+.2%}"

    peak = deviation("accumulation", ["peak_bytes"], ["pieces"])
    alive = pick(frame, implementation="accumulation", metric="activation_bytes", source="measured")
    alive = alive.set_index("pieces")["value"].dropna()
    falls = worst(alive * alive.index / alive[1]) if 1 in alive else float("nan")
    return Finding(
        predicted="activations 4 rows x width x depth bytes; the peak has a weight's "
        "gradient beside them, which does not shrink",
        measured=f"activations {shown(falls)} off 1/n; peak {shown(peak)}",
        parts=[
            agreement(
                "activations of a micro-batch times n over those of n = 1, worst", falls, 1, MEMORY, Evidence.OTHER
            ),
            agreement("peak over the formula, worst", peak, 1, MEMORY, Evidence.OTHER),
        ],
    )


@claim(
    "mixed precision",
    "16-bit activations: a layer saves sbh (34 + 5as/h) bytes",
    OURS,
    experiments=("training-memory",),
    shown="training_memory",
    conditions="PyTorch on a CPU, by its hooks",
    overturn=(Scale(),),
)
def mixed_precision(frame: pandas.DataFrame) -> Finding:
    def deviation(name: str, metrics: list[str], keys: list[str]) -> float:
        rows = pick(frame, implementation=name, metric=metrics)
        table = rows.pivot_table(index=[*keys, "metric"], columns="source", values="value")
        if "measured" not in table or table["measured"].isna().any():
            return float("nan")
        return worst(table["measured"] / table["predicted"])

    def shown(value: float) -> str:
        return NOT_MEASURED if value != value else f"worst {value - 1:+.2%}"

    saved = deviation("mixed-precision", ["saved_bytes"], ["policy", "batch"])
    even = autocast_break_even_tokens(LayerShape(SEQLEN, 1, HIDDEN, HEADS))
    return Finding(
        predicted=f"half of fp32; autocast only from {even} tokens (weight copies)",
        measured=shown(saved),
        parts=[agreement("saved bytes over the formula, worst", saved, 1, MEMORY, Evidence.OTHER)],
    )


@claim(
    "optimiser on the host",
    "optimiser states leave the device: 4 bytes a parameter stay, 12 leave, 2 + 2 move a step",
    OURS,
    experiments=("training-memory",),
    shown="training_memory",
    overturn=(Scale(),),
)
def optimiser_on_the_host(frame: pandas.DataFrame) -> Finding:
    def deviation(name: str, metrics: list[str], keys: list[str]) -> float:
        rows = pick(frame, implementation=name, metric=metrics)
        table = rows.pivot_table(index=[*keys, "metric"], columns="source", values="value")
        if "measured" not in table or table["measured"].isna().any():
            return float("nan")
        return worst(table["measured"] / table["predicted"])

    def shown(value: float) -> str:
        return NOT_MEASURED if value != value else f"worst {value - 1:+.2%}"

    moved = deviation("host-optimizer", ["device_bytes", "host_bytes", "bytes_out", "bytes_in"], [])
    return Finding(
        predicted="4, 12, 2, 2 bytes a parameter",
        measured=shown(moved),
        parts=[exact("bytes held and moved over the formula, worst", moved)],
    )


@claim(
    "optimiser on the host, time",
    "an optimiser step on the host takes the time of its bytes at the memory's bandwidth",
    OURS,
    experiments=("training-memory",),
    shown="training_memory",
    conditions="one core; the bandwidth is that of y += x on the same core",
    overturn=(Scale({"metric": "step_s"}),),
    as_claimed=setting(lambda row: row["value"] / 1.6, metric="step_s", **RAN),
    compared=False,
)
def optimiser_on_the_host_time(frame: pandas.DataFrame) -> Finding:
    timed = pick(frame, implementation="host-optimizer", source="measured").set_index("metric")
    step, bandwidth = (float(timed["value"].get(name, float("nan"))) for name in ("step_s", "stream_bytes_per_s"))
    bound = PARAMETERS * host_streamed_bytes() / bandwidth
    return Finding(
        predicted=f"{bound * 1e3:.0f} ms: {host_streamed_bytes():.0f} bytes a parameter at {bandwidth / 1e9:.1f} GB/s"
        if bound == bound
        else NOT_MEASURED,
        measured=f"{step * 1e3:.0f} ms (one core)" if step == step else NOT_MEASURED,
        parts=[agreement("time over the bound", step, bound, TIME, Evidence.HARDWARE)],
    )
