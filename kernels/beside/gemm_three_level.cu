// Matrix product, step 3 of 4: three levels of tiles.
//
//   block   BLOCK_M x BLOCK_N results, BLOCK_K deep tiles of A and B in shared memory
//   warp    WARP_M x WARP_N of them
//   thread  THREAD_M x THREAD_N of those, in registers, as one contiguous piece
//
// The block tile sets the global reads, the thread tile the shared ones (analysis/gemm.py,
// "three-level"; e = size of an element):
//   a  read  M K e ceil(N / BLOCK_N)       b  read  K N e ceil(M / BLOCK_M)       c  write  M N e
//   shared   (THREAD_M + THREAD_N) e read for THREAD_M THREAD_N multiply-adds
// A's tile is kept transposed, so that a thread's rows are neighbours and are read 16 bytes at once.
// Grid: ceil(M / BLOCK_M) ceil(N / BLOCK_N) blocks, row-major. A, B, C dense, row-major; sums fp32.
// Macros: DTYPE, BLOCK_M, BLOCK_N, BLOCK_K, WARP_M, WARP_N, THREAD_M, THREAD_N.

#include "device.cuh"

constexpr int LANES_N = WARP_N / THREAD_N;
constexpr int WARPS_N = BLOCK_N / WARP_N;
constexpr int THREADS = BLOCK_M / WARP_M * WARPS_N * 32;
static_assert(WARP_M / THREAD_M * LANES_N == 32, "a warp tile is 32 thread tiles");
static_assert(BLOCK_M % WARP_M == 0 && BLOCK_N % WARP_N == 0, "a block tile is whole warp tiles");

// COUNT neighbouring values from shared memory, at most 16 bytes an access.
template <int COUNT>
__device__ __forceinline__ void load_piece(float (&out)[COUNT], const io_t* from) {
    constexpr int LIMIT = 16 / int(sizeof(io_t));
    constexpr int WIDTH = COUNT % LIMIT == 0 ? LIMIT : COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < COUNT; i += WIDTH) {
        const auto piece = ld_shared(reinterpret_cast<const Vec<io_t, WIDTH>*>(from + i));
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) out[i + j] = to_float(piece.v[j]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
gemm_three_level(Tensor1<io_t> a, Tensor1<io_t> b, Tensor1<io_t> c, int m, int n, int k) {
    io_t* a_tile = reinterpret_cast<io_t*>(shared_memory());  // [BLOCK_K][BLOCK_M]
    io_t* b_tile = a_tile + BLOCK_K * BLOCK_M;                // [BLOCK_K][BLOCK_N]
    const int across = ceil_div(n, BLOCK_N);
    const int64 row0 = int64(blockIdx.x / across) * BLOCK_M;
    const int64 col0 = int64(blockIdx.x % across) * BLOCK_N;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int my_row = warp / WARPS_N * WARP_M + lane / LANES_N * THREAD_M;
    const int my_col = warp % WARPS_N * WARP_N + lane % LANES_N * THREAD_N;
    const io_t zero = from_float<io_t>(0.0f);

    float sum[THREAD_M][THREAD_N];
#pragma unroll
    for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) sum[i][j] = 0.0f;

    for (int k0 = 0; k0 < k; k0 += BLOCK_K) {
        for (int at = threadIdx.x; at < BLOCK_M * BLOCK_K; at += THREADS) {
            const int r = at / BLOCK_K, x = at % BLOCK_K;
            const bool real = row0 + r < m && k0 + x < k;
            st_shared(a_tile + x * BLOCK_M + r,
                      real ? ld_global(a.data + (row0 + r) * k + k0 + x) : zero);
        }
        for (int at = threadIdx.x; at < BLOCK_K * BLOCK_N; at += THREADS) {
            const int x = at / BLOCK_N, q = at % BLOCK_N;
            const bool real = k0 + x < k && col0 + q < n;
            st_shared(b_tile + at, real ? ld_global(b.data + int64(k0 + x) * n + col0 + q) : zero);
        }
        block_sync();
#pragma unroll
        for (int x = 0; x < BLOCK_K; ++x) {
            float left[THREAD_M], right[THREAD_N];
            load_piece(left, a_tile + x * BLOCK_M + my_row);
            load_piece(right, b_tile + x * BLOCK_N + my_col);
#pragma unroll
            for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
                for (int j = 0; j < THREAD_N; ++j) sum[i][j] = fmaf(left[i], right[j], sum[i][j]);
        }
        block_sync();
    }
#pragma unroll
    for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) {
            const int64 row = row0 + my_row + i, col = col0 + my_col + j;
            if (row < m && col < n) st_global(c.data + row * n + col, from_float<io_t>(sum[i][j]));
        }
}
