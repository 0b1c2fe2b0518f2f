"""Claims about activations and model states: K12, ZeRO's Table 1, Korthikanti's 4 %."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from analysis.model_states import model_state_bytes
from analysis.parallel_activations import decoder_model_bytes
from repro.claims import NOT_MEASURED, OPEN, Claim, Source, claim

if TYPE_CHECKING:
    import pandas

#: LLaMA-7B (Touvron et al. 2023): 6.74e9 parameters, 32 layers, h = 4096, 32 heads, MLP 11008.
LLAMA_PARAMETERS = 6_738_415_616
LLAMA: dict[str, int] = {"hidden": 4096, "heads": 32, "layers": 32, "mlp_hidden": 11008}

#: GB a device for 7.5B, 128B, 1T parameters: ranks -> stage -> as printed.
ZERO_TABLE_1: dict[int, dict[int, tuple[float, float, float]]] = {
    1: {1: (120, 2048, 16000), 2: (120, 2048, 16000), 3: (120, 2048, 16000)},
    4: {1: (52.5, 896, 7000), 2: (41.3, 704, 5500), 3: (30, 512, 4000)},
    16: {1: (35.6, 608, 4750), 2: (21.6, 368, 2875), 3: (7.5, 128, 1000)},
    64: {1: (31.4, 536, 4187), 2: (16.6, 284, 2218), 3: (1.88, 32, 250)},
    256: {1: (30.4, 518, 4046), 2: (15.4, 263, 2054), 3: (0.47, 8, 62.5)},
    1024: {1: (30.1, 513, 4011), 2: (15.1, 257, 2013), 3: (0.12, 2, 15.6)},
}
ZERO_MODELS = (7.5e9, 128e9, 1e12)


def dominating_length(*, attention_matrix: bool) -> int:
    """Smallest multiple of 256 tokens (batch 1) whose activations exceed 16 bytes a parameter."""
    states = model_state_bytes(LLAMA_PARAMETERS).total
    seqlen = 256
    while (
        decoder_model_bytes(batch=1, seqlen=seqlen, attention_matrix=attention_matrix, **LLAMA)
        <= states
    ):
        seqlen += 256
    return seqlen


def k12(frame: pandas.DataFrame) -> Claim:
    """One activation's bytes, and the context from which activations dominate a 7B model."""
    import numpy as np

    one = np.empty((1, 4096, 4096), np.uint16).nbytes  # bf16 has no NumPy type of its own
    standard = dominating_length(attention_matrix=True)
    flash = dominating_length(attention_matrix=False)
    rows = frame[
        (frame["implementation"] == "mixed-precision")
        & (frame["metric"] == "saved_bytes")
        & (frame["policy"] == "16-bit")
    ].pivot_table(index="batch", columns="source", values="value")
    known = "measured" in rows and not rows["measured"].isna().any()
    worst = float((rows["measured"] / rows["predicted"] - 1).abs().max()) if known else math.nan
    holds = one == 32 * 2**20
    return claim(
        "K12",
        predicted=f"32 MiB; activations exceed 16 bytes a parameter from N = {standard} with the "
        f"attention matrix, {flash} without (batch 1)",
        measured=f"{one / 2**20:g} MiB; formula of a layer's bytes "
        + (f"within {worst:.1%} (CPU)" if known else NOT_MEASURED),
        tolerance="32 MiB exactly; 1 % measured",
        verdict=OPEN if not known else
        f"{'holds within limits' if holds and worst <= 0.01 else 'does not hold'}: they dominate "
        f"only from N = {standard}, and with flash attention from {flash}",
        command="make figures/out/training_memory.svg",
    )  # fmt: skip


def zero_table(frame: pandas.DataFrame) -> Claim:
    """All 54 entries, to the unit of their last printed digit."""
    wrong, count = [], 0
    for ranks, stages in ZERO_TABLE_1.items():
        for stage, printed in stages.items():
            for parameters, value in zip(ZERO_MODELS, printed, strict=True):
                count += 1
                got = model_state_bytes(parameters, ranks, stage).total / 1e9
                digits = len(str(value).partition(".")[2])
                if abs(got - value) >= 10.0**-digits:
                    wrong.append((ranks, stage, parameters, value, got))
    held = frame[
        (frame["part"] == "sharded-states")
        & frame["metric"].isin(["parameter_bytes", "gradient_bytes", "optimizer_bytes"])
    ].pivot_table(index=["implementation", "ranks", "metric"], columns="source", values="value")
    known = "measured" in held and not held["measured"].isna().any()
    worst = float((held["measured"] / held["predicted"] - 1).abs().max()) if known else math.nan
    ok = not wrong and (not known or worst <= 0.02)
    return claim(
        "ZeRO Table 1",
        predicted=f"{count - len(wrong)} of {count} entries to their last digit",
        measured=f"formulas within {worst:.2%} on 2 and 4 ranks" if known else NOT_MEASURED,
        published=f"{count} entries",
        tolerance="last printed digit; 2 % measured",
        verdict=OPEN if not known else "holds" if ok else "does not hold",
        command="make figures/out/sharded_states.svg",
    )


def four_percent(frame: pandas.DataFrame) -> Claim:
    """Extra FLOPs of selective recomputation against the published overhead of a layer."""
    rows = frame[(frame["source"] == "published") & (frame["metric"] == "time_overhead")]
    printed = rows.groupby("implementation")["value"].max()

    def overhead(name: str) -> float:
        return float(printed[name]) if name in printed.index else math.nan

    seqlen, hidden = 2048, 6144  # the 22B model
    forward = 24 * hidden + 4 * seqlen
    extra = 4 * seqlen / (3 * forward)  # attention's two products again, of forward + 2 backward
    both, full = overhead("selective + sequence parallel"), overhead("full recompute")
    return claim(
        "Korthikanti 4 %",
        predicted=f"{extra:.1%} more products (22B), {1 / 3:.0%} for full recomputation",
        measured="no 8-GPU machine here; formulas of its bytes are measured",
        published=f"{both:.0%} with sequence parallelism, {full:.0%} full",
        verdict="open: the prediction is consistent (its own sequence-parallel gain is -3 %), no "
        "measurement" if both == both and extra - 0.03 <= both <= extra + 0.03 else
        "open: not measured",
        command="make figures/out/parallel_layer.svg",
    )  # fmt: skip


SOURCES = (
    Source("K12", ("training-memory",), k12),
    Source("ZeRO Table 1", ("several-ranks",), zero_table),
    Source("Korthikanti 4 %", ("korthikanti",), four_percent),
)
