"""Model states on several ranks: ZeRO."""

from __future__ import annotations

from typing import Any

import pandas

from analysis.model_states import SCHEDULES, communication_volume
from repro.claims import works
from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, agreement
from repro.claims.register import Finding, claim
from repro.claims.tolerances import COUNT, MEMORY
from repro.claims.training.parallel_layer import ENDS, GLOO, at_least
from repro.claims.values import against_sums, formula, known, off, pick, worst
from repro.claims.works import ZERO
from repro.experiments.shared.sharded_states import PART, RANKS

PLAIN = "data-parallel"
HELD = ["parameter_bytes", "gradient_bytes", "optimizer_bytes"]
KEYS = ["implementation", "ranks", "metric"]
SEEN: dict[str, Any] = {"experiments": ("several-ranks",), "shown": "sharded_states"}


def per_parameter(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Bytes a parameter, predicted and measured, a row per engine, ranks and metric."""
    rows = pick(frame, part=PART, metric=[*HELD, "sent_bytes"]).copy()
    rows["value"] = rows["value"] / rows["parameters"]
    table = rows.pivot_table(index=KEYS, columns="source", values="value").reset_index()
    return table.reindex(columns=[*KEYS, "predicted", "measured"])


def at_sockets(frame: pandas.DataFrame, engine: str) -> float:
    """The most that a step sends or receives, in the paper's unit: elements of 2 bytes a parameter,
    times N / (N - 1)."""
    rows = known(frame, part=PART, metric=ENDS, source="measured", implementation=engine)
    return float((rows["value"] / rows["parameters"] / 2 * rows["ranks"] / (rows["ranks"] - 1)).max())


@claim(
    "ZeRO states",
    "a rank holds 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N, 16Ψ/N bytes (P_os, P_os+g, P_os+g+p)",
    ZERO,
    "Fig. 1",
    **SEEN,
    conditions=f"{works.RANKS}, engines of PyTorch",
    overturn=(Scale({"part": PART, "metric": tuple(HELD)}),),
)
def zero_states(frame: pandas.DataFrame) -> Finding:
    held = against_sums(pick(frame, part=PART, metric=HELD), KEYS)
    return Finding(
        predicted="bytes of 5 engines",
        measured=f"{len(held)} values on {RANKS[0]} and {RANKS[1]} ranks, {off(worst(held), '+.3%')}",
        published="Fig. 1, Table 1",
        parts=[agreement("bytes held over the formula, worst", worst(held), 1, MEMORY, Evidence.OTHER)],
    )


@claim(
    "ZeRO volume",
    "a step moves 2Ψ elements, 3Ψ with sharded parameters",
    ZERO,
    "section 7",
    **SEEN,
    conditions=f"{works.RANKS}, engines of PyTorch",
    partial=f"at the sockets the unsharded step alone: {GLOO}, so the sharded steps are seen there from below",
    overturn=(
        *(Scale({"implementation": "data-parallel", "metric": end}, only="up") for end in ENDS),
        Scale({"part": PART, "implementation": ("fsdp2-zero-2", "fsdp2-zero-3"), "metric": "sent_bytes"}),
    ),
)
def zero_volume(frame: pandas.DataFrame) -> Finding:
    claimed = {PLAIN: 2, "fsdp2-zero-2": 2, "fsdp2-zero-3": 3}
    ends = {engine: at_sockets(frame, engine) for engine in claimed}
    sent = against_sums(pick(frame, part=PART, metric="sent_bytes", implementation=list(claimed)), KEYS)
    volumes = ", ".join(f"{communication_volume(n)}Ψ" for n in ("data-parallel", "zero-2", "zero-3"))
    return Finding(
        predicted=volumes,
        measured=", ".join(f"{v:.2f}Ψ" for v in ends.values()) + " at the sockets of gloo, headers included; "
        f"tensors given to collectives, counted as rings would send them: {off(worst(sent))}",
        published="2Ψ, 2Ψ, 3Ψ",
        parts=[
            agreement("data-parallel: elements at the sockets over 2Ψ", ends[PLAIN], 2, MEMORY, Evidence.OTHER),
            agreement("bytes given to collectives over 2Ψ and 3Ψ, worst", worst(sent), 1, COUNT, Evidence.OTHER),
            *(
                at_least(f"{engine}: elements at the sockets over {n}Ψ", ends[engine] / n)
                for engine, n in claimed.items()
                if engine != PLAIN
            ),
        ],
    )


@claim(
    "torch P_os volume",
    "torch's P_os (ZeroRedundancyOptimizer) moves 3Ψ a step, where ZeRO says 2Ψ of P_os",
    works.OURS,
    **SEEN,
    conditions="says nothing of ZeRO's own code: torch's optimiser under DDP all-reduces "
    "every gradient before its owners broadcast; gloo ranks of a CPU",
    overturn=(Scale({"implementation": "torch-zero-1", "metric": tuple(ENDS)}),),
)
def zero_volume_torch_p_os(frame: pandas.DataFrame) -> Finding:
    name = "torch-zero-1"
    ends, told = at_sockets(frame, name), formula(communication_volume(name))
    what = "elements at the sockets over 3Ψ, ZeroRedundancyOptimizer"
    return Finding(
        predicted=f"{told:g}Ψ: {' + '.join(SCHEDULES[name])}",
        measured=f"{ends:.2f}Ψ (at the sockets of gloo, headers included)",
        parts=[agreement(what, ends, told, MEMORY, Evidence.OTHER)],
    )
