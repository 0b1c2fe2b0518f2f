"""What the conformance suite does not show of the flash kernels: many blocks in a mask, the order
of blocks, and memory around and between their views."""

from __future__ import annotations

import numpy as np
import pytest
from flash_support import Problem, aligned, check, check_all, execute, to_bits, to_float, view

from analysis.shapes import Tile
from kernels.host import HostBackend

TILE = Tile(64, 64)
RESULTS = {"out": "q", "dq": "q", "dk": "k", "dv": "v"}
OPERANDS = ("q", "k", "v", "dout")


def test_more_blocks_than_threads() -> None:
    """The mask is read 32 bytes at a time by a block of one warp: several rounds."""
    mask = np.random.default_rng(0).random((1, 1, 5, 50)) < 0.3
    p = Problem(1, 1, 80, 800, 32, "fp16", True, block_mask=mask, block_size=(16, 16))
    check_all(p, Tile(16, 16))


@pytest.mark.parametrize("algorithm", ["flash-deterministic", "flash-split"])
def test_gradients_in_a_fixed_order_repeat_to_the_bit(algorithm: str) -> None:
    """Whichever block runs first; dk and dv are those of the fused pass."""
    p = Problem(1, 2, 150, 150, 64, "fp16", True)
    fused, _ = execute(p, tile=TILE)
    first, second = (execute(p, tile=TILE, algorithm=algorithm, backend=HostBackend(seed=seed))[0] for seed in (1, 2))
    for name, value in first.items():
        assert np.array_equal(value, second[name]), name
    for name in ("dk", "dv"):
        assert np.array_equal(first[name], fused[name]), name


def test_views_and_guard_bands() -> None:
    """Every tensor a view with its own strides; what lies around it survives."""
    p = Problem(2, 2, 70, 70, 40, "fp16", True)
    arrays, buffers, insides = {}, {}, {}
    for name in (*OPERANDS, *RESULTS):
        b, h, n, d = p.data[RESULTS.get(name, name)].shape
        buffers[name] = aligned((b + 1, h + 1, n + 5, d + 16), "fp16")
        buffers[name][...] = np.float16(7.0)
        insides[name] = buffers[name][1:, :-1, 2:-3, 8:-8]
        if name in OPERANDS:
            insides[name][...] = to_bits(p.data[name], "fp16")
        arrays[name] = view(name, insides[name], "fp16")
    execute(p, tile=TILE, arrays=arrays)
    check(p, {name: to_float(insides[name], "fp16") for name in RESULTS})
    for name in RESULTS:
        insides[name][...] = 7.0
        assert (buffers[name] == 7.0).all(), f"{name}: wrote outside its view"


def test_offsets_beyond_32_bits() -> None:
    """The second head lies 2**31 elements after the first; the memory between is never touched."""
    p = Problem(1, 2, 70, 70, 64, "fp16", True)
    arrays, insides = {}, {}
    head_stride = 2**31 + 64
    for name in (*OPERANDS, *RESULTS):
        try:
            buffer = aligned((head_stride + 70 * 64,), "fp16")
        except MemoryError:
            pytest.skip("the system does not give out 4 GiB of address space per tensor")
        inside = np.lib.stride_tricks.as_strided(buffer, (1, 2, 70, 64), (0, 2 * head_stride, 128, 2))
        if name in OPERANDS:
            inside[...] = to_bits(p.data[name], "fp16")
        insides[name], arrays[name] = inside, view(name, inside, "fp16")
    execute(p, tile=TILE, arrays=arrays)
    check(p, {name: to_float(insides[name], "fp16") for name in RESULTS})
