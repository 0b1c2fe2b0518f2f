"""Claims about checkpointing: K6 to K8, K10, K11, K14 of the study notes, Chen's and Korthikanti's.

Each function takes a tidy frame (``repro.experiments.tidy``) that holds the experiments it names
and returns a Claim; the numbers that decide are measured where anything was run.
"""

from __future__ import annotations

import math

import pandas

from analysis.checkpointing import (
    chen_recursive,
    exponential,
    exponential_recursive,
    optimal,
    sqrt,
    store_all,
    uniform_chain,
)
from repro.claims.attention import ratio as attention_ratio
from repro.claims.attention import share_inside
from repro.claims.protocol import Claim, Evidence, Part, agreement
from repro.claims.rows import NOT_MEASURED, Source, claim
from repro.claims.values import growth, one, picked, text
from repro.experiments.checkpointing.checkpoint_pareto import STAGES as PARETO_STAGES
from repro.experiments.shared.checkpoint import formula

NAN = float("nan")
#: Bytes that a small peak may be off by.
SMALL_BYTES = 2**16
#: The chains on which K8 and K11 are judged, named beforehand: model and depth in checkpoint-depth.
DEEP_CHAINS = (("resnet", 1024, "chen-search"), ("lstm", 2048, "chen-search"), ("mlp", 256, "sqrt"))


def agreement_of_peaks(frame: pandas.DataFrame) -> Claim:
    """Peak of every planned step of checkpoint-depth against the simulator on its chain."""
    keys = ["model", "depth", "implementation"]
    rows = frame[frame["metric"].isin(["peak_bytes", "profiled_peak_bytes"])]
    rows = rows[rows["source"] == "measured"]
    wide = rows.pivot_table(index=keys, columns="metric", values="value")
    worst, measured = NAN, NOT_MEASURED
    if {"profiled_peak_bytes", "peak_bytes"} <= set(wide) and len(wide.dropna()):
        wide = wide.dropna()
        off = (wide["peak_bytes"] - wide["profiled_peak_bytes"]).abs()
        # 1 % or 64 KiB, whichever is more: the smallest peaks here are of 0.1 MiB
        worst = float((off / (0.01 * wide["profiled_peak_bytes"]).clip(lower=SMALL_BYTES)).max())
        share = (off / wide["profiled_peak_bytes"]).max()
        measured = f"worst of {len(wide)} steps: {off.max():,.0f} B, {share:.2%}"
    return claim(
        "checkpoint peak",
        predicted="simulator on the profiled chain",
        measured=measured,
        parts=[Part(what="worst deviation, in units of 1 % or 64 KiB", value=worst, high=1.0,
                    evidence=Evidence.OTHER)],
    )  # fmt: skip


def k6(frame: pandas.DataFrame) -> Claim:
    """Growth of the four strategies on the plain chain (checkpoint-depth)."""
    expected = {"store-all": 1.0, "sqrt": 0.5, "recompute-all": 0.0}
    found = {name: growth(frame, model="mlp", implementation=name) for name in expected}
    runs = one(frame, metric="stage_forwards", source="measured", model="mlp",
                  implementation="recompute-all", depth=64)  # fmt: skip
    shown = ", ".join(f"{name} {text(value)}" for name, value in found.items())
    return claim(
        "K6",
        predicted="slopes 1, 1/2, 0; 2,145 = L(L+1)/2 runs for 65 stages",
        measured=f"slopes {shown}; {text(runs, ',.0f')} runs",
        parts=[
            *(Part(what=f"slope of the peak in depth, {name}", value=found[name], low=slope - 0.1,
                   high=slope + 0.1, form=".2f", evidence=Evidence.OTHER)
              for name, slope in expected.items()),
            Part(what="runs of a stage, recompute-all, 65 stages", value=runs, low=65 * 66 / 2,
                 high=65 * 66 / 2, form=".0f", evidence=Evidence.COUNTED),
        ],
    )  # fmt: skip


def k7(frame: pandas.DataFrame) -> Claim:
    """Exponential spacing: the notes' O(log L) memory and compute (checkpoint-depth)."""
    grows = growth(frame, model="mlp", implementation="exponential")
    halving = growth(frame, model="mlp", implementation="recursive")
    chain = uniform_chain(1024)
    states = (exponential(chain), exponential_recursive(chain), chen_recursive(chain))
    return claim(
        "K7",
        predicted=f"L = 1024: {states[0].peak_bytes} outputs alone, {states[1].peak_bytes} split "
        f"the same way (log²), {states[2].peak_bytes} by halving, for {states[2].advances:,} more "
        "runs (L log L)",
        measured=f"slope {text(grows)} alone, {text(halving)} by halving",
        parts=[Part(what="slope of the peak in depth, spacing alone", value=grows, high=0.3,
                    form=".2f", evidence=Evidence.OTHER)],
    )  # fmt: skip


def k10(frame: pandas.DataFrame) -> Claim:
    """The notes' price of k segments, (1 + 1/k) forward (checkpoint-depth; stage runs counted)."""
    stages, segments = 257, 16
    runs = one(frame, metric="stage_forwards", source="measured", model="mlp", depth=256,
                  implementation="sqrt")  # fmt: skip
    return claim(
        "K10",
        predicted=f"1 + (k-1)/k = {1 + (segments - 1) / segments:.2f} for k = {segments}: every "
        "segment but the last runs again",
        measured=f"{text(runs / stages)} forward for k = {segments}",
        parts=[Part(what=f"forwards of {segments} segments", value=runs / stages, form=".2f",
                    low=1 + 1 / segments - 0.01, high=1 + 1 / segments + 0.01,
                    evidence=Evidence.COUNTED)],
    )  # fmt: skip


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
        found[f"gpt {PARETO_STAGES} stages"] = gpt
    depth = picked(frame, experiment="checkpoint-depth", source="measured")
    for model, layers, plan in DEEP_CHAINS:
        where = {"model": model, "depth": layers}
        top, low = (
            one(depth, implementation=i, metric="peak_bytes", **where) for i in ("autograd", plan)
        )
        runs = one(depth, implementation=plan, metric="stage_forwards", **where)
        more = (runs / len(formula(model, layers).stages) - 1) / 3
        if math.isfinite(more) and math.isfinite(top / low):
            found[f"{model} {layers}"] = top / low if more <= extra else 1.0
    return found


def optimum(frame: pandas.DataFrame) -> Claim:
    """No plan is faster than the optimum in that plan's own memory (checkpoint-pareto)."""
    from repro.experiments.checkpointing.checkpoint_pareto import HEURISTICS, LAYERS
    from repro.experiments.shared.checkpoint import plan_for

    chain = formula("gpt", LAYERS)
    step = chain.forward_s + chain.backward_s
    others = [plan_for(chain, name) for name in HEURISTICS]
    gains = [(other.seconds - optimal(chain, other.peak_bytes).seconds) / step for other in others]
    matched = sum(gain >= -1e-9 for gain in gains)
    measured = _pareto(frame, "measured").dropna(subset=["peak_bytes", "profiled_peak_bytes"])
    over = (measured["peak_bytes"] - measured["profiled_peak_bytes"]).max()
    return claim(
        "optimal plans",
        predicted=f"at least as fast as {matched} of {len(others)} heuristics in their own memory, "
        f"by up to {max(gains):.2f} of a step",
        measured=f"largest excess over {len(measured)} plans {text(over, '.0f')} B",
        parts=[
            Part(what="bytes above the budget, worst plan", value=float(over), high=SMALL_BYTES,
                 form=".0f", evidence=Evidence.OTHER),
            Part(what="share of heuristics that the optimum matches", value=matched / len(others),
                 low=1.0, high=1.0, evidence=Evidence.DERIVED),
        ],
    )  # fmt: skip


def k11(frame: pandas.DataFrame) -> Claim:
    """+33 % compute for 4-5x memory: on every chain named beforehand, or it is no rule."""
    found = savings(frame, 1 / 3 + 0.07)
    chains = [uniform_chain(length, 1, 12) for length in (32, 1024)]
    deep = [store_all(chain).peak_bytes / sqrt(chain).peak_bytes for chain in chains]
    return claim(
        "K11",
        predicted=f"the factor grows with depth: {deep[0]:.1f}x for 32, {deep[1]:.1f}x for 1,024 "
        "equal stages",
        measured=", ".join(f"{name}: {v:.1f}x" for name, v in found.items()) + " for at most "
        "0.40 of a step more" if found else NOT_MEASURED,
        parts=[Part(what="share of the chains with 4 to 5.5x",
                    value=share_inside(found.values(), 4, 5.5), low=1.0, high=1.0,
                    limits=(0.5, 1.0), why="not on every chain", evidence=Evidence.OTHER)],
    )  # fmt: skip


def k8(frame: pandas.DataFrame) -> Claim:
    """Both halves: flash attention's memory and compute, and aggressive checkpointing's."""
    memory = 1 / attention_ratio(frame, "peak_memory_bytes", "forward+backward")
    found = savings(frame, 1.0)
    shares = [1 / value for value in found.values()]
    work = 7 / 6  # products of a step: seven against six
    return claim(
        "K8",
        predicted=f"flash: {work:.2f}x the products, memory falls as 1/N; checkpointing: the share "
        "falls with depth",
        measured="flash: " + ", ".join(f"{v:.2f}x at {n:g}" for n, v in memory.items() if n >= 512)
        + " (H200); checkpointing, for at most one step's work more: "
        + (", ".join(f"{name}: {1 / v:.2f}x" for name, v in found.items()) or NOT_MEASURED),
        parts=[
            Part(what="share of lengths with flash's memory at 0.05 to 0.2x",
                 value=share_inside(memory, 0.05, 0.2), low=1.0, high=1.0, limits=(0.5, 1.0),
                 why="at some lengths only", evidence=Evidence.OTHER),
            agreement("products of a step over 1.2", work, 1.2, 0.1, Evidence.DERIVED),
            Part(what="share of the chains at 0.055x or less within twice the work",
                 value=share_inside(shares, 0, 0.055), low=1.0, high=1.0, limits=(0.01, 1.0),
                 why="deep chains only", evidence=Evidence.OTHER),
        ],
    )  # fmt: skip


def granularity(frame: pandas.DataFrame) -> Claim:
    """Bytes a layer keeps at every granularity (checkpoint-granularity)."""
    rows = frame[(frame["metric"] == "saved_bytes_per_layer") & frame["value"].notna()]
    wide = rows.pivot_table(index=["implementation", "mode"], columns="source", values="value")
    worst, count = NAN, 0
    if {"measured", "predicted"} <= set(wide) and len(wide.dropna()):
        ratio = (wide["measured"] / wide["predicted"]).dropna()
        worst, count = float(ratio.iloc[(ratio - 1).abs().argmax()]), len(ratio)
    return claim(
        "granularity", predicted="item by item",
        measured=f"worst of {count} {worst - 1:+.2%}" if count else NOT_MEASURED,
        parts=[agreement("bytes a layer keeps over the formula, worst", worst, 1, 0.03,
                         Evidence.OTHER)],
    )  # fmt: skip


def each_operation(frame: pandas.DataFrame) -> Claim:
    """A checkpoint around each operation against none at all (checkpoint-granularity)."""
    wanted = {"metric": "saved_bytes_per_layer", "source": "measured", "mode": "new"}
    finest = one(frame, implementation="each operation", **wanted)
    none = one(frame, implementation="none", **wanted)
    return claim(
        "checkpoint each operation",
        predicted="three N² maps of inputs are kept instead of two and a mask",
        measured=f"{text(finest / none)}x the bytes of no checkpoint",
        parts=[Part(what="bytes a layer keeps over those without a checkpoint",
                    value=finest / none, high=1.0, form=".2f", evidence=Evidence.OTHER)],
    )  # fmt: skip


def k14(frame: pandas.DataFrame) -> Claim:
    """The notes on the two modes: O(N) to O(1) without reentry, less saving with it."""

    def kept(mode: str, source: str = "measured") -> float:
        return one(frame, metric="saved_bytes_per_layer", source=source,
                      implementation="each block", mode=mode)  # fmt: skip

    new, old, model = kept("new"), kept("reentrant"), kept("new", "predicted")
    return claim(
        "K14",
        predicted=f"{model:,.0f} B a block in both modes: its input, O(N) in layers",
        measured=f"{text(new, ',.0f')} and {text(old, ',.0f')} B a block",
        parts=[
            Part(what="bytes a block, non-reentrant, over the block's input", value=new / model,
                 high=0.5, form=".2f", evidence=Evidence.OTHER),
            Part(what="bytes a block, reentrant over non-reentrant", value=old / new, low=1.05,
                 form=".2f", evidence=Evidence.OTHER),
        ],
    )  # fmt: skip


def korthikanti(frame: pandas.DataFrame) -> Claim:
    """sbh(34 + 5as/h) and 34 sbh (checkpoint-layer-bytes, lengths of 128 and more)."""
    rows = frame[(frame["metric"] == "saved_bytes_per_layer") & (frame["seqlen_q"] >= 128)]
    wide = rows.pivot_table(index=["implementation", "seqlen_q"], columns="source", values="value")
    worst, count = NAN, 0
    if "measured" in wide and wide["measured"].notna().any():
        ratio = (wide["measured"] / wide["predicted"]).dropna().drop("full", errors="ignore")
        worst, count = float(ratio.iloc[(ratio - 1).abs().argmax()]), len(ratio)
    return claim(
        "Korthikanti Eq. 1", predicted="item by item",
        measured=f"worst of {count} {worst - 1:+.2%} (PyTorch's hooks)" if count else NOT_MEASURED,
        published="sbh(34 + 5as/h), 34 sbh",
        parts=[agreement("saved bytes over the formula, worst", worst, 1, 0.02, Evidence.OTHER)],
    )  # fmt: skip


def attention_step_bytes(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Bytes of a step per head: forward + backward, and the step executed under a checkpoint."""
    rows = frame[(frame["metric"] == "traffic_bytes") & frame["value"].notna()]
    keys = ["implementation", "seqlen_q", "source"]
    total = rows.pivot_table(index=keys, columns="pass", values="value", aggfunc="sum")
    total = total.reindex(columns=["forward", "backward", "step"]).dropna()
    parts = []
    for checkpointed, value in (
        (False, total["forward"] + total["backward"]), (True, total["step"])
    ):  # fmt: skip
        parts.append(value.rename("value").reset_index().assign(checkpointed=checkpointed))
    return pandas.concat(parts, ignore_index=True).assign(metric="traffic_bytes")


def redundant_checkpoint(frame: pandas.DataFrame) -> Claim:
    """The checkpoint that flash attention makes redundant (checkpoint-attention)."""
    steps = attention_step_bytes(frame)

    def added(name: str, source: str, seqlen: int) -> float:
        some = steps[(steps["implementation"] == name) & (steps["source"] == source)]
        some = some[some["seqlen_q"] == seqlen].set_index("checkpointed")["value"]
        return float(some[True] / some[False] - 1) if len(some) == 2 else NAN

    names = ("standard", "flash")
    measured = {name: added(name, "measured", 512) for name in names}
    return claim(
        "checkpoint around flash",
        predicted="N = 4096: " + ", ".join(
            f"{name} {text(added(name, 'predicted', 4096), '+.0%')}" for name in names),
        measured="N = 512: " + ", ".join(f"{n} {text(v, '+.1%')}" for n, v in measured.items()),
        parts=[agreement(f"bytes added around {name}, counted over the sums", measured[name],
                         added(name, "predicted", 512), 0.0, Evidence.COUNTED) for name in names],
    )  # fmt: skip


SOURCES = (
    Source("K8", ("checkpoint-pareto", "checkpoint-depth", "fig3-memory"), k8),
    Source("K11", ("checkpoint-pareto", "checkpoint-depth"), k11),
)
