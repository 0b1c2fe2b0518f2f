"""Matrix products, fused chains and offloading on a real GPU, against float64 and the host form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_support import missing_gpu
from torch import nn

from analysis.fusion import CHAINS
from analysis.gemm import VARIANTS
from kernels.beside.elementwise import run_chain
from kernels.beside.gemm import gemm
from kernels.host import HostBackend
from kernels.launch import Array, contiguous_strides, from_numpy
from kernels.launching.cupy_backend import CupyBackend
from repro.training.link import CudaLink, Pool
from repro.training.offload import OffloadSavedTensors

REASON = missing_gpu() or (None if torch.cuda.is_available() else "torch has no CUDA device")
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"needs an NVIDIA GPU: {REASON}")

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def wrap(name: str, t: torch.Tensor, access: str = "rw") -> Array:
    shape = tuple(t.shape)
    return Array(name, t.data_ptr(), shape, contiguous_strides(shape), NAMES[t.dtype], access, t)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [(256, 256, 256), (200, 136, 328)], ids=str)
def test_products(variant: str, dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    if variant == "tensor-core" and dtype == torch.float32:
        pytest.skip("tensor cores take 16-bit types")
    m, n, k = size
    torch.manual_seed(0)
    a, b = (torch.randn(s, device="cuda").to(dtype) for s in ((m, k), (k, n)))
    c = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
    stream = torch.cuda.current_stream().cuda_stream
    gemm(CupyBackend(), variant, wrap("a", a), wrap("b", b), wrap("c", c), stream=stream)
    torch.cuda.synchronize()
    exact = a.double() @ b.double()
    unit = torch.finfo(dtype).eps / 2
    bound = unit * exact.abs() + k * 2.0**-24 * (a.double().abs() @ b.double().abs())
    assert ((c.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("chain", CHAINS)
def test_chains_agree_with_the_host(chain: str, fused: bool) -> None:
    random = np.random.default_rng(0)
    rows, cols = 100, 1032
    values = {n: random.standard_normal((rows, cols)).astype(np.float32) for n in ("x", "residual")}
    values |= {n: random.standard_normal(cols).astype(np.float32) for n in ("bias", "gamma", "beta")}
    options = {"fused": fused, "scale": 1.7, "shift": -0.3, "dropout_p": 0.25, "seed": 7}
    host = np.zeros((rows, cols), np.float32)
    arrays = {n: from_numpy(n, v, "rw") for n, v in (values | {"y": host}).items()}
    run_chain(HostBackend(), chain, arrays, **options)
    device = {n: torch.from_numpy(v).cuda() for n, v in values.items()}
    device["y"] = torch.zeros(rows, cols, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    run_chain(CupyBackend(), chain, {n: wrap(n, t) for n, t in device.items()}, stream=stream, **options)
    torch.cuda.synchronize()
    ours = device["y"].cpu().numpy()
    assert ((ours == 0) == (host == 0)).all()  # the same dropout mask
    np.testing.assert_allclose(ours, host, rtol=2e-5, atol=2e-5)


def test_offload_frees_device_memory_and_keeps_every_bit() -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(8) for m in (nn.Linear(1024, 1024), nn.GELU())]
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(4096, 1024, device="cuda")
    activation = x.nbytes

    def step(offload: OffloadSavedTensors | None) -> tuple[list[torch.Tensor], int]:
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if offload is None:
            loss = model(x).square().sum()
        else:
            with offload:
                loss = model(x).square().sum()
        loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        return [p.grad.clone() for p in model.parameters() if p.grad is not None], peak

    step(None)  # the matrix library's workspace
    plain, stored = step(None)
    offload = OffloadSavedTensors(
        model, link=CudaLink(), pool=Pool(pin=True), prefetch_bytes=activation, in_flight_bytes=2 * activation
    )
    for _ in range(3):
        moved, peak = step(offload)
        assert all(torch.equal(a, b) for a, b in zip(moved, plain, strict=True))
    assert offload.link.bytes_out == offload.link.bytes_in == 3 * 17 * activation
    assert peak <= stored - 8 * activation
