"""Model states on several ranks: ZeRO."""

from __future__ import annotations

import pandas

from analysis.model_states import SCHEDULES, communication_volume
from repro.claims import works
from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, agreement
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import MEMORY
from repro.claims.values import pick, worst
from repro.claims.works import ZERO
from repro.experiments.shared.sharded_states import PART, RANKS

HELD = ["parameter_bytes", "gradient_bytes", "optimizer_bytes"]


def per_parameter(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Bytes a parameter, predicted and measured, a row per engine, ranks and metric."""
    rows = pick(frame, part=PART, metric=[*HELD, "sent_bytes"]).copy()
    rows["value"] = rows["value"] / rows["parameters"]
    keys = ["implementation", "ranks", "metric"]
    table = rows.pivot_table(index=keys, columns="source", values="value").reset_index()
    return table.reindex(columns=[*keys, "predicted", "measured"])


@claim(
    "ZeRO states",
    "a rank holds 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N, 16Ψ/N bytes (P_os, P_os+g, P_os+g+p)",
    ZERO,
    "Fig. 1",
    experiments=("several-ranks",),
    shown="sharded_states",
    conditions=f"{works.RANKS}, engines of PyTorch",
    overturn=(Scale(),),
)
def zero_states(frame: pandas.DataFrame) -> Finding:
    table = per_parameter(frame)
    held = pick(table, metric=HELD)
    known = len(table) and not held["measured"].isna().any()
    holds = worst(held["measured"] / held["predicted"]) if known else float("nan")
    return Finding(
        predicted="bytes of 5 engines",
        measured=f"{len(held)} values on {RANKS[0]} and {RANKS[1]} ranks, worst {holds - 1:+.3%}"
        if known
        else NOT_MEASURED,
        published="Fig. 1, Table 1",
        parts=[agreement("bytes held over the formula, worst", holds, 1, MEMORY, Evidence.OTHER)],
    )


@claim(
    "ZeRO volume",
    "a step moves 2Ψ elements, 3Ψ with sharded parameters",
    ZERO,
    "section 7",
    experiments=("several-ranks",),
    shown="sharded_states",
    conditions=f"{works.RANKS}, engines of PyTorch",
    overturn=(Scale({"metric": "transport_bytes"}),),
    compared=False,
)
def zero_volume(frame: pandas.DataFrame) -> Finding:
    table = per_parameter(frame)
    held, sent = pick(table, metric=HELD), pick(table, metric="sent_bytes")
    known = len(table) and not held["measured"].isna().any()
    below = pick(frame, part=PART, metric="transport_bytes", source="measured")
    # the paper's unit: elements of 2 bytes a parameter, times N / (N - 1)
    volume = below["value"] / below["parameters"] / 2 * below["ranks"] / (below["ranks"] - 1)
    moved = volume.groupby(below["implementation"]).max()
    claimed = {"data-parallel": 2, "fsdp2-zero-2": 2, "fsdp2-zero-3": 3}
    tensors = worst(sent["measured"] / sent["predicted"]) if known else float("nan")

    def of(engine: str) -> float:
        return float(moved.get(engine, float("nan")))

    tool = "at the sockets of gloo, headers included"
    return Finding(
        predicted=", ".join(f"{communication_volume(name)}Ψ" for name in ("data-parallel", "zero-2", "zero-3")),
        measured=", ".join(f"{of(e):.2f}Ψ" for e in claimed) + f" ({tool}); tensors given to "
        f"collectives, counted as rings would send them: {tensors - 1:+.2%} off"
        if known
        else NOT_MEASURED,
        published="2Ψ, 2Ψ, 3Ψ",
        parts=[
            *(
                agreement(
                    f"{engine}: elements at the sockets over {count}Ψ",
                    of(engine),
                    count,
                    MEMORY,
                    Evidence.OTHER,
                    limits=1.6 if engine.startswith("fsdp") else None,
                    why="gloo's reduce-scatter sends twice a ring's bytes",
                )
                for engine, count in claimed.items()
            )
        ],
    )


@claim(
    "torch P_os volume",
    "torch's P_os (ZeroRedundancyOptimizer) moves 3Ψ a step, where ZeRO says 2Ψ of P_os",
    works.OURS,
    experiments=("several-ranks",),
    shown="sharded_states",
    conditions="says nothing of ZeRO's own code: torch's optimiser under DDP all-reduces "
    "every gradient before its owners broadcast; gloo ranks of a CPU",
    overturn=(Scale({"implementation": "torch-zero-1", "metric": "transport_bytes"}),),
    compared=False,
)
def zero_volume_torch_p_os(frame: pandas.DataFrame) -> Finding:
    table = per_parameter(frame)
    held = pick(table, metric=HELD)
    known = len(table) and not held["measured"].isna().any()
    below = pick(frame, part=PART, metric="transport_bytes", source="measured")
    # the paper's unit: elements of 2 bytes a parameter, times N / (N - 1)
    volume = below["value"] / below["parameters"] / 2 * below["ranks"] / (below["ranks"] - 1)
    moved = volume.groupby(below["implementation"]).max()

    def of(engine: str) -> float:
        return float(moved.get(engine, float("nan")))

    tool = "at the sockets of gloo, headers included"
    torch_volume = communication_volume("torch-zero-1")
    return Finding(
        predicted=f"{torch_volume}Ψ: {' + '.join(SCHEDULES['torch-zero-1'])}",
        measured=f"{of('torch-zero-1'):.2f}Ψ ({tool})" if known else NOT_MEASURED,
        parts=[
            agreement(
                "elements at the sockets over 3Ψ, ZeroRedundancyOptimizer",
                of("torch-zero-1"),
                torch_volume,
                MEMORY,
                Evidence.OTHER,
            )
        ],
    )
