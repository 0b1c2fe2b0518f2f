"""Launch kernels on an NVIDIA GPU through CuPy, which compiles them with NVRTC and caches them.

CuPy is imported when a :class:`CupyBackend` is made, never before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import numpy as np

from kernels.cache import digest, headers
from kernels.launch import (
    INCLUDE_DIR,
    ITEMSIZE,
    TENSOR_MAP_BYTES,
    TENSOR_MAP_ROW_BYTES,
    Argument,
    Array,
    Kernel,
    TensorMap,
    check_grid,
    contiguous_strides,
    encode_array,
    encode_scalar,
)

# Shared memory a block may have without asking for more (CUDA programming guide, every GPU).
DEFAULT_SHARED_BYTES = 48 * 1024
MISSING = "running on a GPU needs CuPy: pip install cupy-cuda12x or cupy-cuda13x"


def import_cupy() -> Any:
    """The cupy module. RuntimeError, in one line, where it is not installed or cannot load."""
    try:
        import cupy
    except (ImportError, OSError) as error:
        raise RuntimeError(f"{MISSING} ({error})") from None
    return cupy


def kernel_argument(arg: Argument) -> np.generic | np.ndarray:
    """An argument in the form that CuPy passes by value.

    A view becomes a void array of size 1 with the bytes of Tensor4, Tensor3 or Tensor1, a tensor
    map one with the driver's 128 bytes; a scalar stays the NumPy scalar that it is. A Python number
    is refused: CuPy would pass 64 bits.
    """
    if isinstance(arg, TensorMap):
        array = arg.array
        return _driver_tensor_map(
            array.pointer, array.shape, array.strides, array.dtype, arg.box_rows
        )
    if isinstance(arg, Array):
        data = encode_array(arg)
        return np.frombuffer(data, np.dtype((np.void, len(data))))
    encode_scalar(arg)  # refuses what has no definite width
    return arg


def tensor_map_geometry(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, box_rows: int
) -> tuple[list[int], list[int], list[int]]:
    """Sizes, byte strides of all but the innermost, and box of a (B, H, N, D) array's tensor map.

    Innermost first: 128 bytes of a row, rows, the row's next 128 bytes, heads, batches. N is a
    dimension of its own, so that rows past it read as zero in every head. The stride of a dimension
    of size 1 means nothing, but the driver wants a multiple of 16.
    """
    batch, heads, rows, columns = shape
    chunk = TENSOR_MAP_ROW_BYTES // itemsize
    row_bytes = strides[2] * itemsize if rows > 1 else columns * itemsize
    head_bytes = strides[1] * itemsize if heads > 1 else row_bytes * rows
    batch_bytes = strides[0] * itemsize if batch > 1 else head_bytes * heads
    return (
        [chunk, rows, columns // chunk, heads, batch],
        [row_bytes, TENSOR_MAP_ROW_BYTES, head_bytes, batch_bytes],
        [chunk, box_rows, columns // chunk, 1, 1],
    )


# Making four maps costs about 50 us in Python; a training loop asks for the same ones again.
@lru_cache(maxsize=4096)
def _driver_tensor_map(
    pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, box_rows: int
) -> np.ndarray:
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    kinds = {
        "fp16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bf16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "fp32": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }
    sizes, steps, box = tensor_map_geometry(shape, strides, ITEMSIZE[dtype], box_rows)
    error, encoded = driver.cuTensorMapEncodeTiled(
        kinds[dtype],
        len(sizes),
        pointer,
        [driver.cuuint64_t(n) for n in sizes],
        [driver.cuuint64_t(n) for n in steps],
        [driver.cuuint32_t(n) for n in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise ValueError(
            f"the driver refuses a tensor map of {shape}, strides {strides}, {dtype}, boxes of "
            f"{box_rows} rows: {error.name}"
        )
    words = np.array([int(word) for word in encoded.opaque], dtype=np.uint64)
    return words.view(np.dtype((np.void, TENSOR_MAP_BYTES)))


def launch_after_previous(
    name: str,
    function: int,
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    arguments: Sequence[np.generic | np.ndarray],
    stream: int,
) -> None:
    """Launch a CUfunction with programmatic stream serialisation, which CuPy has no option for.

    The driver copies the arguments before it returns. RuntimeError when it refuses.
    """
    from cuda.bindings import driver

    values = [np.asarray(argument) for argument in arguments]
    addresses = np.array([value.ctypes.data for value in values], np.uintp)
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = driver.CUstream(stream)
    config.attrs, config.numAttrs = [attribute], 1
    (error,) = driver.cuLaunchKernelEx(
        config, driver.CUfunction(function), addresses.ctypes.data, 0
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name}: the driver refuses the launch: {error.name}")


def source_for_cupy(kernel: Kernel) -> str:
    """The source text, marked with the state of the headers: CuPy's cache does not look at them."""
    name = f"{kernel.entry}.cu" if kernel.path is None else kernel.path.name
    return f'// headers {digest(headers())}\n#line 1 "{name}"\n{kernel.text()}'


def options_for(kernel: Kernel, compute_capability: str) -> tuple[str, ...]:
    """NVRTC options. CuPy itself chooses the architecture of the device, except that Hopper's
    warpgroup instructions exist only under the name sm_90a."""
    macros = tuple(f"-D{name}={value}" for name, value in kernel.macros)
    arch = ("-arch=sm_90a",) if compute_capability == "90" else ()
    return ("-std=c++17", f"-I{INCLUDE_DIR}", *arch, *macros)


class CupyBackend:
    """Launches on one device, on any stream of it.

    Args:
        device: CUDA device index; its context may be shared with torch.

    Raises:
        RuntimeError: CuPy is not installed, or it sees no such device.
    """

    name = "cupy"

    def __init__(self, device: int = 0) -> None:
        self._cupy = import_cupy()
        try:
            count = self._cupy.cuda.runtime.getDeviceCount()
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise RuntimeError(f"CuPy finds no GPU ({error})") from None
        if not 0 <= device < count:
            raise RuntimeError(f"device {device}: CuPy sees {count} GPU(s)")
        self.device = device
        handle = self._cupy.cuda.Device(device)
        self.compute_capability: str = handle.compute_capability
        self.shared_limit_bytes: int = handle.attributes["MaxSharedMemoryPerBlockOptin"]
        self.multiprocessors: int = handle.attributes["MultiProcessorCount"]
        # A function belongs to this device's context, so the cache belongs to this object.
        self._functions: dict[Kernel, Any] = {}
        self._raised_shared_bytes: dict[Kernel, int] = {}

    def function(self, kernel: Kernel) -> Any:
        """The compiled entry point, a ``cupy.RawKernel`` (registers: ``num_regs``)."""
        found = self._functions.get(kernel)
        if found is None:
            with self._cupy.cuda.Device(self.device):
                module = self._cupy.RawModule(
                    code=source_for_cupy(kernel),
                    options=options_for(kernel, self.compute_capability),
                )
                found = module.get_function(kernel.entry)
            self._functions[kernel] = found
        return found

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        shared_bytes: int,
        args: Sequence[Argument],
        stream: int | None = None,
        after_previous: bool = False,
    ) -> None:
        """Queue a kernel on ``stream`` (an address, as torch's ``cuda_stream``; None or 0 is the
        default stream) and return.

        after_previous: programmatic dependent launch, for kernels that wait themselves for what
        the one before them writes.

        Raises:
            ValueError: the grid or the shared memory exceed what the device can do, or the device
                cannot do ``after_previous``.
            RuntimeError: the driver refuses an ``after_previous`` launch.
            TypeError: an argument without a definite width.
        """
        check_grid(kernel, grid)
        if not 0 <= shared_bytes <= self.shared_limit_bytes:
            raise ValueError(
                f"{kernel.entry}: {shared_bytes} bytes of shared memory a block, "
                f"device {self.device} has {self.shared_limit_bytes}"
            )
        if after_previous and int(self.compute_capability) < 90:
            raise ValueError(
                f"{kernel.entry}: after_previous needs compute capability 9.0, "
                f"device {self.device} has {self.compute_capability}"
            )
        encoded = tuple(kernel_argument(arg) for arg in args)
        function = self.function(kernel)
        with self._cupy.cuda.Device(self.device), self._stream(stream):
            if shared_bytes > self._raised_shared_bytes.get(kernel, DEFAULT_SHARED_BYTES):
                function.max_dynamic_shared_size_bytes = shared_bytes
                self._raised_shared_bytes[kernel] = shared_bytes
            if after_previous:
                launch_after_previous(
                    kernel.entry, function.kernel.ptr, grid, kernel.threads, shared_bytes, encoded,
                    stream or 0,
                )  # fmt: skip
            else:
                function(grid, (kernel.threads, 1, 1), encoded, shared_mem=shared_bytes)

    def _stream(self, stream: int | None) -> AbstractContextManager[Any]:
        if not stream:
            return self._cupy.cuda.Stream.null
        return self._cupy.cuda.ExternalStream(stream, self.device)

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        """Uninitialised scratch of CuPy's memory pool; keep it until the stream has used it."""
        if dtype not in ITEMSIZE:
            raise TypeError(f"{name}: dtype {dtype!r} is not one of {list(ITEMSIZE)}")
        elements = int(np.prod(shape, dtype=np.int64))
        with self._cupy.cuda.Device(self.device):
            memory = self._cupy.empty(elements * ITEMSIZE[dtype], self._cupy.uint8)
        return Array(
            name, memory.data.ptr, tuple(shape), contiguous_strides(shape), dtype, "rw", memory
        )
