"""Launch ``hopper_vocabulary.cu`` and describe its operands, for tests on the host and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flash_support import to_bits, to_float

from kernels.host import HostBackend
from kernels.launch import Array, Kernel, TensorMap, from_numpy

__all__ = [
    "ROW",
    "Outcome",
    "descriptor_fields",
    "k_major_image",
    "launch_vocabulary",
    "mn_major_image",
    "product_of",
    "swizzled",
    "to_bits",
    "to_float",
]

SOURCE = (Path(__file__).resolve().parent / "hopper_vocabulary.cu").read_text()
SHARED_BYTES = 64 * 1024 + 8 + 1023
ROW = 128  # bytes of a swizzled row


def kernel(dtype: str = "fp16") -> Kernel:
    macros = (("DTYPE", 0 if dtype == "fp16" else 1),)
    return Kernel(SOURCE, "hopper_vocabulary", macros, 128)


@dataclass
class Outcome:
    """What a launch left behind."""

    shared: np.ndarray
    """Bytes of shared memory."""
    floats: np.ndarray
    sums: np.ndarray
    traffic: dict[tuple[str, str], int]

    @property
    def words_out(self) -> np.ndarray:
        return self.shared.view(np.uint32)

    @staticmethod
    def place(registers: np.ndarray) -> np.ndarray:
        """(128 threads, 64 registers) of m64n128 as the 64 x 128 matrix (PTX, "Register fragments"
        of D: register 4 j + e of thread t is row 16 w + g + 8 (e / 2), column 8 j + q + e % 2)."""
        matrix = np.zeros((64, 128))
        for t in range(128):
            w, g, q = t // 32, t % 32 // 4, 2 * (t % 4)
            for register in range(64):
                j, e = divmod(register, 4)
                matrix[16 * w + g + 8 * (e // 2), 8 * j + q + e % 2] = registers[t, register]
        return matrix

    def accumulator(self) -> np.ndarray:
        return self.place(self.floats.reshape(128, 64))


def launch_vocabulary(
    what: int,
    *,
    source: np.ndarray | None = None,
    target: np.ndarray | None = None,
    words: np.ndarray | None = None,
    dtype: str = "fp16",
    count: int | None = None,
    clear_bytes: int = 0,
    seed: int | None = None,
    run: Callable[..., None] | None = None,
    **numbers: int,
) -> Outcome:
    """Run one case of the source; arrays left out are small and unused.

    ``count`` is the number of 32-bit words of shared memory that the case handles. ``run`` launches
    on another backend and brings results back (GPU tests).
    """
    blank = np.zeros((1, 1, 64, 64), np.uint16)
    given = source if source is not None else blank
    taken = target if target is not None else blank.copy()
    words = np.zeros(1024, np.uint32) if words is None else words.view(np.uint32).reshape(-1)
    if count is None and source is not None:
        count = 64 * source.shape[-1] // 2
    if count is None:
        count = clear_bytes // 4 or len(words)
    shared = np.zeros(16 * 1024, np.uint32)
    floats, sums = np.zeros(128 * 64, np.float32), np.ones(1024, np.float32)
    names = ("row", "head", "batch", "a_at", "a_leading", "a_stride", "b_at", "b_leading", "b_stride")
    unknown = set(numbers) - set(names)
    assert not unknown, unknown
    args: list[Any] = [
        TensorMap(_array("source", given, dtype, "r"), 64),
        TensorMap(_array("target", taken, dtype, "rw"), 64),
        from_numpy("words", words.view(np.int32), "r"),
        from_numpy("bytes", shared.view(np.int32), "rw"),
        from_numpy("floats", floats, "rw"),
        from_numpy("sums", sums, "atomic"),
        np.int32(what),
        np.int32(count),
        *(np.int32(numbers.get(name, 0)) for name in names),
    ]
    if run is not None:
        run(kernel(dtype), SHARED_BYTES, args)
        return Outcome(shared.view(np.uint8), floats, sums, {})
    backend = HostBackend(seed=seed)
    backend.launch(kernel(dtype), (1, 1, 1), SHARED_BYTES, args)
    return Outcome(shared.view(np.uint8), floats, sums, backend.traffic["hopper_vocabulary"])


def _array(name: str, x: np.ndarray, dtype: str, access: str) -> Array:
    strides = tuple(s // 2 for s in x.strides)
    return Array(name, x.ctypes.data, x.shape, strides, dtype, access, x)


# ---- operands in shared memory -------------------------------------------------------------------


def swizzled(address: np.ndarray) -> np.ndarray:
    """128-byte swizzle: bits 4-6 of an address, exclusive-or bits 7-9."""
    return address ^ (address >> 7 & 7) << 4


def _image(places: np.ndarray, x: np.ndarray) -> np.ndarray:
    image = np.zeros(x.size, np.uint16)
    image[swizzled(places).reshape(-1) // 2] = x.view(np.uint16).reshape(-1)
    return image


def k_major_image(x: np.ndarray) -> np.ndarray:
    """(rows, depth): slabs of 64 of the depth; a row of a slab is 128 bytes."""
    rows, depth = np.indices(x.shape)
    return _image(depth // 64 * len(x) * ROW + rows * ROW + depth % 64 * 2, x)


def mn_major_image(x: np.ndarray) -> np.ndarray:
    """(rows, depth): slabs of 64 rows; each step of the depth is 128 bytes on."""
    rows, depth = np.indices(x.shape)
    return _image(rows // 64 * x.shape[1] * ROW + depth * ROW + rows % 64 * 2, x)


def product_of(a: np.ndarray, b: np.ndarray, a_mn: bool, b_mn: bool, step: int) -> tuple[np.ndarray, dict[str, int]]:
    """Shared memory with A and behind it B, and the descriptors at depth 16 step."""
    fields: dict[str, int] = {}
    images, at = [], 0
    for name, x, mn in (("a", a, a_mn), ("b", b, b_mn)):
        rows, depth = x.shape
        images.append(mn_major_image(x) if mn else k_major_image(x))
        fields[f"{name}_at"] = at + (step * 16 * ROW if mn else step // 4 * rows * ROW + step % 4 * 32)
        fields[f"{name}_leading"] = depth * ROW if mn else 16
        fields[f"{name}_stride"] = 8 * ROW
        at += images[-1].nbytes
    return np.concatenate(images), fields


def descriptor_fields(bits: int) -> tuple[int, int, int, int]:
    """Start, leading and stride offset in bytes, swizzle mode."""
    return (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, bits >> 62
