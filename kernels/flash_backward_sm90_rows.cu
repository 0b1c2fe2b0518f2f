// What runs before and after flash_backward_sm90.cu, row by row.
//
//   preprocess   delta_i = rowsum(O_i o dO_i), lse in base 2, dQ = 0, whose turn it is = 0
//   postprocess  dQ from accumulator order to rows, scaled, rounded
//
// Paper: FlashAttention-2 (Dao 2023), Algorithm 2, line 4 (delta is D there).
// DLSE: d lse_i / d s_ij = P_ij, so an incoming gradient of lse joins dS = P o (dP - delta) as
// delta - dlse. A row past the end and a row that sees no key get lse = +inf, which makes P zero.
//
// Reads and writes, in bytes, e = 2; padded: whole tiles of rows (analysis/sums/flash_sm90.py):
//   preprocess   out, dout read Nq D e; lse read Nq 4; DLSE: dlse read Nq 4; lse2, delta write padded
//                rows 4 each; dq_accum write padded rows D 4; DETERMINISTIC: turns write 4 a tile
//   postprocess  dq_accum read padded rows D 4; dq write Nq D e
//
// PACKED (packed_sm90.cuh): blocks have numbers of query tiles of all sequences; those without rows
// leave. out, dout, lse, dlse and dq have rows one apart along their items.
//   cu_seqlens_q  read  12  at most per step of a block's search, and 8; cu_seqlens_k  read  8
//
// Both kernels may be part of a chain in which each starts before the one before it has ended.

// ---- constants that shape the code (-D) ----------------------------------------------------------
// DTYPE, HEAD_DIM, BLOCK_M, DETERMINISTIC  as in flash_backward_sm90.cu
// DLSE       1: lse has a gradient of its own. Default 0.
// PACKED     1: the arguments cu_seqlens_q, cu_seqlens_k and sequences. Default 0.

#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#endif
#ifndef DLSE
#define DLSE 0
#endif

#include "backward_sm90.cuh"
#include "packed_sm90.cuh"
#include "tile.cuh"

// ---- before: delta = rowsum(O o dO), lse in base 2, dQ = 0 ---------------------------------------
constexpr int PRE_THREADS = 128;
constexpr int ROW_THREADS = HEAD_DIM / 8;  // threads of a row, 16 bytes each

extern "C" __global__ void __launch_bounds__(PRE_THREADS)
flash_backward_sm90_preprocess(Tensor4<const io_t> out, Tensor4<const io_t> dout,
                               Tensor3<const float> lse, Tensor1<float> lse2, Tensor1<float> delta,
                               Tensor1<float> dq_accum, int heads, int seqlen_q
#if DLSE
                               , Tensor3<const float> dlse
#endif
#if DETERMINISTIC
                               , Tensor1<int> turns
#endif
#if PACKED
                               , Tensor1<const int> cu_seqlens_q, Tensor1<const int> cu_seqlens_k,
                               int sequences
#endif
) {
    next_kernel_start();
    constexpr int ROWS = PRE_THREADS / ROW_THREADS;
#if PACKED
    constexpr int BLOCKS = BLOCK_M / ROWS;  // of a tile
    const int blocks = gridDim.x / heads, head = blockIdx.x / blocks, place = blockIdx.x % blocks;
    const SequenceTile mine = block_sequence_tile<BLOCK_M>(
        cu_seqlens_q.data, cu_seqlens_k.data, sequences, place / BLOCKS, shared_memory());
    if (mine.tile * BLOCK_M >= mine.own) return;
    const int b = mine.own0;
    const int row = mine.tile * BLOCK_M + place % BLOCKS * ROWS + threadIdx.x / ROW_THREADS;
    seqlen_q = mine.own;
#else
    const int blocks = ceil_div(seqlen_q, BLOCK_M) * BLOCK_M / ROWS;
    const int head = blockIdx.x / blocks % heads, b = blockIdx.x / blocks / heads;
    const int row = blockIdx.x % blocks * ROWS + threadIdx.x / ROW_THREADS;
#endif
    const int chunk = threadIdx.x % ROW_THREADS;
    const int64 at = static_cast<int64>(blockIdx.x) * ROWS + threadIdx.x / ROW_THREADS;

    float sum = 0.0f;
    if (row < seqlen_q) {
        const Vec16 o = ld_global(reinterpret_cast<const Vec16*>(out.row(b, head, row)) + chunk);
        const Vec16 g = ld_global(reinterpret_cast<const Vec16*>(dout.row(b, head, row)) + chunk);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float o_lo, o_hi, g_lo, g_hi;
            unpack2<io_t>(o[i], o_lo, o_hi);
            unpack2<io_t>(g[i], g_lo, g_hi);
            sum = fmaf(o_lo, g_lo, fmaf(o_hi, g_hi, sum));
        }
    }
#pragma unroll
    for (int step = ROW_THREADS / 2; step; step /= 2) sum += shfl_xor(sum, step);
    if (chunk == 0) {
        float base2 = -neg_infinity();
        if (row < seqlen_q) {
            const float natural = ld_global(lse.at(b, head, row));
#if DLSE
            const float gradient = ld_global(dlse.at(b, head, row));
#else
            const float gradient = 0.0f;
#endif
            // A row that sees no key has P = 0 and no gradient, whatever dlse says.
            if (natural != neg_infinity()) {
                base2 = natural * LOG2E;
                sum -= gradient;
            }
        }
        st_global(lse2.data + at, base2);
        st_global(delta.data + at, sum);
#if DETERMINISTIC
        if (row % BLOCK_M == 0) st_global(turns.data + at / BLOCK_M, 0);
#endif
    }
    Vec16* const zero = reinterpret_cast<Vec16*>(dq_accum.data) + (at * ROW_THREADS + chunk) * 2;
    st_global(zero, Vec16{});
    st_global(zero + 1, Vec16{});
}

// ---- after: dQ in rows, scaled, rounded ------------------------------------------------------------
constexpr int POST_THREADS = CONSUMERS * WARPGROUP;
constexpr int POST_STRIDE = HEAD_DIM + 8;  // elements; keeps the rows of a column in different banks

extern "C" __global__ void __launch_bounds__(POST_THREADS)
flash_backward_sm90_postprocess(Tensor1<const float> dq_accum, Tensor4<io_t> dq, int heads,
                                int seqlen_q, float scale
#if PACKED
                                , Tensor1<const int> cu_seqlens_q, Tensor1<const int> cu_seqlens_k,
                                int sequences
#endif
) {
    io_t* const staged = reinterpret_cast<io_t*>(shared_memory());
#if PACKED
    const int tiles = gridDim.x / heads, head = blockIdx.x / tiles;
    const SequenceTile mine = block_sequence_tile<BLOCK_M>(
        cu_seqlens_q.data, cu_seqlens_k.data, sequences, blockIdx.x % tiles,
        shared_memory() + BLOCK_M * POST_STRIDE * sizeof(io_t));
    const int tile = mine.tile, b = mine.own0;
    if (tile * BLOCK_M >= mine.own) return;
    seqlen_q = mine.own;
#else
    const int tiles = ceil_div(seqlen_q, BLOCK_M), tile = blockIdx.x % tiles;
    const int head = blockIdx.x / tiles % heads, b = blockIdx.x / tiles / heads;
#endif
    const int half = threadIdx.x / WARPGROUP, lane = threadIdx.x % 32;
    // Of the accumulator: in dQ, or in dQ^T.
    const int row = threadIdx.x / 32 % 4 * 16 + lane / 4 + (BLOCK_M != 64 ? 64 * half : 0);
    const int column = lane % 4 * 2 + (BLOCK_M == 64 ? 64 * half : 0);

    const Vec<float, 4>* const from =
        reinterpret_cast<const Vec<float, 4>*>(
            dq_accum.data + (static_cast<int64>(blockIdx.x) * CONSUMERS + half) * DQ_FLOATS) +
        threadIdx.x % WARPGROUP;
    previous_kernel_wait();
#pragma unroll
    for (int c = 0; c < DQ_REGISTERS / 4; ++c) {
        const Vec<float, 4> four = ld_global(from + c * WARPGROUP);
        if constexpr (DQ_TRANSPOSED) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                st_shared(staged + (column + 8 * c + e % 2) * POST_STRIDE + row + e / 2 * 8,
                          from_float<io_t>(four[e] * scale));
        } else {
#pragma unroll
            for (int e = 0; e < 4; e += 2)
                st_shared(reinterpret_cast<uint32*>(staged + (row + 4 * e) * POST_STRIDE + column +
                                                    8 * c),
                          pack2<io_t>(four[e] * scale, four[e + 1] * scale));
        }
    }
    block_sync();
    const int rows = min_int(BLOCK_M, seqlen_q - tile * BLOCK_M);
    for (int x = threadIdx.x; x < rows * HEAD_DIM / 8; x += POST_THREADS) {
        const int r = x / (HEAD_DIM / 8), chunk = x % (HEAD_DIM / 8);
        const io_t* const at = staged + r * POST_STRIDE + 8 * chunk;
        st_global(reinterpret_cast<Vec16*>(dq.row(b, head, tile * BLOCK_M + r)) + chunk,
                  ld_shared(reinterpret_cast<const Vec16*>(at)));
    }
}
