"""Memory against work: K8, K11, and the optimum among plans."""

from __future__ import annotations

import math

import pandas

from analysis.checkpointing import optimal, sqrt, store_all, uniform_chain
from repro.claims.attention.fig3_memory import without_workspace
from repro.claims.attention.like import share_of_octaves
from repro.claims.checkpointing.depth import SMALL_BYTES
from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, Part, agreement, between
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import COUNT, HEADLINE
from repro.claims.values import NAN, formula, known, one
from repro.claims.works import AUTODIFF, OURS, TILING
from repro.experiments.checkpointing.checkpoint_pareto import STAGES as PARETO_STAGES
from repro.experiments.shared.checkpoint import formula as chain_of

GPT = f"gpt {PARETO_STAGES} stages"
#: The chains on which K8 and K11 are judged, named beforehand: model and depth in checkpoint-depth.
DEEP_CHAINS = (("resnet", 1024, "chen-search"), ("lstm", 2048, "chen-search"), ("mlp", 256, "sqrt"))


DEEPEST = {"model": "lstm", "depth": 2048, "implementation": "chen-search"}


def _pareto(frame: pandas.DataFrame, source: str) -> pandas.DataFrame:
    """(peak, relative time) of the budget sweep and store-all, from checkpoint-pareto."""
    rows = frame[(frame["source"] == source) & frame["value"].notna()].copy()
    if "experiment" in rows:
        rows = rows[rows["experiment"] == "checkpoint-pareto"]
    for column in ("budget_share", "stages", "percent"):
        rows[column] = rows[column].fillna(-1) if column in rows else -1.0
    keys = ["implementation", "budget_share", "stages", "percent"]
    wide = rows.pivot_table(index=keys, columns="metric", values="value").reset_index()
    for column in ("peak_bytes", "time_s", "relative_time", "profiled_peak_bytes"):
        if column not in wide:
            wide[column] = NAN
    return wide


def _saving_at(wide: pandas.DataFrame, extra: float) -> float:
    """How many times less memory the best plan within 1 + extra of the time takes."""
    planned = wide[wide["implementation"].isin(["optimal", "store-all"])]
    base = planned[planned["implementation"] == "store-all"]["peak_bytes"]
    allowed = planned[planned["relative_time"] <= 1 + extra]["peak_bytes"]
    return float(base.iloc[0] / allowed.min()) if len(base) and len(allowed) else NAN


def savings(frame: pandas.DataFrame, extra: float) -> dict[str, float]:
    """Times less memory for at most ``extra`` of a step more work, on the chains named beforehand.

    The transformer's work is its time. The deep chains' stages take a fraction of a millisecond,
    less than the executor's own work on them, so theirs is counted: forward runs beyond one a
    stage, a forward being a third of a step. 1 where the sublinear plan does more work than that;
    a chain without records is left out.
    """
    found = {}
    gpt = _saving_at(_pareto(frame, "measured"), extra)
    if math.isfinite(gpt):
        found[GPT] = gpt
    depth = known(frame, experiment="checkpoint-depth", source="measured")
    for model, layers, plan in DEEP_CHAINS:
        where = {"model": model, "depth": layers}
        top, low = (one(depth, implementation=i, metric="peak_bytes", **where) for i in ("autograd", plan))
        runs = one(depth, implementation=plan, metric="stage_forwards", **where)
        more = (runs / len(chain_of(model, layers).stages) - 1) / 3
        if math.isfinite(more) and math.isfinite(top / low):
            found[f"{model} {layers}"] = top / low if more <= extra else 1.0
    return found


@claim(
    "optimal plans",
    "within a budget no heuristic is faster; no plan exceeds its budget by more than 64 KiB",
    OURS,
    experiments=("checkpoint-pareto",),
    shown="checkpoint_pareto",
    conditions="speed by the simulator, on a chain of formulas; memory measured on a CPU",
    overturn=(Scale({"metric": "peak_bytes"}, only="up"),),
    compared=False,
)
def optimal_plans(frame: pandas.DataFrame) -> Finding:
    """No plan is faster than the optimum in that plan's own memory (checkpoint-pareto)."""
    from repro.experiments.checkpointing.checkpoint_pareto import HEURISTICS, LAYERS
    from repro.experiments.shared.checkpoint import plan_for

    chain = chain_of("gpt", LAYERS)
    step = chain.forward_s + chain.backward_s
    others = [plan_for(chain, name) for name in HEURISTICS]
    gains = [(other.seconds - optimal(chain, other.peak_bytes).seconds) / step for other in others]
    matched = sum(gain >= -1e-9 for gain in gains)
    measured = _pareto(frame, "measured").dropna(subset=["peak_bytes", "profiled_peak_bytes"])
    over = float((measured["peak_bytes"] - measured["profiled_peak_bytes"]).max())
    what, share = "share of heuristics that the optimum matches", matched / len(others)
    return Finding(
        predicted=f"at least as fast as {matched} of {len(others)} heuristics in their own memory, "
        f"by up to {max(gains):.2f} of a step",
        measured=f"largest excess over {len(measured)} plans {over:.0f} B",
        parts=[
            Part("bytes above the budget, worst plan", over, Evidence.OTHER, high=SMALL_BYTES, form=".0f"),
            Part(what, share, Evidence.DERIVED, low=1.0, high=1.0, kind=COUNT),
        ],
    )


@claim(
    "K11",
    "+33 % compute buys 4 to 5 times less memory",
    AUTODIFF,
    "section 4.2",
    experiments=("checkpoint-pareto", "checkpoint-depth"),
    shown="checkpoint_pareto",
    conditions="the note speaks of language models: a GPT of 26 stages, by its time on a CPU. "
    "Deeper chains, by the forwards that were run, save more",
    partial="a language model of about 30 stages; the factor grows with depth",
    overturn=(Scale({"experiment": "checkpoint-pareto", "metric": "peak_bytes", "implementation": "optimal"}),),
    compared=False,
)
def k11(frame: pandas.DataFrame) -> Finding:
    """+33 % compute for 4 to 5 times less memory, of a language model; other chains beside it."""
    found = savings(frame, 1 / 3 + 0.07)
    chains = [uniform_chain(length, 1, 12) for length in (32, 1024)]
    deep = [store_all(chain).peak_bytes / sqrt(chain).peak_bytes for chain in chains]
    what = "times less memory for at most 0.40 of a step more, GPT"
    return Finding(
        predicted=f"the factor grows with depth: {deep[0]:.1f}x for 32, {deep[1]:.1f}x for 1,024 equal stages",
        measured=", ".join(f"{name}: {v:.1f}x" for name, v in found.items()) + " for at most 0.40 of a step more"
        if found
        else NOT_MEASURED,
        parts=[between(what, found.get(GPT, NAN), 4.0, 5.0, Evidence.OTHER, ".1f")],
    )


@claim(
    "K8",
    "flash: 0.1x memory for 1.2x compute; aggressive checkpointing: 0.05x for 2.0x",
    TILING,
    "section 3.2",
    experiments=("checkpoint-pareto", "checkpoint-depth", "fig3-memory"),
    shown="checkpoint_pareto",
    conditions="flash attention on an H200, 0.1x taken as half to twice that; checkpointing on a "
    "CPU, its work as for K11, of the deepest chain that was run",
    overturn=(Scale({"implementation": "sdpa-flash2"}, 8), Scale({**DEEPEST, "metric": "peak_bytes"}, 3, only="up")),
)
def k8(frame: pandas.DataFrame) -> Finding:
    """Both halves: flash attention's memory and compute, and aggressive checkpointing's."""
    flash, standard = (without_workspace(frame, name, "measured") for name in ("sdpa-flash2", "standard-eager"))
    memory = (flash / standard).dropna()
    found = savings(frame, 1.0)
    least = 1 / max(found.values(), default=NAN)
    work = formula(7 / 6)  # products of a step: seven against six
    what = "least share of memory for at most twice the work, deepest chain"
    return Finding(
        predicted=f"flash: {work:.2f}x the products, memory falls as 1/N; checkpointing: the share falls with depth",
        measured="flash: "
        + ", ".join(f"{v:.2f}x at {n:g}" for n, v in memory.items() if n >= 512)
        + " (H200); checkpointing, for at most one step's work more: "
        + (", ".join(f"{name}: {1 / v:.2f}x" for name, v in found.items()) or NOT_MEASURED),
        parts=[
            share_of_octaves("0.05 to 0.2x", memory, 0.05, 0.2),
            Part(what, least, Evidence.OTHER, high=0.05, form=".3f"),
            agreement("products of a step with flash attention over 1.2", work, 1.2, HEADLINE, Evidence.DERIVED),
        ],
    )
