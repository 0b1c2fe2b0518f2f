"""Each instruction alone: small functions compiled for both architectures, held to exact ones."""

from __future__ import annotations

from collections import Counter
from functools import cache

import machine_functions as functions
import numpy as np
import pytest

from kernels.building.compile import compile_cubin
from kernels.launch import Kernel
from kernels.machine import Program, load

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and the NVRTC wheel")
COUNT = 256


@cache
def program(arch: str) -> Program:
    text = functions.source()
    return load(compile_cubin(Kernel(text, next(iter(functions.FUNCTIONS)), (), 128), arch).cubin)


def run(name: str, arch: str, words: np.ndarray) -> tuple[np.ndarray, Counter[str]]:
    """The function's results and the opcodes that made them."""
    out = np.zeros(len(words), np.uint64)
    blocks = -(-len(words) // 128)
    counts = program(arch).launch(name, (blocks, 1, 1), 128, args=[words.reshape(-1), out, np.int32(len(words))])
    return out, counts.executed


def is_nan(name: str, bits: int) -> bool:
    if name.startswith(("f64", "cvt_f32_f64")):
        return bool(np.isnan(functions.f64(bits)))
    if "16x2" in name:
        value = functions.bf16 if "bf16" in name else functions.f16
        return any(np.isnan(value(bits >> by)) for by in (0, 16))
    if name.startswith("cvt_") and "from" not in name and name != "cvt_f64_f32":
        return bits in (0, 1 << 31, 1 << 63)  # of whole numbers
    return bool(np.isnan(functions.f32(bits)))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", sorted(functions.FUNCTIONS))
def test_function(name: str, arch: str) -> None:
    _, reference = functions.FUNCTIONS[name]
    words = functions.inputs(len(name), COUNT)
    out, _ = run(name, arch, words)
    for (a, b, c), got in zip(words.tolist(), out.tolist(), strict=True):
        want = reference(a, b, c)
        if want is functions.NAN:
            assert is_nan(name, got), f"{a:#x} {b:#x} {c:#x}: {got:#x}, not NaN"
        else:
            assert got == want, f"{a:#x} {b:#x} {c:#x}: {got:#x}, not {want:#x}"
