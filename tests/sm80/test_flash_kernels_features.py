"""Masks, dropout, sparsity, modes and views of the flash kernels, on the host, all checks on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flash_support import Problem, aligned, check_all, execute, largest_error, reference, to_bits, view

from analysis.shapes import Tile
from kernels import attention
from kernels.host import HostBackend
from kernels.philox import kept_weights

TILE = Tile(64, 64)
RNG = np.random.default_rng(0)


def lengths_mask(lengths: list[int], seqlen_k: int) -> np.ndarray:
    return np.arange(seqlen_k) < np.array(lengths)[:, None]


# ---- key masks ----------------------------------------------------------------------------------


def test_key_mask() -> None:
    mask = RNG.random((3, 150)) < 0.6
    mask[1] = False  # an item that sees nothing
    mask[2, :100] = False  # a first tile without a key
    p = Problem(3, 2, 70, 150, 64, "fp16", key_mask=mask)
    got = check_all(p, TILE)
    assert not got["out"][1].any()
    assert (got["lse"][1] == -np.inf).all()
    assert not any(got[name][1].any() for name in ("dq", "dk", "dv"))


def test_item_beside_a_masked_one_is_untouched() -> None:
    p = Problem(2, 1, 3, 3, 64, "fp16", key_mask=np.array([[False] * 3, [True] * 3]))
    together, _ = execute(p, tile=TILE)
    alone = Problem(
        1, 1, 3, 3, 64, "fp16", key_mask=np.ones((1, 3), bool), data={name: value[1:] for name, value in p.data.items()}
    )
    for name, value in execute(alone, tile=TILE)[0].items():
        assert np.array_equal(together[name][1:], value), name


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_masked_slots_may_hold_anything(garbage: float) -> None:
    mask = lengths_mask([1, 70, 0], 70)
    p = Problem(3, 2, 70, 70, 64, "fp16", key_mask=mask, seed=3)
    for name in ("k", "v"):
        p.data[name] = np.where(mask[:, None, :, None], p.data[name], garbage)
    got = check_all(p, TILE)
    assert np.isfinite(got["out"]).all()
    for name in ("dk", "dv"):
        assert not got[name][~np.broadcast_to(mask[:, None, :, None], got[name].shape)].any()


def test_scores_below_any_stand_in_for_infinity() -> None:
    """Masked scores are -inf, not a large negative number."""
    p = Problem(1, 1, 2, 2, 64, "fp16", scale=1.0, key_mask=np.array([[True, False]]))
    for name in ("q", "k", "v"):
        p.data[name][:] = 0
    p.data["q"][0, 0, 0, 0] = -20000
    p.data["k"][0, 0, 0, 0] = 1
    p.data["v"][0, 0, :, 0] = (1, 100)
    got = check_all(p, TILE)
    assert got["out"][0, 0, :, 0].tolist() == [1, 1]
    assert got["lse"][0, 0].tolist() == [-20000, 0]


# ---- dropout ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "causal", "tile"), [("fp16", False, (64, 64)), ("fp32", True, (32, 32))])
def test_dropout(dtype: str, causal: bool, tile: tuple[int, int]) -> None:
    check_all(Problem(2, 2, 70, 90, 64, dtype, causal, dropout_p=0.3, dropout_seed=2**40 + 5), Tile(*tile))


def test_dropout_mask_does_not_depend_on_the_tile() -> None:
    """v = dout = identity, q = k = 0: out is P o Z / n and dv its transpose."""
    p = Problem(2, 2, 64, 64, 64, "fp16", dropout_p=0.5, dropout_seed=7)
    p.data["q"][:] = p.data["k"][:] = 0
    p.data["v"][:] = p.data["dout"][:] = np.eye(64)
    kept = kept_weights(7, 0.5, 2, 2, 64, 64)
    for tile in (Tile(64, 64), Tile(32, 128)):
        got = check_all(p, tile)
        assert np.array_equal(got["out"] != 0, kept)
        assert np.array_equal(got["dv"] != 0, kept.swapaxes(2, 3))
        assert np.array_equal(got["dv"], got["out"].swapaxes(2, 3))


def test_dropping_everything() -> None:
    p = Problem(1, 1, 40, 40, 64, "fp16", dropout_p=1.0, dropout_seed=1)
    got = check_all(p, TILE)
    assert not any(got[name].any() for name in ("out", "dq", "dk", "dv"))


# ---- block sparsity -----------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "causal"), [("flash", False), ("flash", True), ("flash-deterministic", True)])
def test_block_sparse(algorithm: str, causal: bool) -> None:
    """Blocks twice the tile; a mask of its own per batch and head; empty rows and columns."""
    mask = RNG.random((2, 4, 2, 3)) < 0.5
    mask[0, 0] = False
    mask[1, 1, 0] = False
    mask[1, :, :, 2] = False
    p = Problem(2, 4, 200, 280, 64, "fp16", causal, kv_heads=2, block_mask=mask, block_size=(128, 128))
    check_all(p, TILE, algorithm)


def test_more_blocks_than_threads() -> None:
    """The mask is read 32 bytes at a time by a block of one warp: several rounds."""
    mask = RNG.random((1, 1, 5, 50)) < 0.3
    p = Problem(1, 1, 80, 800, 32, "fp16", True, block_mask=mask, block_size=(16, 16))
    check_all(p, Tile(16, 16))


@pytest.mark.parametrize("pattern", [[[1, 0], [1, 1]], [[1, 1], [0, 1]]])
def test_block_patterns(pattern: list[list[int]]) -> None:
    mask = np.broadcast_to(np.array(pattern, bool), (1, 2, 2, 2))
    p = Problem(1, 2, 256, 256, 64, "fp16", block_mask=mask, block_size=(128, 128))
    check_all(p, TILE)


@pytest.mark.parametrize("causal", [False, True])
def test_full_density_is_dense_to_the_bit(causal: bool) -> None:
    p = Problem(1, 2, 130, 130, 64, "fp16", causal)
    dense, _ = execute(p, tile=TILE)
    p.block_mask, p.block_size = np.ones((1, 2, 2, 2), bool), (128, 128)
    # Atomic additions come in any order; the host runs blocks in threads.
    sparse, _ = execute(p, tile=TILE, backend=HostBackend(os_threads=1))
    for name in ("out", "lse", "dk", "dv"):
        assert np.array_equal(dense[name], sparse[name]), name
    assert largest_error(dense["dq"], sparse["dq"]) <= 1e-3


def test_lower_triangular_blocks_are_causal() -> None:
    p = Problem(1, 1, 256, 256, 64, "fp16", True)
    dense, _ = execute(p, tile=TILE)
    p.block_mask, p.block_size = np.tri(2, dtype=bool)[None, None], (128, 128)
    sparse = check_all(p, TILE)
    for name in ("out", "dk", "dv"):
        assert np.array_equal(dense[name], sparse[name]), name


# ---- modes --------------------------------------------------------------------------------------


def test_deterministic_backward_repeats_to_the_bit() -> None:
    """Two runs with blocks in different orders; dq's partial sums are added in tile order."""
    p = Problem(1, 2, 200, 200, 64, "fp16", True)
    check_all(p, TILE, "flash-deterministic")
    first, _ = execute(p, tile=TILE, algorithm="flash-deterministic", backend=HostBackend(seed=1))
    second, _ = execute(p, tile=TILE, algorithm="flash-deterministic", backend=HostBackend(seed=2))
    for name, value in first.items():
        assert np.array_equal(value, second[name]), name


@pytest.mark.parametrize("scale", [-0.2, 0.0, 0.2])
def test_any_scale(scale: float) -> None:
    check_all(Problem(1, 2, 70, 90, 64, "fp16", True, scale=scale), TILE)


def test_gradient_of_lse() -> None:
    """lse is an output like out; delta takes its gradient in."""
    p = Problem(1, 2, 90, 70, 64, "fp16", True, with_dlse=True)
    check_all(p, TILE)


# ---- memory -------------------------------------------------------------------------------------


def strided(name: str, values: np.ndarray, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """A (B, H, N, D) view of a larger buffer of markers, and the buffer."""
    b, h, n, d = values.shape
    if layout == "packed":  # one of three in (B, N, 3, H, D)
        buffer = aligned((b, n, 3, h, d), "fp16")
        inside = buffer[:, :, 1].transpose(0, 2, 1, 3)
    else:  # rows and columns to spare on every side
        buffer = aligned((b + 1, h + 1, n + 5, d + 16), "fp16")
        inside = buffer[1:, :-1, 2:-3, 8:-8]
    buffer[...] = np.float16(7.0)
    inside[...] = to_bits(values, "fp16")
    return inside, buffer


@pytest.mark.parametrize(("layout", "head_dim"), [("packed", 64), ("guarded", 40)])
def test_views_and_guard_bands(layout: str, head_dim: int) -> None:
    """Every tensor a view with its own strides; what lies around it survives."""
    p = Problem(2, 2, 70, 70, head_dim, "fp16", True)
    arrays, buffers, insides = {}, {}, {}
    for name in ("q", "k", "v", "dout", "out", "dq", "dk", "dv"):
        values = p.data[name] if name in p.data else np.zeros_like(p.data["q"])
        insides[name], buffers[name] = strided(name, values, layout)
        arrays[name] = view(name, insides[name], "fp16")
    execute(p, tile=TILE, arrays=arrays)
    want = reference(p)
    for name in ("out", "dq", "dk", "dv"):
        assert largest_error(insides[name].astype(float), want[name]) <= 5e-3, name
        insides[name][...] = 7.0
        assert (buffers[name] == 7.0).all(), f"{name}: wrote outside its view"


def test_broadcast_gradient() -> None:
    """The incoming gradient of out.sum() has strides 0 in all outer dimensions."""
    p = Problem(2, 2, 70, 70, 64, "fp16", True)
    p.data["dout"] = np.broadcast_to(p.data["dout"][:1, :1, :1], p.data["dout"].shape)
    row = aligned((64,), "fp16")
    row[:] = to_bits(p.data["dout"][0, 0, 0], "fp16")
    dout = view("dout", np.broadcast_to(row, (2, 2, 70, 64)), "fp16")
    got, _ = execute(p, tile=TILE, arrays={"dout": dout})
    for name, value in reference(p).items():
        assert largest_error(got[name], value) <= 5e-3, name


def test_offsets_beyond_32_bits() -> None:
    """The second head lies 2**31 elements after the first; the memory between is never touched."""
    p = Problem(1, 2, 70, 70, 64, "fp16", True)
    arrays, insides = {}, {}
    for name in ("q", "k", "v", "dout", "out", "dq", "dk", "dv"):
        head_stride = 2**31 + 64
        try:
            buffer = aligned((head_stride + 70 * 64,), "fp16")
        except MemoryError:
            pytest.skip("the system does not give out 4 GiB of address space per tensor")
        inside = np.lib.stride_tricks.as_strided(buffer, (1, 2, 70, 64), (0, 2 * head_stride, 128, 2))
        if name in p.data:
            inside[...] = to_bits(p.data[name], "fp16")
        insides[name], arrays[name] = inside, view(name, inside, "fp16")
    execute(p, tile=TILE, arrays=arrays)
    want = reference(p)
    for name in ("out", "dq", "dk", "dv"):
        assert largest_error(insides[name].astype(float), want[name]) <= 5e-3, name


def test_no_keys_and_no_rows() -> None:
    got, _ = execute(Problem(1, 2, 5, 0, 64, "fp16"), tile=TILE)
    assert not got["out"].any()
    assert (got["lse"] == -np.inf).all()
    assert not got["dq"].any()
    got, _ = execute(Problem(1, 2, 0, 5, 64, "fp16"), tile=TILE)
    assert not got["dk"].any()
    assert not got["dv"].any()


# ---- refusals -----------------------------------------------------------------------------------


class Silent:
    """A backend that must not be reached."""

    name = "silent"
    multiprocessors = 2

    def launch(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("launched in spite of a wrong argument")

    empty = HostBackend().empty


def call(p: Problem, **options: Any) -> None:
    arrays = {}
    for name in ("q", "k", "v"):
        memory = aligned(p.data[name].shape, p.dtype)
        arrays[name] = view(name, memory, p.dtype)
    arrays["out"] = view("out", aligned(p.data["q"].shape, p.dtype), p.dtype)
    arrays |= {name: options.pop(name) for name in list(options) if name in arrays}
    algorithm = options.pop("algorithm", "flash")
    attention.forward(
        Silent(), algorithm, arrays["q"], arrays["k"], arrays["v"], arrays["out"], {}, **({"scale": 1.0} | options)
    )


def test_wrong_arguments_are_refused_with_both_values() -> None:
    p = Problem(2, 6, 8, 8, 64, "fp16")
    small = Problem(2, 6, 8, 8, 32, "fp16")
    unaligned = aligned((2, 6, 8, 72), "fp16")[..., 1:65]
    narrow = aligned((2, 6, 8, 68), "fp16")[..., :64]
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"k": view("k", aligned((2, 4, 8, 64), "fp16"), "fp16")}, ValueError, "heads=6.*=4"),
        ({"v": view("v", small.data["v"].astype(np.float16), "fp16")}, ValueError, "v has shape"),
        ({"v": view("v", aligned((2, 6, 8, 64), "bf16"), "bf16")}, TypeError, "v has dtype bf16"),
        ({"q": view("q", unaligned, "fp16")}, ValueError, "q is not aligned to 16"),
        ({"k": view("k", narrow, "fp16")}, ValueError, "k is not aligned to 16"),
        ({"tile": Tile(40, 64)}, ValueError, "block_m=40"),
        ({"tile": Tile(256, 256)}, ValueError, "98304 bytes of shared memory, the limit is 90000"),
        ({"scale": float("nan")}, ValueError, "scale=nan"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p=1.5"),
        ({"key_mask": view("m", aligned((2, 7), "uint8"), "uint8")}, ValueError, r"\(2, 7\)"),
        ({"block_size": (64, 64)}, ValueError, "without a block_mask"),
        ({"algorithm": "flash3"}, ValueError, "flash3"),
        ({"algorithm": "flash1-skip-first", "dropout_p": 0.5}, ValueError, "flash1-skip-first does not take dropout_p"),
    ]
    for options, error, message in cases:
        limit = {"shared_limit_bytes": 90000} if options.get("tile") == Tile(256, 256) else {}
        with pytest.raises(error, match=message):
            call(p, **options, **limit)
    block_mask = view("block_mask", aligned((2, 6, 1, 1), "uint8"), "uint8")
    with pytest.raises(ValueError, match=r"96 rows a block, not a multiple of the tile's 64"):
        call(p, tile=TILE, block_mask=block_mask, block_size=(96, 64))
    with pytest.raises(ValueError, match=r"shape \(2, 6, 1, 1\).*\(2, 6, 1, 1\)|make it"):
        call(Problem(2, 6, 80, 8, 64), tile=TILE, block_mask=block_mask)


@pytest.mark.parametrize("head_dim", [0, 4, 12, 257, 264])
def test_head_dims_without_a_kernel(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim={head_dim}"):
        attention.padded_head_dim(head_dim)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_every_feature_at_once(kv_heads: int) -> None:
    p = Problem(
        2,
        2,
        190,
        300,
        40,
        "fp16",
        True,
        kv_heads=kv_heads,
        key_mask=RNG.random((2, 300)) < 0.7,
        dropout_p=0.2,
        dropout_seed=99,
        block_mask=RNG.random((2, 2, 2, 3)) < 0.7,
        block_size=(128, 128),
        with_dlse=True,
    )
    check_all(p, TILE, "flash-deterministic")
