"""Bytes of model states and their communication: ZeRO (Rajbhandari et al. 2020) in formulas.

Ψ parameters cost 2Ψ bytes in 16 bits, their gradients 2Ψ, Adam in mixed precision KΨ with K = 12
(fp32 copy, momentum, variance). Stage 0 replicates all of it on each of N ranks; stage 1 (P_os)
shards the optimiser, stage 2 (P_os+g) gradients too, stage 3 (P_os+g+p) parameters too.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.arguments import checked, real

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class StateBytes:
    """Bytes a rank holds; fractions arise where the shards do not come out even."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All model states of a rank."""
        return self.parameters + self.gradients + self.optimizer


@checked
def model_state_bytes(
    parameters: float,
    ranks: int = 1,
    stage: int = 0,
    *,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> StateBytes:
    """Bytes of model states on each of ``ranks`` ranks (ZeRO, Section 5 and Fig. 1).

    The defaults are mixed-precision Adam, 16 bytes a parameter. An engine that keeps only fp32
    parameters between steps (FSDP2) has ``parameter_bytes=4, gradient_bytes=4, optimizer_bytes=8``.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {STAGES}, got {stage}")
    for name, value in (
        ("parameters", parameters),
        ("parameter_bytes", parameter_bytes),
        ("gradient_bytes", gradient_bytes),
        ("optimizer_bytes", optimizer_bytes),
    ):
        real(name, value, least=0)
    shared = [ranks if stage >= first else 1 for first in (3, 2, 1)]
    return StateBytes(
        parameters * parameter_bytes / shared[0],
        parameters * gradient_bytes / shared[1],
        parameters * optimizer_bytes / shared[2],
    )


@checked
def largest_model(memory_bytes: float, ranks: int, stage: int) -> float:
    """Parameters whose model states fill ``memory_bytes`` on each rank (ZeRO, Table 2)."""
    return real("memory_bytes", memory_bytes, least=0) / model_state_bytes(1, ranks, stage).total


#: Times a ring passes the tensor around, except for the share a rank keeps.
RING_PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1, "reduce": 1}


@checked
def ring_sent_bytes(collective: str, nbytes: float, ranks: int) -> float:
    """Bytes each rank sends when a collective runs as a ring on a tensor of ``nbytes`` (full size).

    A reduce-scatter or an all-gather sends (N-1)/N of the tensor, an all-reduce is both. A
    broadcast or a reduce has one root; over pieces whose roots are spread evenly, each rank sends
    what an all-gather or a reduce-scatter would, and that is what is counted.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    share = real("nbytes", nbytes, least=0) * (ranks - 1) / ranks
    if collective not in RING_PASSES:
        raise ValueError(f"collective must be one of {sorted(RING_PASSES)}, got {collective!r}")
    return RING_PASSES[collective] * share


#: What a step needs, in passes over Ψ elements (ZeRO, Section 7): collective -> number of passes.
SCHEDULES: dict[str, dict[str, int]] = {
    "data-parallel": {"all_reduce": 1},
    # The paper's P_os and P_os+g: reduce-scatter the gradients, all-gather the parameters.
    "zero-1": {"reduce_scatter": 1, "all_gather": 1},
    "zero-2": {"reduce_scatter": 1, "all_gather": 1},
    # The same with a root for each parameter instead of shards.
    "zero-2-by-parameter": {"reduce": 1, "broadcast": 1},
    # Parameters are gathered for the forward and again for the backward.
    "zero-3": {"reduce_scatter": 1, "all_gather": 2},
    # torch's ZeroRedundancyOptimizer under DistributedDataParallel: the gradients are all-reduced
    # in full, then each owner broadcasts its parameters, so it moves more than the paper's P_os.
    "torch-zero-1": {"all_reduce": 1, "broadcast": 1},
}


@checked
def communication_volume(schedule: str) -> int:
    """Elements a step moves, in units of Ψ, as the paper counts: 2 (or 3 for P_os+g+p)."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {sorted(SCHEDULES)}, got {schedule!r}")
    return sum(RING_PASSES[name] * times for name, times in SCHEDULES[schedule].items())


@checked
def step_sent_bytes(schedule: str, parameters: float, itemsize: float, ranks: int) -> float:
    """Bytes each rank sends in one step; tends to ``communication_volume`` x Ψ x itemsize."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {sorted(SCHEDULES)}, got {schedule!r}")
    for name, value in (("parameters", parameters), ("itemsize", itemsize)):
        real(name, value, least=0)
    return sum(
        times * ring_sent_bytes(name, parameters * itemsize, ranks) for name, times in SCHEDULES[schedule].items()
    )


@dataclass(frozen=True)
class HostOptimizerStep:
    """Optimiser states on the host: what stays on the device, what moves, how long a step takes."""

    device_bytes: float
    host_bytes: float
    bytes_out: float
    bytes_in: float
    update_s: float
    transfer_s: float


def host_streamed_bytes(parameter_bytes: float = 2, gradient_bytes: float = 2) -> float:
    """Bytes a parameter that an update streams through host memory: 2 g + 2 x 12 + 2 p.

    The gradient arrives (written) and is read, 2 g. Adam reads weight, momentum and variance and
    writes them, 4 bytes each, 2 x 12. The new parameter is written and read to leave, 2 p. The
    update goes slice by slice, so what is used again at once stays in cache and adds nothing: the
    gradient widened to fp32 and the new weight, which is narrowed as soon as it is there.
    """
    return 2 * gradient_bytes + 2 * (3 * 4) + 2 * parameter_bytes


def host_optimizer_step(
    parameters: float,
    *,
    link_bytes_per_s: float,
    host_bytes_per_s: float,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
) -> HostOptimizerStep:
    """Keep Adam's 12 bytes a parameter on the host: gradients come down, parameters go up.

    The update streams its operands once, so it is bound by host memory bandwidth. The two transfer
    directions and the update overlap at best; one after the other at worst.
    """
    streamed = parameters * host_streamed_bytes(parameter_bytes, gradient_bytes)
    moved = parameters * (gradient_bytes + parameter_bytes)
    return HostOptimizerStep(
        device_bytes=parameters * (parameter_bytes + gradient_bytes),
        host_bytes=parameters * 12,
        bytes_out=parameters * gradient_bytes,
        bytes_in=parameters * parameter_bytes,
        update_s=streamed / host_bytes_per_s,
        transfer_s=moved / link_bytes_per_s,
    )
