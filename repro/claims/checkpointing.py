"""Claims about checkpointing: K6, K7, K8, K10, K11, K14 and K16 of the study notes, and Chen's.

Each function takes a tidy frame (``repro.experiments.tidy``) that holds the experiments it names
and returns a Claim whose verdict is computed; without measurements it is "open".
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
from analysis.hardware import H100_SXM
from repro.claims import Claim
from repro.experiments.checkpoint_pareto import STAGES as PARETO_STAGES

NAN = float("nan")


def _rows(frame: pandas.DataFrame, **wanted: object) -> pandas.DataFrame:
    for column, value in wanted.items():
        if column not in frame:
            return frame.iloc[:0]
        frame = frame[frame[column] == value]
    return frame.dropna(subset=["value"])


def _value(frame: pandas.DataFrame, **wanted: object) -> float:
    found = _rows(frame, **wanted)["value"]
    return float(found.iloc[0]) if len(found) else NAN


def _known(*values: float) -> bool:
    return all(math.isfinite(value) for value in values)


def _slope(frame: pandas.DataFrame, **wanted: object) -> float:
    """Measured log-log slope between the two largest depths."""
    rows = _rows(frame, metric="peak_bytes", source="measured", **wanted).sort_values("depth")
    if len(rows) < 2:
        return NAN
    first, last = rows.iloc[-2], rows.iloc[-1]
    return math.log(last["value"] / first["value"]) / math.log(last["depth"] / first["depth"])


def _text(value: float, form: str = ".2f") -> str:
    return format(value, form) if math.isfinite(value) else "not measured yet"


def agreement(frame: pandas.DataFrame) -> Claim:
    """Peak of every planned step of checkpoint-depth against the simulator on its chain."""
    keys = ["model", "depth", "implementation"]
    rows = frame[frame["metric"].isin(["peak_bytes", "profiled_peak_bytes"])]
    rows = rows[rows["source"] == "measured"]
    wide = rows.pivot_table(index=keys, columns="metric", values="value")
    count, verdict, measured = 0, "open: not measured", "not measured yet"
    if "profiled_peak_bytes" in wide:
        wide = wide.dropna()
        off = (wide["peak_bytes"] - wide["profiled_peak_bytes"]).abs()
        good = (off <= 0.01 * wide["profiled_peak_bytes"]) | (off <= 2**20)
        share = (off / wide["profiled_peak_bytes"]).max()
        count, measured = len(wide), f"worst of {len(wide)} steps: {off.max():.0f} B, {share:.2%}"
        verdict = "holds" if good.all() else f"does not hold ({(~good).sum()} of {count} steps)"
    return Claim(
        "checkpoint peak", "the simulator's peak is the measured peak",
        "simulator on the profiled chain", measured, "-", "1 % or 1 MiB", verdict,
        "make figures/out/checkpoint_depth.svg",
    )  # fmt: skip


def k6(frame: pandas.DataFrame) -> Claim:
    """Growth of the four strategies on the plain chain (checkpoint-depth)."""
    expected = {"store-all": 1.0, "sqrt": 0.5, "recompute-all": 0.0}
    found = {name: _slope(frame, model="mlp", implementation=name) for name in expected}
    runs = _value(frame, metric="stage_forwards", source="measured", model="mlp",
                  implementation="recompute-all", depth=64)  # fmt: skip
    if not _known(*found.values(), runs):
        verdict = "open: not measured"
    else:
        good = all(abs(found[name] - expected[name]) <= 0.1 for name in expected)
        verdict = "holds" if good and runs == 65 * 66 / 2 else "does not hold"
        if verdict == "holds":
            verdict += " (recompute all: O(1) states, L(L+1)/2 runs; k-interval is L/k + k states)"
    shown = ", ".join(f"{name} {_text(value)}" for name, value in found.items())
    return Claim(
        "K6", "memory O(L), O(√L), O(1) for storing all, sqrt(L) and recomputing all (O(L²) time)",
        "slopes 1, 1/2, 0; 2,145 runs for 65 stages",
        f"slopes {shown}; {_text(runs, '.0f')} runs", "-", "0.1 in the slope", verdict,
        "make figures/out/checkpoint_depth.svg",
    )  # fmt: skip


def k7(frame: pandas.DataFrame) -> Claim:
    """Exponential spacing: the notes' O(log L) memory and compute (checkpoint-depth)."""
    grows = _slope(frame, model="mlp", implementation="exponential")
    halving = _slope(frame, model="mlp", implementation="recursive")
    chain = uniform_chain(1024)
    states = (exponential(chain), exponential_recursive(chain), chen_recursive(chain))
    predicted = (
        f"L = 1024: {states[0].peak_bytes} outputs alone, {states[1].peak_bytes} split the same "
        f"way (log²), {states[2].peak_bytes} by halving, for {states[2].advances:,} more runs"
    )
    if not _known(grows, halving):
        verdict = "open: not measured"
    elif grows > 0.8 and halving < 0.3:
        verdict = "does not hold (the last part is L/2 long; halving has log L, for L log L runs)"
    else:
        verdict = "holds" if grows < 0.3 else "holds within limits"
    return Claim(
        "K7", "exponential spacing gives O(log L) memory and O(log L) compute", predicted,
        f"slope {_text(grows)} alone, {_text(halving)} by halving", "-", "slope below 0.3",
        verdict, "make figures/out/checkpoint_depth.svg",
    )  # fmt: skip


def chen_memory(frame: pandas.DataFrame) -> Claim:
    """Chen's ResNet: 48 GB to below 7 GB at 1,000 layers (checkpoint-depth)."""

    def ratio(source: str, base: str) -> float:
        top = _value(frame, metric="peak_bytes", source=source, model="resnet", depth=1024,
                     implementation=base)  # fmt: skip
        low = _value(frame, metric="peak_bytes", source=source, model="resnet", depth=1024,
                     implementation="chen-search")  # fmt: skip
        return top / low

    measured = ratio("measured", "autograd")
    chain_ratio = _formula_ratio()
    grows = _slope(frame, model="resnet", implementation="chen-search")
    if not _known(measured, grows):
        verdict = "open: not measured"
    else:
        good = measured >= 48 / 7 and abs(grows - 0.5) < 0.15
        verdict = f"{'holds' if good else 'does not hold'} (slope {grows:.2f})"
    return Claim(
        "Chen Fig. 5", "a 1,000-layer ResNet trains in 7 GB instead of 48 GB",
        f"{chain_ratio:.1f}x less (feature maps, 1,024 layers)",
        f"{_text(measured, '.1f')}x less", "6.9x, whole GPU", "at least 6.9x; slope 0.5 ± 0.15",
        verdict, "make figures/out/checkpoint_depth.svg",
    )  # fmt: skip


def _formula_ratio() -> float:
    from repro.experiments._checkpoint import formula, plan_for

    chain = formula("resnet", 1024)
    return plan_for(chain, "store-all").peak_bytes / plan_for(chain, "chen-search").peak_bytes


def relative_times(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Measured time of every plan over that of storing everything by the same executor."""
    rows = _rows(frame, metric="relative_time", source="measured")
    return rows[rows["implementation"] != "store-all"]


def executor_overhead(frame: pandas.DataFrame) -> float:
    """Median of the executor storing everything over autograd (checkpoint-depth)."""
    rows = _rows(frame, metric="relative_time", source="measured", implementation="store-all")
    return float(rows["value"].median()) if len(rows) else NAN


def _sublinear_times(frame: pandas.DataFrame) -> pandas.Series:
    relative = relative_times(frame)
    return relative[relative["implementation"].isin(["sqrt", "chen-search"])]["value"]


def chen_time(frame: pandas.DataFrame) -> Claim:
    """Chen's Fig. 7: about 30 % more time (checkpoint-depth).

    One more forward is a third of a step where a backward takes two forwards. Small operations are
    not like that, so the forward's share is measured too.
    """
    ratios = _sublinear_times(frame)
    middle = float(ratios.median()) if len(ratios) else NAN
    shares = _rows(frame, metric="forward_share", source="measured", implementation="autograd")
    share = float(shares["value"].median()) if len(shares) else NAN
    verdict = "open: not measured"
    if _known(middle, share):
        if 1.2 <= middle <= 1.45:
            verdict = "holds"
        elif middle <= 1 + 1.15 * share:
            verdict = f"holds within limits (one more forward, which is {share:.0%} of a step here)"
        else:
            verdict = "does not hold"
    own = _text(executor_overhead(frame))
    return Claim(
        "Chen Fig. 7", "the sublinear plan costs about 30 % more time",
        "at most one more forward, 1/3 of a step",
        f"median of {len(ratios)} {_text(middle)}x; storing everything so takes {own}x autograd",
        "1.3x", "1.2 to 1.45; or 1.15 forwards", verdict, "make figures/out/checkpoint_time.svg",
    )  # fmt: skip


def k10(frame: pandas.DataFrame) -> Claim:
    """The notes' price of k segments, (1 + 1/k) forward (checkpoint-depth; stage runs counted)."""
    stages, segments = 257, 16
    runs = _value(frame, metric="stage_forwards", source="measured", model="mlp", depth=256,
                  implementation="sqrt")  # fmt: skip
    extra = runs / stages - 1
    verdict = "open: not measured"
    if _known(extra):
        right = abs(extra - (segments - 1) / segments) < 0.01
        verdict = "does not hold (every segment but the last runs again)" if right else "open"
        if abs(extra - 1 / segments) < 0.01:
            verdict = "holds"
    return Claim(
        "K10", "checkpointing in k segments costs (1 + 1/k) forward",
        f"1 + (k-1)/k = {1 + (segments - 1) / segments:.2f} for k = {segments}",
        f"{_text(1 + extra)} forward for k = {segments}", "-", "0.01", verdict,
        "make figures/out/checkpoint_time.svg",
    )  # fmt: skip


def _pareto(frame: pandas.DataFrame, source: str) -> pandas.DataFrame:
    """(peak, relative time) of the budget sweep and store-all, from checkpoint-pareto."""
    rows = frame[(frame["source"] == source) & frame["value"].notna()].copy()
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


def optimum(frame: pandas.DataFrame) -> Claim:
    """No plan is faster than the optimum in that plan's own memory (checkpoint-pareto)."""
    from repro.experiments._checkpoint import formula, plan_for
    from repro.experiments.checkpoint_pareto import HEURISTICS, LAYERS

    chain = formula("gpt", LAYERS)
    step = chain.forward_s + chain.backward_s
    others = [plan_for(chain, name) for name in HEURISTICS]
    gains = [(other.seconds - optimal(chain, other.peak_bytes).seconds) / step for other in others]
    matched = sum(gain >= -1e-9 for gain in gains)
    measured = _pareto(frame, "measured").dropna(subset=["peak_bytes", "profiled_peak_bytes"])
    over = (measured["peak_bytes"] - measured["profiled_peak_bytes"]).max()
    verdict = "open: not measured"
    if _known(over):
        good = over <= 2**20 and matched == len(others)
        verdict = "holds" if good else "does not hold"
    return Claim(
        "optimal plans", "within a budget no heuristic is faster, and no plan exceeds its budget",
        f"at least as fast as {matched} of {len(others)} heuristics in their own memory, by up to "
        f"{max(gains):.2f} of a step",
        f"largest excess over {len(measured)} plans {_text(over, '.0f')} B", "-", "1 MiB", verdict,
        "make figures/out/checkpoint_pareto.svg",
    )  # fmt: skip


def k11(frame: pandas.DataFrame) -> Claim:
    """+33 % time for 4-5x memory (checkpoint-pareto)."""
    predicted = _saving_at(_pareto(frame, "predicted"), 1 / 3)
    measured = _saving_at(_pareto(frame, "measured"), 1 / 3 + 0.07)
    verdict = "open: not measured"
    if _known(measured):
        if 4 <= predicted <= 5.5 or 4 <= measured <= 5.5:
            verdict = "holds"
        elif min(predicted, measured) > 1.5:
            verdict = (
                "holds within limits (the factor grows with depth as √L / 2, it is no constant)"
            )
        else:
            verdict = "does not hold"
    chains = [uniform_chain(length, 1, 12) for length in (32, 1024)]
    deep = [store_all(chain).peak_bytes / sqrt(chain).peak_bytes for chain in chains]
    return Claim(
        "K11", "+33 % compute buys 4-5x less memory",
        f"{predicted:.1f}x for {PARETO_STAGES} stages; {deep[0]:.1f}x for 32, {deep[1]:.1f}x for "
        "1,024 equal ones",
        f"{_text(measured, '.1f')}x (within 1.40x of the time)", "-", "4 to 5.5", verdict,
        "make figures/out/checkpoint_pareto.svg",
    )  # fmt: skip


def k8(frame: pandas.DataFrame) -> Claim:
    """0.05x memory for 2.0x compute by aggressive checkpointing (checkpoint-pareto; 0.1x and 1.2x
    for flash attention is judged with attention's own measurements)."""
    predicted = 1 / _saving_at(_pareto(frame, "predicted"), 1.0)
    measured = 1 / _saving_at(_pareto(frame, "measured"), 1.0)
    chain = uniform_chain(1024, 1, 12)
    deep = chen_recursive(chain)
    share = deep.peak_bytes / store_all(chain).peak_bytes
    factor = deep.seconds / store_all(chain).seconds
    verdict = "open: not measured"
    if _known(measured):
        verdict = "holds" if min(predicted, measured) <= 0.055 else (
            "holds within limits (deep chains only)" if share <= 0.055 and factor <= 3
            else "does not hold"
        )  # fmt: skip
    return Claim(
        "K8", "aggressive checkpointing: 0.05x memory for 2.0x compute",
        f"{predicted:.2f}x within 2x for {PARETO_STAGES} stages; {share:.3f}x at {factor:.2f}x for "
        "1,024 by halving", f"{_text(measured)}x within 2x", "-", "0.055", verdict,
        "make figures/out/checkpoint_pareto.svg",
    )  # fmt: skip


def granularity(frame: pandas.DataFrame) -> Claim:
    """Bytes a layer keeps at every granularity (checkpoint-granularity)."""
    rows = frame[(frame["metric"] == "saved_bytes_per_layer") & frame["value"].notna()]
    wide = rows.pivot_table(index=["implementation", "mode"], columns="source", values="value")
    verdict, measured = "open: not measured", "not measured yet"
    if "measured" in wide and len(wide.dropna()):
        ratio = (wide["measured"] / wide["predicted"]).dropna()
        worst = float(ratio.iloc[(ratio - 1).abs().argmax()])
        finest = float(wide["measured"].get(("each operation", "new"), NAN))
        none = float(wide["measured"].get(("none", "new"), NAN))
        measured = (
            f"worst of {len(ratio)} {worst - 1:+.2%}; each operation {finest / none:.2f}x none"
        )
        verdict = "does not hold (it keeps more than no checkpoint)" if finest > none else "holds"
        if abs(worst - 1) > 0.03:
            verdict = "open: prediction is off"
    return Claim(
        "note 000 §5", "a checkpoint around each operation saves most memory",
        "three N² maps of inputs instead of two and a mask", measured, "-",
        "3 % on bytes a layer", verdict, "make figures/out/checkpoint_granularity.svg",
    )  # fmt: skip


def k14(frame: pandas.DataFrame) -> Claim:
    """The notes on the two modes: O(N) to O(1) without reentry, less saving with it."""

    def kept(mode: str) -> float:
        return _value(frame, metric="saved_bytes_per_layer", source="measured",
                      implementation="each block", mode=mode)  # fmt: skip

    new, old = kept("new"), kept("reentrant")
    predicted = _value(frame, metric="saved_bytes_per_layer", source="predicted",
                       implementation="each block", mode="new")  # fmt: skip
    verdict = "open: not measured"
    if _known(new, old):
        same = abs(new / old - 1) < 0.01
        verdict = "does not hold" if same and new > 0.9 * predicted else "holds"
        if same:
            verdict += " (both keep one input a block, O(N) in layers)"
    return Claim(
        "K14", "non-reentrant checkpoints need O(1) instead of O(N) memory; reentrant save less",
        f"{predicted:,.0f} B a block in both modes",
        f"{_text(new, ',.0f')} and {_text(old, ',.0f')} B a block", "-", "1 %", verdict,
        "make figures/out/checkpoint_granularity.svg",
    )  # fmt: skip


def korthikanti(frame: pandas.DataFrame) -> Claim:
    """sbh(34 + 5as/h) and 34 sbh (checkpoint-layer-bytes, lengths of 128 and more)."""
    rows = frame[(frame["metric"] == "saved_bytes_per_layer") & (frame["seqlen_q"] >= 128)]
    wide = rows.pivot_table(index=["implementation", "seqlen_q"], columns="source", values="value")
    verdict, measured = "open: not measured", "not measured yet"
    if "measured" in wide:
        ratio = (wide["measured"] / wide["predicted"]).dropna().drop("full", errors="ignore")
        worst = float(ratio.iloc[(ratio - 1).abs().argmax()])
        measured = f"worst of {len(ratio)} {worst - 1:+.2%}"
        verdict = "holds" if abs(worst - 1) <= 0.02 else "does not hold"
    return Claim(
        "Korthikanti Eq. 1", "a layer saves sbh(34 + 5as/h) bytes; 34sbh selective",
        "item by item", measured, "Table 2", "2 %", verdict,
        "make figures/out/checkpoint_layer_bytes.svg",
    )  # fmt: skip


def attention_step_bytes(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Bytes of forward + backward per head, with and without a checkpoint (a second forward)."""
    rows = frame[(frame["metric"] == "traffic_bytes") & frame["value"].notna()]
    keys = ["implementation", "seqlen_q", "source"]
    total = rows.pivot_table(index=keys, columns="pass", values="value", aggfunc="sum").dropna()
    parts = []
    for checkpointed in (False, True):
        value = total["forward"] * (1 + checkpointed) + total["backward"]
        parts.append(value.rename("value").reset_index().assign(checkpointed=checkpointed))
    return pandas.concat(parts, ignore_index=True).assign(metric="traffic_bytes")


def redundant_checkpoint(frame: pandas.DataFrame) -> Claim:
    """The checkpoint that flash attention makes redundant (checkpoint-attention)."""
    steps = attention_step_bytes(frame)

    def added(name: str, source: str, seqlen: int) -> float:
        some = steps[(steps["implementation"] == name) & (steps["source"] == source)]
        some = some[some["seqlen_q"] == seqlen].set_index("checkpointed")["value"]
        return float(some[True] / some[False] - 1) if len(some) == 2 else NAN

    predicted = {name: added(name, "predicted", 4096) for name in ("standard", "flash")}
    measured = {name: added(name, "measured", 512) for name in ("standard", "flash")}
    exact = {name: added(name, "predicted", 512) for name in ("standard", "flash")}
    verdict = "open: not measured"
    if _known(*measured.values()):
        verdict = "holds" if measured == exact else "does not hold"
    return Claim(
        "checkpoint around flash",
        "flash attention recomputes already: a checkpoint around it frees 4 bytes a row and adds a "
        "forward",
        "N = 4096: " + ", ".join(f"{name} {_text(v, '+.0%')}" for name, v in predicted.items()),
        "N = 512: " + ", ".join(f"{name} {_text(v, '+.1%')}" for name, v in measured.items()),
        "-", "to the byte at N = 512", verdict, "make figures/out/checkpoint_attention.svg",
    )  # fmt: skip


def k16(frame: pandas.DataFrame) -> Claim:
    """Recomputing can be faster than storing when memory-bound (checkpoint-attention).

    Judged in bytes: recomputation inside the kernel (flash) against storing P (standard). A
    checkpoint outside never removes a byte from the first forward, so it only adds.
    """
    steps = attention_step_bytes(frame)
    plain = steps[~steps["checkpointed"]]

    def ratio(source: str, seqlen: int) -> float:
        some = plain[(plain["source"] == source) & (plain["seqlen_q"] == seqlen)]
        some = some.set_index("implementation")["value"]
        return float(some["standard"] / some["flash"]) if len(some) == 2 else NAN

    balance = H100_SXM.fp16_tensor_flops / H100_SXM.hbm_bandwidth_bytes_per_s
    predicted, measured = ratio("predicted", 4096), ratio("measured", 512)
    verdict = "open: not measured"
    if _known(measured):
        verdict = "holds within limits (inside one kernel; a checkpoint outside only adds bytes)"
        if min(predicted, measured) <= 1:
            verdict = "does not hold"
    return Claim(
        "K16", "recomputing can be faster than storing when memory-bound",
        f"flash moves {_text(predicted, '.1f')}x fewer bytes at N = 4096; storing an element pays "
        f"only above {balance:.0f} FLOP a byte (H100)",
        f"{_text(measured, '.1f')}x fewer at N = 512 (counted)", "-", "more than 1x", verdict,
        "make figures/out/checkpoint_attention.svg",
    )  # fmt: skip
