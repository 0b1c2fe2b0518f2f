"""Launch the probes of ``probes.cu``: each driver says what moved or was computed.

Every driver returns the work of its launch (bytes, FLOPs, exponentials or steps); the caller times
it. On the host backend the same launches are counted, which is how the numbers are tested.
"""

from __future__ import annotations

import numpy as np

from analysis.arguments import checked
from kernels.launch import DTYPE_CODE, Array, Backend, Count, IoType, Kernel, Size

THREADS = 256
STEPS = 8
VECTOR_BYTES = 16
MMA_FLOPS = 2 * 16 * 8 * 16


@checked
def probe(entry: str, *, dtype: IoType = "fp16", threads: Count = THREADS, steps: Count = STEPS) -> Kernel:
    """The kernel of one probe. ``steps`` is its independent operations a thread and round."""
    macros = (("DTYPE", DTYPE_CODE[dtype]), ("STEPS", steps), ("THREADS", threads))
    return Kernel("beside/probes.cu", entry, macros, threads)


def all_probes() -> list[Kernel]:
    """Every probe, for the compile test."""
    entries = ("read", "copy", "tile_read", "shared", "mma", "exp2", "chase")
    return [probe(f"probe_{entry}") for entry in entries]


@checked
def vectors(array: Array) -> np.int64:
    """16-byte vectors of a flat array; ValueError when a block would not be filled evenly."""
    total = array.size * array.itemsize
    if total % (VECTOR_BYTES * THREADS * STEPS):
        raise ValueError(f"{array.name}: {total} bytes is not a multiple of {VECTOR_BYTES * THREADS * STEPS}")
    return np.int64(total // VECTOR_BYTES)


@checked
def read(backend: Backend, source: Array, blocks: Count) -> int:
    """Stream ``source`` once. Returns the bytes read."""
    out = backend.empty("out", (blocks * THREADS,), "fp32").with_access("w")
    n = vectors(source)
    backend.launch(probe("probe_read"), (blocks, 1, 1), 0, [source, out, n])
    return int(n) * VECTOR_BYTES


@checked
def copy(backend: Backend, source: Array, target: Array, blocks: Count) -> int:
    """Copy ``source`` to ``target``. Returns the bytes read plus the bytes written."""
    n = vectors(source)
    if vectors(target) != n:
        sizes = [array.size * array.itemsize for array in (source, target)]
        raise ValueError(f"source has {sizes[0]} bytes, target {sizes[1]}")
    backend.launch(probe("probe_copy"), (blocks, 1, 1), 0, [source, target, n])
    return 2 * int(n) * VECTOR_BYTES


@checked
def tile_read(backend: Backend, source: Array, blocks: Count) -> int:
    """Every block reads all of ``source``. Returns the bytes that cross the SM boundary."""
    out = backend.empty("out", (blocks * THREADS,), "fp32").with_access("w")
    n = vectors(source)
    shared_bytes = 2 * THREADS * STEPS * VECTOR_BYTES
    backend.launch(probe("probe_tile_read"), (blocks, 1, 1), shared_bytes, [source, out, n])
    return blocks * int(n) * VECTOR_BYTES


@checked
def shared(backend: Backend, blocks: Count, rounds: Size) -> int:
    """Load from shared memory. Returns the bytes loaded."""
    out = backend.empty("out", (blocks * THREADS,), "fp32").with_access("w")
    shared_bytes = THREADS * STEPS * VECTOR_BYTES
    kernel = probe("probe_shared")
    backend.launch(kernel, (blocks, 1, 1), shared_bytes, [out, np.int32(rounds)])
    return blocks * THREADS * STEPS * VECTOR_BYTES * rounds


@checked
def mma(backend: Backend, blocks: Count, rounds: Size, dtype: IoType = "fp16") -> int:
    """Multiply in registers. Returns the FLOPs."""
    out = backend.empty("out", (blocks * THREADS,), "fp32").with_access("w")
    kernel = probe("probe_mma", dtype=dtype)
    backend.launch(kernel, (blocks, 1, 1), 0, [out, np.int32(rounds)])
    return blocks * (THREADS // 32) * STEPS * MMA_FLOPS * rounds


@checked
def exp2(backend: Backend, blocks: Count, rounds: Size) -> int:
    """Take powers of two. Returns how many."""
    out = backend.empty("out", (blocks * THREADS,), "fp32").with_access("w")
    backend.launch(probe("probe_exp2"), (blocks, 1, 1), 0, [out, np.int32(rounds)])
    return blocks * THREADS * STEPS * rounds


@checked
def chase(backend: Backend, links: Array, steps: Size) -> int:
    """Follow ``links`` (uint32 indices as int32) from element 0. Returns the steps taken."""
    out = backend.empty("out", (1,), "int32").with_access("w")
    kernel = probe("probe_chase", threads=32)
    backend.launch(kernel, (1, 1, 1), 0, [links, out, np.int32(steps)])
    return steps


@checked
def chain(elements: Count, stride: Count) -> np.ndarray:
    """A cycle through ``elements`` / ``stride`` places, ``stride`` elements apart, in random order.

    Returns (elements,) int32: entry i names the place after i, so a chase never meets a pattern
    that a prefetcher could guess. The order is the same in every run.
    """
    if elements % stride:
        raise ValueError(f"elements={elements} is not a multiple of stride={stride}")
    places = np.random.default_rng(0).permutation(elements // stride) * stride
    places = np.roll(places, -int(np.flatnonzero(places == 0)[0]))
    links = np.zeros(elements, dtype=np.int32)
    links[places] = np.roll(places, -1)
    return links
