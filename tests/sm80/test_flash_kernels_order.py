"""The order of walks, and the forward's notes of time and place, which the simulated L2 replays."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from analysis.hardware import GPUS
from analysis.l2 import L2, available, replay, simulate
from analysis.l2.attention import query_tiles_outside
from analysis.l2.recorded import events, spread
from analysis.shapes import AttentionShape, Tile
from analysis.traffic import predict_traffic
from kernels import dispatch, hopper
from kernels.attention import FlashConfig
from kernels.flash import progress_notes
from kernels.hopper_forms import PERSISTENT_SEQLEN
from kernels.host import HostBackend
from kernels.launch import Array
from kernels.launches import Device, launches_of
from repro.prediction import predict
from tests.support.flash_support import Problem, check, execute, expected_traffic

TILE = Tile(32, 32)
simulates = pytest.mark.skipif(not available(), reason="no C compiler here")
RANDOM = np.random.default_rng(3)
PROBLEMS = {
    "full": Problem(heads=2, seqlen_q=152, seqlen_k=232, head_dim=32),
    "causal": Problem(heads=2, kv_heads=1, seqlen_q=152, seqlen_k=136, head_dim=32, causal=True),
    "masked": Problem(
        heads=2,
        seqlen_q=128,
        seqlen_k=256,
        head_dim=32,
        key_mask=RANDOM.random((1, 256)) < 0.7,
        block_mask=RANDOM.random((1, 2, 4, 8)) < 0.6,
        block_size=(32, 32),
    ),
}


@pytest.mark.parametrize(
    ("name", "algorithm"), [("causal", "flash"), ("masked", "flash-split"), ("full", "flash-deterministic")]
)
def test_a_sawtooth_is_right_and_moves_the_same_bytes(name: str, algorithm: str) -> None:
    p = PROBLEMS[name]
    got, traffic = execute(p, tile=TILE, algorithm=algorithm, order="sawtooth", wave=2)
    check(p, got)
    assert traffic == expected_traffic(p, TILE, algorithm)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_so_do_the_hopper_kernels(head_dim: int, causal: bool) -> None:
    p = Problem(heads=4, kv_heads=2, seqlen_q=200, seqlen_k=330, head_dim=head_dim, dtype="bf16", causal=causal)
    got, traffic = execute(p, algorithm="flash-sm90", order="sawtooth", wave=3)
    check(p, got)
    for pass_ in ("forward", "backward"):
        tile = hopper.default_tile(head_dim, pass_, causal, PERSISTENT_SEQLEN + (pass_ == "forward"))
        wanted = predict_traffic("flash-sm90", p.shape, tile, pass_).kernels
        assert {kernel: traffic[kernel] for kernel in wanted} == wanted


BIG, SMALL = 2.0**15, 2.0**-20


def telling(rows: int, tiles: int, width: int) -> np.ndarray:
    """Rows in tiles of BIG, -BIG, then SMALL. Added up from the first on, the SMALL ones remain;
    from the last on, they are rounded away beside -BIG."""
    values = np.full((tiles, rows, width), SMALL)
    values[0], values[1] = BIG, -BIG
    return values.reshape(tiles * rows, width)


def by_block(x: np.ndarray, rows: int) -> list[float]:
    """The one value of each ``rows`` rows."""
    blocks = x.reshape(-1, rows * x.shape[-1])
    assert (blocks == blocks[:, :1]).all()
    return blocks[:, 0].tolist()


ROWS = {
    # algorithm, head_dim -> rows of a block and of a step: forward, backward, backward-dq
    ("flash", 32): ((32, 32), (32, 32), None),
    ("flash-split", 32): ((32, 32), (32, 32), (32, 32)),
    ("flash-sm90", 64): ((192, 128), (128, 128), None),
    ("flash-sm90", 128): ((128, 176), (128, 80), None),
}


@pytest.mark.parametrize(("algorithm", "head_dim"), ROWS)
def test_every_second_wave_walks_the_other_way(algorithm: str, head_dim: int) -> None:
    """All weights are equal, so results are sums over a block's walk, and tell its direction. Two
    heads share their keys: the whole walk turns round, the heads in it too."""
    forward, backward, dq = ROWS[algorithm, head_dim]
    tile = None if algorithm == "flash-sm90" else Tile(*forward)
    hopper_way = algorithm == "flash-sm90"  # the Hopper forward begins with the last tile
    for what, (block, step) in (("out", forward), ("dv", backward), ("dq", dq or (0, 0))):
        if not block:
            continue
        groups = 2 if what == "dv" else 1
        sizes = (4 * step // groups, 5 * block) if what == "dv" else (5 * block, 4 * step)
        p = Problem(
            heads=groups,
            kv_heads=1,
            seqlen_q=sizes[0],
            seqlen_k=sizes[1],
            head_dim=head_dim,
            dtype="bf16",
            scale=1.0,
            with_dlse=what == "dq",
        )
        p.data["q"][...] = 0
        walked = telling(step, 4, head_dim)
        if what == "out":
            p.data["v"][0, 0] = walked
        elif what == "dv":
            p.data["dout"][0] = walked.reshape(2, -1, head_dim)
        else:
            p.data["v"][...], p.data["dlse"][...] = 0, -1
            p.data["k"][0, 0] = walked
        got, _ = execute(p, algorithm=algorithm, tile=tile, order="sawtooth", wave=2, backward=what != "out")
        found = [value != 0 for value in by_block(got[what], block)]
        first, second = (False, True) if hopper_way and what == "out" else (True, False)
        assert found == [first, first, second, second, first], what


@simulates
def test_the_wave_is_what_the_device_holds() -> None:
    """By default: multiprocessors times blocks, as ``predict`` counts them."""
    for gpu in GPUS.values():
        if not dispatch.has_flash(gpu.architecture):
            continue
        device = Device(gpu.architecture, gpu.shared_bytes_per_block, gpu.sms)
        for algorithm, pass_ in product(("flash", "flash-sm90"), ("forward", "backward")):
            if algorithm == "flash-sm90" and gpu.compute_capability != (9, 0):
                continue
            shape = AttentionShape(1, 2, 8192, 8192, 128)
            main = launches_of(algorithm, shape, pass_, device, order="sawtooth").main
            predicted = predict(algorithm, shape, pass_, gpu, order="sawtooth", waves=True)
            assert main.args[-1] == gpu.sms * predicted.blocks_per_sm, (gpu.name, algorithm)


def test_orders_and_notes_that_cannot_be_are_refused() -> None:
    p = PROBLEMS["full"]
    with pytest.raises(ValueError, match="wave=0 with order='sawtooth'"):
        execute(p, tile=TILE, backward=False, order="sawtooth", wave=0)
    with pytest.raises(ValueError, match="wave=2 with order='rows'"):
        execute(p, tile=TILE, backward=False, wave=2)
    with pytest.raises(ValueError, match="order='up' is not one of 'rows', 'sawtooth'"):
        execute(p, tile=TILE, backward=False, order="up")
    with pytest.raises(ValueError, match="flash1-skip-first has no order='sawtooth'"):
        execute(p, tile=TILE, backward=False, algorithm="flash1-skip-first", order="sawtooth")
    with pytest.raises(ValueError, match=r"progress is int64 \(3, 5\), not int64 \(10, 11\)"):
        execute(p, tile=TILE, backward=False, progress=notes_of((3, 5))[0], progress_tiles=1)
    with pytest.raises(ValueError, match="backward: progress=2 is the forward's"):
        FlashConfig("backward", "fp16", 32, Tile(32, 32), progress=2)


def test_hopper_forms_without_a_sawtooth_are_refused_before_a_launch() -> None:
    p = Problem(seqlen_q=64, seqlen_k=64, head_dim=64, dtype="bf16")
    backend = HostBackend()
    for algorithm, pass_ in (("flash-sm90-optimistic", "forward"), ("flash-sm90-deterministic", "backward")):
        with pytest.raises(ValueError, match=f"the {pass_} of {algorithm} has no order="):
            execute(p, algorithm=algorithm, order="sawtooth", backend=backend)
    persistent = next(form for form in hopper.FORWARD_FORMS if form.persistent)
    direct = next(form for form in hopper.BACKWARD_FORMS if form.dq_from_registers)
    for form, arguments in ((persistent, ("bf16", False)), (direct, ("", "bf16", False))):
        with pytest.raises(ValueError, match=f"{form.name}.* has no sawtooth"):
            form.kernel(*arguments, features=["sawtooth"])
    turns = hopper.backward_form(64, False)
    with pytest.raises(ValueError, match="deterministic=True has no sawtooth"):
        turns.kernel("", "bf16", False, features=["sawtooth"], deterministic=True)


def notes_of(shape: tuple[int, int]) -> tuple[Array, np.ndarray]:
    memory = np.zeros(shape, np.int64)
    return Array("progress", memory.ctypes.data, shape, (shape[1], 1), "int64", "rw", memory), memory


def recorded(p: Problem, every: int, order: str) -> tuple[np.ndarray, dict[tuple[str, str], int]]:
    """Notes of a launch on the host, and the bytes it counted."""
    blocks = p.batch * p.heads * -(-p.seqlen_q // TILE.block_m)
    array, memory = notes_of((blocks, progress_notes(p.seqlen_k, TILE.block_n, every)))
    backend = HostBackend(checks=True, os_threads=1)
    _, traffic = execute(
        p,
        tile=TILE,
        backward=False,
        backend=backend,
        progress=array,
        progress_tiles=every,
        **({"order": order, "wave": 1} if order == "sawtooth" else {}),
    )
    return memory, traffic["flash_forward"]


def launch_of(p: Problem, order: str):
    return query_tiles_outside(p.shape, TILE, order=order, wave=1)


@simulates
@pytest.mark.parametrize("order", ["rows", "sawtooth"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", ["full", "causal"])
def test_the_replayed_notes_ask_for_the_bytes_that_were_counted(name: str, every: int, order: str) -> None:
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
