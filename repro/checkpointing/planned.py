"""Choosing a plan for a model, and the model that follows it."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from analysis import checkpointing as theory
from analysis.arguments import byte_count, flag
from analysis.checkpointing import Chain, Plan, Replay, Schedule, simulate

from .arguments import check_options, check_sample, refuse_unreal
from .executor import Counts, Program, Run
from .joining import Joined
from .profiling import Profile, profile
from .replay import autocast_now
from .stage_parts import modules_of, parameters_of
from .values import StageFn, plain, single
from .verification import Verification, verify

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

    Call it as the model; its graph, and so its gradients, are the model's, bit for bit, wherever
    running a stage again gives the same bits: results and saved tensors of every repeated run are
    compared with the first one's (`check_recompute`) and a difference raises.  Modules, parameters,
    buffers and state_dict are the model's own, under its names.  `predicted` is what the simulator
    says the schedule costs; `last_run.forwards[l]` how often the latest step ran stage l.

    retain_graph=True keeps what was recomputed, as the plain model keeps what it saved.  Forward
    hooks of modules inside run each time their stage does.  torch.func transforms and tracing
    (torch.fx, torch.jit, torch.export) raise; torch.compile leaves the planned model as it is.
    """

    model: nn.Module | None
    stages: tuple[StageFn, ...]
    chain: Chain
    schedule: Schedule
    name: str
    profiled: Profile
    predicted: Replay
    last_run: Counts | None
    verification: Verification | None
    _program: Program
    _warned: bool

    def __init__(
        self,
        model: Any,
        profiled: Profile,
        schedule: Schedule,
        *,
        name: str = "schedule",
        preserve_rng_state: bool = True,
        check_recompute: bool = True,
        link_bytes_per_s: float | None = None,
    ) -> None:
        super().__init__()
        # Straight into __dict__: a part of the model may have one of these names too.
        self.__dict__.update(
            model=model if isinstance(model, nn.Module) else None,
            stages=profiled.stages,
            chain=profiled.chain,
            schedule=schedule,
            name=name,
            profiled=profiled,
            predicted=simulate(profiled.chain, schedule, link_bytes_per_s=link_bytes_per_s),
            last_run=None,
            verification=None,
            _warned=False,
            _program=Program(
                profiled.stages,
                schedule,
                unpack=profiled.unpack,
                inner=profiled.inner,
                preserve_rng_state=preserve_rng_state,
                check_recompute=check_recompute,
            ),
        )
        self._share(profiled.stages)

    def _share(self, stages: tuple[StageFn, ...]) -> None:
        """Take the model's registered parts over, under its own names: no weight has two."""
        if self.model is not None:
            self.training = self.model.training
            for place in _REGISTERED:
                self.__dict__[place] = self.model.__dict__[place]
        else:
            parts = [module for stage in stages for module in modules_of(stage)]
            self.parts = nn.ModuleList(dict.fromkeys(parts))

    @property
    def predicted_peak_bytes(self) -> int:
        """Activations, interiors, gradients and temporaries at the peak, the input included.

        Parameters and their gradients count as there already; of parameters that several stages
        share, the sum of this step's gradients is held beside an existing .grad.  Weights that
        autocast has cast count for the whole step, though its cache gives them up where autocast
        ends: with autocast this is an upper bound.
        """
        return self.profiled.peak_bytes(self.schedule, self.predicted)

    def train(self, mode: bool = True) -> Self:
        if self.model is not None:
            self.model.train(mode)
        return super().train(mode)

    def forward(self, *inputs: Any) -> Any:
        _refuse_tracing(inputs)
        return self._forward(*inputs)

    @torch.compiler.disable(reason="a planned model runs stages again while it goes backward; compile its stages")
    def _forward(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(self.stages, inputs, self.profiled.unpack)
        leaves = _pytree.tree_leaves(inputs)
        refuse_unreal("the input", [leaf for leaf in leaves if isinstance(leaf, Tensor)])
        self._warn_of_autocast()
        run = Run(self._program)
        self.__dict__["last_run"] = run.counts
        return single(run.forward(inputs), self.profiled.unpack)

    def _warn_of_autocast(self) -> None:
        if self._warned:
            return
        planned = {kind: dtype for kind, on, dtype in self.profiled.autocast if on}
        kinds = [kind for kind, _, _ in self.profiled.autocast]
        now = {kind: dtype for kind, on, dtype in autocast_now(tuple(kinds)) if on}
        if planned != now:
            self.__dict__["_warned"] = True
            warnings.warn(
                f"planned under {_autocast_text(planned)}, trained under {_autocast_text(now)}: "
                "gradients are right, the predicted peak is not; call plan() under the same "
                "autocast",
                stacklevel=4,
            )

    def verify(self, *inputs: Any) -> Verification:
        """Run one step on `inputs` both ways and compare; weights, gradients, buffers and random
        state are left as they were.  See `repro.checkpointing.verify`."""
        return verify(self, inputs)

    def explain(self) -> str:
        """One line: what the schedule costs, against storing everything."""
        all_stored = theory.store_all(self.chain)
        all_bytes = self.profiled.peak_bytes(all_stored.schedule)
        mib = 1 / 2**20
        return (
            f"{self.name}: peak {self.predicted_peak_bytes * mib:.1f} MiB "
            f"(store all {all_bytes * mib:.1f} MiB), "
            f"{self.predicted.forwards} stage forwards for {len(self.chain)} stages, "
            f"{self.predicted.seconds * 1e3:.1f} ms (store all {all_stored.seconds * 1e3:.1f} ms)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedModel:
        """TypeError where a stage is a function that uses modules: a copy of it would use the
        same modules."""
        for stage in self.stages:
            parts = stage.parts if isinstance(stage, Joined) else (stage,)
            for part in parts:
                if isinstance(part, types.FunctionType) and modules_of(part):
                    raise TypeError(
                        f"stage {part.__qualname__} is a function that refers to modules, so a "
                        "copy of this planned model would train the original's weights: make "
                        "the stage a module, or copy the model and plan the copy"
                    )
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


#: Where nn.Module keeps what belongs to it.
_REGISTERED = (
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def _autocast_text(types: dict[str, torch.dtype]) -> str:
    return ", ".join(f"{kind} autocast to {dtype}" for kind, dtype in types.items()) or "no autocast"


def _refuse_tracing(inputs: tuple[Any, ...]) -> None:
    """RuntimeError for what cannot follow a plan, naming what can."""
    way_out = "use the model that was planned (planned.model) for that"
    if any(isinstance(leaf, torch.fx.Proxy) for leaf in _pytree.tree_leaves(inputs)):
        raise RuntimeError(f"torch.fx cannot trace a planned model: {way_out}")
    if torch.jit.is_tracing() or torch.jit.is_scripting():
        raise RuntimeError(f"torch.jit cannot trace a planned model: {way_out}")
    if torch.compiler.is_exporting():
        raise RuntimeError(f"torch.export cannot trace a planned model: {way_out}")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "torch.func transforms (grad, hessian, vmap, jvp, ...) cannot go through a planned "
            f"model, which runs stages again by saved-tensor hooks: {way_out}, or "
            "torch.autograd.functional, which works here"
        )


def plan(
    model: Any,
    sample: Any,
    *,
    budget_bytes: int | None = None,
    strategy: str | None = None,
    profiled: Profile | None = None,
    preserve_rng_state: bool = True,
    check_recompute: bool = True,
    verify: bool = False,
    repeats: int = 3,
    **options: Any,
) -> PlannedModel:
    """Plan the training of a sequential model.

    model: nn.Sequential, an object with a stages() method, or an iterable of callables
    sample: one input, a tensor or a tuple of arguments, of the shapes to train on
    budget_bytes: most that activations and their gradients may take at once, beyond parameters and
        parameter gradients; the fastest plan that fits is chosen
    strategy: a name from STRATEGIES instead, with its own options (segments=, states=, k=, ...)
    profiled: an earlier profile() of the same model and sample
    check_recompute: compare results of every repeated run, and what it saves for the backward, with
        the first run's, by a hash over all elements (one pass over each where it lies); without it
        a stage that does not do the same each time gives wrong gradients without a word
    verify: run one step on `sample` both ways; the report is `planned.verification`, and a warning
        where gradients or the peak are not as promised

    A model's stages are called one after the other; what happens between them in its own forward
    is not seen, which verify=True would notice.  Plan in the state in which the model trains:
    mode, autocast, device.

    Raises, before anything runs, TypeError for arguments of another kind, ValueError for an unknown
    strategy, an impossible value, a missing budget or option. What only the profiled chain tells is
    said after that: ValueError for more segments than it has stages, kinds that none has, or a
    stage to run again that changes what nobody puts back; InfeasibleBudgetError (a ValueError that
    names the smallest feasible budget) when nothing fits; RuntimeError for a stage that goes on
    from a result of an earlier run with its graph.
    """
    if strategy is None:
        if budget_bytes is None:
            raise ValueError("neither budget_bytes nor strategy was given")
        strategy = "optimal"
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is not one of {sorted(STRATEGIES)}")
    if budget_bytes is not None:
        budget_bytes = byte_count("budget_bytes", budget_bytes)
    if (strategy in NEEDS_BUDGET) != (budget_bytes is not None):
        wants = "needs" if strategy in NEEDS_BUDGET else "takes no"
        raise ValueError(f"strategy {strategy!r} {wants} budget_bytes, got {budget_bytes}")
    check_options(strategy, STRATEGIES[strategy], options)
    check_sample(sample)
    for name, value in (
        ("preserve_rng_state", preserve_rng_state),
        ("verify", verify),
        ("check_recompute", check_recompute),
    ):
        flag(name, value)
    if profiled is not None:
        _require_same_model(model, profiled)
    found = profiled or profile(model, sample, repeats=repeats)
    if budget_bytes is None:
        chosen = choose(found.chain, strategy, **options)
    else:
        chosen = found.plan_within(lambda budget: choose(found.chain, strategy, budget, **options), budget_bytes)
    planned = PlannedModel(
        model,
        found,
        chosen.schedule,
        name=chosen.name,
        preserve_rng_state=preserve_rng_state,
        check_recompute=check_recompute,
    )
    if check_recompute:
        found.refuse_changes(
            planned._program.repeated, "strategy='store-all', or check_recompute=False if that does not matter"
        )
    if verify:
        report = planned.verify(*(sample if isinstance(sample, tuple) else (sample,)))
        planned.__dict__["verification"] = report
        if not report.as_promised:
            warnings.warn(str(report), stacklevel=2)
    return planned


def _require_same_model(model: Any, profiled: Profile) -> None:
    """ValueError for a profile with a stage none of whose weights are the model's."""
    if not isinstance(model, nn.Module):
        return
    own = set(model.parameters())
    for stage in profiled.stages:
        weights = parameters_of(stage)
        if weights and own.isdisjoint(weights):
            raise ValueError(
                f"profiled has a stage {type(stage).__name__} with no weight of this "
                f"{type(model).__name__}: profile() the model that is planned"
            )


def choose(chain: Chain, strategy: str, budget_bytes: int | None = None, **options: Any) -> Plan:
    """The plan of a strategy for a chain."""
    if budget_bytes is not None:
        options["budget_bytes"] = budget_bytes
    return STRATEGIES[strategy](chain, **options)
