"""The optimistic softmax: as good as the exact one on inputs made to defeat it.

Its reference is the maximum over the first key tiles walked, which are the last keys. Scores that
grow towards the first keys, by 20 to 200 nats, are its worst case: up to 2^40 it loses nothing,
and beyond that the tile must be flagged and done again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flash_support import BOUNDS, Problem, check, reference, to_bits, to_float, view
from hopper_runs import launch

from analysis.shapes import AttentionShape, Tile
from analysis.traffic import Traffic, predict_traffic
from kernels import attention, hopper
from kernels.hopper import ForwardForm
from kernels.host import HostBackend

FORM = ForwardForm(64, 3, 128)
LIMIT_LOG2 = 40


def problem(causal: bool = False, **changes: Any) -> Problem:
    settings = {"heads": 2, "seqlen_q": 400, "seqlen_k": 520, "dtype": "bf16", "causal": causal}
    return Problem(**{**settings, **changes})


def add_to_scores(p: Problem, rows: slice, by_key: np.ndarray) -> None:
    """Adds by_key (nats) to the scaled scores of some rows of every head, through one column."""
    p.data["q"][..., 0] = 0
    p.data["q"][:, :, rows, 0] = 8
    assert p.scale is not None
    p.data["k"][..., 0] = by_key / (8 * p.scale)
    for name in ("q", "k"):
        p.data[name] = to_float(to_bits(p.data[name], "bf16"), "bf16")


def overflowing(p: Problem, form: ForwardForm = FORM) -> list[tuple[int, int, int]]:
    """(batch, head, query tile) whose sums pass the limit, from the definition of the reference.

    Tiles within a factor of two of the limit would depend on rounding; there are none here.
    """
    tile = form.tile
    assert p.scale is not None
    group = p.heads // p.kv_heads
    k = np.repeat(p.data["k"], group, axis=1)
    scores = np.where(p.visible(), p.scale * (p.data["q"] @ k.swapaxes(2, 3)), -np.inf)
    found = []
    for b, h in np.ndindex(p.batch, p.heads):
        for i in range(-(-p.seqlen_q // tile.block_m)):
            rows = scores[b, h, i * tile.block_m : (i + 1) * tile.block_m]
            seen = np.isfinite(rows).any(axis=0).sum()
            unmasked = np.isfinite(rows).all(axis=0).sum() // tile.block_n
            # Tiles with a mask and the first without one.
            looked_at = max(unmasked - 1, 0) * tile.block_n
            if seen == 0 or looked_at == 0:
                continue
            top = rows[:, looked_at:].max(axis=1, keepdims=True)
            sums = np.exp2((rows - top) / np.log(2)).sum(axis=1)
            assert not 2.0**39 < sums.max() < 2.0**41
            if sums.max() > 2.0**LIMIT_LOG2:
                found.append((b, h, i))
    return found


def compare(p: Problem, expected: int, form: ForwardForm = FORM, seed: int | None = None) -> None:
    """Flags ``expected`` tiles, there the same bits, elsewhere as good; bytes as predicted."""
    flagged = overflowing(p, form)
    assert len(flagged) == expected
    exact, backend = launch(p, form), HostBackend(seed=seed)
    got = launch(p, form, backend=backend, optimistic=True)
    want = reference(p)
    for name in ("out", "lse"):
        finite = np.isfinite(want[name])
        assert (np.isfinite(got[name]) == finite).all()
        ours, theirs = (x[name][finite] - want[name][finite] for x in (got, exact))
        assert np.abs(ours).max() <= BOUNDS["bf16"][0]
        # The largest weight is no longer exactly 1: it is rounded to bf16 as the others are.
        assert np.sqrt((ours**2).mean()) <= 1.5 * np.sqrt((theirs**2).mean()) + 1e-7, name
    for b, h, i in flagged:
        rows = slice(i * form.tile.block_m, (i + 1) * form.tile.block_m)
        for name in ("out", "lse"):
            np.testing.assert_array_equal(got[name][b, h, rows], exact[name][b, h, rows])
    predicted = predict_traffic(
        "flash-sm90-optimistic", p.shape, form.tile, "forward", flagged=tuple(i for *_, i in flagged)
    )
    assert Traffic(backend.traffic).kernels == predicted.kernels


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
def test_ordinary_scores_flag_nothing(causal: bool) -> None:
    p = problem(causal)
    compare(p, 0)
    check(p, launch(p, FORM, backend=HostBackend(seed=3), optimistic=True))


@pytest.mark.parametrize("nats", [20, 60, 200])
@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
def test_scores_that_drift_upward(causal: bool, nats: int) -> None:
    """Over 520 keys; the reference is that of the last 136 (dense)."""
    p = problem(causal)
    add_to_scores(p, slice(None), np.linspace(nats, 0, p.seqlen_k))
    # 400 rows are three tiles a head. Causal, the first tile's rows look at nearly all their keys.
    expected = {20: 0, 60: 6, 200: 6}[nats]
    if causal:
        expected = len(overflowing(p))
        assert (expected > 0) == (nats >= 60)
    compare(p, expected)


def test_downward_drift_is_harmless() -> None:
    p = problem()
    add_to_scores(p, slice(None), np.linspace(0, 200, p.seqlen_k))
    compare(p, 0)


def test_one_late_outlier() -> None:
    """A single key, the last one walked, dwarfs all others."""
    p = problem()
    drift = np.zeros(p.seqlen_k)
    drift[1] = 90
    add_to_scores(p, slice(None), drift)
    compare(p, 6, seed=1)


def test_only_the_tiles_that_overflow_are_done_again() -> None:
    """Rows 200 to 210 lie in the second of three tiles."""
    p = problem()
    add_to_scores(p, slice(200, 211), np.linspace(150, 0, p.seqlen_k))
    compare(p, 2)


@pytest.mark.parametrize(("multiprocessors", "most", "blocks"), [(1, 256, 1), (4, 256, 4), (100, 256, 6), (1, 2, 3)])
def test_few_blocks_look_for_the_tiles_to_repair(
    multiprocessors: int, most: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six tiles: a block does up to six of them again, one after another, or has none to do."""
    grids = {}

    class Watched(HostBackend):
        def launch(self, kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
            grids[kernel.entry] = grid
            super().launch(kernel, grid, *args, **options)

    monkeypatch.setattr(hopper, "REPAIR_TILES", most)
    for rows, seed in ((slice(None), None), (slice(None), 1), (slice(200, 211), 2)):
        p = problem()
        add_to_scores(p, rows, np.linspace(150, 0, p.seqlen_k))
        backend = Watched(seed=seed)
        backend.multiprocessors = multiprocessors
        got = launch(p, FORM, backend=backend, optimistic=True)
        assert grids["flash_forward_sm90_repair"] == (blocks, 1, 1)
        exact = launch(p, FORM)
        for _, h, i in overflowing(p):
            tile = slice(i * FORM.tile.block_m, (i + 1) * FORM.tile.block_m)
            for name in ("out", "lse"):
                np.testing.assert_array_equal(got[name][0, h, tile], exact[name][0, h, tile])


def test_sums_that_fit_with_outputs_that_do_not() -> None:
    """2^30 · 2^110 passes fp32's end although the sum is far below the limit."""
    p = problem(heads=1, seqlen_q=64)
    add_to_scores(p, slice(None), np.linspace(22, 0, p.seqlen_k))
    p.data["v"] *= 2.0**110
    exact, backend = launch(p, FORM), HostBackend()
    got = launch(p, FORM, backend=backend, optimistic=True)
    assert backend.traffic["flash_forward_sm90_repair"]["q", "read"] > 0
    np.testing.assert_array_equal(got["out"], exact["out"])
    assert np.isfinite(got["out"]).all()


def test_rows_that_see_nothing_and_grouped_heads() -> None:
    p = problem(True, heads=2, kv_heads=1, seqlen_q=520, seqlen_k=400)
    add_to_scores(p, slice(None), np.linspace(300, 0, p.seqlen_k))
    compare(p, len(overflowing(p)), seed=2)


@pytest.mark.parametrize(("head_dim", "block_n"), [(128, 128), (256, 80)])
def test_two_consumers(head_dim: int, block_n: int) -> None:
    p = problem(heads=1, head_dim=head_dim, seqlen_q=200)
    add_to_scores(p, slice(None), np.linspace(100, 0, p.seqlen_k))
    compare(p, 2, ForwardForm(head_dim, 2, block_n))


def test_it_is_asked_for_by_name_and_never_chosen() -> None:
    p = problem(heads=1, seqlen_q=64, seqlen_k=64)
    stats: dict[str, Any] = {}
    arrays = [view(n, to_bits(p.data[n], "bf16").copy(), "bf16") for n in ("q", "k", "v", "dout")]
    backend = HostBackend()
    attention.forward(backend, "flash-sm90-optimistic", *arrays, stats, scale=0.125)
    parts = ("clear_counter", "persistent_optimistic", "repair")
    assert set(backend.traffic) == {f"flash_forward_sm90_{part}" for part in parts}


def test_fp16_is_refused() -> None:
    with pytest.raises(ValueError, match="exponents of bf16, not fp16"):
        launch(problem(heads=1, seqlen_q=8, seqlen_k=8, dtype="fp16"), optimistic=True)


def test_a_flagged_tile_must_exist() -> None:
    shape = AttentionShape(1, 1, 100, 100, 64, dtype="bf16")
    with pytest.raises(ValueError, match="flagged tile 1 is none of the 1"):
        predict_traffic("flash-sm90-optimistic", shape, Tile(192, 128), "forward", flagged=(0, 1))
