"""Arguments of every driver, form and launch of ``kernels/`` are refused by name where they are of
another kind, before anything is launched: all are checked, and some are tried with each kind."""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from analysis.arguments import check_fields
from analysis.gemm import GemmTile
from analysis.problem import Problem
from analysis.shapes import AttentionShape, Tile
from kernels import (
    attention,
    dispatch,
    flash,
    flash1,
    flash_config,
    hopper,
    hopper_forms,
    ladder,
    launch,
    launches,
    options,
    philox,
    prebuild,
    standard,
    variants,
)
from kernels.beside import elementwise, gemm, online_softmax, probes
from kernels.launch import Array, Kernel, TensorMap, contiguous_strides
from kernels.launching.plan import Recorder

NAN, INF = math.nan, math.inf
B, H, N, D = 1, 2, 64, 64
SHAPE = AttentionShape(B, H, N, N, D)


def array(name: str, shape: tuple[int, ...] = (B, H, N, D), dtype: str = "fp16") -> Array:
    return Array(name, 1 << 20, shape, contiguous_strides(shape), dtype, "rw")


def one(*names: str, **more: Any) -> dict[str, Any]:
    return {name: array(name) for name in names} | more


STATS = {"lse": array("lse", (B, H, N), "fp32"), "p": array("p", (B, H, N, N))}
STATS |= {name: array(name, (B, H, N), "fp32") for name in ("m", "l")}
BACKWARD = one("q", "k", "v", "out", "dout", "dq", "dk", "dv", scale=0.1)
FORWARD = one("q", "k", "v", "out", scale=0.1)
LSE = {"lse": STATS["lse"]}
KERNEL = Kernel("beside/probes.cu", "probe_read", (("A", 1),), 64)
ROWS = {name: array(name, (8, 64)) for name in ("x", "y", "residual")}
BIAS = {name: array(name, (64,)) for name in ("bias", "gamma", "beta")}
MATRICES = {name: array(name, (64, 64)) for name in "abc"}
VECTOR = array("source", (probes.THREADS * probes.STEPS * 8,))
TOP = {"values": array("values", (8, 4), "fp32"), "indices": array("indices", (8, 4), "int32")}
FORM = {"head_dim": 64, "causal": False, "seqlen_q": 64}
SIZES = {"batch": 1, "heads": 2, "seqlen_q": 64, "seqlen_k": 64}

#: Function -> arguments with which it works; a driver gets its backend from the test.
WORKS: dict[Callable[..., Any], dict[str, Any]] = {
    attention.forward: {"algorithm": "flash", "stats": {}, "key_mask": None} | FORWARD,
    attention.backward: {"algorithm": "flash", "stats": STATS} | BACKWARD,
    flash.progress_notes: {"seqlen_k": 64, "block_n": 16, "progress_tiles": 1},
    hopper.forward: FORWARD | LSE,
    hopper.backward: BACKWARD | LSE,
    hopper.unsupported_reason: {"dtype": "fp16", "head_dim": 64, "scale": 0.1},
    hopper.default_tile: FORM | {"pass_": "forward"},
    hopper_forms.forward_form: FORM,
    hopper_forms.form_of_tile: {"head_dim": 64, "tile": hopper_forms.forward_form(**FORM).tile},
    hopper_forms.backward_form: {"head_dim": 64, "causal": False},
    flash1.flash1_forward: {"stats": {}} | FORWARD,
    flash1.flash1_backward: {"stats": STATS, "form": "literal"} | BACKWARD,
    flash1.flash1_tile: {"head_dim": 64, "dtype": "fp16", "pass_": "forward"},
    standard.standard_forward: {"stats": {}} | FORWARD,
    standard.standard_backward: {"stats": STATS, **{name: value for name, value in BACKWARD.items() if name != "out"}},
    standard.standard_row_bytes: {"seqlen_k": 64, "dtype": "fp16", "threads": 128, "rows": 1},
    ladder.default_tile: {"algorithm": "standard", "head_dim": 64, "dtype": "fp16", "pass_": "forward"},
    flash_config.default_tile: {"head_dim": 64, "dtype": "fp16", "pass_": "forward"},
    flash_config.configure: {"head_dim": 64, "dtype": "fp16", "pass_": "forward"},
    options.Options: {"scale": 0.1},
    dispatch.choose: {"arrays": [array("q")], "scale": 0.1},
    dispatch.form_name: {"head_dim": 64, "pass_": "forward", "seqlen_q": 64},
    dispatch.default_tile: FORM | {"algorithm": "flash", "dtype": "fp16", "pass_": "forward"},
    dispatch.kernel_tile: {"pass_": "forward", "problem": Problem(SHAPE, tile=Tile(64, 64))},
    launches.launches_of: {"algorithm": "flash", "problem": SHAPE, "pass_": "forward"},
    launches.Device: {},
    gemm.gemm_kernel: {"variant": "tiled", "dtype": "fp16"},
    gemm.gemm: {"variant": "tiled"} | MATRICES,
    elementwise.elementwise_kernel: {"entry": "scale", "dtype": "fp16", "vector": 8},
    elementwise.run_chain: {"chain": "layer-norm", "arrays": ROWS | BIAS, "fused": True},
    online_softmax.softmax_kernel: {"entry": "topk", "dtype": "fp16"},
    online_softmax.predict_bytes: {"algorithm": "safe", "rows": 8, "cols": 8, "dtype": "fp16"},
    online_softmax.softmax: {"algorithm": "safe", "x": ROWS["x"], "y": ROWS["y"]},
    online_softmax.softmax_topk: {"x": ROWS["x"]} | TOP,
    online_softmax.topk: {"y": ROWS["y"]} | TOP,
    probes.probe: {"entry": "probe_read"},
    probes.read: {"source": VECTOR, "blocks": 2},
    probes.copy: {"source": VECTOR, "target": VECTOR, "blocks": 2},
    probes.tile_read: {"source": VECTOR, "blocks": 2},
    probes.shared: {"blocks": 2, "rounds": 2},
    probes.mma: {"blocks": 2, "rounds": 2},
    probes.exp2: {"blocks": 2, "rounds": 2},
    probes.chase: {"links": array("links", (64,), "int32"), "steps": 4},
    probes.chain: {"elements": 64, "stride": 8},
    philox.kept_weights: SIZES | {"seed": 0, "dropout_p": 0.5},
    philox.drop_threshold: {"dropout_p": 0.5},
    launch.from_numpy: {"name": "x", "values": np.ones(4, np.float32), "access": "r"},
    launch.contiguous_strides: {"shape": (2, 3)},
    launch.check_grid: {"kernel": KERNEL, "grid": (1, 1, 1)},
    Kernel: {"source": "beside/probes.cu", "entry": "probe_read", "macros": (("A", 1),), "threads": 64},
    Array: {"name": "x", "pointer": 4096, "shape": (2, 3), "strides": (3, 1), "dtype": "fp16", "access": "r"},
    TensorMap: {"array": array("q"), "box_rows": 64},
}

#: Of no kind at all.
ANYTHING = (None, object())
#: What an argument with this annotation cannot be.
HOSTILE: dict[Any, tuple[Any, ...]] = {
    int: (True, np.bool_(False), "1", 1.0, NAN, INF, [1], 2**64, -1),
    float: (True, "0.1", NAN, INF, -INF, 1j, torch.ones(2), 10**400),
    bool: (1, 0, "no", 1.0, []),
    str: (1, b"flash", True, ["flash"], "nonsense"),
    Array: (np.ones((B, H, N, D), np.float16), torch.ones(2), "q", 5),
    Tile: ((64, 64), 64, "64x64", GemmTile(64, 64, 64)),
    GemmTile: ((64, 64), 64, Tile(64, 64)),
}
#: Any text is a name.
FREE = {"name", "entry", "source", "owner"}


def kind_of(function: Callable[..., Any], name: str) -> tuple[Any, bool]:
    """The annotation of a parameter without its bounds, and whether it may be None."""
    hint = typing.get_type_hints(function)[name]
    inside = [each for each in typing.get_args(hint) if each is not type(None)]
    optional = type(None) in typing.get_args(hint)
    return (inside[0] if optional and len(inside) == 1 else hint), optional


def label(function: Callable[..., Any]) -> str:
    return f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"


PARAMETERS = [
    pytest.param(function, name, id=f"{label(function)}-{name}")
    for function in WORKS
    for name in inspect.signature(function).parameters
    if name in typing.get_type_hints(function)
]
#: One of each sort of function: what checks them is the same for all.
SWEPT = {attention.forward, dispatch.form_name, gemm.gemm_kernel, Kernel, Array, TensorMap}


def call(function: Callable[..., Any], backend: Recorder, **changed: Any) -> Any:
    first = {"backend": backend} if "backend" in inspect.signature(function).parameters else {}
    return function(**(first | WORKS[function] | changed))


@pytest.mark.parametrize("function", WORKS, ids=label)
def test_what_is_changed_below_works(function: Callable[..., Any]) -> None:
    backend = Recorder()
    call(function, backend)
    is_driver = "backend" in inspect.signature(function).parameters
    assert bool(backend.launches) == (is_driver and function is not dispatch.choose)


def test_every_function_checks_its_arguments() -> None:
    for function in WORKS:
        checks = check_fields.__name__ in inspect.getsource(function)
        assert hasattr(function, "__wrapped__") or checks, label(function)


@pytest.mark.parametrize(("function", "name"), [p for p in PARAMETERS if p.values[0] in SWEPT])
def test_every_argument_is_refused_by_name(function: Callable[..., Any], name: str) -> None:
    kind, optional = kind_of(function, name)
    backend = Recorder()
    for value in (*HOSTILE.get(kind, ()), *ANYTHING):
        if (value is None and optional) or name in ("owner", "config"):
            continue
        if name in FREE and isinstance(value, str):
            continue
        with pytest.raises((TypeError, ValueError)) as caught:
            call(function, backend, **{name: value})
        said = str(caught.value)
        assert name.rstrip("_") in said or str(value) in said, (value, said)
        assert not backend.launches, value


ARRAYS = [p for p in PARAMETERS if kind_of(*p.values)[0] is Array and p.values[0] is not TensorMap]
#: What a call may have besides: as it would be right, for drivers that then are called with it.
OPTIONAL = {
    "key_mask": array("key_mask", (B, N), "uint8"),
    "block_mask": array("block_mask", (B, H, 1, 1), "uint8"),
    "alibi_slopes": array("alibi_slopes", (B, H, 1), "fp32"),
    "bias": array("bias", (B, H, N, N), "fp16"),
    "dbias": array("dbias", (B, H, N, N), "fp16"),
    "dlse": array("dlse", (B, H, N), "fp32"),
    "k_scale": array("k_scale", (B, H, 1), "fp32"),
    "v_scale": array("v_scale", (B, H, 1), "fp32"),
}
CODES = {name: array(name, (B, H, N, D), "uint8") for name in ("k", "v")}
#: What goes with one of these.
BESIDE = {
    "dbias": {"bias": OPTIONAL["bias"]},
    "k_scale": {"v_scale": OPTIONAL["v_scale"], **CODES},
    "v_scale": {"k_scale": OPTIONAL["k_scale"], **CODES},
}
#: These stand alone: there is no other array that they could disagree with. (``progress`` has its
#: own test, in test_flash_kernels_order.py.)
ALONE = {probes.read, probes.tile_read, probes.chase, options.Options}
COMPARED = [p for p in ARRAYS if p.values[0] not in ALONE and p.values[1] != "progress"]
COMPARED += [
    pytest.param(attention.forward, name, id=f"attention.forward-{name}")
    for name in OPTIONAL
    if name not in ("dbias", "dlse")
]


@pytest.mark.parametrize(("function", "name"), COMPARED)
def test_arrays_that_disagree_are_refused(function: Callable[..., Any], name: str) -> None:
    """Another size, another number of dimensions, another type: of each array for itself."""
    given = WORKS[function].get(name) or OPTIONAL[name]
    beside = BESIDE.get(name, {}) if name in OPTIONAL else {}
    backend = Recorder()
    call(function, backend, **{name: given} | beside)
    assert backend.launches
    backend = Recorder()
    *front, last = given.shape
    shapes = [(*front, 2 * last)]
    if front:
        shapes += [(*front[:-1], front[-1] + 16, last), (*given.shape, 1)]
    if name in ("x", "y") and "indices" in WORKS[function]:
        del shapes[0]  # the k largest of any number of columns
    others = [array(name, shape, given.dtype) for shape in shapes]
    if function is not probes.copy:  # of bytes
        others.append(array(name, given.shape, "int64"))
    for other in others:
        with pytest.raises((TypeError, ValueError)) as caught:
            call(function, backend, **{name: other} | beside)
        said = str(caught.value)
        types = other.dtype != given.dtype and other.dtype in said and given.dtype in said
        sizes = any(str(n) in said for n in (*other.shape, 2 * last * other.itemsize))
        assert types or sizes, said
        assert not backend.launches, other


@pytest.mark.parametrize(
    ("function", "changed", "words"),
    [
        (standard.standard_forward, {"scale": 1e300}, "scale=1e.300 times log2"),
        (flash1.flash1_backward, {"scale": -1e300}, "scale=-1e.300 times log2"),
        (elementwise.run_chain, {"scale": 1e39}, "scale=1e.39 is beyond"),
        (elementwise.run_chain, {"eps": -1e-5}, "eps=-1e-05 is below 0"),
        (elementwise.run_chain, {"dropout_p": 1.5}, r"dropout_p=1.5 is outside \[0, 1\]"),
        (elementwise.run_chain, {"arrays": {"x": ROWS["x"]}}, "'gamma' is missing"),
        (attention.forward, {"dropout_p": NAN}, "dropout_p=nan"),
        (attention.forward, {"wave": 3}, "wave=3 with order='rows'"),
        (attention.backward, {"stats": {}}, r"needs 'lse' of its forward pass, stats has \[\]"),
        (dispatch.choose, {"arrays": []}, r"arrays=\[\] has no q"),
        (launches.launches_of, {"gradients": ["dq", "dx"]}, "gradients='dx' is not one of"),
        (launches.launches_of, {"gradients": "dq"}, "gradients='dq' is a str"),
        (launches.Device, {"compute_capability": "9.0"}, "compute_capability='9.0'"),
        (online_softmax.topk, {"values": array("values", (8, 40), "fp32")}, "k = 40 is outside"),
        (probes.read, {"source": array("source", (7,))}, "source: 14 bytes is not a multiple"),
        (Array, {"strides": (3,)}, r"shape \(2, 3\) but strides \(3,\)"),
        (Array, {"dtype": "fp128"}, "'fp128' is not one of"),
        (Kernel, {"threads": 33}, "a multiple of 32 in 32..1024, not 33"),
        (TensorMap, {"box_rows": 257}, "box_rows=257 is outside 1..256"),
        (launch.check_grid, {"grid": (1, 70000, 1)}, "grid.y = 70000 is outside 1..65535"),
        (launch.check_grid, {"grid": (1, 1)}, "has 2 entries, not 3"),
        (launch.from_numpy, {"values": np.ones(2, complex)}, "complex128 cannot be passed"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_values_that_make_no_sense(function: Callable[..., Any], changed: dict[str, Any], words: str) -> None:
    backend = Recorder()
    with pytest.raises((TypeError, ValueError), match=words):
        call(function, backend, **changed)
    assert not backend.launches


def test_sizes_beyond_32_bits_are_refused() -> None:
    long = (1, 1, 2**31, 64)
    q, k = array("q", long), array("k", (1, 1, 64, 64))
    backend = Recorder()
    for function in (standard.standard_forward, flash1.flash1_forward, attention.forward):
        with pytest.raises(ValueError, match=r"2147483648, 64\), above 2147483647"):
            call(function, backend, q=q, k=k, v=k, out=q, stats={})
    assert not backend.launches


def test_numbers_of_any_library_are_taken() -> None:
    backend = Recorder()
    call(attention.forward, backend, scale=np.float32(0.5), causal=np.bool_(True), seed=np.int64(3))
    call(probes.mma, backend, blocks=np.int32(2), rounds=np.uint8(3))
    assert len(backend.launches) == 2


@pytest.mark.parametrize("command", [variants.main, prebuild.main], ids=["variants", "prebuild"])
def test_a_part_of_no_name_is_refused(command: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["command", "--only", "nonsense"])
    with pytest.raises(ValueError, match="--only 'nonsense': no "):
        command()
