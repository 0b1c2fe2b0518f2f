// Matrix product, step 2 of 4: TILE x TILE tiles in shared memory, one thread a result.
//
// Each element that a block brings in serves TILE results, so global reads fall by TILE:
//   a  read  M K e ceil(N / TILE)          b  read  K N e ceil(M / TILE)          c  write  M N e
// Shared memory now pays what global memory paid: 2 reads a multiply-add (analysis/gemm.py, "tiled").
// Grid: ceil(M / TILE) ceil(N / TILE) blocks, row-major, TILE² threads. A, B, C dense, row-major;
// sums are fp32. Macros: DTYPE, TILE (8, 16 or 32).

#include "device.cuh"

extern "C" __global__ void __launch_bounds__(TILE * TILE)
gemm_tiled(Tensor1<io_t> a, Tensor1<io_t> b, Tensor1<io_t> c, int m, int n, int k) {
    io_t* a_tile = reinterpret_cast<io_t*>(shared_memory());
    io_t* b_tile = a_tile + TILE * TILE;
    const int across = ceil_div(n, TILE);
    const int r = threadIdx.x / TILE, q = threadIdx.x % TILE;
    const int64 row = int64(blockIdx.x / across) * TILE + r;
    const int64 col = int64(blockIdx.x % across) * TILE + q;
    const io_t zero = from_float<io_t>(0.0f);
    float sum = 0.0f;
    for (int k0 = 0; k0 < k; k0 += TILE) {
        const bool in_a = row < m && k0 + q < k, in_b = k0 + r < k && col < n;
        st_shared(a_tile + threadIdx.x, in_a ? ld_global(a.data + row * k + k0 + q) : zero);
        st_shared(b_tile + threadIdx.x, in_b ? ld_global(b.data + int64(k0 + r) * n + col) : zero);
        block_sync();
#pragma unroll
        for (int x = 0; x < TILE; ++x)
            sum = fmaf(to_float(ld_shared(a_tile + r * TILE + x)),
                       to_float(ld_shared(b_tile + x * TILE + q)), sum);
        block_sync();
    }
    if (row < m && col < n) st_global(c.data + row * n + col, from_float<io_t>(sum));
}
