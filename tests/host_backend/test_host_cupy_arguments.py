"""What the CuPy launcher hands to CuPy, checked against a stand-in that records it. No GPU."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels.launch import INCLUDE_DIR, Array, Kernel, TensorMap, encode
from kernels.launching.cupy_backend import CupyBackend, kernel_argument, options_for, source_for_cupy

KERNEL = Kernel("// text\n", "entry", (("HEAD_DIM", 64), ("CAUSAL", 1)), 128)
Q = Array("q", 4096, (2, 3, 5, 64), (960, 320, 64, 1), "fp16", "r")


class Scope:
    """A device or stream of the stand-in: notes that it was entered."""

    def __init__(self, log: list[Any], *what: Any) -> None:
        self.log = log
        self.what = what
        self.compute_capability = "90"
        self.attributes = {"MaxSharedMemoryPerBlockOptin": 232448, "MultiProcessorCount": 132}

    def __enter__(self) -> Scope:
        self.log.append(self.what)
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("leave")


class Function:
    def __init__(self, log: list[Any]) -> None:
        object.__setattr__(self, "log", log)
        object.__setattr__(self, "kernel", SimpleNamespace(ptr=0xF00))

    def __setattr__(self, name: str, value: Any) -> None:
        self.log.append((name, value))

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int) -> None:
        self.log.append(("launch", grid, block, args, shared_mem))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    entries: list[Any] = []

    class CUDARuntimeError(RuntimeError):
        pass

    def raw_module(*, code: str, options: tuple[str, ...]) -> Any:
        entries.append(("compile", code, options))
        return SimpleNamespace(get_function=lambda name: Function(entries))

    cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDeviceCount=lambda: 2, CUDARuntimeError=CUDARuntimeError),
        Device=lambda index: Scope(entries, "device", index),
        Stream=SimpleNamespace(null=Scope(entries, "stream", 0)),
        ExternalStream=lambda pointer, device: Scope(entries, "stream", pointer, device),
    )
    cupy = SimpleNamespace(
        cuda=cuda,
        RawModule=raw_module,
        uint8=np.uint8,
        empty=lambda n, dtype: SimpleNamespace(nbytes=n, data=SimpleNamespace(ptr=512)),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return entries


def launches(log: list[Any]) -> list[Any]:
    return [entry for entry in log if entry[0] == "launch"]


def test_views_travel_by_value() -> None:
    argument = kernel_argument(Q)
    assert isinstance(argument, np.ndarray)
    assert argument.size == 1
    assert argument.dtype == np.dtype("V32")
    assert list(argument.view(np.int64)) == [4096, 960, 320, 64]
    assert argument.tobytes() == encode(Q)
    rows = kernel_argument(Array("lse", 8, (2, 3, 5), (15, 5, 1), "fp32", "w"))
    assert rows.dtype.itemsize == 24
    assert kernel_argument(Array("n", 8, (), (), "int32", "r")).dtype.itemsize == 8
    scale = np.float32(0.5)
    assert kernel_argument(scale) is scale
    for value in (0.5, 1, np.float64(0.5), True):
        with pytest.raises(TypeError, match="give one of"):
            kernel_argument(value)  # type: ignore[arg-type]


def test_options_and_source() -> None:
    options = options_for(KERNEL, "80")
    assert set(options) == {"-std=c++17", "-default-device", f"-I{INCLUDE_DIR}", "-DCAUSAL=1", "-DHEAD_DIM=64"}
    assert "-arch=sm_90a" in options_for(KERNEL, "90")
    # CuPy keys its cache by this text, so it must change with the headers.
    first, second, *rest = source_for_cupy(KERNEL).split("\n")
    assert first.startswith("// headers ")
    assert second == '#line 1 "entry.cu"'
    assert rest == ["// text", ""]


def test_launch(log: list[Any]) -> None:
    backend = CupyBackend(1)
    assert log == []  # looking at the device makes it current for nobody
    backend.launch(KERNEL, (7, 1, 1), 1024, [Q, np.int32(3)], stream=0xABC0)
    _, code, options = next(entry for entry in log if entry[0] == "compile")
    assert code == source_for_cupy(KERNEL)
    assert options == options_for(KERNEL, "90")
    i = log.index(("stream", 0xABC0, 1))
    assert log[i - 1] == ("device", 1)
    name, grid, block, args, shared = log[i + 1]
    assert (name, grid, block, shared) == ("launch", (7, 1, 1), (128, 1, 1), 1024)
    assert args[0].tobytes() == encode(Q)
    assert args[1] == 3
    assert type(args[1]) is np.int32
    assert log[i + 2 :] == ["leave", "leave"]


def test_a_launch_after_the_previous_one(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the driver: the attribute, the shape of the launch, and each argument's bytes behind
    its address, whatever it is."""
    driver = pytest.importorskip("cuda.bindings.driver")
    backend = CupyBackend(0)
    whole = np.arange(16, dtype=np.uint64)
    monkeypatch.setattr("kernels.launching.cupy_backend.tensor_map", lambda *_: whole)
    args = [Q, np.int32(-3), np.float32(0.5), TensorMap(Q, 64), np.uint64(2**63), np.int64(-1)]
    widths = [32, 4, 4, 128, 8, 8]
    seen: dict[str, Any] = {}

    def launch(config: Any, function: Any, parameters: int, extra: int) -> tuple[Any]:
        addresses = (ctypes.c_void_p * len(args)).from_address(parameters)
        seen["bytes"] = [ctypes.string_at(a, n) for a, n in zip(addresses, widths, strict=True)]
        seen["grid"] = (config.gridDimX, config.gridDimY, config.gridDimZ)
        seen["block"] = (config.blockDimX, config.blockDimY, config.blockDimZ)
        seen["rest"] = (config.sharedMemBytes, int(config.hStream), int(function), extra)
        (attribute,) = config.attrs
        seen["attribute"] = (attribute.id, attribute.value.programmaticStreamSerializationAllowed)
        assert config.numAttrs == 1
        log.append(("driver",))
        return (answers.pop(),)

    ok, refused = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_VALUE
    answers = [refused, ok]
    monkeypatch.setattr(driver, "cuLaunchKernelEx", launch)
    backend.launch(KERNEL, (7, 2, 1), 65536, args, stream=0xABC0, pdl=True)
    expected = [encode(arg) for arg in args]
    expected[3] = whole.tobytes()
    assert seen["bytes"] == expected
    assert (seen["grid"], seen["block"]) == ((7, 2, 1), (128, 1, 1))
    assert seen["rest"] == (65536, 0xABC0, 0xF00, 0)
    ident = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert seen["attribute"] == (ident, 1)
    # In the device's context, with its shared memory raised, and not through CuPy.
    assert ("max_dynamic_shared_size_bytes", 65536) in log
    assert log[-3:] == [("driver",), "leave", "leave"]
    assert not launches(log)
    with pytest.raises(RuntimeError, match=r"the driver refuses .* CUDA_ERROR_INVALID_VALUE"):
        backend.launch(KERNEL, (1, 1, 1), 0, args, pdl=True)
    assert seen["rest"] == (0, 0, 0xF00, 0)
    backend.compute_capability = "80"
    with pytest.raises(ValueError, match=r"needs compute capability 9.0, device 0 has 80"):
        backend.launch(KERNEL, (1, 1, 1), 0, args, pdl=True)


def test_default_stream_and_cache(log: list[Any]) -> None:
    backend, other = CupyBackend(0), CupyBackend(1)
    for _ in range(3):
        backend.launch(KERNEL, (1, 1, 1), 0, [])
    assert ("stream", 0) in log
    assert sum(entry[0] == "compile" for entry in log) == 1
    same = Kernel(KERNEL.source, "entry", (("CAUSAL", 1), ("HEAD_DIM", 64)), 128)
    backend.launch(same, (1, 1, 1), 0, [])
    assert sum(entry[0] == "compile" for entry in log) == 1
    other.launch(KERNEL, (1, 1, 1), 0, [])  # another device, another context
    changed = Kernel(KERNEL.source, "entry", (("CAUSAL", 0), ("HEAD_DIM", 64)), 128)
    backend.launch(changed, (1, 1, 1), 0, [])
    assert sum(entry[0] == "compile" for entry in log) == 3
    assert len(launches(log)) == 6


def test_shared_memory_is_raised_once_above_48_kib(log: list[Any]) -> None:
    backend = CupyBackend(0)

    def raised() -> list[int]:
        return [entry[1] for entry in log if entry[0] == "max_dynamic_shared_size_bytes"]

    backend.launch(KERNEL, (1, 1, 1), 49152, [])
    assert raised() == []
    for size in (98304, 49153, 98304, 232448):
        backend.launch(KERNEL, (1, 1, 1), size, [])
    assert raised() == [98304, 232448]
    with pytest.raises(ValueError, match=r"entry: 232449 bytes .* device 0 has 232448"):
        backend.launch(KERNEL, (1, 1, 1), 232449, [])
    assert len(launches(log)) == 5


def test_refused_before_anything_is_compiled(log: list[Any]) -> None:
    backend = CupyBackend(0)
    with pytest.raises(ValueError, match=r"grid.z = 70000 is outside 1..65535"):
        backend.launch(KERNEL, (1, 1, 70000), 0, [])
    with pytest.raises(TypeError, match="give one of"):
        backend.launch(KERNEL, (1, 1, 1), 0, [1.0])  # type: ignore[list-item]
    assert log == []
    with pytest.raises(RuntimeError, match=r"device 2: CuPy sees 2 GPU"):
        CupyBackend(2)


def test_scratch(log: list[Any]) -> None:
    array = CupyBackend(1).empty("dq_accum", (2, 3, 4, 8), "fp32")
    assert log[0] == ("device", 1)
    assert (array.pointer, array.shape, array.strides) == (512, (2, 3, 4, 8), (96, 32, 8, 1))
    assert array.owner.nbytes == 2 * 3 * 4 * 8 * 4


def test_without_cupy_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"^running on a GPU needs CuPy: pip install cupy-cuda12"):
        CupyBackend()


def test_package_import_leaves_cupy_alone() -> None:
    import kernels.launching.cupy_backend

    assert "cupy" not in vars(kernels.launching.cupy_backend)
