// FlashAttention backward on tensor cores: dQ, dK, dV with P recomputed from the row statistic.
//
// Paper: FlashAttention-2 (Dao 2023), Algorithm 2; FlashAttention (2022), Appendix B.2 and
// Algorithm 4. With L = lse and D = rowsum(dO o O) (flash_backward_rows.cu):
//   P = exp(scale Q K^T - L)     dV = P^T dO     dP = dO V^T     dS = P o (dP - D)
//   dQ = scale dS K              dK = scale dS^T Q
// Dropout with mask Z, scaled by 1 / (1 - p): P o Z in dV, dP o Z in dS (2022, Algorithm 4).
// P and dS are rounded to the io type for the products; sums are fp32.
//
// Loop order: one thread block per (batch, key/value head, key tile j); inside it the heads of the
// group and their query tiles i in increasing order (SAWTOOTH: all of them the other way round in
// every second wave of blocks, for the same bytes). dK and dV stay in registers over the whole
// loop and are sums over the group. A warp owns whole key rows of the transposed scores
// S^T = K Q^T, whose accumulator layout is the operand layout of dV += P^T dO and dK += dS^T Q:
// only dS passes through shared memory, for dQ.
//
// Reads and writes, in bytes, e = size of an element, real rows only (analysis/sums/flash.py):
//   k, v        read   rows_j D e  each, once per key tile that any query tile meets
//   q, dout     read   rows_i D e  each, per visited (head, i, j)
//   lse, delta  read   rows_i 4    each, per visited (head, i, j)
//   dk, dv      write  Nk D e      each, per key/value head
//   dq_accum    atomic rows_i D 4  per visited (head, i, j); DETERMINISTIC: plain writes of as
//                                  much, a slab per key tile, added up in order by postprocess;
//                                  QUERY_GRADIENT 0: nothing
//   KEY_MASK      key_mask   read  rows_j  per key tile that any query tile meets
//   BLOCK_SPARSE  block_mask read  1       per (head, i, j) that causal mask and window leave
//   ALIBI         alibi_slopes  read  4    per visited (head, i, j)
//   BIAS          bias       read  e       per pair that the causal mask leaves in a visited tile
//   BIAS_GRADIENT dbias      write e       1: the same pairs, where the bias is not shared
//                 dbias_accum  atomic 4    2: added up over those that share it
//                 dbias_accum  write  4    3: all apart; flash_bias_sum adds them up in order
//   PACKED        cu_seqlens_k read 8      per block, those without keys included
//                 cu_seqlens_q read 8      per block with keys
//
// Limits: as flash_forward.cu. With HEAD_DIM above 128 (fp32: 64) several warps share the rows.

// ---- constants that shape the code (-D) ---------------------------------------------------------
// DTYPE, HEAD_DIM, BLOCK_M, BLOCK_N, CAUSAL, WINDOW   as in flash_forward.cu
// NUM_WARPS      warps a block; SHARES of them own each BLOCK_N SHARES / NUM_WARPS key rows
// STAGES         2: the next Q, dO tile arrives during the work on this one; 1: after it
// DETERMINISTIC  1: partial dQ tiles to a workspace (key tiles * B, H, seqlen_q, head_dim)
// SOFTCAP, ALIBI, BIAS, BIAS_GRADIENT   scores.cuh
// PACKED         packed.cuh; not with DETERMINISTIC
// QUERY_GRADIENT 0: dK and dV only; dQ comes from flash_backward_dq.cu or is not wanted
#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#endif
#ifndef QUERY_GRADIENT
#define QUERY_GRADIENT 1
#endif
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
#define SAWTOOTH 0  // 1: every second wave of blocks makes its visits from the last to the first
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
// Warps that share key rows, each with its columns of dK and dV.
constexpr int SHARES = HEAD_DIM > (DTYPE == 2 ? 64 : 128) ? HEAD_DIM / (DTYPE == 2 ? 64 : 128) : 1;
constexpr int WARP_KEYS = BLOCK_N / (NUM_WARPS / SHARES);
constexpr int GROUPS = WARP_KEYS / 16;
constexpr int WARP_DIM = HEAD_DIM / SHARES;     // columns of dK and dV of a warp
constexpr int D_TILES = WARP_DIM / 8;
// P^T and dS^T reach their products through registers, or through shared memory where the
// operands come from there anyway (fp32) or from another warp of the rows.
constexpr bool STAGED = DTYPE == 2 || SHARES > 1;
// Queries worked on at once: few, to leave the registers to dK and dV (and to random words, the
// derivatives of a cap, the addresses of a bias).
constexpr bool ROOM = GROUPS == 1 && !BIAS && (STAGED || !(DROPOUT || SOFTCAP) || WARP_DIM < 128);
constexpr int CHUNK_M = ROOM && BLOCK_M % 32 == 0 ? 32 : 16;
constexpr int S_TILES = CHUNK_M / 8;
// dQ is made in pieces of 16 rows and DQ_DIM columns, dealt out to the warps.
constexpr int DQ_DIM = 32;
constexpr int DQ_TILES = DQ_DIM / 8;
static_assert(NUM_WARPS % SHARES == 0 && GROUPS * 16 * NUM_WARPS == BLOCK_N * SHARES,
              "each warp owns whole 16-row groups");
static_assert(STAGES == 1 || STAGES == 2, "stages");

using KTile = Tile<io_t, BLOCK_N, HEAD_DIM>;   // K and V; stage dK and dV at the end
using QTile = Tile<io_t, BLOCK_M, HEAD_DIM>;   // Q and dO
using STile = Tile<io_t, BLOCK_N, BLOCK_M>;    // dS^T, and P^T if STAGED

// Dynamic shared memory, in this order.
constexpr int V_AT = KTile::BYTES;
constexpr int Q_AT = V_AT + KTile::BYTES;
constexpr int DO_AT = Q_AT + STAGES * QTile::BYTES;
constexpr int DS_AT = DO_AT + STAGES * QTile::BYTES;
constexpr int P_AT = DS_AT + STile::BYTES;
constexpr int STATS_AT = P_AT + (STAGED ? STile::BYTES : 0);  // lse and delta, two slots
constexpr int KEEP_AT = STATS_AT + 2 * 2 * BLOCK_M * 4;
constexpr int SLOPE_AT = KEEP_AT + (KEY_MASK ? BLOCK_N * 4 : 0);  // two slots
constexpr int PACKED_AT = SLOPE_AT + (ALIBI ? 16 : 0);
constexpr int FLAGS_AT = PACKED_AT + PACKED_BYTES;

using Scores = float[GROUPS][S_TILES][4];  // transposed: rows are keys, columns are queries

// Two neighbouring queries' values of a row statistic.
__device__ __forceinline__ Vec<float, 2> stat_pair(const float* stats, int query) {
    return ld_shared(reinterpret_cast<const Vec<float, 2>*>(stats + query));
}

// S^T -> P^T. The subtraction comes first: scores and lse may both be in the thousands, and a
// factor log2(e) rounded into each of them would leave that rounding error in the exponent.
__device__ __forceinline__ void recompute_probabilities(Scores& s, const float* lse, int chunk,
                                                        float scale) {
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
        const auto l = stat_pair(lse, chunk + 8 * n + lane_id() % 4 * 2);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                // fp32 rounds the product as the forward pass did, so that a lone key cancels.
                const float exponent = CHANGED      ? s[g][n][e] - l[e % 2]
                                       : DTYPE == 2 ? mul_rn(s[g][n][e], scale) - l[e % 2]
                                                    : fmaf(s[g][n][e], scale, -l[e % 2]);
                s[g][n][e] = exp2_approx(exponent * LOG2E);
            }
    }
}

// Zeroes the weights that do not exist. Coordinates are those of the warp's first key and of the
// chunk's first query; `keep` holds a word per key of the warp (KEY_MASK only).
__device__ __forceinline__ void mask_probabilities(Scores& p, int key0, int query0, int seqlen_q,
                                                   int seqlen_k, const Window& window,
                                                   const uint32* keep) {
    const int query = query0 + lane_id() % 4 * 2;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int c = 16 * g + 8 * half + lane_id() / 4;
            bool exists = key0 + c < seqlen_k;
            if constexpr (KEY_MASK) exists = ld_shared(keep + c) != 0;
            int first = 0;  // query that sees the key
            const int diagonal = key0 + c - (seqlen_k - seqlen_q);  // query whose last key this is
            if constexpr (CAUSAL) first = diagonal;
            if (!exists) first = seqlen_q;
#pragma unroll
            for (int n = 0; n < S_TILES; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (query + 8 * n + e < first ||
                        window.hides_query(diagonal, query + 8 * n + e, key0 + c))
                        p[g][n][2 * half + e] = 0.0f;
        }
}

// dP^T -> dS^T = P^T o (dP^T - D).
__device__ __forceinline__ void softmax_gradient(Scores& dp, const Scores& p, const float* delta,
                                                 int chunk) {
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
        const auto d = stat_pair(delta, chunk + 8 * n + lane_id() % 4 * 2);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int e = 0; e < 4; ++e) dp[g][n][e] = p[g][n][e] * (dp[g][n][e] - d[e % 2]);
    }
}

#if DROPOUT
// Bit n * 4 + e of kept[g]: the weight survives. The forward pass drew the same words.
__device__ __forceinline__ void draw_mask(uint32 (&kept)[GROUPS], const Dropout& dropout,
                                          int query0, int key0) {
    const int query = query0 + lane_id() % 4 * 2, key = key0 + lane_id() / 4;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        kept[g] = 0;
#pragma unroll
        for (int n = 0; n < S_TILES; n += 2)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const PhiloxWords words = dropout.words(query + 8 * n + c, key + 16 * g);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (words.w[i] >= dropout.threshold)
                        kept[g] |= 1u << ((n + i / 2) * 4 + i % 2 * 2 + c);
            }
    }
}

__device__ __forceinline__ void drop(Scores& to, const Scores& from, const uint32 (&kept)[GROUPS],
                                     float factor) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int n = 0; n < S_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                to[g][n][e] = kept[g] >> (n * 4 + e) & 1 ? from[g][n][e] * factor : 0.0f;
}
#endif

// Adds a piece of dQ to the accumulator, or puts it into the workspace.
__device__ __forceinline__ void send_dq(float* dq_rows, int64 stride_n,
                                        const float (&dq)[1][DQ_TILES][4], int row0, int col0,
                                        int rows, int head_dim) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row0 + 8 * half + lane_id() / 4;
        float* const row = dq_rows + r * stride_n;
#pragma unroll
        for (int n = 0; n < DQ_TILES; ++n) {
            const int col = col0 + 8 * n + lane_id() % 4 * 2;
            if (r >= rows || col >= head_dim) continue;
            const float lo = dq[0][n][2 * half], hi = dq[0][n][2 * half + 1];
            if constexpr (DETERMINISTIC) {
                st_global(reinterpret_cast<Vec<float, 2>*>(row + col), {{lo, hi}});
            } else {
                atomic_add_global(row + col, lo);
                atomic_add_global(row + col + 1, hi);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash_backward(Tensor4<const io_t> q, Tensor4<const io_t> k, Tensor4<const io_t> v,
               Tensor4<const io_t> dout, Tensor3<const float> lse, Tensor3<const float> delta,
#if QUERY_GRADIENT
               Tensor4<float> dq_accum,
#endif
               Tensor4<io_t> dk, Tensor4<io_t> dv, int batches, int kv_heads, int group,
               int seqlen_q, int seqlen_k, int head_dim, float scale
#if SOFTCAP
               , float softcap, float rate  // the cap, and scale / softcap
#endif
#if ALIBI
               , Tensor3<const float> alibi_slopes  // (B, H, 1)
#endif
#if BIAS
               , Tensor4<const io_t> bias
#endif
#if BIAS_GRADIENT
               , Tensor4<bias_gradient_t> dbias
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
    // ---- which tile -----------------------------------------------------------------------------
    const int key_tiles = ceil_div(seqlen_k, BLOCK_N);
    const int j = blockIdx.x % key_tiles;
    const int kv_head = blockIdx.x / key_tiles % kv_heads;
    const int batch = blockIdx.x / key_tiles / kv_heads;
    const int key0 = j * BLOCK_N;
    unsigned char* shared = shared_memory();
#if PACKED
    const Sequence sequence = sequence_of(cu_seqlens_k.data, cu_seqlens_q.data, batch, key0,
                                          reinterpret_cast<uint32*>(shared + PACKED_AT));
    if (key0 >= sequence.own) return;
    seqlen_k = sequence.own;
    seqlen_q = sequence.other;
    const int key_row = sequence.own0 + key0, first_query = sequence.other0;
#else
    const int key_row = key0;
    constexpr int first_query = 0;
#endif
    const int keys = min_int(BLOCK_N, seqlen_k - key0);
    const int offset = seqlen_k - seqlen_q;
    const int warp_key = warp_id() / SHARES * WARP_KEYS;
    const int share = warp_id() % SHARES;

    const KTile k_tile = tile_at<KTile>(shared), v_tile = tile_at<KTile>(shared + V_AT);
    const STile ds_tile = tile_at<STile>(shared + DS_AT), p_tile = tile_at<STile>(shared + P_AT);

#if WINDOW
    const Window window{window_left, window_right, sinks};
#else
    const Window window{};
#endif
    // Visits are numbered over the heads of the group and, for each, the query tiles that see keys.
    const QueryTiles tiles =
        query_tiles_of<BLOCK_M, BLOCK_N, CAUSAL>(j, seqlen_q, seqlen_k, window);
    const int tiles_a_head = tiles.end - tiles.first, visits = group * tiles_a_head;
#if SAWTOOTH
    const bool down = blockIdx.x / wave % 2;
    auto visit_of = [=](int t) { return down ? visits - 1 - t : t; };
#else
    auto visit_of = [](int t) { return t; };
#endif
    auto head_of = [=](int t) { return kv_head * group + visit_of(t) / tiles_a_head; };
    auto tile_of = [=](int t) { return tiles.first + visit_of(t) % tiles_a_head; };
#if BLOCK_SPARSE
    auto address = [=](int t) {
        return block_mask.row(batch, head_of(t), tile_of(t) * BLOCK_M / SPARSE_M) +
               key0 / SPARSE_N;
    };
    SparseWalk<THREADS, decltype(address)> walk{
        visits, reinterpret_cast<uint32*>(shared + FLAGS_AT), address};
#else
    DenseWalk walk{visits};
#endif

    int t = walk.next(0);
    if (t >= visits) {  // nobody looks at these keys
        store_zeros<THREADS>(k_tile, dk.row(batch, kv_head, key_row), dk.stride_n, keys, head_dim);
        store_zeros<THREADS>(v_tile, dv.row(batch, kv_head, key_row), dv.stride_n, keys, head_dim);
        return;
    }

    // ---- loads ----------------------------------------------------------------------------------
    auto q_tile = [&](int stage) { return tile_at<QTile>(shared + Q_AT + stage * QTile::BYTES); };
    auto do_tile = [&](int stage) { return tile_at<QTile>(shared + DO_AT + stage * QTile::BYTES); };
    auto lse_at = [&](int slot) {
        return reinterpret_cast<float*>(shared + STATS_AT) + 2 * slot * BLOCK_M;
    };
    // Row statistics of the next visit wait in registers while this one is worked on.
    constexpr int STATS = (BLOCK_M + THREADS - 1) / THREADS;
    float next_lse[STATS], next_delta[STATS];
    auto slope_at = [&](int slot) { return shared + SLOPE_AT + 4 * slot; };
#if ALIBI
    float next_slope;
#endif
    auto load_visit = [&](int visit, int stage) {
        const int head = head_of(visit), row0 = tile_of(visit) * BLOCK_M;
        const int rows = min_int(BLOCK_M, seqlen_q - row0), row = first_query + row0;
        load_tile_async<THREADS>(q_tile(stage), q.row(batch, head, row), q.stride_n, rows,
                                 head_dim);
        load_tile_async<THREADS>(do_tile(stage), dout.row(batch, head, row), dout.stride_n, rows,
                                 head_dim);
        cp_async_commit();
#if ALIBI
        if (threadIdx.x == 0) next_slope = ld_global(alibi_slopes.at(batch, head, 0));
#endif
#pragma unroll
        for (int x = 0; x < STATS; ++x) {
            const int r = x * THREADS + threadIdx.x;
            next_lse[x] = neg_infinity();
            next_delta[x] = 0.0f;
            if (r < rows) {
                next_lse[x] = ld_global(lse.at(batch, head, row) + r);
                next_delta[x] = ld_global(delta.at(batch, head, row) + r);
            }
        }
    };
    auto publish_stats = [&](int slot) {
#if ALIBI
        if (threadIdx.x == 0) st_shared(reinterpret_cast<float*>(slope_at(slot)), next_slope);
#endif
#pragma unroll
        for (int x = 0; x < STATS; ++x) {
            const int r = x * THREADS + threadIdx.x;
            if (r < BLOCK_M) {
                // Rows that see nothing, and rows that do not exist, get exp(s - inf) = 0.
                const float l = next_lse[x];
                st_shared(lse_at(slot) + r, l == neg_infinity() ? -l : l);
                st_shared(lse_at(slot) + BLOCK_M + r, next_delta[x]);
            }
        }
    };
    load_tile_async<THREADS>(k_tile, k.row(batch, kv_head, key_row), k.stride_n, keys, head_dim);
    load_tile_async<THREADS>(v_tile, v.row(batch, kv_head, key_row), v.stride_n, keys, head_dim);
    load_visit(t, 0);
    publish_stats(0);
    uint32* const keep = reinterpret_cast<uint32*>(shared + KEEP_AT);
#if KEY_MASK
    const uint8* const keep_bytes = key_mask.data + int64(batch) * seqlen_k + key0;
    for (int c = threadIdx.x; c < BLOCK_N; c += THREADS)
        st_shared(keep + c, c < keys ? ld_global(keep_bytes + c) : 0);
    cp_async_wait<0>();
    block_sync();
    clear_rows<THREADS>(k_tile, keep);
    clear_rows<THREADS>(v_tile, keep);
#endif
    // ---- the loop over heads and query tiles ----------------------------------------------------
    float dk_acc[GROUPS][D_TILES][4], dv_acc[GROUPS][D_TILES][4];
    clear(dk_acc);
    clear(dv_acc);
    const int dim0 = share * WARP_DIM;  // columns of dK and dV of this warp

#if SOFTCAP
    const ScoreChange change{scale, offset, softcap, rate};
#else
    const ScoreChange change{scale, offset};
#endif

    int stage = 0, slot = 0;
    for (int next; t < visits; t = next, stage ^= STAGES - 1, slot ^= 1) {
        next = walk.next(t + 1);
        cp_async_wait<0>();
        block_sync();  // this visit's tiles are here, and every warp is done with the one before
        if (STAGES == 2 && next < visits) load_visit(next, stage ^ 1);
        const int head = head_of(t), row0 = tile_of(t) * BLOCK_M;
        const float* lse_rows = lse_at(slot);
        const float* delta_rows = lse_rows + BLOCK_M;
        const bool masked = KEY_MASK || key0 + BLOCK_N > seqlen_k ||
                            (CAUSAL && key0 + BLOCK_N - 1 > row0 + offset) ||
                            window.hides_any(row0 + offset, BLOCK_M, key0, BLOCK_N);
#if DROPOUT
        const Dropout dropout{seed, drop_threshold, keep_scale, uint32(batch), uint32(head)};
#endif
#pragma unroll 1
        for (int chunk = share * CHUNK_M; chunk < BLOCK_M; chunk += SHARES * CHUNK_M) {
#if BIAS
            io_t bias_values[GROUPS][S_TILES][4];
            load_bias<true>(bias_values,
                            Pairs<const io_t>{bias.row(batch, head, 0), bias.stride_n, seqlen_q,
                                              seqlen_k, window},
                            key0 + warp_key, row0 + chunk);
#endif
            Scores p;
            clear(p);
            const QTile q_chunk = q_tile(stage).from_row(chunk);
            const QTile do_chunk = do_tile(stage).from_row(chunk);
            gemm<HEAD_DIM>(p, Rows{k_tile.from_row(warp_key)}, KMajor{q_chunk});
            Scores passed;
            if constexpr (CHANGED)
                change_scores<true>(p, passed, change, slope_of(slope_at(slot)), key0 + warp_key,
                                    row0 + chunk);
#if BIAS
            add_bias(p, bias_values);
#endif
            recompute_probabilities(p, lse_rows, chunk, scale);
            if (masked)
                mask_probabilities(p, key0 + warp_key, row0 + chunk, seqlen_q, seqlen_k, window,
                                   keep + warp_key);
#if DROPOUT
            uint32 kept[GROUPS];
            draw_mask(kept, dropout, row0 + chunk, key0 + warp_key);
            Scores dropped;
            drop(dropped, p, kept, 1.0f);  // dV is scaled once, at the end
#else
            const Scores& dropped = p;
#endif
#if DTYPE != 2
            uint32 operand[GROUPS][S_TILES / 2][4];
#endif
            if constexpr (STAGED) {
                store_accumulator(p_tile.from_row(warp_key), chunk, dropped);
            } else {
#if DTYPE != 2
                round_to_operand(operand, dropped);
                gemm<CHUNK_M>(dv_acc, Registers{operand}, NMajor{do_chunk, 0});
#endif
            }
            Scores ds;
            clear(ds);
            gemm<HEAD_DIM>(ds, Rows{v_tile.from_row(warp_key)}, KMajor{do_chunk});
#if DROPOUT
            drop(ds, ds, kept, keep_scale);
#endif
            softmax_gradient(ds, p, delta_rows, chunk);
#if BIAS_GRADIENT
            send_bias_gradient<true>(ds,
                                     Pairs<bias_gradient_t>{dbias.row(batch, head, 0),
                                                            dbias.stride_n, seqlen_q, seqlen_k,
                                                            window},
                                     key0 + warp_key, row0 + chunk);
#endif
            pass_back(ds, passed);
            if constexpr (QUERY_GRADIENT || STAGED)
                store_accumulator(ds_tile.from_row(warp_key), chunk, ds);
            if constexpr (!STAGED) {
#if DTYPE != 2
                round_to_operand(operand, ds);
                gemm<CHUNK_M>(dk_acc, Registers{operand}, NMajor{q_chunk, 0});
#endif
            }
        }
        if (next < visits && STAGES == 2) publish_stats(slot ^ 1);
        block_sync();  // dS^T (and P^T) complete
        if constexpr (STAGED) {
            gemm<BLOCK_M>(dv_acc, Rows{p_tile.from_row(warp_key)}, NMajor{do_tile(stage), dim0});
            gemm<BLOCK_M>(dk_acc, Rows{ds_tile.from_row(warp_key)}, NMajor{q_tile(stage), dim0});
        }

#if QUERY_GRADIENT
        // ---- dQ += dS K -------------------------------------------------------------------------
        float* const dq_rows = dq_accum.row(DETERMINISTIC ? int64(j) * batches + batch : batch,
                                            head, first_query + row0);
        constexpr int COLUMNS = HEAD_DIM / DQ_DIM;
#pragma unroll 1
        for (int piece = warp_id(); piece < BLOCK_M / 16 * COLUMNS; piece += NUM_WARPS) {
            const int dq_row = piece / COLUMNS * 16, dq_col = piece % COLUMNS * DQ_DIM;
            float dq[1][DQ_TILES][4];
            clear(dq);
            gemm<BLOCK_N>(dq, Columns{ds_tile, dq_row}, NMajor{k_tile, dq_col});
            send_dq(dq_rows, dq_accum.stride_n, dq, dq_row, dq_col, seqlen_q - row0, head_dim);
        }
#endif
        if (STAGES == 1 && next < visits) {
            block_sync();
            load_visit(next, 0);
            publish_stats(slot ^ 1);
        }
    }

    // ---- store dK and dV through the tiles of K and V -------------------------------------------
    block_sync();
    multiply(dk_acc, scale);
#if DROPOUT
    multiply(dv_acc, keep_scale);
#endif
    store_accumulator(k_tile.from_row(warp_key), dim0, dk_acc);
    store_accumulator(v_tile.from_row(warp_key), dim0, dv_acc);
    block_sync();
    store_tile<THREADS>(k_tile, dk.row(batch, kv_head, key_row), dk.stride_n, keys, head_dim);
    store_tile<THREADS>(v_tile, dv.row(batch, kv_head, key_row), dv.stride_n, keys, head_dim);
}
