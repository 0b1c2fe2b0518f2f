"""Kernels that Triton compiled, for an A100 and an H100: right to float64 bounds, bytes exact."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from kernels.machine import Counts, load

pytest.importorskip("triton", reason="needs triton")

DRAW = np.random.default_rng(5)
BOTH = pytest.mark.parametrize("capability", [80, 90])


def run(
    capability: int, name: str, types: list[str], constants: dict[str, int], grid: tuple[int, ...], args: list[Any]
) -> Counts:
    """Compile without a card and run; two scratch pointers come after the kernel's arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel = getattr(import_module("machine_triton"), name)
    names = [*types, *("constexpr" for _ in constants)]
    signature = dict(zip(kernel.arg_names, names, strict=True))
    compiled = compile(
        ASTSource(kernel, signature, constexprs=constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4},
    )
    return load(compiled.asm["cubin"]).launch(
        compiled.metadata.name, (*grid, 1, 1)[:3], 128, compiled.metadata.shared, [*args, None, None]
    )


@BOTH
def test_softmax(capability: int) -> None:
    x, y = DRAW.standard_normal((6, 1000)).astype(np.float32), np.zeros((6, 1000), np.float32)
    counts = run(capability, "softmax", ["*fp32", "*fp32", "i32"], {"BLOCK": 1024}, (6,), [x, y, np.int32(1000)])
    e = np.exp(x.astype(np.float64))
    assert np.allclose(y, e / e.sum(1, keepdims=True), rtol=1e-5)
    assert (counts.nbytes(0, "read"), counts.nbytes(1, "write")) == (x.nbytes, y.nbytes)
    assert set(counts.traffic) == {(0, "read"), (1, "write")}


@BOTH
def test_layer_norm(capability: int) -> None:
    x = DRAW.standard_normal((5, 777)).astype(np.float32)
    w, b, y = (DRAW.standard_normal(777).astype(np.float32) for _ in "wby")
    y = np.zeros_like(x)
    run(
        capability,
        "layer_norm",
        ["*fp32"] * 4 + ["i32", "fp32"],
        {"BLOCK": 1024},
        (5,),
        [x, w, b, y, np.int32(777), np.float32(1e-5)],
    )
    v = x.astype(np.float64)
    exact = (v - v.mean(1, keepdims=True)) / np.sqrt(v.var(1, keepdims=True) + 1e-5) * w + b
    assert np.abs(y - exact).max() < 1e-5


@BOTH
@pytest.mark.parametrize("form", ["fp16", "bf16", "fp32"])
def test_product(capability: int, form: str) -> None:
    m, n, k = 70, 88, 96
    exact_a, exact_b = (DRAW.integers(-8, 9, s).astype(np.float64) for s in ((m, k), (k, n)))
    kept = {
        "fp16": lambda x: x.astype(np.float16),
        "fp32": lambda x: x.astype(np.float32),
        "bf16": lambda x: (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
    }[form]
    c = np.zeros((m, n), np.float32)
    counts = run(
        capability,
        "product",
        [f"*{form}"] * 2 + ["*fp32"] + ["i32"] * 3,
        {"BM": 64, "BN": 64, "BK": 32},
        (2, 2),
        [kept(exact_a), kept(exact_b), c, *map(np.int32, (m, n, k))],
    )
    assert (c == exact_a @ exact_b).all()  # small whole numbers: every sum is exact
    assert counts.nbytes(2, "write") == c.nbytes
    assert counts.nbytes(0, "read") == 2 * kept(exact_a).nbytes


@BOTH
def test_attention(capability: int) -> None:
    n, d = 150, 64
    q, k, v = (DRAW.standard_normal((n, d)).astype(np.float16) for _ in "qkv")
    out = np.zeros_like(q)
    run(
        capability,
        "attention",
        ["*fp16"] * 4 + ["i32", "fp32"],
        {"D": d, "BM": 64, "BN": 64},
        (3,),
        [q, k, v, out, np.int32(n), np.float32(d**-0.5)],
    )
    s = q.astype(np.float64) @ k.astype(np.float64).T * d**-0.5
    p = np.exp(s - s.max(1, keepdims=True))
    exact = p / p.sum(1, keepdims=True) @ v.astype(np.float64)
    assert np.abs(out - exact).max() < 1e-3


@BOTH
def test_whole_numbers(capability: int) -> None:
    n = 1000
    x, counts = DRAW.integers(0, 128, n).astype(np.int32), np.zeros(128, np.int32)
    run(capability, "histogram", ["*i32", "*i32", "i32"], {"BLOCK": 512}, (2,), [x, counts, np.int32(n)])
    assert (counts == np.bincount(x, minlength=128)).all()
    y = np.zeros_like(x)
    run(capability, "scan", ["*i32", "*i32", "i32"], {"BLOCK": 1024}, (1,), [x, y, np.int32(n)])
    assert (y == np.cumsum(x)).all()
    a = DRAW.integers(-(2**62), 2**62, 200)
    b = DRAW.integers(1, 2**40, 200) * DRAW.choice([-1, 1], 200)
    quotient, rest = np.zeros_like(a), np.zeros_like(a)
    run(capability, "division", ["*i64"] * 4 + ["i32"], {"BLOCK": 256}, (1,), [a, b, quotient, rest, np.int32(200)])
    exact = [abs(p) // abs(r) * (1 if (p < 0) == (r < 0) else -1) for p, r in zip(a.tolist(), b.tolist(), strict=True)]
    assert quotient.tolist() == exact
    assert (rest == a - quotient * b).all()
