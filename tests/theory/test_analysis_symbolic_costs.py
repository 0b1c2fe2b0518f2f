"""The symbolic costs are the integer sums: any length, any tile, causal or not, grouped or not."""

from __future__ import annotations

import pytest
import sympy as sp
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from analysis import memory, symbolic_costs
from analysis.flops import executed_exponentials, executed_flops, useful_flops
from analysis.hardware import H200
from analysis.hbm import compulsory_hbm
from analysis.shapes import AttentionShape, Tile
from analysis.symbolic_costs import ALGORITHMS
from analysis.time_model import attention_work, datasheet_ceilings, predict_time
from analysis.traffic import predict_traffic
from kernels import attention
from repro import prediction
from repro.prediction import predict

RATES = (1e15, 4e12, 1e13, 4e12)


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, AttentionShape, Tile]:
    algorithm = draw(st.sampled_from(ALGORITHMS))
    seqlen_q = draw(st.integers(1, 300))
    causal = draw(st.booleans())
    seqlen_k = draw(st.integers(seqlen_q if causal else 1, 400))
    kv_heads = draw(st.integers(1, 3))
    group = draw(st.integers(1, 3)) if algorithm in ("flash", "flash-deterministic") else 1
    shape = AttentionShape(
        draw(st.integers(1, 3)), kv_heads * group, seqlen_q, seqlen_k,
        draw(st.sampled_from((8, 40, 64))), kv_heads, draw(st.sampled_from(("fp16", "fp32"))),
        causal,
    )  # fmt: skip
    return algorithm, shape, Tile(draw(st.integers(1, 70)), draw(st.integers(1, 70)))


def number(expression: sp.Expr, values: dict[sp.Symbol, float]) -> float:
    return symbolic_costs.evaluate(sp.sympify(expression), values)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@settings(deadline=None, max_examples=40)
@given(problem=problems())
def test_traffic_first_touches_flops_and_memory_are_the_integer_sums(pass_, problem):
    algorithm, shape, tile = problem
    values = symbolic_costs.values_of(shape, tile.block_m, tile.block_n, RATES)
    exact = predict_traffic(algorithm, shape, tile, pass_)
    entries = {
        key: number(expression, values)
        for key, expression in symbolic_costs.traffic(algorithm, pass_).items()
    }
    assert {key: n for key, n in entries.items() if n} == exact.by_tensor()
    once = compulsory_hbm(exact, shape)
    assert [number(x, values) for x in symbolic_costs.compulsory(algorithm, pass_)] == [
        once.read_bytes, once.write_bytes,
    ]  # fmt: skip
    recompute = algorithm != "standard"
    assert number(
        symbolic_costs.useful_flops(algorithm, pass_, sp.Integer(shape.visible_pairs)), values
    ) == useful_flops(shape, pass_, recompute=recompute)
    if recompute:
        assert number(symbolic_costs.executed_flops(algorithm, pass_), values) == executed_flops(
            shape, tile, pass_
        )
        assert number(symbolic_costs.exponentials(algorithm, pass_), values) == (
            executed_exponentials(shape, tile, pass_)
        )


@settings(deadline=None, max_examples=30)
@given(problem=problems())
def test_memory_is_the_sum_of_the_named_tensors(problem):
    algorithm, shape, _ = problem
    shape = AttentionShape(
        shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k, 64, shape.kv_heads
    )
    for pass_ in ("forward", "backward"):
        found = predict(algorithm, shape, pass_, H200)
        values = symbolic_costs.values_of(shape, found.tile.block_m, found.tile.block_n, RATES)
        assert number(symbolic_costs.saved_bytes(algorithm), values) == found.saved_bytes
        assert number(symbolic_costs.peak_bytes(algorithm, pass_), values) == found.peak_bytes


@settings(deadline=None, max_examples=40)
@given(problem=problems(), pass_=st.sampled_from(("forward", "backward")))
def test_the_bound_never_exceeds_the_time_models(problem, pass_):
    algorithm, shape, tile = problem
    assume(algorithm != "standard")
    sheet = datasheet_ceilings(H200)
    assert sheet.sm_boundary_bytes_per_s is not None
    rates = (
        sheet.tensor_flops, sheet.exp_per_s, sheet.sm_boundary_bytes_per_s, sheet.hbm_bytes_per_s,
    )  # fmt: skip
    values = symbolic_costs.values_of(shape, tile.block_m, tile.block_n, rates)
    ours = {name: float(number(x, values)) for name, x in
            symbolic_costs.times(algorithm, pass_).items()}  # fmt: skip
    theirs = predict_time(attention_work(algorithm, shape, tile, pass_, H200), sheet)
    assert max(ours.values()) <= theirs.seconds * (1 + 1e-12)
    for resource, seconds in ours.items():
        assert seconds <= theirs.by_resource[resource] * (1 + 1e-12)


def test_the_accumulator_of_the_released_kernels_appears_beyond_one_key_tile():
    peak = symbolic_costs.peak_bytes("flash1-skip-first", "backward")
    below, above = (
        symbolic_costs.values_of(AttentionShape(1, 1, n, n, 64), 16, 256, RATES) for n in (256, 257)
    )
    limit = memory.FLASH1_SINGLE_TILE_SEQLEN
    assert number(peak, below) == 11 * limit * 64 * 2 + 8 * limit
    assert number(peak, above) == 13 * 257 * 64 * 2 + 8 * 257


def test_a_causal_shape_with_more_queries_than_keys_is_refused():
    with pytest.raises(ValueError, match="64 < 65"):
        symbolic_costs.values_of(AttentionShape(1, 1, 65, 64, 64, causal=True), 64, 64, RATES)


def test_what_can_be_predicted_has_a_closed_form():
    """All but the Hopper kernels and dq in a pass of its own, which are exact sums only."""
    assert prediction.CLOSED == ALGORITHMS
    others = set(prediction.ALGORITHMS) - set(prediction.CLOSED)
    assert others == {*attention.HOPPER, "flash-split"}
