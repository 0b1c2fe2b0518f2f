"""Count your own kernel: an ordinary softmax over rows. Comments say what stood in three lines."""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from kernels.host import HostBackend
from kernels.launch import Kernel, from_numpy

SOURCE = r"""
#include "counted.cuh"

extern "C" __global__ void softmax_rows(Global<const float> x,  // const float* x
                                        Global<float> y,        // float* y
                                        int columns) {
    Shared<float> partial = dynamic_shared<float>();  // __shared__ float partial[4];
    x += blockIdx.x * columns;
    y += blockIdx.x * columns;
    float top = -INFINITY, sum = 0;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) top = fmaxf(top, x[c]);
    for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = top;
    __syncthreads();
    for (int w = 0; w < blockDim.x / 32; ++w) top = fmaxf(top, partial[w]);
    __syncthreads();
    for (int c = threadIdx.x; c < columns; c += blockDim.x) sum += expf(x[c] - top);
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < blockDim.x / 32; ++w) sum += partial[w];
    for (int c = threadIdx.x; c < columns; c += blockDim.x) y[c] = expf(x[c] - top) / sum;
}
"""


def counted(rows: int, columns: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Bytes that the kernel moves in global memory; its input; its result."""
    x = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    y, backend = np.empty_like(x), HostBackend()
    args = [from_numpy("x", x, "r"), from_numpy("y", y, "w"), np.int32(columns)]
    backend.launch(Kernel(SOURCE, "softmax_rows", (), 128), (rows, 1, 1), 4 * 4, args)
    return sum(backend.traffic["softmax_rows"].values()), x, y


def predicted(rows: int, columns: int) -> int:
    """Three passes read x (maximum, sum, result), one writes y; 4 bytes an element."""
    return (3 + 1) * 4 * rows * columns


if __name__ == "__main__":
    sizes = [100, 200, 400, 800]
    found = [counted(3, n)[0] for n in sizes]
    print("counted", found, "predicted", [predicted(3, n) for n in sizes])
    plt.rcdefaults(), plt.plot(sizes, [predicted(3, n) for n in sizes], "-", label="predicted")
    plt.plot(sizes, found, "o", label="counted on the host")
    plt.xlabel("columns"), plt.ylabel("bytes"), plt.legend()
    plt.savefig(Path(sys.argv[1] if len(sys.argv) > 1 else ".") / "own_kernel.png")
