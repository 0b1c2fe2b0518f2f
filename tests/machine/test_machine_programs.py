"""Short programs: votes, shuffles, divergence, calls, atomics, local and generic memory.

Each runs at once and in adversarial time, and gives what NumPy or plain Python gives.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kernels.building.compile import compile_cubin
from kernels.launch import Kernel
from kernels.machine import Program, load

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and the NVRTC wheel")

N, WARP = 128, 32
DRAW = np.random.default_rng(3)
X = DRAW.integers(-(2**31), 2**31, N).astype(np.int32)
X[::3] = DRAW.integers(0, 100, len(X[::3]))
F = (DRAW.standard_normal(N) * 3).astype(np.float32)
WARPS = X.astype(np.int64).reshape(-1, WARP)
MODES = [(arch, late) for arch in ("sm_80", "sm_90") for late in (False, True)]


@cache
def program(arch: str) -> Program:
    text = (Path(__file__).resolve().parent / "machine_programs.cu").read_text()
    return load(compile_cubin(Kernel(text, "votes", (), N), arch).cubin)


def run(name: str, arch: str, late: bool) -> tuple[np.ndarray, np.ndarray]:
    words, floats = np.zeros(2048, np.int32), np.zeros(8192, np.float32)
    program(arch).launch(name, (1, 1, 1), N, args=[X, words, F, floats, np.int32(N)], adversarial=late)
    return words, floats


def word(value: int) -> int:
    return (int(value) + 2**31) % 2**32 - 2**31


def whole_quotient(a: int, b: int) -> int:
    return abs(a) // b * (1 if a >= 0 else -1)


def votes(t: int) -> list[int]:
    w = WARPS[t // WARP]
    same = {int(v) >> 20 for v in w}
    return [
        sum(int(v & 1) << k for k, v in enumerate(w)),
        int((w > 50).any()) + 2 * int((w < 90).all()),
        sum(1 << k for k in range(WARP) if w[k] & 3 == X[t] & 3),
        0xFFFFFFFF + 1 if len(same) == 1 else 0,
    ]


def reduces(t: int) -> list[int]:
    w = WARPS[t // WARP]
    u = w & 0xFFFFFFFF
    bits = [f.reduce(u) for f in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)]
    return [w.sum(), w.min(), u.max(), *bits, w.max(), u.min()]


def shuffles(t: int) -> list[int]:
    w, k = WARPS[t // WARP], t % WARP
    return [
        w[(t * 7) & 31],
        w[k - 3] if k >= 3 else w[k],
        w[k + 5] if k + 5 < WARP else w[k],
        w[k ^ 9],
        w[(k & ~7) | 3],
        w[k - 1] if k % 4 else w[k],
        w[k + 2] if k % 16 + 2 < 16 else w[k],
        w[k],
    ]


def diverge(t: int) -> list[int]:
    v, s = int(X[t]), 0
    for i in range(v & 15):
        if i % 3 == t % 3:
            s = word(s + i * v)
        elif i & 1:
            s = word(s ^ v)
        if s > 1000000:
            break
    return [s + int(X[t // WARP * WARP + (t % WARP ^ (2 if t & 1 else 4))])]


def switches(t: int) -> list[int]:
    v = int(X[t])
    arms = [
        v * 3,
        v + t,
        whole_quotient(v, 7),
        ~v,
        v << 3,
        v - whole_quotient(v, 11) * 11,
        (v & 0xFFFFFFFF).bit_count(),
        v * v,
    ]
    return [arms[v & 7]]


def recursion(t: int) -> list[int]:
    def call(a: int, depth: int) -> int:
        return a if depth <= 0 else word(call(word(a * 3 + depth), depth - 1) + depth)

    return [call(int(X[t]), int(X[t]) & 7)]


def locals_(t: int) -> list[int]:
    kept = [int(X[(t + i) % N]) for i in range(32)]
    return [sum(kept[(int(X[t]) + i * 5) & 31] * (i + 1) for i in range(32))]


def counts(t: int) -> list[int]:
    odd, low, five = (X & 1).sum(), (X < 100).all(), (X == -5).any()
    return [int(odd) + 1000 * int(low) + 10000 * int(five)]


@pytest.mark.parametrize(("arch", "late"), MODES)
@pytest.mark.parametrize("reference", [votes, reduces, shuffles, diverge, switches, recursion, locals_, counts])
def test_words_of_every_thread(reference: object, arch: str, late: bool) -> None:
    assert callable(reference)
    words, _ = run(reference.__name__.rstrip("_"), arch, late)
    for t in range(N):
        want = [word(v) for v in reference(t)]
        assert words[len(want) * t : len(want) * (t + 1)].tolist() == want, t


@pytest.mark.parametrize(("arch", "late"), MODES)
def test_atomics(arch: str, late: bool) -> None:
    unsigned = X.astype(np.int64) & 0xFFFFFFFF
    total, small = word(X.astype(np.int64).sum()), float((X & 7).sum())
    words, floats = run("gatomics", arch, late)
    either = word(np.bitwise_or.reduce(unsigned))
    assert words[:5].tolist() == [total, max(0, X.max()), min(0, X.min()), 0, either]
    assert (words[8], words[9], words[12], floats[0]) == (123, 2 * N, 3 * N, small)
    assert floats[2:4].view(np.float64)[0] == (X & 3).sum()
    assert words[10:12].view(np.int64)[0] == unsigned.sum()
    assert sorted(words[32 : 32 + N].tolist()) == list(range(0, 2 * N, 2))
    words, floats = run("satomics", arch, late)
    assert (words[0], words[6], words[7], floats[0]) == (total, N, 1, small)
    assert words[8:10].view(np.int64)[0] == unsigned.sum()
    assert words[4] == either
    assert sorted(words[16 : 16 + N].tolist()) == list(range(N))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_mathematics_of_the_library(arch: str) -> None:
    """CUDA's functions of fp32 and fp64, inlined by the compiler, within their own bounds."""
    v = F.astype(np.float64)
    _, floats = run("mathd", arch, False)
    found = floats[: 16 * N].view(np.float64).reshape(N, 8)
    want = [
        np.exp(v),
        np.log(abs(v) + 0.1),
        np.sin(v * 50),
        abs(v) ** 1.7,
        np.tanh(v),
        np.sqrt(abs(v)) / (v * v + 0.3),
        v * v - v,
        np.fmod(v * 37, 1.3) + np.floor(v * 3) + np.fmin(v, 0.2) + (v > 0),
    ]
    for column, exact in zip(found.T, want, strict=True):
        assert np.allclose(column, exact, rtol=1e-14, atol=1e-14)
    _, floats = run("mathf", arch, False)
    single = floats[: 20 * N].reshape(N, 20).astype(np.float64)
    exact = {
        0: np.exp(v),
        2: np.sin(v),
        4: np.tanh(v),
        7: np.arctan2(v, 2),
        8: np.cbrt(v),
        15: np.log1p(abs(v)),
        16: np.sin((F * np.float32(1e6)).astype(np.float64)),
        19: (F / np.float32(3.7)).astype(np.float64),
    }
    for column, values in exact.items():
        assert np.allclose(single[:, column], values, rtol=1e-6, atol=1e-6), column


@pytest.mark.parametrize(("arch", "late"), MODES)
def test_bytes_and_constants(arch: str, late: bool) -> None:
    words, floats = run("bytes_", arch, late)
    assert (floats.view(np.int8)[:N] == X.astype(np.int8)).all()
    assert (floats[256:].view(np.int16)[:N] == X.astype(np.int16)).all()
    bytes_, halves = X.view(np.int8).astype(int), X.view(np.uint16).astype(int)
    for t in range(N):
        want = bytes_[t] * 3 + halves[t] + int(X.view(np.int16)[t]) + (int(bytes_[t + 1]) & 255)
        assert words[t] == want
    fibonacci = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597]
    words, _ = run("constants", arch, late)
    assert words[:N].tolist() == [fibonacci[v & 15] + 7 + int(v & 3) for v in X]
