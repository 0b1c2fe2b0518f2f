"""The CuPy launcher on a real device, and the host backend held against that device.

Every kernel of ``tests/vocabulary.cu`` runs on both. This is what entitles the CPU tests to speak
for the GPU: conversions, fragment layouts and shuffles must agree bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_support import missing_gpu

from kernels.host import HostBackend
from kernels.launch import Argument, Array, Kernel, from_numpy
from kernels.launching.cupy_backend import CupyBackend

SOURCE = (Path(__file__).resolve().parents[1] / "support" / "vocabulary.cu").read_text()
DTYPES = {"fp16": 0, "bf16": 1}


REASON = missing_gpu()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"needs an NVIDIA GPU: {REASON}")


def kernel(entry: str, threads: int = 32, dtype: str = "fp16") -> Kernel:
    return Kernel(SOURCE, entry, (("DTYPE", DTYPES[dtype]),), threads)


def on_device(arg: Argument, keep: list[Any]) -> Argument:
    """A copy of a dense host array on the device; ``keep`` holds (array, its host values)."""
    import cupy

    if not isinstance(arg, Array):
        return arg
    memory = cupy.asarray(arg.owner.view(np.uint8))
    keep.append((memory, arg))
    return Array(arg.name, memory.data.ptr, arg.shape, arg.strides, arg.dtype, arg.access, memory)


def run_both(
    what: Kernel, grid: tuple[int, int, int], shared_bytes: int, args: list[Argument]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Written tensors as (host backend, device), by name."""
    import cupy

    keep: list[Any] = []
    device_args = [on_device(arg, keep) for arg in args]
    CupyBackend().launch(what, grid, shared_bytes, device_args)
    cupy.cuda.runtime.deviceSynchronize()
    HostBackend().launch(what, grid, shared_bytes, args)
    return {
        arg.name: (arg.owner, memory.get().view(arg.owner.dtype).reshape(arg.owner.shape))
        for memory, arg in keep
        if arg.access != "r"
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_conversions_agree(dtype: str) -> None:
    rng = np.random.default_rng(1)
    floats = rng.integers(0, 2**32, 1 << 20, dtype=np.uint32).view(np.float32)
    # CuPy compiles with -ftz=true, which concerns fp32 subnormals: leave those out.
    floats = np.where(abs(floats) < 2.0**-126, np.float32(0), floats)
    args: list[Argument] = [
        from_numpy("in", np.arange(65536, dtype=np.uint16), "r", dtype),
        from_numpy("widened", np.empty(65536, np.float32), "w"),
        from_numpy("floats", floats, "r"),
        from_numpy("narrowed", np.empty(len(floats), np.uint16), "w", dtype),
        from_numpy("packed", np.empty(len(floats) // 2, np.int32), "w"),
        from_numpy("unpacked", np.empty(len(floats), np.float32), "w"),
        np.int32(65536),
        np.int32(len(floats)),
    ]
    for host, device in run_both(kernel("convert", 128, dtype), (4, 1, 1), 0, args).values():
        np.testing.assert_array_equal(host, device)


@pytest.mark.smoke
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_agree(dtype: str) -> None:
    rng = np.random.default_rng(2)

    def bits(*shape: int) -> np.ndarray:
        x = rng.standard_normal(shape).astype(np.float32)
        if dtype == "fp16":
            return x.astype(np.float16).view(np.uint16)
        return (x.view(np.uint32) >> 16).astype(np.uint16)

    a, b = bits(64, 1, 16, 16), bits(64, 1, 8, 16)
    c = rng.standard_normal((64, 1, 16, 8)).astype(np.float32)
    args: list[Argument] = [from_numpy("a", a, "r", dtype), from_numpy("b", b, "r", dtype), from_numpy("d", c, "rw")]
    host, device = run_both(kernel("multiply", 32, dtype), (64, 1, 1), 0, args)["d"]
    # The tensor core truncates inside a group of products; bound by the sum of magnitudes.
    assert (abs(host - device) <= 2.0**-18 * (1 + abs(host).max())).all()


@pytest.mark.sanitize
def test_matrices_and_lanes_agree() -> None:
    rng = np.random.default_rng(3)
    args: list[Argument] = [
        from_numpy("in", rng.integers(0, 65536, 512, dtype=np.uint16), "r", "fp16"),
        from_numpy("rows", rng.permutation(64).astype(np.int32), "r"),
        from_numpy("plain", np.empty(256, np.int32), "w"),
        from_numpy("transposed", np.empty(256, np.int32), "w"),
    ]
    for host, device in run_both(kernel("matrices", 64), (1, 1, 1), 64 * 48, args).values():
        np.testing.assert_array_equal(host, device)
    blocks = 24
    args = [
        from_numpy("by_xor", np.empty(blocks * 64 * 5, np.int32), "w"),
        from_numpy("from_lane", np.empty(blocks * 64, np.float32), "w"),
        from_numpy("who", np.empty(blocks * 64 * 8, np.int32), "w"),
    ]
    for host, device in run_both(kernel("lanes", 64), (3, 2, 4), 0, args).values():
        np.testing.assert_array_equal(host, device)


def test_functions_agree_to_their_stated_error() -> None:
    rng = np.random.default_rng(4)
    x = np.concatenate(
        [rng.uniform(-140, 140, 40_000), rng.uniform(-9, 9, 40_000), np.arange(-140, 140), [np.inf, -np.inf, np.nan]]
    ).astype(np.float32)
    args: list[Argument] = [
        from_numpy("x", x, "r"),
        *(from_numpy(n, np.empty_like(x), "w") for n in ("powers", "logs", "reciprocals", "tangents", "larger")),
        from_numpy("bits", np.empty(len(x), np.int32), "w"),
        np.int32(len(x)),
    ]
    out = run_both(kernel("functions", 64), (1, 1, 1), 0, args)
    np.testing.assert_array_equal(*out["larger"])
    np.testing.assert_array_equal(*out["bits"])
    np.testing.assert_allclose(*out["reciprocals"], rtol=2.0**-22)
    np.testing.assert_allclose(*out["powers"], rtol=2.0**-21)
    np.testing.assert_allclose(*out["logs"], rtol=2.0**-20, atol=2.0**-21)
    for tangents in out["tangents"]:  # to what PTX states, and 1 where fp32 has nothing nearer
        np.testing.assert_allclose(tangents, np.tanh(x.astype(np.float64)), rtol=2.0**-11)
        np.testing.assert_array_equal(tangents[abs(x) > 9.02], np.sign(x[abs(x) > 9.02]))


def test_shared_memory_limits() -> None:
    import cupy

    backend = CupyBackend()
    text = (
        '#include "device.cuh"\n'
        'extern "C" __global__ void touch(Tensor1<float> out, int words) {\n'
        "    float* const s = reinterpret_cast<float*>(shared_memory());\n"
        "    st_shared(s + words - 1, 3.f);\n    block_sync();\n"
        "    st_global(out.data, ld_shared(s + words - 1));\n}\n"
    )
    touch = Kernel(text, "touch", (), 32)
    for size in (1024, 48 * 1024, 64 * 1024, backend.shared_limit_bytes):
        out = backend.empty("out", (1,), "fp32")
        backend.launch(touch, (1, 1, 1), size, [out, np.int32(size // 4)])
        assert out.owner.view(cupy.float32).get()[0] == 3
    with pytest.raises(ValueError, match=str(backend.shared_limit_bytes)):
        backend.launch(touch, (1, 1, 1), backend.shared_limit_bytes + 4, [out, np.int32(1)])


def test_work_is_queued_on_the_stream_that_is_named() -> None:
    import cupy

    backend = CupyBackend()
    text = (
        '#include "device.cuh"\n'
        'extern "C" __global__ void next(Tensor1<float> x, int count) {\n'
        "    const int i = blockIdx.x * 256 + threadIdx.x;\n"
        "    if (i < count) st_global(x.data + i, ld_global(x.data + i) * 2.f + 1.f);\n}\n"
    )
    step = Kernel(text, "next", (), 256)
    stream = cupy.cuda.Stream(non_blocking=True)
    count = 1 << 22
    with stream:
        memory = cupy.zeros(count, cupy.float32)
    x = Array("x", memory.data.ptr, (count,), (1,), "fp32", "rw", memory)
    for _ in range(50):
        with stream:
            memory.fill(0)  # behind this, or the result is not 7
        for _ in range(3):
            backend.launch(step, (count // 256, 1, 1), 0, [x, np.int32(count)], stream.ptr)
        with stream:
            total = memory.sum()
        stream.synchronize()
        assert float(total.get()) == 7.0 * count
