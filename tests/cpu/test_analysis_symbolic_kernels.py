"""The symbolic kernels against the integer sums, which know nothing of SymPy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import symbolic_costs as costs
from analysis import symbolic_kernels
from analysis.flops import executed_exponentials
from analysis.hardware import H200
from analysis.hbm import compulsory_hbm
from analysis.shapes import AttentionShape, Tile
from analysis.sums.copies import copies
from analysis.traffic import predict_traffic
from kernels import hopper
from repro.prediction import predict

RATES = (1.0, 1.0, 1.0, 1.0)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, str, AttentionShape, Tile | None]:
    algorithm = draw(st.sampled_from(symbolic_kernels.ALGORITHMS))
    pass_ = draw(st.sampled_from(("forward", "backward")))
    causal = draw(st.booleans())
    kv_heads = draw(st.integers(1, 2))
    alone = not algorithm.startswith("flash") or algorithm.startswith("flash1")
    group = 1 if alone else draw(st.sampled_from((1, 3)))
    rows = draw(st.integers(1, 700))
    keys = draw(st.integers(rows if causal else 1, 900))
    sm90 = algorithm.startswith("flash-sm90")
    head_dim = draw(st.sampled_from((64, 128) if sm90 else (5, 8, 24, 40, 64, 100)))
    dtype = draw(st.sampled_from(("fp16", "bf16") if sm90 else ("fp16", "fp32")))
    shape = AttentionShape(
        draw(st.integers(1, 2)), kv_heads * group, rows, keys, head_dim, kv_heads, dtype, causal
    )
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


@settings(max_examples=120, deadline=None)
@given(shapes())
def test_bytes_flops_and_exponentials_of_every_kernel(
    drawn: tuple[str, str, AttentionShape, Tile],
) -> None:
    algorithm, pass_, shape, tile = drawn
    padded = shape.padded
    persistent = algorithm == symbolic_kernels.PERSISTENT and pass_ == "forward"
    name = algorithm.split()[0]
    moved = predict_traffic(
        name, padded, tile, pass_, **({"persistent": True} if persistent else {})
    )
    once = compulsory_hbm(moved, padded)
    values = costs.values_of(padded, tile.block_m, tile.block_n, RATES)
    values |= {symbolic_kernels.C: padded.head_dim, symbolic_kernels.D: shape.head_dim}
    found = {kernel.name: kernel for kernel in symbolic_kernels.kernels(algorithm, pass_)}
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
@given(shapes())
def test_work_and_memory_are_those_of_a_prediction(
    drawn: tuple[str, str, AttentionShape, Tile],
) -> None:
    """Of the kernels that the drivers pick for the shape, without a tile asked for."""
    algorithm, pass_, shape, _ = drawn
    name = algorithm.split()[0]
    point = predict(name, shape, pass_, H200, waves=True)
    if point.form is not None and pass_ == "forward":
        algorithm = name + (" persistent" if "persistent" in point.form else "")
    values = costs.values_of(shape.padded, point.tile.block_m, point.tile.block_n, RATES)
    values |= {symbolic_kernels.C: point.columns, symbolic_kernels.D: shape.head_dim}
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


def test_what_is_missing_from_a_pass_is_noticed() -> None:
    """The kernels of a pass add up to the pass."""
    for algorithm in costs.ALGORITHMS:
        for pass_ in ("forward", "backward"):
            total = sum(
                expression
                for kernel in symbolic_kernels.kernels(algorithm, pass_)
                for expression in kernel.moved.values()
            )
            whole = sum(costs.traffic(algorithm, pass_).values())
            assert (total - whole).expand() == pytest.approx(0)
