"""What the first ladder steps accept: layouts, tiles, limits. Refusals come before any launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flash_support import Problem, aligned, check, to_float, view

from analysis.shapes import Tile
from analysis.tiles import paper_tile
from kernels import attention, ladder
from kernels.flash1 import flash1_tile
from kernels.host import HostBackend
from kernels.launch import Array, Kernel, contiguous_strides
from kernels.standard import standard_kernel

A100_SHARED_BYTES = 163 * 1024


def paint(shape: tuple[int, ...], marker: float) -> np.ndarray:
    memory = aligned(shape, "fp16")
    memory[...] = marker
    return memory


@pytest.mark.parametrize("algorithm", ladder.ALGORITHMS)
def test_views_of_one_buffer_between_guard_bands(algorithm: str) -> None:
    """q, k, v out of one (B, N, 3, H, D) tensor; results into the middle of marked buffers."""
    p = Problem(batch=2, heads=3, seqlen_q=37, seqlen_k=37, causal=True)
    packed = paint((2, 37, 3, 3, 64), np.nan)
    for slot, name in enumerate("qkv"):
        packed[:, :, slot] = p.data[name].transpose(0, 2, 1, 3)
    arrays = {name: view(name, packed[:, :, slot].transpose(0, 2, 1, 3), "fp16") for slot, name in enumerate("qkv")}
    # An incoming gradient transposed to (B, N, H, D), and marked room around every result.
    dout = paint((2, 37, 3, 64), 0.0)
    dout[...] = p.data["dout"].transpose(0, 2, 1, 3)
    arrays["dout"] = view("dout", dout.transpose(0, 2, 1, 3), "fp16")
    marker = -77.0
    buffers = {name: paint((2, 3, 37 + 2, 64 + 16), marker) for name in ("out", "dq", "dk", "dv")}
    for name, buffer in buffers.items():
        arrays[name] = view(name, buffer[:, :, 1:-1, 8:-8], "fp16")
    backend = HostBackend()
    stats: dict[str, Array] = {}
    options = {"scale": p.scale, "causal": True, "tile": Tile(64, 64) if algorithm == "standard" else Tile(16, 64)}
    inputs = [arrays[name] for name in ("q", "k", "v", "out")]
    attention.forward(backend, algorithm, *inputs, stats, **options)
    gradients = [arrays[name] for name in ("dq", "dk", "dv")]
    attention.backward(backend, algorithm, *inputs, arrays["dout"], stats, *gradients, **options)
    check(p, {name: to_float(b[:, :, 1:-1, 8:-8], "fp16") for name, b in buffers.items()})
    for name, buffer in buffers.items():
        buffer[:, :, 1:-1, 8:-8] = marker
        assert (buffer == marker).all(), f"{name}: the marked room around it changed"


class Refusing:
    """A backend that must not be reached."""

    name = "refusing"
    multiprocessors = 1

    def launch(self, kernel: Kernel, *args: Any, **options: Any) -> None:
        raise AssertionError(f"{kernel.entry} was launched")

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        return fake(name, shape, dtype)


def fake(name: str, shape: tuple[int, ...], dtype: str = "fp16", pointer: int = 4096) -> Array:
    """An array that nobody will read."""
    return Array(name, pointer, shape, contiguous_strides(shape), dtype, "rw")


def attempt(algorithm: str, pass_: str = "forward", **changes: Any) -> None:
    """Run a pass on arrays nobody reads; ``changes`` replace arrays or options."""
    q_shape = changes.pop("q_shape", (1, 2, 64, 64))
    k_shape = changes.pop("k_shape", (1, 2, 64, 64))
    dtype = changes.pop("dtype", "fp16")
    arrays = {
        name: fake(name, k_shape if name in ("k", "v", "dk", "dv") else q_shape, dtype)
        for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    }
    arrays |= {name: changes.pop(name) for name in list(changes) if name in arrays}
    stats = changes.pop(
        "stats",
        {"p": fake("p", (*q_shape[:3], k_shape[2]), dtype)}
        | {name: fake(name, q_shape[:3], "fp32") for name in ("l", "m")},
    )
    q, k, v, out, dout, dq, dk, dv = arrays.values()
    options = {"scale": 0.125} | changes
    backend = Refusing()
    if pass_ == "forward":
        attention.forward(backend, algorithm, q, k, v, out, {}, **options)
    else:
        attention.backward(backend, algorithm, q, k, v, out, dout, stats, dq, dk, dv, **options)


def test_the_attempt_itself_is_sound() -> None:
    with pytest.raises(AssertionError, match="flash1_forward was launched"):
        attempt("flash1-skip-first")
    with pytest.raises(AssertionError, match="standard_dv was launched"):
        attempt("standard", "backward")


REFUSED = {
    "grouped heads": ({"k_shape": (1, 1, 64, 64)}, ValueError, r"\(1, 2, 64, 64\) and k \(1, 1, 64, 64\)"),
    "head_dim 136": ({"q_shape": (1, 2, 8, 136), "k_shape": (1, 2, 8, 136)}, ValueError, "head_dim 136 .*128"),
    "empty": ({"q_shape": (1, 2, 0, 64)}, ValueError, r"\(1, 2, 0, 64\).*empty"),
    "integers": ({"dtype": "int32"}, TypeError, "int32"),
    "address": ({"k": fake("k", (1, 2, 64, 64), pointer=4104)}, ValueError, "0x1008"),
    "row stride": (
        {"k": Array("k", 4096, (1, 2, 64, 64), (0, 64 * 68, 68, 1), "fp16", "r")},
        ValueError,
        r"\(0, 4352, 68, 1\)",
    ),
    "key mask": ({"key_mask": fake("key_mask", (1, 64), "uint8")}, ValueError, "key_mask"),
    "dropout": ({"dropout_p": 0.1}, ValueError, "dropout_p"),
}


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", ladder.ALGORITHMS)
def test_bad_arguments(algorithm: str, pass_: str) -> None:
    for changes, error, message in REFUSED.values():
        with pytest.raises(error, match=message):
            attempt(algorithm, pass_, **changes)


@pytest.mark.parametrize(
    ("algorithm", "missing"), [("standard", "'p'"), ("flash1-skip-first", "'l'"), ("flash1-literal", "'l'")]
)
def test_backward_without_its_forward(algorithm: str, missing: str) -> None:
    with pytest.raises(ValueError, match=f"needs {missing}.*'lse'"):
        attempt(algorithm, "backward", stats={"lse": fake("lse", (1, 2, 64), "fp32")})


def test_statistics_of_another_problem() -> None:
    stats = {name: fake(name, (1, 2, 32), "fp32") for name in ("l", "m")}
    with pytest.raises(ValueError, match=r"\(1, 2, 32\).*\(1, 2, 64\)"):
        attempt("flash1-skip-first", "backward", stats=stats)
    with pytest.raises(ValueError, match=r"\(1, 2, 64, 32\).*\(1, 2, 64, 64\)"):
        attempt("standard", "backward", stats={"p": fake("p", (1, 2, 64, 32))})


# ---- tiles and shared memory ---------------------------------------------------------------------


def test_tiles_above_the_limit_name_both_numbers() -> None:
    """K and V of 512 keys in fp32 do not fit; in fp16 they do."""
    tile = Tile(16, 512)
    needed = ladder.flash1_shared_bytes(tile, 64, "fp32", "forward")
    with pytest.raises(ValueError, match=f"{needed} bytes.*{227 * 1024}"):
        attempt("flash1-skip-first", tile=tile, dtype="fp32")
    with pytest.raises(AssertionError, match="launched"):
        attempt("flash1-skip-first", tile=tile)
    needed = ladder.flash1_shared_bytes(tile, 64, "fp16", "forward")
    with pytest.raises(ValueError, match=f"{needed} bytes.*{A100_SHARED_BYTES}"):
        attempt("flash1-skip-first", tile=tile, shared_limit_bytes=A100_SHARED_BYTES)


def test_a_row_of_scores_above_the_limit() -> None:
    """standard.cu stages one row forward, two backward."""
    long = {"q_shape": (1, 1, 1, 64), "k_shape": (1, 1, 60000, 64)}
    with pytest.raises(AssertionError, match="standard_scores was launched"):
        attempt("standard", **long)
    with pytest.raises(ValueError, match=r"row of 60000 keys.*240016 bytes.*232448"):
        attempt("standard", "backward", **long)
    with pytest.raises(ValueError, match=r"row of 60000 keys.*240016 bytes.*232448"):
        attempt("standard", dtype="fp32", **long)


def test_tiles_the_standard_kernels_do_not_have() -> None:
    with pytest.raises(ValueError, match=r"block_n=12 .*8"):
        attempt("standard", tile=Tile(16, 12))
    with pytest.raises(ValueError, match="128 sums a thread, the limit is 64"):
        attempt("standard", tile=Tile(512, 64))
    assert standard_kernel("standard_dq", Tile(64, 64), 64, "fp16").threads == 128
    assert standard_kernel("standard_dq", Tile(128, 64), 128, "fp16").threads == 256


def test_shared_bytes_grow_with_the_type() -> None:
    """Three tiles of 64 x 128: 49152 bytes in fp16, 98304 in fp32, plus rows' padding and S."""
    tile = Tile(64, 64)
    padding, scores, statistics = 3 * 64 * 16, 64 * 68 * 4, 4 * 64 * 4
    for dtype, tiles in (("fp16", 49152), ("fp32", 98304)):
        needed = ladder.flash1_shared_bytes(tile, 128, dtype, "forward")
        assert needed == tiles + padding + scores + statistics


def test_the_papers_tile() -> None:
    """Bc = ceil(M / 4d), Br = min(Bc, d), M in elements."""
    assert paper_tile(64, 48 * 1024) == Tile(64, 192)
    assert paper_tile(64, 48 * 1024 + 1) == Tile(64, 193)
    assert paper_tile(64, 4096) == Tile(16, 16)
    with pytest.raises(ValueError, match="M=0"):
        paper_tile(64, 0)


def test_default_tiles_fit_the_device() -> None:
    assert ladder.default_tile("flash1-skip-first", 64, "fp16", "forward") == Tile(16, 256)
    assert ladder.default_tile("flash1-skip-first", 64, "fp16", "backward") == Tile(16, 256)
    small = flash1_tile(64, "fp16", "backward", A100_SHARED_BYTES)
    assert small == Tile(16, 128)
    with pytest.raises(ValueError, match="bytes of shared memory, the limit is 1024"):
        flash1_tile(64, "fp16", "forward", 1024)
    with pytest.raises(ValueError, match=r"'flash9'.*flash1-literal"):
        ladder.default_tile("flash9", 64, "fp16", "forward")
