// FlashAttention forward on tensor cores: O = softmax(scale Q K^T) V, queries outside.
//
// Paper: FlashAttention-2 (Dao 2023), Algorithm 1; online softmax of FlashAttention (2022), §3.1
// and Algorithm 2 (masking, dropout). The products are mma.sync m16n8k16 (sm_80 and newer), fed by
// ldmatrix from swizzled tiles that cp.async fills one step ahead. fp32 runs the same code with
// fused multiply-adds in the place of the tensor cores.
//
// Loop order: one thread block per (batch, head, query tile i); inside it the key tiles j in
// increasing order (SAWTOOTH: decreasing in every second wave of blocks, for the same bytes). A warp
// owns BLOCK_M / NUM_WARPS whole rows, so the softmax needs no exchange between warps. Long rows of
// a causal mask start first.
//
// Reads and writes, in bytes, e = size of an element, real rows only (analysis/sums/flash.py):
//   q     read   rows_i D e    once per query tile that visits a key tile
//   k, v  read   rows_j D e    each, per visited (i, j)
//   out   write  Nq D e        per head
//   lse   write  Nq 4          per head; natural logarithm, -inf for a row that sees no key
//   KEY_MASK      key_mask   read  rows_j  per visited (i, j)
//   BLOCK_SPARSE  block_mask read  1       per (i, j) that causal mask and window leave
//   ALIBI         alibi_slopes  read  4    once per query tile that visits a key tile
//   BIAS          bias       read  e       per pair that the causal mask leaves in a visited (i, j)
//   SINK_LOGITS   sink_logits   read  4    once per query tile
//   FP8           k, v are 1 byte an element; k_scale, v_scale  read  4 each per 16 keys of every
//                 visited (i, j)
//   PACKED        cu_seqlens_q read 8      per block, those without rows included
//                 cu_seqlens_k read 8      per block with rows
//
// Limits: head_dim <= HEAD_DIM, a multiple of 8 (FP8: of 16); HEAD_DIM a multiple of 32; BLOCK_M and BLOCK_N
// multiples of 16; rows start on 16-byte boundaries; shared memory: shared_bytes in
// kernels/flash_config.py.

// ---- constants that shape the code (-D) ---------------------------------------------------------
// DTYPE      0 fp16, 1 bf16, 2 fp32
// HEAD_DIM   columns of a tile; the argument head_dim may be smaller, the rest is zero
// BLOCK_M, BLOCK_N   rows of Q and of K, V a tile
// CAUSAL     1: query r sees key c when c <= r + seqlen_k - seqlen_q
// NUM_WARPS  warps a block; each owns BLOCK_M / NUM_WARPS rows, a multiple of 16
// WINDOW     1: query r sees few keys around its diagonal, and sinks; window.cuh
// PACKED     1: sequences of different lengths, all tokens one after another; packed.cuh
// STAGES     2: the next K, V tile arrives during the work on this one; 1: K and V in turn, each
//            during the work on the other (FP8: codes of the next tile beside these)
#ifndef KEY_MASK
#define KEY_MASK 0  // 1: bytes (B, seqlen_k), 0 takes a key out
#endif
#ifndef DROPOUT
#define DROPOUT 0  // 1: drop weights, philox.cuh
#endif
#ifndef BLOCK_SPARSE
#define BLOCK_SPARSE 0  // 1: bytes (B, H, rows / SPARSE_M, keys / SPARSE_N), 0 leaves a tile out
#endif
// SOFTCAP, ALIBI, BIAS   scores.cuh
#ifndef SINK_LOGITS
#define SINK_LOGITS 0  // 1: a logit a head joins the denominator (attention sinks, gpt-oss 2025)
#endif
#ifndef FP8
#define FP8 0  // 1: k and v are e4m3 with fp32 scales, fp8_tiles.cuh; 16-bit DTYPE, STAGES 1
#endif
#ifndef ANY_SCALE
#define ANY_SCALE 0  // 1: scale may be 0 or negative, for one more multiplication a score
#endif
#ifndef SAWTOOTH
#define SAWTOOTH 0  // 1: every second wave of blocks walks the keys from the last tile to the first,
#endif              //    and finds in L2 what the wave before it read last
#ifndef PROGRESS
#define PROGRESS 0  // n: every n tiles a block notes the time, for the order of blocks on a GPU
#endif

#if PROGRESS
#include "clock.cuh"
#endif
#include "device.cuh"
#include "fp8_tiles.cuh"
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
constexpr int O_TILES = HEAD_DIM / 8;     // 8-column tiles of the output
// Q stays in registers where that costs at most 32 of them; else it is read again for each tile.
constexpr bool Q_IN_REGISTERS = DTYPE != 2 && GROUPS * HEAD_DIM <= 128;
// exp(scale (s - max)): fp32 subtracts first, which gives a lone key weight 1 to the bit. The
// 16-bit types could not tell, and save an instruction by one fused multiply-add.
constexpr bool SUBTRACT_FIRST = DTYPE == 2;
static_assert(GROUPS * 16 * NUM_WARPS == BLOCK_M, "each warp owns whole 16-row groups");
static_assert(STAGES == 1 || STAGES == 2, "stages");
static_assert(!FP8 || (DTYPE != 2 && STAGES == 1), "the next tile's codes wait beside the tiles");
// Steps of Q K^T that are unrolled together: all where two groups of rows share each operand.
constexpr int QK_UNROLL = GROUPS == 2 ? 8 : 4;
// One buffer each: V arrives during Q K^T, the next K during the softmax and P V.
#define IN_TURN (STAGES == 1 && !FP8)

#if FP8
using kv_t = uint8;
#else
using kv_t = io_t;
#endif
using QTile = Tile<io_t, BLOCK_M, HEAD_DIM>;   // also stages the output
using KTile = Tile<io_t, BLOCK_N, HEAD_DIM>;   // K and V
using PTile = Tile<io_t, BLOCK_M, BLOCK_N>;    // fp32 only: probabilities on their way to P V
using Codes = Tile<uint8, BLOCK_N, HEAD_DIM>;  // FP8 only: K and V as they come
using Scales = KeyScales<BLOCK_N>;             // FP8 only

// Dynamic shared memory, in this order.
constexpr int K_AT = QTile::BYTES;
constexpr int V_AT = K_AT + STAGES * KTile::BYTES;
constexpr int P_AT = V_AT + STAGES * KTile::BYTES;
constexpr int CODES_AT = P_AT + (DTYPE == 2 ? PTile::BYTES : 0);
constexpr int SCALES_AT = CODES_AT + (FP8 ? 2 * Codes::BYTES : 0);
constexpr int KEEP_AT = SCALES_AT + (FP8 ? Scales::BYTES : 0);
constexpr int SLOPE_AT = KEEP_AT + (KEY_MASK ? 2 * BLOCK_N * 4 : 0);
#if SINK_LOGITS
constexpr int SINK_AT = SLOPE_AT + (ALIBI ? 16 : 0);
constexpr int PACKED_AT = SINK_AT + 16;
#else
constexpr int PACKED_AT = SLOPE_AT + (ALIBI ? 16 : 0);
#endif
constexpr int FLAGS_AT = PACKED_AT + PACKED_BYTES;
// The scale is in the scores before the softmax, not in its exponents.
constexpr bool SCALED = ANY_SCALE || CHANGED || FP8;

// The running softmax of the rows a thread shares in: row g (half 0) and g + 8 (half 1) of each
// group. The four threads of a row hold the same maximum; the sum is split among them.
struct Softmax {
    float max[GROUPS][2];
    float sum[GROUPS][2];
#if FP8
    float unit[GROUPS][2];  // of the row's output (scale_weights)
#endif
};

// One step of the online softmax (FlashAttention 2022, Algorithm 1, lines 10 to 12). In: scores.
// Out: scores hold exp(score - max). The output so far and the sum are rescaled to the new maximum.
__device__ __forceinline__ void softmax_step(float (&score)[GROUPS][S_TILES][4],
                                             float (&out)[GROUPS][O_TILES][4], Softmax& state,
                                             float log2_scale) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float new_max = state.max[g][half];
#pragma unroll
            for (int n = 0; n < S_TILES; ++n)
                new_max = fmaxf(new_max, fmaxf(score[g][n][2 * half], score[g][n][2 * half + 1]));
            new_max = fmaxf(new_max, shfl_xor(new_max, 1));
            new_max = fmaxf(new_max, shfl_xor(new_max, 2));
            // A row that has seen no key yet has maximum -inf; 0 keeps (-inf) - (-inf) away.
            const float safe_max = new_max == neg_infinity() ? 0.0f : new_max;
            const float shift = SUBTRACT_FIRST ? safe_max : safe_max * log2_scale;
            auto weight = [=](float s) {
                return exp2_approx(SUBTRACT_FIRST ? (s - shift) * log2_scale
                                                  : fmaf(s, log2_scale, -shift));
            };
            const float rescale = weight(state.max[g][half]);
            state.max[g][half] = new_max;
            float sum = state.sum[g][half] * rescale;
#pragma unroll
            for (int n = 0; n < S_TILES; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    score[g][n][e] = weight(score[g][n][e]);
                    sum += score[g][n][e];
                }
            state.sum[g][half] = sum;
#if FP8
            state.unit[g][half] *= rescale;  // scale_weights multiplies the output
#else
#pragma unroll
            for (int n = 0; n < O_TILES; ++n) {
                out[g][n][2 * half] *= rescale;
                out[g][n][2 * half + 1] *= rescale;
            }
#endif
        }
}

// Sets what may not be seen to -inf. `keep` holds a word per key of the tile (KEY_MASK only).
__device__ __forceinline__ void mask_scores(float (&score)[GROUPS][S_TILES][4], int row0, int key0,
                                            int seqlen_q, int seqlen_k, const Window& window,
                                            const uint32* keep) {
    const int row = row0 + lane_id() / 4, key = key0 + lane_id() % 4 * 2;
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
        bool kept[2] = {true, true};
        if constexpr (KEY_MASK) {
            const auto pair = ld_shared(reinterpret_cast<const Vec8*>(keep + 8 * n + key - key0));
            kept[0] = pair[0] != 0;
            kept[1] = pair[1] != 0;
        }
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int visible = seqlen_k;  // number of keys, from the first, that this row may see
                if constexpr (CAUSAL)
                    visible = min_int(visible,
                                      row + 16 * g + e / 2 * 8 + 1 + seqlen_k - seqlen_q);
                const int diagonal = row + 16 * g + e / 2 * 8 + seqlen_k - seqlen_q;
                if (key + 8 * n + e % 2 >= visible || !kept[e % 2] ||
                    window.hides(diagonal, key + 8 * n + e % 2))
                    score[g][n][e] = neg_infinity();
            }
    }
}

#if DROPOUT
__device__ __forceinline__ void drop_weights(float (&p)[GROUPS][S_TILES][4], int row0, int key0,
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
                for (int i = 0; i < 4; ++i)
                    if (words.w[i] < dropout.threshold) p[g][n + i % 2][i / 2 * 2 + c] = 0.0f;
            }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash_forward(Tensor4<const io_t> q, Tensor4<const kv_t> k, Tensor4<const kv_t> v,
              Tensor4<io_t> out, Tensor3<float> lse, int heads, int group, int seqlen_q,
              int seqlen_k, int head_dim, float scale
#if FP8
              , Tensor3<const float> k_scale, Tensor3<const float> v_scale  // (B, Hkv, blocks)
              , int scale_block  // keys that share a scale, a multiple of SCALE_KEYS or seqlen_k
#endif
#if SOFTCAP
              , float softcap, float rate  // the cap, and scale / softcap
#endif
#if ALIBI
              , Tensor3<const float> alibi_slopes  // (B, H, 1)
#endif
#if BIAS
              , Tensor4<const io_t> bias
#endif
#if SINK_LOGITS
              , Tensor1<const float> sink_logits  // (H)
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
              , Tensor1<const int> cu_seqlens_q, Tensor1<const int> cu_seqlens_k  // (sequences + 1)
#endif
#if PROGRESS
              , Tensor1<int64> progress  // (blocks, notes): SM, start, every PROGRESS tiles, end
              , int notes
#endif
) {
    // ---- which tile -----------------------------------------------------------------------------
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

#if PROGRESS
    int64* const noted = progress.data + int64(blockIdx.x) * notes;
    auto note = [=](int at, int64 value) {
        if (threadIdx.x == 0) st_global(noted + at, value);
    };
    note(0, multiprocessor());
    note(1, global_nanoseconds());
#endif

    // Candidate t of the walk is this key tile.
#if SAWTOOTH
    const bool down = blockIdx.x / wave % 2;
    auto tile_of = [=](int t) { return tiles.at(down ? end - 1 - t : t); };
#else
    auto tile_of = [=](int t) { return tiles.at(t); };
#endif

    const QTile q_tile = tile_at<QTile>(shared);
    io_t* const out_rows = out.row(batch, head, row);
    float* const lse_rows = lse.at(batch, head, row);

#if BLOCK_SPARSE
    const uint8* const block_row = block_mask.row(batch, head, row0 / SPARSE_M);
    auto address = [=](int t) { return block_row + tile_of(t) * BLOCK_N / SPARSE_N; };
    SparseWalk<THREADS, decltype(address)> walk{
        end, reinterpret_cast<uint32*>(shared + FLAGS_AT), address};
#else
    DenseWalk walk{end};
#endif

#if SINK_LOGITS
    float* const sink_here = reinterpret_cast<float*>(shared + SINK_AT);
    if (threadIdx.x == 0) st_shared(sink_here, ld_global(sink_logits.data + head));
#endif

    int j = walk.next(0);
    if (j >= end) {  // these rows see nothing, or the sink alone
        store_zeros<THREADS>(q_tile, out_rows, out.stride_n, rows, head_dim);
#if SINK_LOGITS
        block_sync();
        for (int r = threadIdx.x; r < rows; r += THREADS)
            st_global(lse_rows + r, ld_shared(sink_here));
#else
        for (int r = threadIdx.x; r < rows; r += THREADS) st_global(lse_rows + r, neg_infinity());
#endif
        return;
    }

    // ---- loads ----------------------------------------------------------------------------------
    const int kv_head = head / group;
    const kv_t* const k_rows = k.row(batch, kv_head, first_key);
    const kv_t* const v_rows = v.row(batch, kv_head, first_key);
    auto k_tile = [&](int stage) { return tile_at<KTile>(shared + K_AT + stage * KTile::BYTES); };
    auto v_tile = [&](int stage) { return tile_at<KTile>(shared + V_AT + stage * KTile::BYTES); };
    auto keep_at = [&](int slot) {
        return reinterpret_cast<uint32*>(shared + KEEP_AT) + slot * BLOCK_N;
    };
#if FP8
    const Codes k_codes = tile_at<Codes>(shared + CODES_AT);
    const Codes v_codes = tile_at<Codes>(shared + CODES_AT + Codes::BYTES);
    float* const scales_here = reinterpret_cast<float*>(shared + SCALES_AT);
    const Scales scales{k_scale.at(batch, kv_head, 0), v_scale.at(batch, kv_head, 0), scale_block,
                        seqlen_k};
    float next_scale = 0.0f;  // of the tile whose codes are on their way
#endif
    auto load = [&](auto to, const kv_t* rows_of, int64 stride_n, int tile) {
        const int keys = min_int(BLOCK_N, seqlen_k - tile * BLOCK_N);
        load_tile_async<THREADS, IN_TURN>(to, rows_of + int64(tile) * BLOCK_N * stride_n, stride_n,
                                          keys, head_dim);
    };
#if IN_TURN
    auto load_k = [&](int tile) {
        load(k_tile(0), k_rows, k.stride_n, tile);
        cp_async_commit();
    };
    auto load_v = [&](int tile) {
        load(v_tile(0), v_rows, v.stride_n, tile);
        cp_async_commit();
    };
#else
    auto load_kv = [&](int tile, int stage) {
#if FP8
        next_scale = scales.load(tile);
        load(k_codes, k_rows, k.stride_n, tile);
        load(v_codes, v_rows, v.stride_n, tile);
#else
        load(k_tile(stage), k_rows, k.stride_n, tile);
        load(v_tile(stage), v_rows, v.stride_n, tile);
#endif
        cp_async_commit();
    };
#endif
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
#if IN_TURN
    load_k(tile_of(j));
#else
    load_kv(tile_of(j), 0);
#endif

    // ---- the loop over key tiles ----------------------------------------------------------------
    const float log2_scale = SCALED ? LOG2E : scale * LOG2E;
    float acc[GROUPS][O_TILES][4];
    clear(acc);
    Softmax state;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
        for (int half = 0; half < 2; ++half) {
            state.max[g][half] = neg_infinity();
            state.sum[g][half] = 0.0f;
#if FP8
            state.unit[g][half] = 0.0f;
#endif
        }
#if DTYPE != 2
    uint32 q_fragment[GROUPS][HEAD_DIM / 16][4];
    bool first = true;
#endif
#if DROPOUT
    const Dropout dropout{seed, drop_threshold, keep_scale, uint32(batch), uint32(head)};
#endif

#if PROGRESS
    int walked = 0;
#endif
    int stage = 0, slot = 0;
    for (int next; j < end; j = next, stage ^= STAGES - 1, slot ^= 1) {
        next = walk.next(j + 1);
        cp_async_wait<0>();
        block_sync();  // this tile is here, and every warp is done with the one before
#if FP8
        convert_own_chunks<THREADS>(k_tile(0), k_codes);
        convert_own_chunks<THREADS>(v_tile(0), v_codes);
        scales.publish(scales_here, next_scale);
        block_sync();
#endif
#if IN_TURN
        load_v(tile_of(j));
#else
        if (next < end) load_kv(tile_of(next), stage ^ 1);
#endif
        const uint32* keep = keep_at(slot);
#if KEY_MASK
        if (next < end) load_keep(tile_of(next));
#endif
#if KEY_MASK && !IN_TURN
        clear_rows<THREADS>(v_tile(stage), keep);
        block_sync();
#endif
        const int key0 = tile_of(j) * BLOCK_N, warp_row0 = row0 + warp_row;
        const int offset = seqlen_k - seqlen_q;
        // The whole tile may lie beside what this warp's rows see.
        const bool sees = (!CAUSAL || key0 <= warp_row0 + WARP_ROWS - 1 + offset) &&
                          !window.hides_all(warp_row0 + offset, WARP_ROWS, key0, BLOCK_N);
        float score[GROUPS][S_TILES][4];
        if (sees) {
#if BIAS
            io_t bias_values[GROUPS][S_TILES][4];
            load_bias<false>(bias_values,
                             Pairs<const io_t>{bias.row(batch, head, 0), bias.stride_n, seqlen_q,
                                               seqlen_k, window},
                             warp_row0, key0);
#endif
            clear(score);
#if DTYPE != 2
            if constexpr (Q_IN_REGISTERS) {
                if (first)
#pragma unroll
                    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                        for (int s = 0; s < HEAD_DIM / 16; ++s)
                            load_a(q_fragment[g][s], Rows{q_tile.from_row(warp_row)}, g, s);
                first = false;
                gemm<HEAD_DIM>(score, Registers{q_fragment}, KMajor{k_tile(stage)});
            } else
#endif
                gemm<HEAD_DIM, QK_UNROLL>(score, Rows{q_tile.from_row(warp_row)}, KMajor{k_tile(stage)});
#if FP8
            scale_scores(score, scales_here, CHANGED ? 1.0f : scale);
#endif
            if constexpr (CHANGED) {
                float passed[GROUPS][S_TILES][4];  // only the backward pass has a use for it
                change_scores<false>(score, passed, change, slope_of(shared + SLOPE_AT), warp_row0,
                                     key0);
            } else if constexpr (ANY_SCALE && !FP8) {
                multiply(score, scale);
            }
#if BIAS
            add_bias(score, bias_values);
#endif
            const bool ragged = key0 + BLOCK_N > seqlen_k;
            const bool cut = (CAUSAL && key0 + BLOCK_N - 1 > warp_row0 + offset) ||
                             window.hides_any(warp_row0 + offset, WARP_ROWS, key0, BLOCK_N);
            if (KEY_MASK || ragged || cut)
                mask_scores(score, warp_row0, key0, seqlen_q, seqlen_k, window, keep);
        }
#if IN_TURN
        cp_async_wait<0>();
        block_sync();  // V is here, and every warp is done with K
        if (next < end) load_k(tile_of(next));
#if KEY_MASK
        clear_rows<THREADS>(v_tile(0), keep);
        block_sync();
#endif
#endif
        if (sees) {
            softmax_step(score, acc, state, log2_scale);
#if DROPOUT
            drop_weights(score, warp_row0, key0, dropout);
#endif
#if FP8
            scale_weights(score, acc, state.unit, scales_here + Scales::COUNT);
#endif
#if DTYPE != 2
            uint32 p_fragment[GROUPS][S_TILES / 2][4];
            round_to_operand(p_fragment, score);
            gemm<BLOCK_N>(acc, Registers{p_fragment}, NMajor{v_tile(stage), 0});
#else
            // A warp touches its own rows only.
            const PTile p_tile = tile_at<PTile>(shared + P_AT).from_row(warp_row);
            store_accumulator(p_tile, 0, score);
            warp_sync();
            gemm<BLOCK_N>(acc, Rows{p_tile}, NMajor{v_tile(stage), 0});
            warp_sync();
#endif
        }
#if KEY_MASK
        if (next < end) publish_keep(slot ^ 1);
#endif
#if PROGRESS
        if (++walked % PROGRESS == 0) note(1 + walked / PROGRESS, global_nanoseconds());
#endif
    }
#if PROGRESS
    note(notes - 1, global_nanoseconds());
#endif

    // ---- normalise and store --------------------------------------------------------------------
    const float unit = SCALED ? 1.0f : scale;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = state.sum[g][half];
            sum += shfl_xor(sum, 1);
            sum += shfl_xor(sum, 2);
#if SINK_LOGITS
            // Its weight joins the sum; a sink above all scores is what they are rescaled to.
            const float sink = ld_shared(sink_here), sink_log2 = sink * LOG2E;
            const float seen_log2 = state.max[g][half] * log2_scale;
            const float top = fmaxf(seen_log2, sink_log2);
            const float safe_top = top == neg_infinity() ? 0.0f : top;
            const float rescale = exp2_approx(seen_log2 - safe_top);
            sum = fmaf(sum, rescale, exp2_approx(sink_log2 - safe_top));
#endif
            // A sum of 0 means that nothing was seen; a NaN must stay one.
            float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
#if DROPOUT
            inverse *= keep_scale;
#endif
#if FP8
            inverse *= state.unit[g][half];
#endif
#if SINK_LOGITS
            inverse *= rescale;
#endif
#pragma unroll
            for (int n = 0; n < O_TILES; ++n) {
                acc[g][n][2 * half] *= inverse;
                acc[g][n][2 * half + 1] *= inverse;
            }
            // Where the exponents were shifted by the rounded product max * log2_scale, its
            // rounding error is taken back here: it matters where scores are in the thousands.
            const float max = state.max[g][half];
            const float residual =
                SUBTRACT_FIRST ? 0.0f : fmaf(max, log2_scale, -(max * log2_scale));
#if SINK_LOGITS
            const float value = sink_log2 > seen_log2 ? fmaf(LN2, log2_approx(sum), sink)
                                : sum == 0.0f
                                    ? neg_infinity()
                                    : fmaf(max, unit, LN2 * (log2_approx(sum) - residual));
#else
            const float value =
                sum == 0.0f ? neg_infinity()
                            : fmaf(max, unit, LN2 * (log2_approx(sum) - residual));
#endif
            const int r = warp_row + 16 * g + 8 * half + lane_id() / 4;
            if (lane_id() % 4 == 0 && r < rows) st_global(lse_rows + r, value);
        }
    // A warp reads only its own rows of Q, so it may overwrite them without waiting for the others.
    warp_sync();
    store_accumulator(q_tile.from_row(warp_row), 0, acc);
    block_sync();
    store_tile<THREADS>(q_tile, out_rows, out.stride_n, rows, head_dim);
}
