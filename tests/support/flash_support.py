"""Run the flash kernels on NumPy data, and the float64 attention they are held to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from analysis.shapes import AttentionShape, Tile
from analysis.traffic import predict_traffic
from kernels import attention
from kernels.host import HostBackend
from kernels.launch import Array
from kernels.philox import keep_scale, kept_weights

BOUNDS = {"fp32": (1e-5, 2e-5), "fp16": (3e-3, 5e-3), "bf16": (2e-2, 4e-2)}
"""Largest absolute error of (out, gradients) for N(0, 1) inputs, N <= 512, D <= 128: about twice
what fp32 accumulation with P and dS rounded to the io type gives."""

ULP = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}
"""Distance of neighbouring numbers, relative: a result of 8 in fp16 is known to 0.008 at best."""


def to_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """Values as the kernels store them; bf16 as uint16, rounded to nearest even."""
    if dtype == "fp16":
        return x.astype(np.float16)
    if dtype == "fp32":
        return x.astype(np.float32)
    u = x.astype(np.float32).view(np.uint32)
    rounded = (u + 0x7FFF + (u >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def to_float(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Stored values as float64."""
    if dtype == "bf16":
        bits = (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float64)


def aligned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Uninitialised memory that starts on 16 bytes, as device memory does."""
    itemsize = 4 if dtype == "fp32" else 1 if dtype == "uint8" else 2
    raw = np.empty(int(np.prod(shape)) * itemsize + 16, np.uint8)
    start = -raw.ctypes.data % 16
    kind = {"fp16": np.float16, "bf16": np.uint16, "fp32": np.float32, "uint8": np.uint8}[dtype]
    return raw[start : start + int(np.prod(shape)) * itemsize].view(kind).reshape(shape)


def view(name: str, x: np.ndarray, dtype: str) -> Array:
    """A NumPy array (or strided view) as kernels take it."""
    strides = [s // x.itemsize if n > 1 else 0 for n, s in zip(x.shape, x.strides, strict=True)]
    assert strides[-1] in (0, 1), f"{name} is not contiguous in its last dimension"
    strides[-1] = 1
    return Array(name, x.ctypes.data, x.shape, tuple(strides), dtype, "rw", x)


@dataclass
class Problem:
    """Inputs of one attention problem, rounded to their type; values are float64."""

    batch: int = 1
    heads: int = 1
    seqlen_q: int = 64
    seqlen_k: int = 64
    head_dim: int = 64
    dtype: str = "fp16"
    causal: bool = False
    kv_heads: int = 0
    scale: float | None = None
    seed: int = 0
    key_mask: np.ndarray | None = field(default=None, repr=False)
    """(B, Nk) bool."""
    dropout_p: float = 0.0
    dropout_seed: int = 0
    block_mask: np.ndarray | None = field(default=None, repr=False)
    """(B, H, rows, keys) bool."""
    block_size: tuple[int, int] | None = None
    softcap: float | None = None
    alibi_slopes: np.ndarray | None = field(default=None, repr=False)
    """(H,) or (B, H) float32."""
    bias: tuple[int, int] | None = None
    """(1 or B, 1 or H): items and heads of a bias drawn with the rest, its gradient made too."""
    with_dlse: bool = False
    window: tuple[int | None, int | None] = (None, None)
    sinks: int = 0
    data: dict[str, np.ndarray] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.kv_heads = self.kv_heads or self.heads
        if self.scale is None:
            self.scale = self.head_dim**-0.5
        rng = np.random.default_rng(self.seed)
        q_shape = (self.batch, self.heads, self.seqlen_q, self.head_dim)
        k_shape = (self.batch, self.kv_heads, self.seqlen_k, self.head_dim)
        for name, shape in (("q", q_shape), ("k", k_shape), ("v", k_shape), ("dout", q_shape)):
            values = rng.standard_normal(shape)
            if name not in self.data:
                self.data[name] = to_float(to_bits(values, self.dtype), self.dtype)
        if self.with_dlse and "dlse" not in self.data:
            self.data["dlse"] = rng.standard_normal(q_shape[:3]).astype(np.float32).astype(float)
        if self.bias is not None and "bias" not in self.data:
            bias = rng.standard_normal((*self.bias, self.seqlen_q, self.seqlen_k))
            self.data["bias"] = to_float(to_bits(bias, self.dtype), self.dtype)

    @property
    def shape(self) -> AttentionShape:
        """As the formulas know it."""
        return AttentionShape(
            self.batch,
            self.heads,
            self.seqlen_q,
            self.seqlen_k,
            self.head_dim,
            self.kv_heads,
            self.dtype,
            self.causal,
            self.window,
            self.sinks,
        )

    def slopes(self) -> np.ndarray:
        """(B, H, 1): the slopes as kernels take them."""
        assert self.alibi_slopes is not None
        shared = np.broadcast_to(self.alibi_slopes, (self.batch, self.heads))
        return shared[..., None]

    def distances(self) -> np.ndarray:
        """(Nq, Nk): how far a key is from the query's own place."""
        rows = np.arange(self.seqlen_q)[:, None] + self.seqlen_k - self.seqlen_q
        return abs(rows - np.arange(self.seqlen_k))

    def visible(self) -> np.ndarray:
        """(B, H, Nq, Nk): which pairs enter the softmax."""
        rows, keys = np.arange(self.seqlen_q), np.arange(self.seqlen_k)
        seen = np.ones((self.batch, self.heads, self.seqlen_q, self.seqlen_k), bool)
        diagonal = rows[:, None] + self.seqlen_k - self.seqlen_q
        left, right = self.window
        if left is not None:
            seen &= (keys >= diagonal - left) | (keys < self.sinks)
        if right is not None:
            seen &= (keys <= diagonal + right) | (keys < self.sinks)
        if self.causal:
            seen &= keys <= diagonal
        if self.key_mask is not None:
            seen &= self.key_mask[:, None, None, :]
        if self.block_mask is not None:
            assert self.block_size is not None
            bm, bn = self.block_size
            seen &= self.block_mask[:, :, rows // bm][..., keys // bn]
        return seen


def reference(p: Problem) -> dict[str, np.ndarray]:
    """out, lse, dq, dk, dv in float64, with the definition of empty rows: zeros and -inf."""
    group = p.heads // p.kv_heads
    q, dout = p.data["q"], p.data["dout"]
    k, v = (np.repeat(p.data[name], group, axis=1) for name in ("k", "v"))
    if p.key_mask is not None:  # masked slots may hold anything
        k, v = (np.where(p.key_mask[:, None, :, None], x, 0.0) for x in (k, v))
    seen = p.visible()
    s = p.scale * (q @ k.swapaxes(2, 3))
    passed: Any = 1.0
    if p.softcap is not None:
        t = np.tanh(s / p.softcap)
        passed, s = 1.0 - t * t, p.softcap * t
    if p.alibi_slopes is not None:
        s = s - p.slopes()[..., None].astype(float) * p.distances()
    if p.bias is not None:
        s = s + p.data["bias"]
    s = np.where(seen, s, -np.inf)
    top = np.max(s, axis=3, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    e = np.exp(s - top)
    total = e.sum(axis=3, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.where(total > 0, e / total, 0.0)
        lse = (top + np.log(total))[..., 0]
    z = np.ones_like(weights)
    if p.dropout_p:
        kept = kept_weights(p.dropout_seed, p.dropout_p, *seen.shape)
        z = kept * keep_scale(p.dropout_p)
    out = (weights * z) @ v
    dv = (weights * z).swapaxes(2, 3) @ dout
    dp = (dout @ v.swapaxes(2, 3)) * z
    delta = (weights * dp).sum(axis=3, keepdims=True)
    if "dlse" in p.data:
        delta = delta - p.data["dlse"][..., None]
    ds = weights * (dp - delta)
    gradients = {}
    if p.bias is not None:
        shared = tuple(axis for axis in (0, 1) if p.bias[axis] != ds.shape[axis])
        gradients["dbias"] = ds.sum(axis=shared, keepdims=True)
    ds = ds * passed
    dq = p.scale * (ds @ k)
    dk = p.scale * (ds.swapaxes(2, 3) @ q)
    grouped = (p.batch, p.kv_heads, group, p.seqlen_k, p.head_dim)
    return gradients | {
        "out": out,
        "lse": lse,
        "dq": dq,
        "dk": dk.reshape(grouped).sum(axis=2),
        "dv": dv.reshape(grouped).sum(axis=2),
    }


def execute(
    p: Problem,
    *,
    tile: Tile | None = None,
    algorithm: str = "flash",
    backward: bool = True,
    backend: HostBackend | None = None,
    arrays: dict[str, Array] | None = None,
    pdl: bool = False,
    **forward: Any,
) -> tuple[dict[str, np.ndarray], dict[str, dict[tuple[str, str], int]]]:
    """Results as float64 and the traffic counted, per kernel. ``arrays`` replaces inputs;
    ``forward``: further options of the forward pass; ``order``, ``wave`` and ``shared_limit_bytes``
    are both passes'."""
    backend = backend or HostBackend(checks=True)
    backend.reset()
    given: dict[str, Array] = {}
    results: dict[str, np.ndarray] = {}
    for name in ("q", "k", "v", "dout"):
        memory = aligned(p.data[name].shape, p.dtype)
        memory[...] = to_bits(p.data[name], p.dtype)
        given[name] = view(name, memory, p.dtype)
    for name, like in (("out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        results[name] = aligned(p.data[like].shape, p.dtype)
        given[name] = view(name, results[name], p.dtype)
    given |= arrays or {}
    lse = aligned(p.data["q"].shape[:3], "fp32")
    stats = {"lse": view("lse", lse, "fp32")}
    options: dict[str, Any] = {"scale": p.scale, "causal": p.causal, "tile": tile, "pdl": pdl}
    options |= {"window": p.window, "sinks": p.sinks}
    options |= {name: forward.pop(name) for name in ("order", "wave", "shared_limit_bytes") if name in forward}
    if p.key_mask is not None:
        options["key_mask"] = view("key_mask", p.key_mask.astype(np.uint8, order="C"), "uint8")
    if p.dropout_p:
        options |= {"dropout_p": p.dropout_p, "seed": p.dropout_seed}
    if p.block_mask is not None:
        options["block_mask"] = view("block_mask", p.block_mask.astype(np.uint8, order="C"), "uint8")
        options["block_size"] = p.block_size
    if p.softcap is not None:
        options["softcap"] = p.softcap
    if p.alibi_slopes is not None:
        options["alibi_slopes"] = view("alibi_slopes", p.slopes(), "fp32")
    if p.bias is not None:
        memory = aligned(p.data["bias"].shape, p.dtype)
        memory[...] = to_bits(p.data["bias"], p.dtype)
        options["bias"] = given.get("bias", view("bias", memory, p.dtype))
    q, k, v, out, dout = (given[name] for name in ("q", "k", "v", "out", "dout"))
    attention.forward(backend, algorithm, q, k, v, out, stats, **options, **forward)
    if backward:
        if "dlse" in p.data:
            options["dlse"] = view("dlse", p.data["dlse"].astype(np.float32), "fp32")
        if p.bias is not None:
            results["dbias"] = aligned(p.data["bias"].shape, p.dtype)
            options["dbias"] = view("dbias", results["dbias"], p.dtype)
        attention.backward(
            backend, algorithm, q, k, v, out, dout, stats, given["dq"], given["dk"], given["dv"], **options
        )
    names = list(results) if backward else ["out"]
    values = {name: to_float(results[name], p.dtype) for name in names}
    return values | {"lse": lse.astype(np.float64)}, backend.traffic


def largest_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest absolute error; inf where only one of the two is finite or infinities differ."""
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape}, expected {want.shape}")
    same = got == want
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(got - want))
    error = np.where(np.isnan(error) | (np.isfinite(got) != np.isfinite(want)), np.inf, error)
    return float(error.max(initial=0.0))


def check(p: Problem, got: dict[str, np.ndarray], factor: float = 1.0) -> None:
    """Hold results to the reference: within the bounds, or to the next number if that is more.

    ``factor`` widens the bounds where a test's inputs are no N(0, 1) numbers; it says why.
    """
    want = reference(p)
    for name, value in got.items():
        bound = factor * BOUNDS[p.dtype][0 if name in ("out", "lse") else 1]
        with np.errstate(invalid="ignore"):
            coarse = np.abs(want[name]) * ULP[p.dtype] > bound
            close = np.abs(value - want[name]) <= np.abs(want[name]) * ULP[p.dtype]
        error = largest_error(np.where(coarse & close, want[name], value), want[name])
        assert error <= bound, f"{name}: error {error:.3g} above {bound}, {p}"


def expected_traffic(
    p: Problem, tile: Tile, algorithm: str, *, backward: bool = True
) -> dict[str, dict[tuple[str, str], int]]:
    """What ``analysis`` says the kernels move, per kernel."""
    shape = p.shape
    options: dict[str, Any] = {} if p.key_mask is None else {"key_mask": True}
    if p.alibi_slopes is not None:
        options["alibi"] = True
    if p.block_mask is not None:
        assert p.block_size is not None
        options |= {"block_mask": p.block_mask, "mask_block": Tile(*p.block_size)}
    if p.bias is not None:
        options["bias"] = p.bias
    total = predict_traffic(algorithm, shape, tile, "forward", **options)
    if backward:
        options["lse_gradient"] = p.with_dlse
        if p.bias is not None:
            options["bias_gradient"] = True
        total = total + predict_traffic(algorithm, shape, tile, "backward", **options)
    return {name: dict(entries) for name, entries in total.kernels.items()}


def check_all(
    p: Problem, tile: Tile, algorithm: str = "flash", *, backward: bool = True, backend: HostBackend | None = None
) -> dict[str, np.ndarray]:
    """Run with the host's checks on; results within the bounds, bytes as predicted, exactly."""
    got, traffic = execute(p, tile=tile, algorithm=algorithm, backward=backward, backend=backend)
    check(p, got)
    assert traffic == expected_traffic(p, tile, algorithm, backward=backward)
    return got
