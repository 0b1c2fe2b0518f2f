"""The offload model: transfer rule, timeline, and the crossover in closed form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.offload import (
    HostLinkModel,
    LayerCost,
    SavedView,
    crossover_bandwidth,
    free_bandwidth,
    steady_layer_seconds,
    step_timeline,
    transfer_bytes,
)

COSTS = st.builds(
    LayerCost, saved_bytes=st.integers(1, 10**9), forward_s=st.floats(1e-4, 1.0), backward_s=st.floats(1e-4, 3.0)
)


def view(storage: int, offset: int, size, stride, storage_bytes: int = 4096, **rest) -> SavedView:
    return SavedView(storage, storage_bytes, offset, size, stride, 4, **rest)


def test_transfer_rule() -> None:
    whole = view(1, 0, (32, 32), (32, 1))
    assert transfer_bytes([whole, view(1, 0, (32, 32), (1, 32))]) == 4096  # transpose
    assert transfer_bytes([view(1, 8 * i, (32, 8), (32, 1)) for i in range(4)]) == 4096  # columns
    assert transfer_bytes([view(1, 0, (32, 32), (0, 1), storage_bytes=128)]) == 128  # broadcast
    assert transfer_bytes([view(1, 0, (32, 32), (32, 1), resident=True)]) == 0
    assert transfer_bytes([view(1, 64, (1, 32), (32, 1))]) == 128  # a row: its span only
    assert transfer_bytes([view(1, 64, (1, 32), (32, 1)), whole]) == 128 + 4096  # row came first
    assert transfer_bytes([whole, view(1, 64, (1, 32), (32, 1))]) == 4096
    assert transfer_bytes([view(2, 0, (0, 4), (4, 1), storage_bytes=0)]) == 0


def test_timeline_by_hand() -> None:
    # Two layers, forward 1 s, backward 2 s, copies 3 s.
    layers = [LayerCost(30, 1.0, 2.0)] * 2
    link = HostLinkModel(10.0)
    store = step_timeline(layers, ["store"] * 2, link)
    assert (store.total_s, store.waiting_s, store.moved_bytes, store.peak_bytes) == (6, 0, 0, 60)
    recompute = step_timeline(layers, ["recompute"] * 2, link)
    assert (recompute.total_s, recompute.peak_bytes) == (8, 30)
    # out: 1..4, 4..7. in: layer 1 7..10, layer 0 10..13. backward: 10..12, 13..15.
    both = step_timeline(layers, ["offload"] * 2, link)
    assert (both.total_s, both.waiting_s, both.moved_bytes) == (15, 9, 60)
    # only layer 0: out 1..4, backward of layer 1 2..4, in 4..7, backward 7..9
    one = step_timeline(layers, ["offload", "store"], link)
    assert (one.total_s, one.waiting_s) == (9, 3)
    with pytest.raises(ValueError, match="2 layers but 1 actions"):
        step_timeline(layers, ["store"], link)


def test_a_prefetch_window_bounds_memory() -> None:
    layers = [LayerCost(100, 1.0, 2.0)] * 12
    link = HostLinkModel(400.0)
    narrow = step_timeline(layers, ["offload"] * 12, link, prefetch_bytes=100)
    wide = step_timeline(layers, ["offload"] * 12, link)
    assert narrow.peak_bytes == 200 < wide.peak_bytes
    assert narrow.total_s == wide.total_s, "one layer ahead is enough when a copy is short"
    none = step_timeline(layers, ["offload"] * 12, link, prefetch_bytes=0)
    assert none.total_s == pytest.approx(narrow.total_s + 11 * 0.25)


@given(COSTS)
def test_crossover_separates_offload_from_recompute(cost: LayerCost) -> None:
    edge = crossover_bandwidth(cost)
    for factor, faster in ((1.01, True), (0.99, False)):
        link = HostLinkModel(edge * factor)
        moved = steady_layer_seconds(cost, "offload", link)
        again = steady_layer_seconds(cost, "recompute", link)
        assert (moved < again) is faster
    hidden = HostLinkModel(free_bandwidth(cost) * 1.0001)
    assert steady_layer_seconds(cost, "offload", hidden) == steady_layer_seconds(cost, "store", hidden)


@given(cost=COSTS, bandwidth=st.floats(1e6, 1e12), depth=st.integers(1, 8))
def test_timeline_approaches_the_steady_state(cost: LayerCost, bandwidth: float, depth: int):
    """A step never beats the steady state by more than the copies that have nothing to wait for,
    nor loses to it by more than filling and draining the two copy engines."""
    link = HostLinkModel(bandwidth)
    step = step_timeline([cost] * depth, ["offload"] * depth, link)
    steady = depth * steady_layer_seconds(cost, "offload", link)
    copy = link.seconds(cost.saved_bytes)
    assert abs(step.total_s - steady) <= 2 * copy + cost.forward_s + cost.backward_s + 1e-9


@pytest.mark.parametrize("bad", [{"saved_bytes": -1}, {"forward_s": -1.0}])
def test_bad_costs(bad: dict) -> None:
    with pytest.raises(ValueError, match="-1"):
        LayerCost(**({"saved_bytes": 1, "forward_s": 1.0, "backward_s": 1.0} | bad))
    with pytest.raises(ValueError, match=r"0\.0"):
        HostLinkModel(0.0)
