// Matrix product, step 4 of 4: block and warp tiles, the innermost level on tensor cores.
//
// Warps multiply with mma.sync m16n8k16 on fragments that ldmatrix brings from swizzled tiles;
// cp.async fills the next tiles meanwhile. Bytes (analysis/gemm.py, "tensor-core"; e = 2):
//   a  read  M K e ceil(N / BLOCK_N)       b  read  K N e ceil(M / BLOCK_M)       c  write  M N e
//   shared   (WARP_M + WARP_N) e read for WARP_M WARP_N multiply-adds of a warp, and the result
//            once in and once out
// Grid: ceil(M / BLOCK_M) ceil(N / BLOCK_N) blocks, row-major. A, B, C dense, row-major, K and N
// multiples of 8; sums are fp32. Macros: DTYPE (0 or 1), BLOCK_M, BLOCK_N, BLOCK_K, WARP_M, WARP_N.

#include "fragments.cuh"

constexpr int WARPS_N = BLOCK_N / WARP_N;
constexpr int THREADS = BLOCK_M / WARP_M * WARPS_N * 32;
static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "warp tiles are made of 16 x 16 blocks");
static_assert(BLOCK_M % WARP_M == 0 && BLOCK_N % WARP_N == 0, "a block tile is whole warp tiles");

using ATile = Tile<io_t, BLOCK_M, BLOCK_K>;
using BTile = Tile<io_t, BLOCK_K, BLOCK_N>;
using CTile = Tile<io_t, BLOCK_M, BLOCK_N>;
constexpr int STAGE_BYTES = ATile::BYTES + BTile::BYTES;

extern "C" __global__ void __launch_bounds__(THREADS)
gemm_tensor_core(Tensor1<io_t> a, Tensor1<io_t> b, Tensor1<io_t> c, int m, int n, int k) {
    unsigned char* shared = shared_memory();
    const int across = ceil_div(n, BLOCK_N);
    const int row0 = blockIdx.x / across * BLOCK_M, col0 = blockIdx.x % across * BLOCK_N;
    const int steps = ceil_div(k, BLOCK_K);

    auto start_loading = [&](int step) {
        unsigned char* stage = shared + step % 2 * STAGE_BYTES;
        const int k0 = step * BLOCK_K;
        load_tile_async<THREADS>(tile_at<ATile>(stage), a.data + int64(row0) * k + k0, k, m - row0,
                                 k - k0);
        load_tile_async<THREADS>(tile_at<BTile>(stage + ATile::BYTES),
                                 b.data + int64(k0) * n + col0, n, k - k0, n - col0);
        cp_async_commit();
    };

    float sum[WARP_M / 16][WARP_N / 8][4];
    clear(sum);
    const int my_row = warp_id() / WARPS_N * WARP_M, my_col = warp_id() % WARPS_N * WARP_N;
    start_loading(0);
    for (int step = 0; step < steps; ++step) {
        if (step + 1 < steps) {
            start_loading(step + 1);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        block_sync();
        unsigned char* stage = shared + step % 2 * STAGE_BYTES;
        gemm<BLOCK_K>(sum, Rows{tile_at<ATile>(stage).from_row(my_row)},
                      NMajor{tile_at<BTile>(stage + ATile::BYTES), my_col});
        block_sync();  // this stage is filled again two steps from now
    }
    const auto result = tile_at<CTile>(shared);
    store_accumulator(result.from_row(my_row), my_col, sum);
    block_sync();
    store_tile<THREADS>(result, c.data + int64(row0) * n + col0, n, m - row0, n - col0);
}
