// Matrix product, step 1 of 4: C (M, N) = A (M, K) B (K, N), one thread a result, no tile.
//
// Reads and writes, in bytes, e = size of an element (analysis/gemm.py, "naive"):
//   a  read  M N K e     every multiply-add reads both operands from global memory
//   b  read  M N K e
//   c  write M N e
// Grid: ceil(M N / THREADS) blocks, results in row-major order. A, B, C are dense and row-major;
// sums are fp32. Macros: DTYPE, THREADS.

#include "device.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
gemm_naive(Tensor1<io_t> a, Tensor1<io_t> b, Tensor1<io_t> c, int m, int n, int k) {
    const int64 at = int64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= int64(m) * n) return;
    const int64 row = at / n, col = at % n;
    float sum = 0.0f;
    for (int64 x = 0; x < k; ++x)
        sum = fmaf(to_float(ld_global(a.data + row * k + x)), to_float(ld_global(b.data + x * n + col)),
                   sum);
    st_global(c.data + at, from_float<io_t>(sum));
}
