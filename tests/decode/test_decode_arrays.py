"""The driver of the decoding kernels refuses arrays that disagree, whoever calls it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flash_support import aligned, view

from kernels import decode
from kernels.host import HostBackend
from kernels.launch import Array, from_numpy


def arrays() -> dict[str, Any]:
    """A paged call: 2 sequences of 4 heads, a cache of 5 pages of 16 keys of 2 heads."""
    made: dict[str, Any] = {"scale": 1.0}
    shapes = {"q": (2, 4, 1, 32), "k": (5, 2, 16, 32), "v": (5, 2, 16, 32), "out": (2, 4, 1, 32)}
    for name, shape in shapes.items():
        memory = aligned(shape, "fp16")
        memory[...] = 0
        made[name] = view(name, memory, "fp16")
    made["lse"] = view("lse", aligned((2, 4, 1), "fp32"), "fp32")
    made["seqlens"] = from_numpy("seqlens", np.array([3, 20], np.int32), "r")
    made["block_table"] = from_numpy("block_table", np.zeros((2, 2), np.int32), "r")
    return made


def other(name: str, shape: tuple[int, ...], dtype: str = "fp16") -> Array:
    """An array of another shape or type, at an aligned address."""
    return view(name, aligned(shape, dtype), dtype)


def numbers(name: str, shape: tuple[int, ...]) -> Array:
    return from_numpy(name, np.zeros(shape, np.int32), "r")


def test_a_call_that_is_right() -> None:
    backend = HostBackend()
    decode.forward(backend, **arrays())
    assert set(backend.traffic) == {"flash_decode"}
    decode.forward(backend, **arrays() | {"splits": 2})
    assert set(backend.traffic) == {"flash_decode", "flash_decode_merge"}


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rank": ({"k": numbers("k", (5, 2, 16))}, ValueError, r"k \(5, 2, 16\), not four"),
    "type": ({"q": numbers("q", (2, 4, 1, 32))}, TypeError, "q has dtype int32"),
    "queries": ({"q": other("q", (2, 4, 17, 32))}, ValueError, "17 queries a sequence, above 16"),
    "columns": ({"k": other("k", (5, 2, 16, 64))}, ValueError, "head_dim=32 but k 64"),
    "heads": ({"q": other("q", (2, 3, 1, 32))}, ValueError, "heads=3 .*kv_heads=2"),
    "values": ({"v": other("v", (5, 2, 32, 32))}, ValueError, r"v has shape \(5, 2, 32, 32\)"),
    "page": ({"k": other("k", (5, 2, 8, 32))}, ValueError, "page_size=8 is not a multiple of 16"),
    "pages": ({"block_table": None}, ValueError, "2 sequences but k 5"),
    "table": ({"block_table": numbers("t", (3, 2))}, ValueError, r"int32 \(3, 2\), not int32 \(2"),
    "lse": ({"lse": other("lse", (2, 4, 2), "fp32")}, ValueError, r"fp32 \(2, 4, 2\), not"),
    "one scale": ({"k_scale": other("s", (2,), "fp32")}, ValueError, "go together"),
    "no values": ({"v": None, "v_scale": other("s", (2,), "fp32")}, ValueError, "without v"),
    "scales": (
        {"k_scale": other("s", (3,), "fp32"), "v_scale": other("s", (2,), "fp32")},
        ValueError,
        r"k_scale is fp32 \(3,\)",
    ),
    "fp8": (
        {"k_scale": other("s", (2,), "fp32"), "v_scale": other("s", (2,), "fp32")},
        TypeError,
        "k has dtype fp16, not uint8",
    ),
    "scale": ({"scale": float("inf")}, ValueError, "scale=inf"),
    "limit": ({"shared_limit_bytes": 1000}, ValueError, "shared memory, the limit is 1000"),
}


@pytest.mark.parametrize("case", WRONG)
def test_arrays_that_disagree_are_refused(case: str) -> None:
    changes, kind, message = WRONG[case]
    backend = HostBackend()
    with pytest.raises(kind, match=message):
        decode.forward(backend, **arrays() | changes)
    assert backend.traffic == {}


def test_strided_tables_are_refused() -> None:
    table = from_numpy("block_table", np.zeros((2, 4), np.int32)[:, :2], "r")
    with pytest.raises(ValueError, match=r"block_table has strides \(4, 1\), not \(2, 1\)"):
        decode.forward(HostBackend(), **arrays() | {"block_table": table})


@pytest.mark.parametrize(("form", "rows"), [("plain", 33), ("fp8", 1), ("wide fp8", 33), ("fp32", 1)])
def test_threads_in_any_order_give_the_same_bits(form: str, rows: int) -> None:
    """Barriers stand where they must: with them, the order of a block's threads means nothing."""
    head_dim = 256 if form == "wide fp8" else 64
    dtype = "fp32" if form == "fp32" else "fp16"
    rng = np.random.default_rng(0)
    cache_dtype = "uint8" if "fp8" in form else dtype
    made: dict[str, Any] = {}
    for name in ("q", "k", "v", "out"):
        kind = cache_dtype if name in "kv" else dtype
        shape = (5, 1, 64, head_dim) if name in "kv" else (1, rows, 1, head_dim)
        memory = aligned(shape, kind)
        values = rng.standard_normal(shape)
        memory[...] = rng.integers(0, 0x7F, shape) if kind == "uint8" else values
        made[name] = view(name, memory, kind)
    made["lse"] = view("lse", aligned((1, rows, 1), "fp32"), "fp32")
    table = np.array([[3, 0, 4, 1, 2]], np.int32)
    made["block_table"] = from_numpy("block_table", table, "r")
    made["seqlens"] = from_numpy("seqlens", np.array([300], np.int32), "r")
    if "fp8" in form:
        scales = np.full(1, 0.01, np.float32)
        made |= {name: from_numpy(name, scales, "r") for name in ("k_scale", "v_scale")}
    found = []
    for seed in (None, 1, 2):
        decode.forward(HostBackend(seed=seed), **made, scale=1.0, splits=2)
        found.append(made["out"].owner.copy())
    assert all(np.array_equal(found[0], other) for other in found[1:])
    assert np.isfinite(found[0]).all()
