"""``python -m repro plan``: how to train a model within a memory budget by recomputing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from analysis.rank_memory import Ranks
from repro.commands import output, sweep
from repro.commands.chains import PRESETS, Resident, chain_of, imported, is_whole, layer_names
from repro.measuring.images import UNSAID, own_look, settle
from repro.measuring.progress import counter

if TYPE_CHECKING:
    from analysis.checkpointing import Chain, Plan

#: Budgets of the Pareto curve, as shares of the way from the smallest budget to store-all.
STEPS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def command(
    model: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(PRESETS)}; gpt or llama with --hidden, --layers, --heads of your "
            "own; chain-64 (64 equal stages); or module:name of a "
            "(model, sample) pair, a (model, arguments, keyword arguments) triple, a Chain, or a "
            "function that gives one"
        ),
    ],
    budget: Annotated[
        str | None, typer.Option(help="most bytes of activations, as 8GiB or 30% (of storing everything)")
    ] = None,
    total_budget: Annotated[
        str | None,
        typer.Option(
            help="most bytes of everything: activations, logits, and weights, gradients and "
            "optimiser states (--bytes-a-parameter each)"
        ),
    ] = None,
    bytes_a_parameter: Annotated[float, typer.Option(min=0, help="16: Adam, in mixed precision or in fp32")] = 16.0,
    strategy: Annotated[
        str | None, typer.Option(help="one planner, e.g. sqrt, optimal; default: all, compared")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="named models: micro-batch")] = 1,
    seqlen: Annotated[int | None, typer.Option(min=1, help="named models: sequence")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="named models: layers")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="named models: hidden size")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="named models: heads of q")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="llama kind: of k and v")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="llama kind: of a head (default: hidden / heads)")] = None,
    ffn: Annotated[int | None, typer.Option(min=1, help="llama kind: width of the MLP")] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="named models: vocabulary")] = None,
    tied: Annotated[bool, typer.Option("--tied", help="llama kind: the logits use the embedding")] = False,
    attention: Annotated[str, typer.Option(help="named models: flash or standard")] = "flash",
    data: Annotated[int, typer.Option(min=1, help="named models: data parallel ranks")] = 1,
    tensor: Annotated[int, typer.Option(min=1, help="named models: tensor parallel ranks")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="named models: pipeline stages (1F1B)")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="tensor ranks share out the norms too")
    ] = False,
    zero: Annotated[
        int,
        typer.Option(min=0, max=3, help="data parallel ranks shard the optimiser (1), gradients (2), parameters (3)"),
    ] = 0,
    microbatches: Annotated[int | None, typer.Option(min=1, help="of a step (default: the pipeline's stages)")] = None,
    gpu: Annotated[str, typer.Option(help="named models: the time model of predict for it")] = "H200",
    repeats: Annotated[int, typer.Option(min=0, help="imported models: timed runs per stage; 0 counts stages")] = 3,
    actions: Annotated[bool, typer.Option(help="also print the schedule, action by action")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw memory against time to this .svg, .png or .pdf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="plans with their schedules")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="a line per plan")] = False,
) -> None:
    """Plan the recomputation of a model: schedule, predicted peak and overhead, trade-off.

    Without a budget every planner is compared. With one, the fastest plan that fits is shown; a
    budget below the least possible is an error that names it.
    """
    output.require_one_format(as_json, as_csv)
    if plot is not None and plot.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"--plot {plot}: expected a name ending in .svg, .png or .pdf")
    found = imported(model) if ":" in model else None
    if found is not None and is_whole(found):
        if strategy is not None or plot is not None or actions or as_csv:
            raise ValueError(
                f"model {model!r} is planned by whole blocks: --strategy, --plot, --actions and "
                "--csv are for chains of stages"
            )
        whole(model, found, budget, total_budget, bytes_a_parameter, repeats, as_json)
        return
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": ffn,
        "vocab": vocab,
        "seqlen": seqlen,
        "tied": tied or None,
    }
    ranks = Ranks(data, tensor, pipeline, sequence_parallel, zero, microbatches)
    chain = chain_of(
        model, found=found, repeats=repeats, batch=batch, attention=attention, gpu=gpu, ranks=ranks, **sizes
    )
    rest = Resident.of(model, batch, bytes_a_parameter, sizes, ranks) if total_budget else None
    from analysis.checkpointing import store_all

    everything = store_all(chain)
    if rest is not None:
        if budget is not None:
            raise ValueError(f"--budget {budget} and --total-budget {total_budget}: give one")
        budget = f"{rest.left(sweep.byte_count(str(total_budget), '--total-budget'))}B"
    budget_bytes = None if budget is None else _budget(budget, everything.peak_bytes)
    plans = find_plans(chain, strategy, budget_bytes)
    if plot is not None:
        draw(chain, plans if strategy is None else [*plans, *pareto(chain)], plot, model)
    rows = [row(chain, plan, everything.peak_bytes) for plan in plans]
    if as_csv:
        output.print_csv(rows)
        return
    chosen = min(plans, key=lambda p: (p.seconds, p.peak_bytes)) if budget or strategy else None
    if as_json:
        for found, plan in zip(rows, plans, strict=True):
            if chosen is None or plan is chosen:
                found["schedule"] = [str(action) for action in plan.schedule]
        known = {} if rest is None else asdict(rest)
        output.print_json({"model": model, "stages": len(chain), "budget_bytes": budget_bytes, **known, "plans": rows})
        return
    if rest is not None:
        print(f"--total-budget {total_budget}: {rest}")
    _tables(model, chain, rows, budget_bytes)
    if chosen is not None:
        describe(chain, chosen, actions)
        if budget_bytes is not None and pipeline == 1:
            _whole_layers(model, chain, budget_bytes)
    elif actions:
        raise ValueError("--actions needs a --budget or a --strategy to choose one plan")


def _whole_layers(model: str, chain: Chain, budget_bytes: int) -> None:
    """The same budget by recomputing whole layers, as torch alone does it, with code."""
    from analysis.checkpointing import InfeasibleBudgetError, Keep, Op, greedy
    from analysis.checkpointing.modules import checkpoint_code, layers_of

    names = layer_names(model, len(chain) // 2)
    if names is None:
        return
    layers = layers_of(chain, 2)
    try:
        plan = greedy(layers, budget_bytes)
    except InfeasibleBudgetError as error:
        print(f"\nby whole layers it does not fit: that takes {output.of_bytes(error.smallest_budget_bytes)} at least")
        return
    again = sorted({a.stage for a in plan.schedule if a.op is Op.FORWARD and a.keep is not Keep.ALL})
    if not again:
        return
    found = row(layers, plan, plan.peak_bytes)
    print(
        f"\nby whole layers: recompute {len(again)} of {len(layers)}, peak {output.of_bytes(plan.peak_bytes)}", end=""
    )
    print(f", {found['overhead']:+.1%} time; for a model of transformers:\n")
    print(checkpoint_code([names[stage - 1] for stage in again]), end="")


def whole(
    name: str,
    found: tuple[Any, ...],
    budget: str | None,
    total_budget: str | None,
    bytes_a_parameter: float,
    repeats: int,
    as_json: bool,
) -> None:
    """Plan a model that its own forward calls: which blocks to recompute, and code that does it."""
    from repro.checkpointing import plan_blocks

    if (budget is None) == (total_budget is None):
        raise ValueError(f"model {name!r} needs one of --budget and --total-budget")
    activations = None if budget is None else sweep.byte_count(budget, "--budget")
    everything = None if total_budget is None else sweep.byte_count(total_budget, "--total-budget")
    model, args, *rest = found
    with counter(f"profiling {name}") as progress:
        plan = plan_blocks(
            model,
            args,
            rest[0] if rest else None,
            budget_bytes=activations,
            total_budget_bytes=everything,
            bytes_a_parameter=bytes_a_parameter,
            repeats=repeats,
            progress=progress,
        )
    if as_json:
        limits = {"budget_bytes": activations, "total_budget_bytes": everything}
        output.print_json({"model": name, **limits, **plan.to_json()})
        return
    given = (
        f"--budget {budget}, of activations"
        if budget
        else (
            f"--total-budget {total_budget}, with {plan.resident_bytes:,} bytes of weights, gradients "
            "and optimiser states"
        )
    )
    print(f"{plan}\n({given})")
    if plan.recompute:
        print(f"\n{plan.code()}", end="")


def _budget(text: str, everything: int) -> int:
    if text.endswith("%"):
        try:
            share = float(text[:-1]) / 100
        except ValueError:
            share = -1.0
        if not 0 < share <= 1:
            raise ValueError(f"--budget {text!r}: a share must be above 0 % and at most 100 %")
        return int(share * everything)
    return sweep.byte_count(text, "--budget")


def find_plans(chain: Chain, strategy: str | None, budget_bytes: int | None) -> list[Plan]:
    """The plans to show, least memory first.

    Raises ValueError for an unknown strategy, one that lacks its budget, or a budget too small.
    """
    from analysis.checkpointing import optimal, store_all
    from analysis.checkpointing.optimal import heuristic_plans

    if strategy is not None:
        from repro.checkpointing import STRATEGIES, choose
        from repro.checkpointing.planned import NEEDS_BUDGET

        if strategy not in STRATEGIES:
            raise ValueError(f"no strategy {strategy!r}; known: {', '.join(STRATEGIES)}")
        if strategy in NEEDS_BUDGET:
            if budget_bytes is None:
                raise ValueError(f"strategy {strategy!r} needs a --budget")
            return [choose(chain, strategy, budget_bytes)]
        plan = choose(chain, strategy, **_defaults(chain, strategy))
        if budget_bytes is not None and plan.peak_bytes > budget_bytes:
            raise ValueError(
                f"{plan.name} peaks at {plan.peak_bytes} bytes, the budget is {budget_bytes}; "
                "--strategy optimal finds what fits"
            )
        return [plan]
    if budget_bytes is not None:
        best = optimal(chain, budget_bytes)  # raises where nothing fits
        others = [p for p in heuristic_plans(chain) if p.peak_bytes <= budget_bytes]
        return _sorted([best, *others])
    return _sorted([store_all(chain), *heuristic_plans(chain), *pareto(chain)])


def _defaults(chain: Chain, strategy: str) -> dict[str, Any]:
    """Options that a planner needs and the command line has no field for."""
    half = max(1, len(chain) // 2)
    options: dict[str, dict[str, Any]] = {
        "uniform": {"segments": half},
        "every": {"stages": 2},
        "revolve": {"states": max(2, round(len(chain) ** 0.5))},
        "selective": {"kinds": {"attention"}},
    }
    return options.get(strategy, {})


def pareto(chain: Chain) -> list[Plan]:
    """The optimal planner at budgets between the smallest that works and storing everything."""
    from dataclasses import replace

    from analysis.checkpointing import optimal, smallest_budget, store_all

    low, high = smallest_budget(chain), store_all(chain).peak_bytes
    budgets = sorted({low + round(step * (high - low)) for step in STEPS})
    found = [optimal(chain, budget) for budget in budgets]
    return [replace(plan, name=f"optimal within {output.of_bytes(b)}") for plan, b in zip(found, budgets, strict=True)]


def _sorted(plans: Sequence[Plan]) -> list[Plan]:
    """Least memory first; of plans that cost the same the first named."""
    seen: dict[tuple[int, float], Plan] = {}
    for plan in plans:
        seen.setdefault((plan.peak_bytes, plan.seconds), plan)
    return sorted(seen.values(), key=lambda p: (p.peak_bytes, p.seconds))


def row(chain: Chain, plan: Plan, everything: int) -> dict[str, Any]:
    """A plan's numbers; overhead is extra time over a step that recomputes nothing."""
    least = chain.forward_s + chain.backward_s
    return {
        "plan": plan.name,
        "peak_bytes": plan.peak_bytes,
        "peak_share": plan.peak_bytes / everything,
        "forwards": plan.forwards,
        "advances": plan.advances,
        "seconds": plan.seconds,
        "overhead": plan.seconds / least - 1 if least else 0.0,
    }


def front(rows: Sequence[dict[str, Any]]) -> list[bool]:
    """Whether no other plan is at most as slow with less memory; rows sorted by memory."""
    best, marks = float("inf"), []
    for one in rows:
        marks.append(one["seconds"] < best)
        best = min(best, one["seconds"])
    return marks


def _tables(model: str, chain: Chain, rows: Sequence[dict[str, Any]], budget_bytes: int | None) -> None:
    limit = f", budget {output.of_bytes(budget_bytes)}" if budget_bytes is not None else ""
    print(
        f"{model}: {len(chain)} stages, one step without recomputation "
        f"{output.of_seconds(chain.forward_s + chain.backward_s)}{limit}\n"
    )
    output.print_table(
        ["", "plan", "peak", "of store-all", "forward runs", "overhead"],
        [
            [
                "*" if mark else "",
                r["plan"],
                output.of_bytes(r["peak_bytes"]),
                f"{r['peak_share']:.1%}",
                r["forwards"],
                f"{r['overhead']:+.1%}",
            ]
            for r, mark in zip(rows, front(rows), strict=True)
        ],
    )
    if len(rows) > 1:
        print("* no other plan here is as fast with less memory")


def describe(chain: Chain, plan: Plan, actions: bool) -> None:
    """Replays the plan with the simulator, which knows no planner, and says what it does."""
    from analysis.checkpointing import simulate

    replay = simulate(chain, plan.schedule)
    print(
        f"\n{plan.name}: {len(plan.schedule)} actions; replayed: peak "
        f"{output.of_bytes(replay.peak_bytes)} at action {replay.peak_index} "
        f"({plan.schedule[replay.peak_index]})"
    )
    for runs in sorted(set(replay.forwards_by_stage)):
        stages = [i for i, n in enumerate(replay.forwards_by_stage, start=1) if n == runs]
        times = {1: "once", 2: "twice"}.get(runs, f"{runs} times")
        print(f"  forward {times}: stages {_ranges(stages)}")
    if actions:
        for index, action in enumerate(plan.schedule):
            print(f"{index:6}  {action}  {output.of_bytes(replay.live_bytes[index])}")


def _ranges(numbers: Sequence[int]) -> str:
    """1-4, 6, 8-9."""
    breaks = [0] + [i for i, (a, b) in enumerate(pairwise(numbers), start=1) if b != a + 1]
    parts = [numbers[a:b] for a, b in zip(breaks, [*breaks[1:], len(numbers)], strict=True)]
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def draw(chain: Chain, plans: Sequence[Plan], path: Path, title: str) -> None:
    """Memory against overhead: the optimal planner as a line, the others as points."""
    import matplotlib

    matplotlib.use("Agg")
    with own_look():
        _draw(chain, plans, path, title)


def _draw(chain: Chain, plans: Sequence[Plan], path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    least = chain.forward_s + chain.backward_s
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    points = [(p.peak_bytes / 1e9, 100 * (p.seconds / least - 1), p.name) for p in _sorted(plans)]
    line = [p for p in points if p[2].startswith("optimal")]
    axes.step([p[0] for p in line], [p[1] for p in line], where="post", color="#009E73", label="optimal")
    rest = [p for p in points if not p[2].startswith("optimal")]
    axes.plot([p[0] for p in rest], [p[1] for p in rest], "o", color="#0072B2", label="heuristics")
    for x, y, name in rest:
        axes.annotate(name, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=6.5)
    axes.set(xlabel="peak of activations (GB)", ylabel="extra time (%)", title=title)
    axes.set_xscale("log")
    axes.legend(frameon=False)
    settle(figure)
    try:
        figure.savefig(path, metadata=UNSAID[path.suffix[1:]])
    except OSError as error:
        raise ValueError(f"--plot {path}: {error.strerror}") from None
