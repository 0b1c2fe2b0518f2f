"""Choosing a plan for a model, and the model that follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from analysis import checkpointing as theory
from analysis.checkpointing import Chain, Plan, Replay, Schedule, simulate

from .executor import PlannedFunction, Run
from .profiling import Profile, profile
from .replay import State

#: Planners by name.  Those in NEEDS_BUDGET take budget_bytes.
STRATEGIES: dict[str, Callable[..., Plan]] = {
    "store-all": theory.store_all,
    "recompute-all": theory.recompute_all,
    "uniform": theory.uniform,  # segments=
    "every": theory.every,  # stages=
    "sqrt": theory.sqrt,
    "exponential": theory.exponential,
    "exponential-recursive": theory.exponential_recursive,
    "recursive": theory.chen_recursive,  # k=
    "chen-search": theory.chen_search,
    "revolve": theory.revolve,  # states=
    "selective": theory.selective,  # kinds=
    "greedy": theory.greedy,
    "optimal": theory.optimal,
}
NEEDS_BUDGET = frozenset({"greedy", "optimal"})


class PlannedModel(nn.Module):
    """A sequential model that trains by a schedule.

    Call it as the model; gradients are the model's, bit for bit.  `predicted` is what the simulator
    says the schedule costs; `last_run` the latest step's executor with its counts.
    """

    def __init__(
        self,
        model: Any,
        profiled: Profile,
        schedule: Schedule,
        *,
        name: str = "schedule",
        preserve_rng_state: bool = True,
        link_bytes_per_s: float | None = None,
    ) -> None:
        super().__init__()
        self.model = model if isinstance(model, nn.Module) else None
        self.parts = nn.ModuleList(s for s in profiled.stages if isinstance(s, nn.Module))
        self.stages, self.chain, self.schedule = profiled.stages, profiled.chain, schedule
        self.name, self.preserve_rng_state = name, preserve_rng_state
        self.predicted: Replay = simulate(
            profiled.chain, schedule, link_bytes_per_s=link_bytes_per_s
        )
        self._shared = list(profiled.shared)
        self.last_run: Run | None = None

    @property
    def predicted_peak_bytes(self) -> int:
        """Activations, interiors, gradients and temporaries at the peak, the input included.

        Parameters and their gradients count as there already; of parameters that several stages
        share, the sum of this step's gradients is held beside an existing .grad.
        """
        shared = sum(p.numel() * p.element_size() for p in self._shared if p.requires_grad)
        return self.predicted.peak_bytes + shared

    def forward(self, *inputs: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return _plain(self.stages, inputs)
        run = Run(self.stages, self.schedule, preserve_rng_state=self.preserve_rng_state)
        self.last_run = run
        anchor = torch.empty(0, requires_grad=True)
        outputs = PlannedFunction.apply(run, self._shared, anchor, *inputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def explain(self) -> str:
        """One line: what the schedule costs, against storing everything."""
        all_stored = theory.store_all(self.chain)
        mib = 1 / 2**20
        return (
            f"{self.name}: peak {self.predicted_peak_bytes * mib:.1f} MiB "
            f"(store all {all_stored.peak_bytes * mib:.1f} MiB), "
            f"{self.predicted.forwards} stage forwards for {len(self.chain)} stages, "
            f"{self.predicted.seconds * 1e3:.1f} ms (store all {all_stored.seconds * 1e3:.1f} ms)"
        )


def _plain(stages: tuple, state: State) -> Any:
    result: Any = state
    for stage in stages:
        result = stage(*result) if isinstance(result, tuple) else stage(result)
    return result[0] if isinstance(result, tuple) and len(result) == 1 else result


def plan(
    model: Any,
    sample: Tensor | State,
    *,
    budget_bytes: int | None = None,
    strategy: str | None = None,
    profiled: Profile | None = None,
    preserve_rng_state: bool = True,
    repeats: int = 3,
    **options: Any,
) -> PlannedModel:
    """Plan the training of a sequential model.

    model: nn.Sequential, an object with a stages() method, or an iterable of callables
    sample: one input, a tensor or a tuple of tensors, of the shapes to train on
    budget_bytes: most that activations and their gradients may take at once, beyond parameters and
        parameter gradients; the fastest plan that fits is chosen
    strategy: a name from STRATEGIES instead, with its own options (segments=, states=, k=, ...)
    profiled: an earlier profile() of the same model and sample

    Raises ValueError for an unknown strategy or a missing budget, InfeasibleBudgetError (a
    ValueError that names the smallest feasible budget) when nothing fits.
    """
    if strategy is None:
        if budget_bytes is None:
            raise ValueError("neither budget_bytes nor strategy was given")
        strategy = "optimal"
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is not one of {sorted(STRATEGIES)}")
    if (strategy in NEEDS_BUDGET) != (budget_bytes is not None):
        wants = "needs" if strategy in NEEDS_BUDGET else "takes no"
        raise ValueError(f"strategy {strategy!r} {wants} budget_bytes, got {budget_bytes}")
    found = profiled or profile(model, sample, repeats=repeats)
    chosen = choose(found.chain, strategy, budget_bytes, **options)
    return PlannedModel(
        model, found, chosen.schedule, name=chosen.name, preserve_rng_state=preserve_rng_state
    )


def choose(chain: Chain, strategy: str, budget_bytes: int | None = None, **options: Any) -> Plan:
    """The plan of a strategy for a chain."""
    if budget_bytes is not None:
        options["budget_bytes"] = budget_bytes
    return STRATEGIES[strategy](chain, **options)
