// FlashAttention backward, split form: dQ alone, queries outside, no atomics and no workspace.
//
// Paper: FlashAttention-2 (Dao 2023), Algorithm 2, with its two loops exchanged for dQ; identities of
// FlashAttention (2022), Appendix B.2. With L = lse and D = rowsum(dO o O):
//   P = exp(scale Q K^T - L)     dP = dO V^T     dS = P o (dP - D)     dQ = scale dS K
// dK and dV come from flash_backward.cu without its dQ (QUERY_GRADIENT 0). Both passes recompute
// P and dP: seven products instead of five, and in exchange dQ is summed in registers, in a fixed
// order, and leaves once in the io type. It is also all that is needed when only Q has a gradient.
//
// Loop order: one thread block per (batch, head, query tile i); inside it the key tiles j in
// increasing order, or in a SAWTOOTH, as in flash_forward.cu. A warp owns whole rows.
//
// Reads and writes, in bytes, e = size of an element, rows without padding (analysis/sums/flash.py):
//   q, dout     read   rows_i D e  each, once per query tile that visits a key tile
//   lse, delta  read   rows_i 4    each, once per query tile that visits a key tile
//   k, v        read   rows_j D e  each, per visited (i, j)
//   dq          write  Nq D e      per head
//   KEY_MASK      key_mask   read  rows_j  per visited (i, j)
//   BLOCK_SPARSE  block_mask read  1       per (i, j) that causal mask and window leave
//   ALIBI         alibi_slopes  read  4    once per query tile that visits a key tile
//   BIAS          bias       read  e       per pair that the causal mask leaves in a visited (i, j)
//   PACKED        cu_seqlens_q read 8      per block, those without rows included
//                 cu_seqlens_k read 8      per block with rows
//
// Limits: as flash_forward.cu.

// ---- constants that shape the code (-D) ----------------------------------------------------------
// DTYPE, HEAD_DIM, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, NUM_WARPS, STAGES   as in flash_forward.cu
// SOFTCAP, ALIBI, BIAS   scores.cuh
// PACKED                 packed.cuh
#ifndef KEY_MASK
#define KEY_MASK 0
#endif
#ifndef DROPOUT
#define DROPOUT 0
#endif
#ifndef BLOCK_SPARSE
#define BLOCK_SPARSE 0
#endif
#ifndef SAWTOOTH
#define SAWTOOTH 0
#endif

#include "device.cuh"
#include "fragments.cuh"
#include "packed.cuh"
#include "philox.cuh"
#include "scores.cuh"
#include "tile.cuh"
#include "tile_order.cuh"
#include "window.cuh"

constexpr int THREADS = NUM_WARPS * 32;
constexpr int WARP_ROWS = BLOCK_M / NUM_WARPS;
constexpr int GROUPS = WARP_ROWS / 16;    // 16-row groups of a warp
constexpr int S_TILES = BLOCK_N / 8;      // 8-column tiles of the scores
constexpr int D_TILES = HEAD_DIM / 8;     // 8-column tiles of dQ
static_assert(GROUPS * 16 * NUM_WARPS == BLOCK_M, "each warp owns whole 16-row groups");
static_assert(STAGES == 1 || STAGES == 2, "stages");

using QTile = Tile<io_t, BLOCK_M, HEAD_DIM>;   // Q and dO; stages dQ at the end
using KTile = Tile<io_t, BLOCK_N, HEAD_DIM>;   // K and V
using STile = Tile<io_t, BLOCK_M, BLOCK_N>;    // fp32 only: dS on its way to dS K

// Dynamic shared memory, in this order.
constexpr int DO_AT = QTile::BYTES;
constexpr int K_AT = DO_AT + QTile::BYTES;
constexpr int V_AT = K_AT + STAGES * KTile::BYTES;
constexpr int S_AT = V_AT + STAGES * KTile::BYTES;
constexpr int KEEP_AT = S_AT + (DTYPE == 2 ? STile::BYTES : 0);
constexpr int SLOPE_AT = KEEP_AT + (KEY_MASK ? 2 * BLOCK_N * 4 : 0);
constexpr int PACKED_AT = SLOPE_AT + (ALIBI ? 16 : 0);
constexpr int FLAGS_AT = PACKED_AT + PACKED_BYTES;

using Scores = float[GROUPS][S_TILES][4];

// A row statistic of the rows a thread shares in: row g (half 0) and g + 8 (half 1) of each group.
struct RowValues {
    float at[GROUPS][2];
};
__device__ __forceinline__ RowValues row_values(const float* rows_of_warp, int rows, float missing) {
    RowValues values;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = 16 * g + 8 * half + lane_id() / 4;
            values.at[g][half] = missing;
            if (r < rows) values.at[g][half] = ld_global(rows_of_warp + r);
        }
    return values;
}

// S -> P, zero where a pair takes no part. Coordinates are those of the warp's first row and of the
// tile's first key; `keep` holds a word per key of the tile (KEY_MASK only).
__device__ __forceinline__ void recompute_probabilities(Scores& s, const RowValues& lse, float scale,
                                                        bool masked, int row0, int key0,
                                                        int seqlen_q, int seqlen_k,
                                                        const Window& window,
                                                        const uint32* keep) {
    const int row = row0 + lane_id() / 4, key = lane_id() % 4 * 2;
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
        bool kept[2] = {true, true};
        if constexpr (KEY_MASK) {
            const auto pair = ld_shared(reinterpret_cast<const Vec8*>(keep + 8 * n + key));
            kept[0] = pair[0] != 0;
            kept[1] = pair[1] != 0;
        }
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                // fp32 rounds the product as the forward pass did, so that a lone key cancels.
                const float l = lse.at[g][e / 2];
                const float exponent = CHANGED      ? s[g][n][e] - l
                                       : DTYPE == 2 ? mul_rn(s[g][n][e], scale) - l
                                                    : fmaf(s[g][n][e], scale, -l);
                s[g][n][e] = exp2_approx(exponent * LOG2E);
                if (masked) {
                    int visible = seqlen_k;  // keys, from the first, that this row may see
                    if constexpr (CAUSAL)
                        visible = min_int(visible,
                                          row + 16 * g + e / 2 * 8 + 1 + seqlen_k - seqlen_q);
                    const int diagonal = row + 16 * g + e / 2 * 8 + seqlen_k - seqlen_q;
                    if (key0 + key + 8 * n + e % 2 >= visible || !kept[e % 2] ||
                        window.hides(diagonal, key0 + key + 8 * n + e % 2))
                        s[g][n][e] = 0.0f;
                }
            }
    }
}

#if DROPOUT
// dP -> dP o Z, with the words the forward pass drew.
__device__ __forceinline__ void drop_gradients(Scores& dp, int row0, int key0,
                                               const Dropout& dropout) {
    const int row = row0 + lane_id() / 4, key = key0 + lane_id() % 4 * 2;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int n = 0; n < S_TILES; n += 2)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const PhiloxWords words = dropout.words(row + 16 * g, key + 8 * n + c);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& value = dp[g][n + i % 2][i / 2 * 2 + c];
                    value = words.w[i] < dropout.threshold ? 0.0f : value * dropout.keep_scale;
                }
            }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash_backward_dq(Tensor4<const io_t> q, Tensor4<const io_t> k, Tensor4<const io_t> v,
                  Tensor4<const io_t> dout, Tensor3<const float> lse, Tensor3<const float> delta,
                  Tensor4<io_t> dq, int heads, int group, int seqlen_q, int seqlen_k, int head_dim,
                  float scale
#if SOFTCAP
                  , float softcap, float rate  // the cap, and scale / softcap
#endif
#if ALIBI
                  , Tensor3<const float> alibi_slopes  // (B, H, 1)
#endif
#if BIAS
                  , Tensor4<const io_t> bias
#endif
#if KEY_MASK
                  , Tensor1<const uint8> key_mask  // (B, seqlen_k), dense
#endif
#if DROPOUT
                  , uint64 seed, uint32 drop_threshold, float keep_scale
#endif
#if BLOCK_SPARSE
                  , Tensor4<const uint8> block_mask
#endif
#if SAWTOOTH
                  , int wave  // blocks that run at a time
#endif
#if WINDOW
                  , int window_left, int window_right, int sinks
#endif
#if PACKED
                  , Tensor1<const int> cu_seqlens_q  // (sequences + 1)
                  , Tensor1<const int> cu_seqlens_k
#endif
) {
    // ---- which tile -------------------------------------------------------------------------------
    const int query_tiles = ceil_div(seqlen_q, BLOCK_M);
    const int place = blockIdx.x % query_tiles;
    const int i = CAUSAL ? query_tiles - 1 - place : place;
    const int head = blockIdx.x / query_tiles % heads;
    const int batch = blockIdx.x / query_tiles / heads;
    const int row0 = i * BLOCK_M;
    unsigned char* shared = shared_memory();
#if PACKED
    const Sequence sequence = sequence_of(cu_seqlens_q.data, cu_seqlens_k.data, batch, row0,
                                          reinterpret_cast<uint32*>(shared + PACKED_AT));
    if (row0 >= sequence.own) return;
    seqlen_q = sequence.own;
    seqlen_k = sequence.other;
    const int row = sequence.own0 + row0, first_key = sequence.other0;
#else
    const int row = row0;
    constexpr int first_key = 0;
#endif
    const int rows = min_int(BLOCK_M, seqlen_q - row0);
    const int warp_row = warp_id() * WARP_ROWS;
#if WINDOW
    const Window window{window_left, window_right, sinks};
#else
    const Window window{};
#endif
    const KeyTiles tiles =
        key_tiles_of<BLOCK_M, BLOCK_N, CAUSAL>(i, seqlen_q, seqlen_k, window);
    const int end = tiles.count;

    // Candidate t of the walk is this key tile.
#if SAWTOOTH
    const bool down = blockIdx.x / wave % 2;
    auto tile_of = [=](int t) { return tiles.at(down ? end - 1 - t : t); };
#else
    auto tile_of = [=](int t) { return tiles.at(t); };
#endif

    const QTile q_tile = tile_at<QTile>(shared), do_tile = tile_at<QTile>(shared + DO_AT);
    io_t* const dq_rows = dq.row(batch, head, row);

#if BLOCK_SPARSE
    const uint8* const block_row = block_mask.row(batch, head, row0 / SPARSE_M);
    auto address = [=](int t) { return block_row + tile_of(t) * BLOCK_N / SPARSE_N; };
    SparseWalk<THREADS, decltype(address)> walk{
        end, reinterpret_cast<uint32*>(shared + FLAGS_AT), address};
#else
    DenseWalk walk{end};
#endif

    int j = walk.next(0);
    if (j >= end) {  // these rows see nothing
        store_zeros<THREADS>(q_tile, dq_rows, dq.stride_n, rows, head_dim);
        return;
    }

    // ---- loads --------------------------------------------------------------------------------------
    const int kv_head = head / group;
    const io_t* const k_rows = k.row(batch, kv_head, first_key);
    const io_t* const v_rows = v.row(batch, kv_head, first_key);
    auto k_tile = [&](int stage) { return tile_at<KTile>(shared + K_AT + stage * KTile::BYTES); };
    auto v_tile = [&](int stage) { return tile_at<KTile>(shared + V_AT + stage * KTile::BYTES); };
    auto keep_at = [&](int slot) {
        return reinterpret_cast<uint32*>(shared + KEEP_AT) + slot * BLOCK_N;
    };
    auto load_kv = [&](int tile, int stage) {
        const int64 key0 = int64(tile) * BLOCK_N;
        const int keys = min_int(BLOCK_N, seqlen_k - tile * BLOCK_N);
        load_tile_async<THREADS>(k_tile(stage), k_rows + key0 * k.stride_n, k.stride_n, keys,
                                 head_dim);
        load_tile_async<THREADS>(v_tile(stage), v_rows + key0 * v.stride_n, v.stride_n, keys,
                                 head_dim);
        cp_async_commit();
    };
#if KEY_MASK
    // The bytes of the next tile wait in registers while this tile is worked on.
    constexpr int KEEPS = (BLOCK_N + THREADS - 1) / THREADS;
    uint32 next_keep[KEEPS];
    auto load_keep = [&](int tile) {
#pragma unroll
        for (int x = 0; x < KEEPS; ++x) {
            const int key = x * THREADS + threadIdx.x;
            const int64 at = int64(tile) * BLOCK_N + key;
            next_keep[x] = 0;
            if (key < BLOCK_N && at < seqlen_k)
                next_keep[x] = ld_global(key_mask.data + int64(batch) * seqlen_k + at);
        }
    };
    auto publish_keep = [&](int slot) {
#pragma unroll
        for (int x = 0; x < KEEPS; ++x) {
            const int key = x * THREADS + threadIdx.x;
            if (key < BLOCK_N) st_shared(keep_at(slot) + key, next_keep[x]);
        }
    };
    load_keep(tile_of(j));
    publish_keep(0);
#endif
#if ALIBI
    if (threadIdx.x == 0)
        st_shared(reinterpret_cast<float*>(shared + SLOPE_AT),
                  ld_global(alibi_slopes.at(batch, head, 0)));
#endif
#if SOFTCAP
    const ScoreChange change{scale, seqlen_k - seqlen_q, softcap, rate};
#else
    const ScoreChange change{scale, seqlen_k - seqlen_q};
#endif
    load_tile_async<THREADS>(q_tile, q.row(batch, head, row), q.stride_n, rows, head_dim);
    load_tile_async<THREADS>(do_tile, dout.row(batch, head, row), dout.stride_n, rows, head_dim);
    load_kv(tile_of(j), 0);
    // Rows that see nothing, and rows that do not exist, get exp(s - inf) = 0. The four threads of a
    // row fetch one address, which the hardware serves once: the lanes share it by shuffle instead,
    // so that what is counted is what is moved.
    RowValues lse_rows, delta_rows;
    {
        const int left = rows - warp_row;
        const bool leader = lane_id() % 4 == 0;
        lse_rows = row_values(lse.at(batch, head, row + warp_row), leader ? left : 0,
                              neg_infinity());
        delta_rows = row_values(delta.at(batch, head, row + warp_row), leader ? left : 0, 0.0f);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float l = shfl(lse_rows.at[g][half], lane_id() & ~3);
                lse_rows.at[g][half] = l == neg_infinity() ? -l : l;
                delta_rows.at[g][half] = shfl(delta_rows.at[g][half], lane_id() & ~3);
            }
    }

    // ---- the loop over key tiles --------------------------------------------------------------------
    float acc[GROUPS][D_TILES][4];
    clear(acc);
#if DROPOUT
    const Dropout dropout{seed, drop_threshold, keep_scale, uint32(batch), uint32(head)};
#endif
    int stage = 0, slot = 0;
    for (int next; j < end; j = next, stage ^= STAGES - 1, slot ^= 1) {
        next = walk.next(j + 1);
        cp_async_wait<0>();
        block_sync();  // this tile is here, and every warp is done with the one before
        if (STAGES == 2 && next < end) load_kv(tile_of(next), stage ^ 1);
        const uint32* keep = keep_at(slot);
#if KEY_MASK
        if (next < end) load_keep(tile_of(next));
        clear_rows<THREADS>(k_tile(stage), keep);
        clear_rows<THREADS>(v_tile(stage), keep);
        block_sync();
#endif
        const int key0 = tile_of(j) * BLOCK_N, warp_row0 = row0 + warp_row;
        const int offset = seqlen_k - seqlen_q;
        // The whole tile may lie beside what this warp's rows see.
        if ((!CAUSAL || key0 <= warp_row0 + WARP_ROWS - 1 + offset) &&
            !window.hides_all(warp_row0 + offset, WARP_ROWS, key0, BLOCK_N)) {
            const bool ragged = key0 + BLOCK_N > seqlen_k;
            const bool cut = (CAUSAL && key0 + BLOCK_N - 1 > warp_row0 + offset) ||
                             window.hides_any(warp_row0 + offset, WARP_ROWS, key0, BLOCK_N);
#if BIAS
            io_t bias_values[GROUPS][S_TILES][4];
            load_bias<false>(bias_values,
                             Pairs<const io_t>{bias.row(batch, head, 0), bias.stride_n, seqlen_q,
                                               seqlen_k, window},
                             warp_row0, key0);
#endif
            Scores p;
            clear(p);
            gemm<HEAD_DIM>(p, Rows{q_tile.from_row(warp_row)}, KMajor{k_tile(stage)});
            Scores passed;
            if constexpr (CHANGED)
                change_scores<false>(p, passed, change, slope_of(shared + SLOPE_AT), warp_row0,
                                     key0);
#if BIAS
            add_bias(p, bias_values);
#endif
            recompute_probabilities(p, lse_rows, scale, KEY_MASK || ragged || cut, warp_row0, key0,
                                    seqlen_q, seqlen_k, window, keep);
            Scores ds;
            clear(ds);
            gemm<HEAD_DIM>(ds, Rows{do_tile.from_row(warp_row)}, KMajor{v_tile(stage)});
#if DROPOUT
            drop_gradients(ds, warp_row0, key0, dropout);
#endif
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int n = 0; n < S_TILES; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        ds[g][n][e] = p[g][n][e] * (ds[g][n][e] - delta_rows.at[g][e / 2]);
            pass_back(ds, passed);
#if DTYPE != 2
            uint32 operand[GROUPS][S_TILES / 2][4];
            round_to_operand(operand, ds);
            gemm<BLOCK_N>(acc, Registers{operand}, NMajor{k_tile(stage), 0});
#else
            // A warp touches its own rows only.
            const STile s_tile = tile_at<STile>(shared + S_AT).from_row(warp_row);
            store_accumulator(s_tile, 0, ds);
            warp_sync();
            gemm<BLOCK_N>(acc, Rows{s_tile}, NMajor{k_tile(stage), 0});
            warp_sync();
#endif
        }
#if KEY_MASK
        if (next < end) publish_keep(slot ^ 1);
#endif
        if (STAGES == 1 && next < end) {
            block_sync();
            load_kv(tile_of(next), 0);
        }
    }

    // ---- store through the tile of Q ----------------------------------------------------------------
    multiply(acc, scale);
    // A warp reads only its own rows of Q, so it may overwrite them without waiting for the others.
    warp_sync();
    store_accumulator(q_tile.from_row(warp_row), 0, acc);
    block_sync();
    store_tile<THREADS>(q_tile, dq_rows, dq.stride_n, rows, head_dim);
}
