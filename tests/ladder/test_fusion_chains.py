"""Fused and unfused chains: same values as torch, bytes as predicted, passes as stated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from analysis.fusion import CHAINS, passes, predict_fusion, total_bytes
from kernels.beside.elementwise import run_chain
from kernels.host import HostBackend
from kernels.launch import Array, contiguous_strides
from kernels.philox import drop_threshold, philox_4x32_10
from repro.training.op_bytes import OperationBytes

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-23}
DROP = 0.25
SEED = 12345678901234567


def wrap(name: str, t: torch.Tensor) -> Array:
    dtype = next(k for k, v in TYPES.items() if v == t.dtype)
    shape = tuple(t.shape)
    return Array(name, t.data_ptr(), shape, contiguous_strides(shape), dtype, "rw", t)


def kept(rows: int, cols: int) -> torch.Tensor:
    """The mask in NumPy: word i % 4 of counter i / 4."""
    element = np.arange(rows * cols)
    words = np.stack(philox_4x32_10((element // 4, 0, 0, 0), (SEED & 0xFFFFFFFF, SEED >> 32)))
    word = words[element % 4, element]
    return torch.from_numpy(word >= drop_threshold(DROP)).view(rows, cols)


def inputs(rows: int, cols: int, dtype: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {name: torch.randn(rows, cols) for name in ("x", "residual")}
    made |= {name: torch.randn(cols) for name in ("bias", "gamma", "beta")}
    return {name: t.to(TYPES[dtype]) for name, t in made.items()}


def reference(chain: str, t: dict[str, torch.Tensor]) -> torch.Tensor:
    x, residual, bias, gamma, beta = (t[name].double() for name in ("x", "residual", "bias", "gamma", "beta"))
    if chain == "scale-shift":
        return x * 1.7 - 0.3
    if chain == "layer-norm":
        return functional.layer_norm(x, x.shape[1:], gamma, beta)
    active = functional.gelu(x + bias, approximate="tanh")
    return residual + active * kept(*x.shape) / (1 - DROP)


def run(chain: str, fused: bool, rows: int, cols: int, dtype: str, checks: bool = True):
    tensors = inputs(rows, cols, dtype)
    y = torch.full((rows, cols), 77.0, dtype=TYPES[dtype])
    backend = HostBackend(checks=checks)
    run_chain(
        backend,
        chain,
        {name: wrap(name, t) for name, t in (tensors | {"y": y}).items()},
        fused=fused,
        scale=1.7,
        shift=-0.3,
        dropout_p=DROP,
        seed=SEED,
    )
    return backend, y, tensors


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize(
    ("rows", "cols", "dtype"),
    [(33, 64, "fp32"), (33, 64, "bf16"), (5, 27, "fp16"), (1, 1, "fp32"), (16, 2064, "bf16")],
    ids=str,
)
def test_values_and_bytes(chain: str, fused: bool, rows: int, cols: int, dtype: str) -> None:
    backend, y, tensors = run(chain, fused, rows, cols, dtype)
    want = reference(chain, tensors)
    # each kernel rounds its result once; approximate exponentials cost 2^-21 in fp32
    roundings = 1 if fused else len(CHAINS[chain][0])
    size = sum(tensors[name].double().abs().max() for name in ("residual", "gamma", "beta"))
    bound = roundings * UNIT[dtype] * (2 * want.abs() + size) + 2.0**-20
    assert ((y.double() - want).abs() <= bound).all()
    assert backend.traffic == predict_fusion(chain, fused, rows, cols, dtype)


def test_passes_of_the_chains() -> None:
    assert [passes(c, fused) for c in CHAINS for fused in (False, True)] == [4, 2, 9, 3, 6, 2]


def test_k13_unfused_scale_and_bias_moves_exactly_twice_the_bytes() -> None:
    counted = [total_bytes(run("scale-shift", fused, 64, 256, "bf16")[0].traffic) for fused in (False, True)]
    assert counted == [4 * 64 * 256 * 2, 2 * 64 * 256 * 2]


def test_torch_eager_moves_what_the_unfused_chain_moves() -> None:
    x = torch.randn(64, 256)
    with OperationBytes() as eager:
        y = x * 1.7 + -0.3
    assert y.shape == x.shape
    assert eager.total_bytes == total_bytes(predict_fusion("scale-shift", False, 64, 256, "fp32"))
    with OperationBytes() as views:
        x.t().view(2, 128, 64)[0].unsqueeze(0)
    assert views.total_bytes == 0
    bias, residual = torch.randn(256), torch.randn(64, 256)
    with OperationBytes() as chain:
        active = functional.gelu(x + bias, approximate="tanh")
        dropped, mask = torch.native_dropout(active, DROP, True)
        dropped + residual
    unit = x.nbytes
    assert chain.total_bytes == 9 * unit + bias.nbytes + mask.nbytes  # and a mask of one byte


def test_dropout_keeps_the_stated_share_and_repeats() -> None:
    first = run("bias-gelu-dropout-residual", True, 64, 1024, "fp32", checks=False)
    again = run("bias-gelu-dropout-residual", True, 64, 1024, "fp32", checks=False)
    assert torch.equal(first[1], again[1])
    share = float(kept(256, 1024).double().mean())
    assert abs(share - (1 - DROP)) < 4 * (DROP * (1 - DROP) / (256 * 1024)) ** 0.5


def test_bad_arguments() -> None:
    t = inputs(4, 8, "fp32")
    arrays = {name: wrap(name, x) for name, x in (t | {"y": torch.zeros(4, 8)}).items()}
    backend = HostBackend()
    with pytest.raises(ValueError, match="got 'swish'"):
        run_chain(backend, "swish", arrays, fused=True)
    missing = {k: v for k, v in arrays.items() if k != "bias"}
    with pytest.raises(ValueError, match="'bias' is missing"):
        run_chain(backend, "bias-gelu-dropout-residual", missing, fused=True)
    wrong = arrays | {"gamma": wrap("gamma", torch.zeros(7))}
    with pytest.raises(ValueError, match=r"gamma is \(7,\) fp32, x needs \(8,\) fp32"):
        run_chain(backend, "layer-norm", wrong, fused=True)
    long = {n: wrap(n, torch.zeros(1, 20000)) for n in ("x", "y")}
    long |= {n: wrap(n, torch.zeros(20000)) for n in ("gamma", "beta")}
    with pytest.raises(ValueError, match="240032 bytes of shared memory, the limit is 49152"):
        run_chain(backend, "layer-norm", long, fused=True)
