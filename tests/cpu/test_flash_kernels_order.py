"""The forward's order of keys, and its notes of time and place, which the simulated L2 replays."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.l2 import L2, available, replay, simulate
from analysis.l2.attention import query_tiles_outside
from analysis.l2.recorded import events, spread
from analysis.shapes import AttentionShape, Tile
from kernels.attention import FlashConfig, progress_notes
from kernels.host import HostBackend
from kernels.launch import Array
from tests.flash_support import Problem, check, execute, expected_traffic

TILE = Tile(32, 32)
simulates = pytest.mark.skipif(not available(), reason="no C compiler here")
PROBLEMS = {
    "full": Problem(heads=2, seqlen_q=152, seqlen_k=232, head_dim=32),
    "causal": Problem(heads=2, seqlen_q=152, seqlen_k=136, head_dim=32, causal=True),
    "masked": Problem(
        heads=2, seqlen_q=128, seqlen_k=256, head_dim=32,
        key_mask=np.random.default_rng(3).random((1, 256)) < 0.7,
        block_mask=np.random.default_rng(4).random((1, 2, 4, 8)) < 0.6, block_size=(32, 32),
    ),
    "fp32": Problem(heads=1, seqlen_q=96, seqlen_k=128, head_dim=32, dtype="fp32"),
    "dropout": Problem(heads=1, seqlen_q=96, seqlen_k=128, head_dim=32, dropout_p=0.3),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_sawtooth_is_right_and_moves_the_same_bytes(name: str) -> None:
    p = PROBLEMS[name]
    got, traffic = execute(p, tile=TILE, backward=False, order="sawtooth", wave=2)
    check(p, got)
    assert traffic == expected_traffic(p, TILE, "flash", backward=False)


def test_every_second_wave_walks_from_the_last_tile_to_the_first() -> None:
    """To the bit what a walk upwards gives on keys whose tiles are in reverse order."""
    p = Problem(seqlen_q=6 * 32, seqlen_k=8 * 32, head_dim=32, dtype="fp32", seed=7)
    turned = Problem(seqlen_q=6 * 32, seqlen_k=8 * 32, head_dim=32, dtype="fp32", seed=7)
    for name in "kv":
        tiles = p.data[name].reshape(1, 1, 8, 32, 32)
        turned.data[name] = tiles[:, :, ::-1].reshape(1, 1, 256, 32)
    up, down, both = (
        execute(problem, tile=TILE, backward=False, **order)[0]["out"].reshape(6, -1)
        for problem, order in ((p, {}), (turned, {}), (p, {"order": "sawtooth", "wave": 2}))
    )
    assert (up != down).any(axis=1).all(), "the order of summation shows in the last bits"
    for block in range(6):
        want = down if block // 2 % 2 else up
        assert (both[block] == want[block]).all(), block


def test_orders_and_notes_that_cannot_be_are_refused() -> None:
    p = PROBLEMS["full"]
    with pytest.raises(ValueError, match="needs the blocks that run at a time, got wave=None"):
        execute(p, tile=TILE, backward=False, order="sawtooth")
    with pytest.raises(ValueError, match="neither 'rows' nor 'sawtooth'"):
        execute(p, tile=TILE, backward=False, order="up")
    with pytest.raises(ValueError, match="flash1-skip-first has neither"):
        execute(
            p, tile=TILE, backward=False, algorithm="flash1-skip-first", order="sawtooth", wave=2
        )
    with pytest.raises(ValueError, match=r"progress is int64 \(3, 5\), not int64 \(10, 11\)"):
        execute(p, tile=TILE, backward=False, progress=notes_of((3, 5))[0], progress_tiles=1)
    with pytest.raises(ValueError, match="backward: sawtooth and progress are the forward's"):
        FlashConfig("backward", "fp16", 32, Tile(32, 32), sawtooth=True)


def notes_of(shape: tuple[int, int]) -> tuple[Array, np.ndarray]:
    memory = np.zeros(shape, np.int64)
    return Array(
        "progress", memory.ctypes.data, shape, (shape[1], 1), "int64", "rw", memory
    ), memory


def recorded(p: Problem, every: int, order: str) -> tuple[np.ndarray, dict[tuple[str, str], int]]:
    """Notes of a launch on the host, and the bytes it counted."""
    blocks = p.batch * p.heads * -(-p.seqlen_q // TILE.block_m)
    array, memory = notes_of((blocks, progress_notes(p.seqlen_k, TILE.block_n, every)))
    backend = HostBackend(checks=True, os_threads=1)
    _, traffic = execute(
        p, tile=TILE, backward=False, backend=backend, order=order, wave=1, progress=array,
        progress_tiles=every,
    )  # fmt: skip
    return memory, traffic["flash_forward"]


def launch_of(p: Problem, order: str):
    shape = AttentionShape(
        p.batch, p.heads, p.seqlen_q, p.seqlen_k, p.head_dim, p.kv_heads, p.dtype, p.causal
    )
    return query_tiles_outside(shape, TILE, order=order, wave=1)


@simulates
@pytest.mark.parametrize("order", ["rows", "sawtooth"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", ["full", "causal"])
def test_the_replayed_notes_ask_for_the_bytes_that_were_counted(
    name: str, every: int, order: str
) -> None:
    """A cache that keeps nothing: what it fetches and writes is what the host backend counted."""
    p = PROBLEMS[name]
    notes, counted = recorded(p, every, order)
    launch = launch_of(p, order)
    found = replay(launch, L2(1, 1, 1), 2, events(launch, notes, every))
    moved = {(t, "read"): c.fetched for t, c in found.items() if c.fetched}
    moved |= {(t, "write"): c.written + c.left for t, c in found.items() if c.written + c.left}
    assert moved == {key: n for key, n in counted.items() if key[0] != "progress"}
    assert set(notes[:, 0]) == {0, 1}
    assert spread(notes) >= 0


@simulates
def test_a_sawtooth_saves_what_a_cache_holds_on_the_recorded_order() -> None:
    """The host runs block after block, a wave of one. Of the 64 KB of K and V the cache holds 32:
    upwards nothing is found again, in a sawtooth half a walk, as the simulator says by itself."""
    p = Problem(seqlen_q=8 * 32, seqlen_k=512, head_dim=32)
    l2 = L2(1, 16, 16)
    walks = {}
    for order in ("rows", "sawtooth"):
        notes, _ = recorded(p, 1, order)
        launch = launch_of(p, order)
        found = replay(launch, l2, 2, events(launch, notes, 1))
        alone = simulate(launch, l2, 1, sampled_sets=16, burst=1)
        assert found == alone
        walks[order] = sum(found[t].fetched for t in "kv") / (2 * 512 * 64)
    assert walks["rows"] == 8
    assert 1 + 7 / 2 < walks["sawtooth"] < 1 + 7 / 2 + 0.7  # Q and O take some of the room


@simulates
def test_notes_of_another_launch_are_refused() -> None:
    p = PROBLEMS["full"]
    notes, _ = recorded(p, 1, "rows")
    launch = launch_of(p, "rows")
    with pytest.raises(ValueError, match="is not of 10 blocks"):
        events(launch, notes[:-1], 1)
    with pytest.raises(ValueError, match="block 0: notes"):
        events(launch, notes, 4)
    with pytest.raises(ValueError, match="no block noted its end"):
        spread(np.zeros((3, 4), np.int64))
