"""The Hopper forward with a sliding window, sinks, a softcap and ALiBi, on the host.

Every launch runs with all checks on. Most tests share the few forms of head dimension 64 that are
in ``CHANGES``; the other head dimensions and the sawtooth are thorough.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flash_support import Problem, check, check_all, execute, expected_traffic, reference
from hopper_runs import changed_source

from analysis.shapes import AttentionShape, Tile
from kernels import dispatch, hopper
from kernels.hopper_forms import ForwardForm, forward_form
from kernels.host import HostBackend
from kernels.launch import INCLUDE_DIR, Kernel
from kernels.launches import Device, launches_of

FORWARD = "flash-sm90"
TILE = Tile(192, 128)
SLOPES = np.array([0.5, 0.03125], np.float32)
#: What is compiled into a form; a window's numbers are arguments.
CHANGES: dict[str, dict[str, Any]] = {
    "window": {"window": (100, 20)},
    "causal window": {"window": (100, 0), "causal": True},
    "changed": {"softcap": 2.0, "alibi_slopes": SLOPES},
    "all": {"window": (100, 0), "causal": True, "softcap": 2.0, "alibi_slopes": SLOPES},
}


def hold(p: Problem, tile: Tile = TILE, seed: int | None = None) -> None:
    """Values to float64 and bytes to the prediction, for threads of a block in a drawn order.

    The tile is asked for, so that a window that hides nothing has one block a query tile too.
    """
    got, counted = execute(p, tile=tile, algorithm=FORWARD, backward=False, backend=HostBackend(seed=seed))
    check(p, got)
    assert counted == expected_traffic(p, tile, FORWARD, backward=False)


@pytest.mark.parametrize(
    ("window", "sinks", "sizes"),
    [
        ((0, 0), 0, (150, 150)),  # each query its own key
        ((0, 0), 3, (1, 1000)),  # one query far from its sinks
        ((128, 64), 0, (1, 16)),  # a window that hides nothing
        ((5, 5), 0, (500, 90)),  # query tiles that see nothing, and rows of one that does
        ((5, None), 0, (500, 90)),
        ((None, 0), 200, (193, 700)),  # sinks beyond a tile
        ((63, 64), 0, (192, 640)),
        ((127, 128), 129, (385, 385)),
    ],
    ids=str,
)
def test_edges(window: tuple[int | None, int | None], sinks: int, sizes: tuple[int, int]) -> None:
    for causal in (False, True):
        p = Problem(1, 1, *sizes, 64, "bf16", causal, window=window, sinks=sinks)
        hold(p, seed=1)


def test_tiles_outside_the_window_are_never_loaded() -> None:
    """The keys of a query tile are the window's, however long the sequence is."""
    counts = {}
    for seqlen_k in (1024, 2048):
        p = Problem(1, 1, 192, seqlen_k, 64, "bf16", True, window=(100, 0), sinks=1)
        for name in ("k", "v"):  # whoever reads them has no finite result
            p.data[name][:, :, 128 : seqlen_k - 384] = np.nan
        got, counts[seqlen_k] = execute(p, algorithm=FORWARD, backward=False)
        for name in ("k", "v"):
            p.data[name] = np.nan_to_num(p.data[name])
        check(p, got)
    assert counts[1024] == counts[2048]
    assert counts[1024]["flash_forward_sm90"]["k", "read"] == (128 + 384) * 128


def test_tiles_that_all_rows_see_are_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that hides all it is asked for leaves the tiles whose keys each of 64 rows sees."""
    right = "if (!(bits >> b & 1u)) score"
    header = (INCLUDE_DIR / "forward_sm90.cuh").read_text()
    kernel_of = ForwardForm.kernel

    def hiding(self: ForwardForm, *args: object, **options: object) -> Kernel:
        return changed_source(kernel_of(self, *args, **options), (right, "score"), header=header)

    monkeypatch.setattr(ForwardForm, "kernel", hiding)
    p = Problem(1, 1, 400, 900, 64, "bf16", window=(300, 200))
    got, _ = execute(p, algorithm=FORWARD, backward=False)
    rows = -(-p.seqlen_q // 64)
    keys = -(-p.seqlen_k // TILE.block_n)
    seen = np.zeros((1, 1, rows, keys), bool)
    for i in range(rows):
        for j in range(keys):
            tile = p.visible()[0, 0, 64 * i : 64 * i + 64, TILE.block_n * j :][:, : TILE.block_n]
            ragged = TILE.block_n * (j + 1) > p.seqlen_k or 64 * (i + 1) > p.seqlen_q
            seen[0, 0, i, j] = tile.all() and not ragged
    assert 5 < seen.sum() < rows * 4
    left = replace(p, block_mask=seen, block_size=(64, TILE.block_n))
    assert np.abs(got["out"] - reference(left)["out"])[..., :384, :].max() < 2e-2


def test_what_dispatch_picks() -> None:
    """One block a query tile where the plain forward would have blocks that stay."""
    shape = AttentionShape(1, 1, 1024, 1024, 128, dtype="bf16", causal=True, window=(128, 0))
    found = launches_of("auto", shape, "forward", Device("90"))
    assert (found.algorithm, found.main.kernel.entry) == (FORWARD, "flash_forward_sm90")
    assert dict(found.main.kernel.macros)["WINDOW"] == 1
    plain = launches_of("auto", replace(shape, window=(None, None)), "forward", Device("90"))
    assert plain.main.kernel.entry == "flash_forward_sm90_persistent"
    assert dispatch.form_name(128, "forward", 1024, ["causal", "window"]) == "flash-sm90 d128 128x128, pingpong"
    assert hopper.default_tile(128, "forward", False, 9999, featured=True) == Tile(128, 128)
    assert hopper.default_tile(128, "forward", False, 9999) == Tile(128, 176)


def test_what_has_none_of_it_says_so() -> None:
    with pytest.raises(ValueError, match="flash-sm90-optimistic does not take window"):
        execute(Problem(1, 1, 8, 8, 64, "bf16", window=(2, 0)), algorithm="flash-sm90-optimistic", backward=False)
    with pytest.raises(ValueError, match="flash-sm90 does not take bias"):
        execute(Problem(1, 1, 8, 8, 64, "bf16", bias=(1, 1)), algorithm=FORWARD)
    with pytest.raises(ValueError, match="persistent, pingpong has no window, alibi: that is for"):
        forward_form(64, False, 100).kernel("bf16", False, features=["window", "alibi"])


@pytest.mark.thorough
@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_every_head_dimension(head_dim: int, changes: str, dtype: str) -> None:
    tile = forward_form(head_dim, False, 1, featured=True).tile
    for seed, sizes in enumerate(((1, 1), (127, 300), (300, 127), (333, 400))):
        p = Problem(2, 2, *sizes, head_dim, dtype, kv_heads=1, seed=seed, **CHANGES[changes])
        hold(p, tile, seed=seed or None)


@pytest.mark.thorough
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_sawtooth_walks_the_same_tiles(changes: str) -> None:
    p = Problem(2, 2, 420, 420, 64, "bf16", kv_heads=1, sinks=3, **CHANGES[changes])
    rows, counted = execute(p, algorithm=FORWARD, backward=False)
    turned, also = execute(p, algorithm=FORWARD, backward=False, order="sawtooth", wave=2)
    assert counted == also
    check(p, turned)
    assert (rows["lse"] != turned["lse"]).any()  # sums in another order


@pytest.mark.thorough
def test_a_tile_may_be_asked_for() -> None:
    p = Problem(1, 2, 200, 700, 128, "bf16", **CHANGES["all"])
    check_all(p, Tile(128, 176), FORWARD, backward=False)
