"""A driver of NVIDIA's that does nothing, for machines without a GPU: what reaches it is noted.

``install()`` loads a small library under the driver's name, so that ``cuda.bindings`` passes
through it whatever it would pass to the real one: the arguments of launches as bytes, tensor maps
as the fields they were made from. CuPy, which would want much more of a driver, is replaced by the
few calls that ``kernels.launching.cupy_backend`` makes of it. A process cannot go back to the real
driver: tests use one of their own (``tests/driver_report.py``).
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kernels.host.compiler import build

SOURCE = r"""
#include <cstdint>
#include <cstring>

typedef void (*Noted)(const uint64_t* numbers, void** parameters);

extern "C" {

Noted fake_noted = nullptr;
int fake_answer = 0;

struct Attribute { int id; int pad; uint64_t value[8]; };
struct Config {
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
    const Attribute* attributes;
    unsigned count;
};

static int note(const Config& c, void* function, void** parameters) {
    uint64_t numbers[11] = {
        (uint64_t)function, c.grid[0], c.grid[1], c.grid[2], c.block[0], c.block[1], c.block[2],
        c.shared_bytes, (uint64_t)c.stream,
        c.count ? (uint64_t)c.attributes->id : 0, c.count ? c.attributes->value[0] & 0xffffffff : 0,
    };
    if (fake_noted) fake_noted(numbers, parameters);
    return fake_answer;
}

int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared_bytes, void* stream, void** parameters, void**) {
    Config config = {{gx, gy, gz}, {bx, by, bz}, shared_bytes, stream, nullptr, 0};
    return note(config, function, parameters);
}

int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void**) {
    return note(*config, function, parameters);
}

// The 16 words: address; type, rank, interleave, swizzle, promotion, fill, a byte each; 5 sizes;
// 4 strides; 5 times box and element stride, 32 bits each.
int cuTensorMapEncodeTiled(uint64_t* map, int type, unsigned rank, void* address,
                           const uint64_t* sizes, const uint64_t* strides, const unsigned* box,
                           const unsigned* steps, int interleave, int swizzle, int promotion,
                           int fill) {
    map[0] = (uint64_t)address;
    map[1] = (uint64_t)type | (uint64_t)rank << 8 | (uint64_t)interleave << 16 |
             (uint64_t)swizzle << 24 | (uint64_t)promotion << 32 | (uint64_t)fill << 40;
    for (unsigned i = 0; i < 5; ++i) map[2 + i] = i < rank ? sizes[i] : 0;
    for (unsigned i = 0; i < 4; ++i) map[7 + i] = i + 1 < rank ? strides[i] : 0;
    for (unsigned i = 0; i < 5; ++i)
        map[11 + i] = i < rank ? box[i] | (uint64_t)steps[i] << 32 : 0;
    return fake_answer;
}

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }

int cuGetErrorName(int code, const char** name) {
    *name = code == 1 ? "CUDA_ERROR_INVALID_VALUE" : nullptr;
    return *name ? 0 : 1;
}

int cuGetProcAddress_v2(const char* name, void** found, int, uint64_t, int* status) {
    static const struct { const char* name; void* address; } known[] = {
        {"cuInit", (void*)cuInit},
        {"cuDriverGetVersion", (void*)cuDriverGetVersion},
        {"cuGetProcAddress", (void*)cuGetProcAddress_v2},
        {"cuLaunchKernel", (void*)cuLaunchKernel},
        {"cuLaunchKernelEx", (void*)cuLaunchKernelEx},
        {"cuTensorMapEncodeTiled", (void*)cuTensorMapEncodeTiled},
    };
    *found = nullptr;
    for (const auto& entry : known)
        if (!strcmp(name, entry.name)) *found = entry.address;
    if (status) *status = *found ? 0 : 1;
    return *found ? 0 : 500;
}

int cuGetProcAddress(const char* name, void** found, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, found, version, flags, nullptr);
}

}
"""
NAMES = ("function", "grid", "block", "shared_bytes", "stream", "attribute")


def words(data: bytes) -> list[int]:
    """Bytes as 64-bit words, the last padded."""
    padded = data + bytes(-len(data) % 8)
    return [int(word) for word in np.frombuffer(padded, np.uint64)]


@dataclass
class FakeDriver:
    """What has reached the driver.

    widths: bytes of each argument of the next launch, which a driver knows of the function.
    delay_s: how long a launch takes before it reads its arguments; others may run meanwhile.
    """

    library: ctypes.CDLL
    launches: list[dict[str, Any]] = field(default_factory=list)
    widths: Sequence[int] = ()
    noted: Any = None
    delay_s: float = 0.0

    def note(self) -> None:
        """Write launches down from now on."""
        kind = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p)

        def noted(numbers: Any, parameters: int) -> None:
            if self.delay_s:
                time.sleep(self.delay_s)
            addresses = (ctypes.c_void_p * len(self.widths)).from_address(parameters)
            entry = {
                "function": numbers[0],
                "grid": numbers[1:4],
                "block": numbers[4:7],
                "shared_bytes": numbers[7],
                "stream": numbers[8],
                "attribute": numbers[9:11],
                "arguments": [
                    words(ctypes.string_at(address, width))
                    for address, width in zip(addresses, self.widths, strict=True)
                ],
            }
            self.launches.append(entry)

        self.noted = kind(noted)
        ctypes.c_void_p.in_dll(self.library, "fake_noted").value = ctypes.cast(self.noted, ctypes.c_void_p).value

    def answer(self, code: int) -> None:
        """Refuse everything from now on with a CUresult; 0: accept it."""
        ctypes.c_int.in_dll(self.library, "fake_answer").value = code


def install() -> FakeDriver:
    """Load the driver and the stand-in for CuPy. RuntimeError if the process has a driver."""
    if "cupy" in sys.modules or "libcuda.so" in Path("/proc/self/maps").read_text():
        raise RuntimeError("this process has a driver already")
    flags = ("-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1")
    driver = FakeDriver(ctypes.CDLL(str(build(SOURCE, flags, "fake_driver", "")), mode=ctypes.RTLD_GLOBAL))
    sys.modules["cupy"] = _fake_cupy(driver)  # type: ignore[assignment]
    return driver


def _fake_cupy(driver: FakeDriver) -> SimpleNamespace:
    class Device:
        compute_capability = "90"

        def __init__(self, index: int) -> None:
            self.attributes = {"MaxSharedMemoryPerBlockOptin": 232448, "MultiProcessorCount": 132}

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    class Stream:
        def __init__(self, pointer: int = 0, device: int = 0) -> None:
            self.pointer = pointer

        def __enter__(self) -> None:
            streams.append(self.pointer)

        def __exit__(self, *_: object) -> None:
            streams.pop()

    class Function:
        """A RawKernel: a call of it reaches the driver as CuPy's own would."""

        def __init__(self, handle: int) -> None:
            self.kernel = SimpleNamespace(ptr=handle)
            self.max_dynamic_shared_size_bytes = 0

        def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int) -> None:
            driver.launches.append(
                {
                    "function": self.kernel.ptr,
                    "grid": list(grid),
                    "block": list(block),
                    "shared_bytes": shared_mem,
                    "stream": streams[-1],
                    "attribute": [0, 0],
                    "arguments": [words(argument.tobytes()) for argument in args],
                }
            )

    streams = [0]
    handles = count(0x1000, 0x10)
    pointers = count(1 << 32, 1 << 28)

    def module(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(get_function=lambda name: Function(next(handles)))

    return SimpleNamespace(
        cuda=SimpleNamespace(
            runtime=SimpleNamespace(getDeviceCount=lambda: 1, setDevice=lambda index: None, CUDARuntimeError=OSError),
            Device=Device,
            Stream=SimpleNamespace(null=Stream()),
            ExternalStream=Stream,
        ),
        RawModule=module,
        RawKernel=lambda code, name: lambda grid, block, args: None,
        uint8=np.uint8,
        empty=lambda n, dtype: SimpleNamespace(data=SimpleNamespace(ptr=next(pointers))),
    )
