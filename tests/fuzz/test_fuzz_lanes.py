"""Drawn own kernels of barriers, shuffles and votes do on the host what CUDA's rules say."""

from __future__ import annotations

from typing import Any

from fuzzing import fuzzed
from hypothesis import strategies as st
from lanes_case import ALL, SHUFFLES, VOTES, Barrier, Branch, Case, End, Exchange, Loop, Mask, Word, failure, source_of

SIZES = st.sampled_from([1, 2, 4, 8, 16, 32])
LANES = st.sampled_from([0xF, 0xFF, 0xFFFF, 0xFFFF0000, 0x55555555, 0x80000001]) | st.integers(0, ALL)
#: One step in about twenty is wrong or may be: a barrier where threads are missing, another mask.
RARELY = st.sampled_from([False] * 19 + [True])


@st.composite
def words(draw: st.DrawFn, kind: str, lanes: int) -> Exchange | Word:
    if kind == "exchange":
        return Exchange(Mask(draw(SIZES), lanes))
    mask = Mask(draw(SIZES), draw(LANES) if draw(RARELY) else lanes)
    if kind == "vote":
        return Word(draw(st.sampled_from(VOTES)), mask, draw(LANES))
    return Word(draw(st.sampled_from(SHUFFLES)), mask, draw(st.integers(0, 31)), draw(SIZES))


@st.composite
def steps(draw: st.DrawFn, lanes: int, warps: int, whole: bool, depth: int) -> tuple[list[Any], int]:
    """Some steps of the lanes and warps that come here, and the lanes that are there after them.
    whole: every thread of the block that has not ended is among them."""
    found: list[Any] = []
    for _ in range(draw(st.integers(1, 4))):
        if not lanes:
            break
        kind = draw(st.sampled_from(["shuffle", "shuffle", "vote", "exchange", "barrier", "branch", "loop", "end"]))
        if kind == "barrier" and (whole or draw(RARELY)):
            found.append(Barrier())
        elif kind == "branch" and depth:
            branch, lanes = draw(branches(lanes, warps, whole, depth))
            found.append(branch)
        elif kind == "loop" and depth and draw(RARELY):
            found.append(Loop(draw(st.integers(0, 2)), True, (draw(st.just(Barrier()) | words("shuffle", lanes)),)))
        elif kind == "loop" and depth:
            body, after = draw(steps(lanes, warps, whole, depth - 1))
            found.append(Loop(1 if after != lanes else draw(st.integers(0, 3)), False, tuple(body)))
            lanes = after
        elif kind == "end" and draw(RARELY):
            found.append(End())
            return found, 0
        else:
            found.append(draw(words(kind, lanes)))
    return found, lanes


@st.composite
def branches(draw: st.DrawFn, lanes: int, warps: int, whole: bool, depth: int) -> tuple[Branch, int]:
    """Some lanes, or some warps, go another way; of lanes those of one way may end."""
    if draw(st.booleans()):
        some = draw(st.integers(0, 15))
        first, left = draw(steps(lanes, warps & some, whole and warps & some == warps, depth - 1))
        second, also = draw(steps(lanes, warps & ~some, whole and not warps & some, depth - 1))
        return Branch(ALL, some, tuple(first), tuple(second)), left & also
    some = draw(LANES)
    first, left = draw(steps(lanes & some, warps, whole and lanes & some == lanes, depth - 1))
    if draw(st.sampled_from([False, False, True])):
        first, left = [*first, End()], 0
    second, also = draw(steps(lanes & ~some, warps, whole and not lanes & some, depth - 1))
    return Branch(some, 15, tuple(first), tuple(second)), left | also


@st.composite
def programs(draw: st.DrawFn) -> Case:
    warps = draw(st.integers(1, 4))
    program, _ = draw(steps(ALL, (1 << warps) - 1, True, 3))
    return Case(warps, tuple(program), draw(st.none() | st.integers(0, 2**16)))


@fuzzed(programs(), examples=8)
def test_any_program_of_lanes_follows_the_rules_of_cuda(case: Case) -> None:
    wrong = failure(case)
    assert wrong is None, f"{wrong}\n{source_of(case)}"
