"""The symbolic kernels against the integer sums, which know nothing of SymPy."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import symbolic_costs as costs
from analysis import symbolic_kernels, symbolic_loop
from analysis.flops import executed_exponentials, visited_pairs
from analysis.hardware import H200
from analysis.hbm import compulsory_hbm
from analysis.shapes import AttentionShape, Tile
from analysis.sums.copies import copies
from analysis.symbolic import V
from analysis.symbolic_costs import B, H, P, Rk, Rq
from analysis.tile_loop import tile_loop
from analysis.traffic import predict_traffic
from kernels import hopper
from kernels.attention import FLASH
from repro.prediction import predict


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, str, AttentionShape, Tile | None]:
    """Algorithm, pass, shape and, but for the Hopper kernels, a tile; any mask that it takes."""
    algorithm = draw(st.sampled_from(symbolic_kernels.ALGORITHMS))
    pass_ = draw(st.sampled_from(("forward", "backward")))
    causal = draw(st.booleans())
    kv_heads = draw(st.integers(1, 2))
    alone = not algorithm.startswith("flash") or algorithm.startswith("flash1")
    group = 1 if alone else draw(st.sampled_from((1, 3)))
    sm90 = algorithm.startswith("flash-sm90")
    head_dim = draw(st.sampled_from((64, 128) if sm90 else (5, 8, 24, 40, 64, 100)))
    dtype = draw(st.sampled_from(("fp16", "bf16") if sm90 else ("fp16", "fp32")))
    side = st.none() | st.sampled_from((0, 1, 33, 400))
    window, sinks = (None, None), 0
    if algorithm in FLASH:
        window, sinks = draw(st.tuples(side, side)), draw(st.sampled_from((0, 0, 3, 100)))
    shape = AttentionShape(
        draw(st.integers(1, 2)), kv_heads * group, draw(st.integers(1, 700)),
        draw(st.integers(1, 900)), head_dim, kv_heads, dtype, causal, window, sinks,
    )  # fmt: skip
    tile = None if sm90 else Tile(draw(st.sampled_from((16, 48))), draw(st.sampled_from((16, 32))))
    if sm90:  # of both kinds of forward blocks, whatever the length
        wanted = algorithm == symbolic_kernels.PERSISTENT
        tile = next(
            form.tile
            for form in hopper.FORWARD_FORMS
            if form.head_dim == head_dim and form.persistent == wanted
        )
        if pass_ == "backward":
            tile = hopper.backward_form(head_dim, causal).tile
    return algorithm, pass_, shape, tile


def values_of(shape: AttentionShape, tile: Tile, columns: int, head_dim: int) -> dict[Any, float]:
    values = symbolic_loop.values_of(shape, tile)
    values[symbolic_kernels.C], values[symbolic_kernels.D] = columns, head_dim
    return values | {symbolic_kernels.TANH: 0}


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_counts_of_any_mask(drawn: tuple[str, str, AttentionShape, Tile]) -> None:
    _, _, shape, tile = drawn
    loop, heads = tile_loop(shape, tile), shape.batch * shape.heads
    found = symbolic_loop.values_of(shape, tile)
    counted = {
        V: loop.visits, Rq: loop.query_rows_visited, Rk: loop.key_rows_visited,
        P: heads * visited_pairs(shape, tile),
        symbolic_loop.Q1: loop.query_rows_with_a_visit,
        symbolic_loop.T1: loop.query_tiles_with_a_visit,
        symbolic_loop.PAIRS: heads * shape.visible_pairs,
        symbolic_loop.SEEING: heads * shape.visible.rows_that_see,
        symbolic_loop.SEEN: heads * shape.visible.keys_seen,
    }  # fmt: skip
    assert {each: heads * found[each] for each in counted} == counted
    of_keys = shape.batch * shape.kv_heads * found[symbolic_loop.K1]
    assert of_keys == loop.key_rows_with_a_visit


@settings(max_examples=120, deadline=None)
@given(problems(), st.booleans(), st.sampled_from(("", *symbolic_kernels.BIASES)))
def test_bytes_of_every_kernel(
    drawn: tuple[str, str, AttentionShape, Tile], alibi: bool, bias: str
) -> None:
    algorithm, pass_, shape, tile = drawn
    padded, name = shape.padded, algorithm.split()[0]
    asked: dict[str, Any] = {}
    if algorithm == symbolic_kernels.PERSISTENT and pass_ == "forward":
        asked["persistent"] = True
    options, values = symbolic_kernels.PLAIN, values_of(padded, tile, 0, shape.head_dim)
    if algorithm in FLASH:
        if bias:
            items, heads = symbolic_kernels.BIASES[bias]
            sizes = {B: shape.batch, H: shape.heads}
            asked["bias"] = int(items.subs(sizes)), int(heads.subs(sizes))
            if asked["bias"] == (shape.batch, shape.heads):
                bias = "full"
            asked |= {"bias_gradient": True} if pass_ == "backward" else {}
        asked |= {"alibi": True} if alibi else {}
        options = symbolic_kernels.Options(alibi, bias, shape.causal or shape.windowed)
    moved = predict_traffic(name, padded, tile, pass_, **asked)
    once = compulsory_hbm(moved, padded, asked.get("bias"))
    found = {kernel.name: kernel for kernel in symbolic_kernels.kernels(algorithm, pass_, options)}
    assert found.keys() == moved.kernels.keys()
    for kernel, entries in moved.kernels.items():
        each = found[kernel]
        counted = {key: costs.evaluate(x, values) for key, x in each.moved.items()}
        assert {key: n for key, n in counted.items() if n} == dict(entries), kernel
        assert costs.evaluate(each.hbm_read, values) == sum(once.reads[kernel].values()), kernel
        assert costs.evaluate(each.hbm_write, values) == sum(once.writes[kernel].values()), kernel
    around = copies(shape, pass_).get("copy", {})
    if around:
        printed = symbolic_kernels.copies(pass_)
        assert {k: costs.evaluate(x, values) for k, x in printed.items()} == around


@settings(max_examples=60, deadline=None)
@given(problems())
def test_work_and_memory_are_those_of_a_prediction(
    drawn: tuple[str, str, AttentionShape, Tile],
) -> None:
    """Of the kernels that the drivers pick for the shape, without a tile asked for."""
    algorithm, pass_, shape, _ = drawn
    name = algorithm.split()[0]
    point = predict(name, shape, pass_, H200, once=True)
    if point.form is not None and pass_ == "forward":
        algorithm = name + (" persistent" if "persistent" in point.form else "")
    values = values_of(shape.padded, point.tile, point.columns, shape.head_dim)
    found = symbolic_kernels.kernels(algorithm, pass_)
    assert sum(costs.evaluate(kernel.flops, values) for kernel in found) == point.executed_flops
    if name == "standard":
        pairs = shape.batch * shape.heads * shape.seqlen_q * shape.seqlen_k
        exponentials = pairs if pass_ == "forward" else 0
    else:
        exponentials = executed_exponentials(shape.padded, point.tile, pass_)
    assert sum(costs.evaluate(kernel.exponentials, values) for kernel in found) == exponentials
    (main,) = (kernel for kernel in found if kernel.main)
    assert main.blocks is not None
    if name != "standard":
        assert costs.evaluate(main.blocks, values) == point.blocks
    peak = costs.evaluate(symbolic_kernels.peak_bytes(algorithm, pass_), values)
    if shape.padded.head_dim != shape.head_dim:
        peak += costs.evaluate(symbolic_kernels.given_bytes(algorithm, pass_), values)
    assert peak == point.peak_bytes
