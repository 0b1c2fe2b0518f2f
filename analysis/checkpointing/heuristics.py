"""Planners that do not look at costs, or only at sizes: each returns a Plan for any chain.

Chen et al. 2016 (1604.06174) is "Chen" below; the exponential spacing is the study notes' (K7).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from analysis.arguments import names, whole

from .chain import Chain
from .plan_tree import Node, Plan, PlanBuilder, plan_of


def store_all(chain: Chain) -> Plan:
    """Keep everything: O(L) memory, no forward run twice."""
    build = PlanBuilder(chain)
    return plan_of("store all", build, build.keep_all(1, len(chain)))


def recompute_all(chain: Chain) -> Plan:
    """Keep a_0 only and run forward from it for every stage: O(1) memory, L(L+1)/2 forwards."""
    build = PlanBuilder(chain)
    node = build.keep(1)
    for stage in range(2, len(chain) + 1):
        node = build.split(1, build.keep(stage), node)
    return plan_of("recompute all", build, node)


def segment_starts(length: int, segments: int) -> list[int]:
    """First stages of `segments` contiguous parts of 1..length whose sizes differ by at most 1.

    Raises ValueError when segments is not in 1..length.
    """
    segments = whole("segments", segments)
    if not 1 <= segments <= length:
        raise ValueError(f"{segments} segments for {length} stages: need 1 <= segments <= stages")
    return [1 + (length * part) // segments for part in range(segments)]


def uniform(chain: Chain, segments: int, *, keep_last: bool = True) -> Plan:
    """`segments` equal segments, their inputs kept, each run again in its turn (Chen Alg. 1).

    keep_last=False runs the last segment again too, as wrapping every segment in a checkpoint does.
    """
    return _segmented(chain, segment_starts(len(chain), segments), f"{segments} segments", keep_last)


def every(chain: Chain, stages: int, *, keep_last: bool = True) -> Plan:
    """Segments of `stages` stages (the last may be shorter): the notes' k-interval."""
    stages = whole("stages", stages)
    if stages < 1:
        raise ValueError(f"segments of {stages} stages: need at least 1")
    starts = list(range(1, len(chain) + 1, stages))
    return _segmented(chain, starts, f"every {stages}", keep_last)


def _segmented(chain: Chain, starts: list[int], name: str, keep_last: bool) -> Plan:
    build, last = PlanBuilder(chain), len(chain)
    if keep_last:
        return plan_of(name, build, build.segments(starts, last))
    node = build.rerun(build.keep_all(starts[-1], last))
    for start, end in zip(starts[-2::-1], (s - 1 for s in starts[:0:-1]), strict=True):
        node = build.split(start, node, build.keep_all(start, end))
    return plan_of(name, build, node)


def sqrt_segments(length: int) -> int:
    """round(sqrt(L)), at least 1: Chen's k for a chain without interiors."""
    return max(1, round(math.sqrt(length)))


def sqrt(chain: Chain) -> Plan:
    """sqrt(L) segments: O(sqrt(L)) memory for one extra forward (Chen Eq. 1)."""
    return replace(uniform(chain, sqrt_segments(len(chain))), name="sqrt(L)")


def exponential(chain: Chain) -> Plan:
    """Keep a_1, a_2, a_4, a_8, ... as the study notes have it, each part kept whole in its turn.

    The last part is L/2 long, so memory stays O(L).
    """
    build = PlanBuilder(chain)
    return plan_of("exponential", build, build.segments(_exponential_starts(1, len(chain)), len(chain)))


def exponential_recursive(chain: Chain) -> Plan:
    """The same spacing with every part split the same way again: about log2(L)^2 / 2 states."""
    return _recursive(chain, "exponential, recursive", _exponential_starts)


def chen_recursive(chain: Chain, k: int = 1) -> Plan:
    """Keep k states, split into k+1 equal parts, recurse: k log_{k+1} L states (Chen Eq. 3)."""
    k = whole("k", k)
    if k < 1:
        raise ValueError(f"k={k}: need at least 1 state per level")

    def starts(first: int, last: int) -> list[int]:
        length = last - first + 1
        return [first - 1 + s for s in segment_starts(length, min(k + 1, length))]

    return _recursive(chain, f"recursive, k={k}", starts)


def _exponential_starts(first: int, last: int) -> list[int]:
    starts, offset = [first], 1
    while first + offset <= last:
        starts.append(first + offset)
        offset *= 2
    return starts


def _recursive(chain: Chain, name: str, starts: Callable[[int, int], list[int]]) -> Plan:
    """Split (first, last) at starts(first, last), and every part in the same way, to single
    stages.  Depth is logarithmic, so plain recursion is fine."""
    build = PlanBuilder(chain)

    def solve(first: int, last: int) -> Node:
        if first == last:
            return build.keep(first)
        parts = starts(first, last)
        ends = [*(start - 1 for start in parts[1:]), last]
        node = solve(parts[-1], last)
        for start, end in zip(parts[-2::-1], ends[-2::-1], strict=True):
            node = build.split(start, node, solve(start, end))
        return node

    return plan_of(name, build, solve(1, len(chain)))


def chen_budget_segments(chain: Chain, budget_bytes: float) -> list[int]:
    """Chen's Alg. 3: first stages of the segments that a sweep with budget B cuts.

    Stage outputs and interiors are summed; where the sum passes B the output is kept and the sum
    starts again.
    """
    if budget_bytes < 0:
        raise ValueError(f"budget_bytes={budget_bytes}: must not be negative")
    starts, pending = [1], 0
    for index, stage in enumerate(chain.stages[:-1], start=1):
        pending += stage.activation_bytes + stage.saved_bytes
        if pending > budget_bytes:
            starts.append(index + 1)
            pending = 0
    return starts


def chen_search(chain: Chain, *, grid: int = 6) -> Plan:
    """Chen's appendix A: B = sqrt(x y) from a first sweep with B = 0, then a grid over
    [B/sqrt(2), sqrt(2) B]; the plan of least exact peak wins.

    x is the sum of kept outputs, y the largest segment.
    """
    costs, build, last = chain.costs, PlanBuilder(chain), len(chain)

    def plan_for(budget: float) -> Node:
        return build.segments(chen_budget_segments(chain, budget), last)

    kept = int(costs.activation[1:-1].sum())
    largest = int((costs.activation + costs.saved)[1:].max())
    centre = math.sqrt(kept * largest)
    steps: Iterable[float] = (2 ** (-0.5 + step / max(1, grid - 1)) for step in range(grid))
    best = min((plan_for(centre * step) for step in steps), key=lambda node: node.need_bytes)
    return plan_of("Chen's search", build, best)


def selective(chain: Chain, kinds: frozenset[str] | set[str] = frozenset({"attention"})) -> Plan:
    """Run again exactly the stages whose kind is in `kinds`, keep all others whole.

    Raises ValueError for a kind that no stage has, TypeError for one string.
    """
    kinds = names("kinds", kinds)
    present = {stage.kind for stage in chain.stages}
    if absent := sorted(set(kinds) - present):
        raise ValueError(f"no stage of kind {absent} in a chain of kinds {sorted(present)}")
    chosen = [i for i, stage in enumerate(chain.stages, start=1) if stage.kind in kinds]
    build = PlanBuilder(chain)
    return plan_of("selective", build, recompute_stages(build, chosen))


def recompute_stages(build: PlanBuilder, chosen: Iterable[int]) -> Node:
    """Every boundary kept; stages in `chosen` are run again, the others keep their interior.

    Stage L is kept whatever `chosen` says: its backward follows its forward at once.
    """
    again = set(chosen)
    node = build.keep(build.length)
    for stage in range(build.length - 1, 0, -1):
        node = build.split(stage, node, build.keep(stage)) if stage in again else build.keep(stage, node)
    return node
