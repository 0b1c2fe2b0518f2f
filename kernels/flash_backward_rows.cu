// What the backward pass does row by row, before and after flash_backward.cu: memory-bound.
//
// flash_backward_preprocess: D = rowsum(dO o O), minus the gradient of lse where lse was returned
//   (FlashAttention-2 (Dao 2023), Algorithm 2, line 4; FlashAttention (2022), Appendix B.2, eq. 4).
//   d lse_i / d s_ij = P_ij, so an incoming gradient of lse joins dS = P o (dP - D) as D - dlse.
// flash_backward_postprocess: dQ = scale times the fp32 sum of the key tiles' contributions.
//
// Loop order: one thread block per (batch, head, BLOCK_M query rows).
//
// Reads and writes, in bytes, e = size of an element, real rows only (analysis/sums/flash.py):
//   preprocess   out, dout  read Nq D e each; delta write Nq 4; DLSE: dlse read Nq 4
//                dq_accum   write Nq D 4, zeros for the atomic additions; not if DETERMINISTIC
//   postprocess  dq_accum   read Nq D 4, or if DETERMINISTIC rows_i D 4 per visited (i, j), by j
//                dq         write Nq D e
//                BLOCK_SPARSE and DETERMINISTIC: block_mask read 1 per (i, j) that causal, window leave
//
// Limits: as flash_forward.cu.

// ---- constants that shape the code (-D) ---------------------------------------------------------
// DTYPE, HEAD_DIM      as in flash_forward.cu
// DETERMINISTIC        as in flash_backward.cu; also where no dQ is accumulated at all
// BLOCK_M              rows a block; if DETERMINISTIC those of flash_backward.cu, as is BLOCK_N
// CAUSAL, WINDOW, BLOCK_N   only matter if DETERMINISTIC
#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#endif
#ifndef DLSE
#define DLSE 0  // 1: lse has an incoming gradient
#endif
#ifndef BLOCK_SPARSE
#define BLOCK_SPARSE 0
#endif

#include "device.cuh"
#include "tile.cuh"
#include "tile_order.cuh"
#include "window.cuh"

constexpr int THREADS = NUM_WARPS * 32;
constexpr int VEC = 16 / int(sizeof(io_t));
constexpr int CHUNKS = HEAD_DIM / VEC;              // 16-byte pieces of a row
constexpr int LANES = CHUNKS < 32 ? CHUNKS : 32;    // threads of a row
using Chunk = Vec<io_t, VEC>;
using Float4 = Vec<float, 4>;

extern "C" __global__ void __launch_bounds__(THREADS)
flash_backward_preprocess(Tensor4<const io_t> out, Tensor4<const io_t> dout, Tensor3<float> delta,
                          int heads, int seqlen_q, int head_dim
#if DLSE
                          , Tensor3<const float> dlse
#endif
#if !DETERMINISTIC
                          , Tensor4<float> dq_accum
#endif
) {
    const int query_tiles = ceil_div(seqlen_q, BLOCK_M);
    const int row0 = blockIdx.x % query_tiles * BLOCK_M;
    const int head = blockIdx.x / query_tiles % heads;
    const int batch = blockIdx.x / query_tiles / heads;
    const int rows = min_int(BLOCK_M, seqlen_q - row0);
    const int lane = threadIdx.x % LANES;

    // Every thread takes part in every round: the shuffles need whole warps.
    for (int start = 0; start < rows; start += THREADS / LANES) {
        const int r = start + threadIdx.x / LANES;
        const bool real = r < rows;
        float sum = 0.0f;
#pragma unroll
        for (int c = lane; c < CHUNKS; c += LANES)
            if (real && c * VEC < head_dim) {
                const auto o = ld_global(
                    reinterpret_cast<const Chunk*>(out.row(batch, head, row0 + r) + c * VEC));
                const auto g = ld_global(
                    reinterpret_cast<const Chunk*>(dout.row(batch, head, row0 + r) + c * VEC));
#pragma unroll
                for (int x = 0; x < VEC; ++x) sum = fmaf(to_float(o[x]), to_float(g[x]), sum);
            }
#pragma unroll
        for (int mask = 1; mask < LANES; mask *= 2) sum += shfl_xor(sum, mask);
        if (real && lane == 0) {
#if DLSE
            sum -= ld_global(dlse.at(batch, head, row0 + r));
#endif
            st_global(delta.at(batch, head, row0 + r), sum);
        }
#if !DETERMINISTIC
        for (int c = lane; c * 4 < head_dim; c += LANES)
            if (real)
                st_global(reinterpret_cast<Float4*>(dq_accum.row(batch, head, row0 + r) + c * 4),
                          Float4{});
#endif
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
flash_backward_postprocess(Tensor4<const float> dq_accum, Tensor4<io_t> dq, int batches, int heads,
                           int seqlen_q, int seqlen_k, int head_dim, float scale
#if BLOCK_SPARSE && DETERMINISTIC
                           , Tensor4<const uint8> block_mask
#endif
#if WINDOW && DETERMINISTIC
                           , int window_left, int window_right, int sinks
#endif
) {
    const int query_tiles = ceil_div(seqlen_q, BLOCK_M);
    const int i = blockIdx.x % query_tiles, row0 = i * BLOCK_M;
    const int head = blockIdx.x / query_tiles % heads;
    const int batch = blockIdx.x / query_tiles / heads;
    const int rows = min_int(BLOCK_M, seqlen_q - row0);

    constexpr int MINE = (BLOCK_M * CHUNKS + THREADS - 1) / THREADS;  // pieces of a thread
    float sum[MINE][VEC];
#pragma unroll
    for (int m = 0; m < MINE; ++m)
#pragma unroll
        for (int x = 0; x < VEC; ++x) sum[m][x] = 0.0f;
    // Calls body(piece number, row, first column) for this thread's pieces of the tile.
    auto for_each_piece = [&](auto body) {
#pragma unroll
        for (int m = 0; m < MINE; ++m) {
            const int index = m * THREADS + threadIdx.x;
            const int r = index / CHUNKS, col = index % CHUNKS * VEC;
            if (r < rows && col < head_dim) body(m, r, col);
        }
    };
    auto add_slab = [&](int64 slab) {
        for_each_piece([&](int m, int r, int col) {
            const float* from = dq_accum.row(slab, head, row0 + r) + col;
#pragma unroll
            for (int x = 0; x < VEC; x += 4) {
                const auto part = ld_global(reinterpret_cast<const Float4*>(from + x));
#pragma unroll
                for (int y = 0; y < 4; ++y) sum[m][x + y] += part[y];
            }
        });
    };

#if DETERMINISTIC
#if WINDOW
    const Window window{window_left, window_right, sinks};
#else
    const Window window{};
#endif
    const KeyTiles tiles =
        key_tiles_of<BLOCK_M, BLOCK_N, CAUSAL>(i, seqlen_q, seqlen_k, window);
    const int end = tiles.count;
#if BLOCK_SPARSE
    const uint8* const block_row = block_mask.row(batch, head, row0 / SPARSE_M);
    auto address = [=](int t) { return block_row + tiles.at(t) * BLOCK_N / SPARSE_N; };
    SparseWalk<THREADS, decltype(address)> walk{
        end, reinterpret_cast<uint32*>(shared_memory()), address};
#else
    DenseWalk walk{end};
#endif
    for (int t = walk.next(0); t < end; t = walk.next(t + 1))
        add_slab(int64(tiles.at(t)) * batches + batch);
#else
    add_slab(batch);
#endif

    for_each_piece([&](int m, int r, int col) {
        Chunk chunk;
#pragma unroll
        for (int x = 0; x < VEC; ++x) chunk[x] = from_float<io_t>(sum[m][x] * scale);
        st_global(reinterpret_cast<Chunk*>(dq.row(batch, head, row0 + r) + col), chunk);
    });
}
