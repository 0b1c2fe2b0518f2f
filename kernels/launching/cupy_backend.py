"""Launch kernels on an NVIDIA GPU through CuPy, which compiles them with NVRTC and caches them.

CuPy is imported when a :class:`CupyBackend` is made, never before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import local
from typing import Any

import numpy as np

from kernels.building.cache import digest, headers
from kernels.launch import (
    INCLUDE_DIR,
    ITEMSIZE,
    TENSOR_MAP_BYTES,
    Argument,
    Array,
    Kernel,
    TensorMap,
    check_grid,
    contiguous_strides,
    encode_array,
    encode_scalar,
)
from kernels.launching.driver import PackedLaunch, PreparedLaunch, layout_of, tensor_map
from kernels.launching.plan import Launch

_TENSOR_MAP = np.dtype((np.void, TENSOR_MAP_BYTES))
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
        return tensor_map(arg.array.pointer, *layout_of(arg)).view(_TENSOR_MAP)
    if isinstance(arg, Array):
        data = encode_array(arg)
        return np.frombuffer(data, np.dtype((np.void, len(data))))
    encode_scalar(arg)  # refuses what has no definite width
    return arg


def source_for_cupy(kernel: Kernel) -> str:
    """The source text, marked with the state of the headers: CuPy's cache does not look at them."""
    name = f"{kernel.entry}.cu" if kernel.path is None else kernel.path.name
    return f'// headers {digest(headers(kernel.text()))}\n#line 1 "{name}"\n{kernel.text()}'


def options_for(kernel: Kernel, compute_capability: str) -> tuple[str, ...]:
    """NVRTC options. CuPy itself chooses the architecture of the device, except that Hopper's
    warpgroup instructions exist only under the name sm_90a."""
    macros = tuple(f"-D{name}={value}" for name, value in kernel.macros)
    arch = ("-arch=sm_90a",) if compute_capability == "90" else ()
    # NVRTC 13.0 takes a lambda in some templates for a function of the host.
    return ("-std=c++17", "-default-device", f"-I{INCLUDE_DIR}", *arch, *macros)


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
        self._bound = local()

    def function(self, kernel: Kernel) -> Any:
        """The compiled entry point, a ``cupy.RawKernel`` (registers: ``num_regs``)."""
        found = self._functions.get(kernel)
        if found is None:
            with self._cupy.cuda.Device(self.device):
                module = self._cupy.RawModule(
                    code=source_for_cupy(kernel), options=options_for(kernel, self.compute_capability)
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
        pdl: bool = False,
    ) -> None:
        """Queue a kernel on ``stream`` (an address, as torch's ``cuda_stream``; None or 0 is the
        default stream) and return.

        pdl: programmatic dependent launch, for kernels that wait themselves for what
        the one before them writes.

        Raises:
            ValueError: the grid or the shared memory exceed what the device can do, or the device
                cannot do ``pdl``.
            RuntimeError: the driver refuses an ``pdl`` launch.
            TypeError: an argument without a definite width.
        """
        self._check(kernel, grid, shared_bytes, pdl)
        encoded = tuple(kernel_argument(arg) for arg in args)
        function = self.function(kernel)
        with self._cupy.cuda.Device(self.device), self._stream(stream):
            self._allow_shared(kernel, shared_bytes)
            if pdl:  # CuPy has no option for it
                pieces = [argument.tobytes() for argument in encoded]
                launch = PackedLaunch(
                    kernel.entry, function.kernel.ptr, grid, kernel.threads, shared_bytes, pieces, pdl
                )
                launch(stream or 0)
            else:
                function(grid, (kernel.threads, 1, 1), encoded, shared_mem=shared_bytes)

    def prepare(self, launches: Sequence[Launch]) -> Callable[[Sequence[int], int], None]:
        """A function of (addresses of a plan's slots, stream) that queues its launches.

        Compiling, checking, packing and asking for shared memory are done here, once. The device
        must be the current one of the thread that calls the function.

        Raises as :meth:`launch` does; the function raises RuntimeError when the driver refuses.
        """
        prepared = []
        with self._cupy.cuda.Device(self.device):
            for launch in launches:
                self._check(launch.kernel, launch.grid, launch.shared_bytes, launch.pdl)
                function = self.function(launch.kernel)
                self._allow_shared(launch.kernel, launch.shared_bytes)
                prepared.append(PreparedLaunch(launch, function.kernel.ptr))

        def queue(addresses: Sequence[int], stream: int) -> None:
            self._bind_thread()
            for launch in prepared:
                launch(addresses, stream)

        return queue

    def _check(self, kernel: Kernel, grid: tuple[int, int, int], shared_bytes: int, pdl: bool) -> None:
        check_grid(kernel, grid)
        if not 0 <= shared_bytes <= self.shared_limit_bytes:
            raise ValueError(
                f"{kernel.entry}: {shared_bytes} bytes of shared memory a block, "
                f"device {self.device} has {self.shared_limit_bytes}"
            )
        if pdl and int(self.compute_capability) < 90:
            raise ValueError(
                f"{kernel.entry}: pdl needs compute capability 9.0, device {self.device} has {self.compute_capability}"
            )

    def _allow_shared(self, kernel: Kernel, shared_bytes: int) -> None:
        """Let the kernel have that much dynamic shared memory. Its device is current."""
        if shared_bytes > self._raised_shared_bytes.get(kernel, DEFAULT_SHARED_BYTES):
            self.function(kernel).max_dynamic_shared_size_bytes = shared_bytes
            self._raised_shared_bytes[kernel] = shared_bytes

    def _bind_thread(self) -> None:
        """Make the device's context current in a thread that has made no call of CUDA yet: such a
        thread has no context, though it has a current device."""
        if not getattr(self._bound, "done", False):
            self._cupy.cuda.runtime.setDevice(self.device)
            self._bound.done = True

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
        return Array(name, memory.data.ptr, tuple(shape), contiguous_strides(shape), dtype, "rw", memory)
