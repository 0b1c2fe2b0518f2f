// Attention of few queries to a long cache, split over the keys: O = softmax(scale Q K^T) V.
//
// Idea: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023), the online softmax of FlashAttention (2022),
// Algorithm 1, with the keys of one row shared out over warps and over thread blocks. A partial
// result of any set of keys is (out, lse); two of them combine exactly, in any order:
//   lse = log(e^lse1 + e^lse2),  out = e^(lse1 - lse) out1 + e^(lse2 - lse) out2.
//
// Loop order: one thread block per (batch, key/value head, split, row tile); inside it the split's
// key tiles in increasing order. The rows of a block are all queries of all query heads that share
// the key/value head (row = head in the group * seqlen_q + query), so that K and V are read once for
// the group. BLOCK_M / 16 warps side by side own 16 rows each, WARPS_N of them one after the other
// share out the keys of a tile; their sums meet in shared memory at the end. flash_decode_merge.cu adds
// up the splits; with one split (SPLIT 0) it is not launched.
//
// A wide latent (MLA: 576 columns, of which the first 512 are values) has more output than a warp
// has registers for: COLUMN_WARPS warps make the same scores and own a part of the columns of the
// output each, so that the cache is read once even so.
//
// Reads and writes, in bytes, e = size of an element of q and out, c of an element of the cache;
// T_b = ceil(seqlen_b / BLOCK_N) key tiles, S splits, of which min(S, T_b) have a tile
// (analysis/sums/decode.py):
//   q            read   rows D e       per split that has a tile
//   k, v         read   seqlen_b D c   each, per (key/value head, row tile); LATENT: k alone
//   SEQLENS      seqlens      read  4  per block, and per row of the merging kernel
//   PAGED        block_table  read  4  per 16 keys of every visit of a block
//   FP8          k_scale, v_scale read  4 each per block; with SCALE_BLOCKS per 16 keys of every
//                visit of a block
//   SPLIT 0      out write rows Dv e, lse write rows 4; Dv = D but for a wide latent
//   SPLIT 1      part_out write rows Dv 4, part_lse write rows 4 per split that has a tile; the
//                merging kernel reads both, and writes out and lse
//
// Limits: head_dim <= HEAD_DIM, a multiple of 8 (FP8: of 16); rows start on 16-byte boundaries; page
// sizes are multiples of 16; shared memory: shared_bytes in kernels/decode_config.py.

// ---- constants that shape the code (-D) ---------------------------------------------------------
// DTYPE      0 fp16, 1 bf16, 2 fp32: of q and out, and of the cache unless FP8
// HEAD_DIM   columns of a tile; the argument head_dim may be smaller, the rest is zero
// BLOCK_M, BLOCK_N   rows of q and keys a tile; BLOCK_M / 16 * WARPS_N warps a block
// WARPS_N    warps that share out the keys of a tile, BLOCK_N / WARPS_N each, a multiple of 16
// BLOCKS_PER_SM   blocks that an SM is to hold: what the compiler may spend on registers follows
// CAUSAL     1: query i sees key j when j <= i + seqlen_b - seqlen_q
// SEQLENS    1: sequence b has seqlens[b] keys; 0: all have seqlen_k
// PAGED      1: k and v are (pages, Hkv, page_size, D), block_table says which page holds a key
// FP8        1: k and v are e4m3 with an fp32 scale a head; 16-bit DTYPE only
// SCALE_BLOCKS   1, with FP8: a scale for scale_block keys, of a sequence or of a page
// LATENT     1: the values are the keys, or of a wide latent their first value_dim columns
// VALUE_DIM  columns of a tile of the output, HEAD_DIM but for a wide latent
// COLUMN_WARPS   warps that share them out
// SPLIT      1: write partial results, fp32
#include "decode.cuh"
#include "device.cuh"
#include "fp8_tiles.cuh"
#include "fragments.cuh"
#include "tile.cuh"

constexpr int ROW_WARPS = BLOCK_M / 16;
constexpr int NUM_WARPS = ROW_WARPS * WARPS_N * COLUMN_WARPS;
constexpr int THREADS = NUM_WARPS * 32;
constexpr int WARP_KEYS = BLOCK_N / WARPS_N;  // keys of a tile that a warp takes
constexpr int S_TILES = WARP_KEYS / 8;        // 8-column tiles of its scores
constexpr int O_COLUMNS = VALUE_DIM / COLUMN_WARPS;
constexpr int O_TILES = O_COLUMNS / 8;        // 8-column tiles of its output
constexpr int STAGES = FP8 ? 1 : 2;           // fp8 waits for its turn in registers
constexpr int CHUNK_KEYS = 16;                // a page has a multiple of these
constexpr int CHUNKS = BLOCK_N / CHUNK_KEYS;
constexpr bool Q_IN_REGISTERS = DTYPE != 2 && !FP8 && HEAD_DIM <= 64;
constexpr bool AHEAD = HEAD_DIM <= 128;       // fp8: registers hold the next tile meanwhile
static_assert(WARP_KEYS % 16 == 0 && WARP_KEYS * WARPS_N == BLOCK_N, "16 keys a product");
static_assert(!FP8 || DTYPE != 2, "fp8 is multiplied in 16 bits");
static_assert(FP8 || !SCALE_BLOCKS, "fp8 has scales");
static_assert(VALUE_DIM == HEAD_DIM || (LATENT && DTYPE != 2), "a wide latent, in 16 bits");

#if FP8
using cache_t = uint8;
#else
using cache_t = io_t;
#endif
using QTile = Tile<io_t, BLOCK_M, HEAD_DIM>;
using KTile = Tile<io_t, BLOCK_N, HEAD_DIM>;   // K and V
using PTile = Tile<io_t, 16, WARP_KEYS>;       // fp32 only: a warp's weights on their way to P V
using Sums = Tile<float, 16, O_COLUMNS>;       // a warp's output, at the end, in the place of K and V

// Dynamic shared memory, in this order.
constexpr int K_AT = QTile::BYTES;
constexpr int V_AT = K_AT + (LATENT ? 0 : STAGES * KTile::BYTES);
constexpr int TILES_END = V_AT + STAGES * KTile::BYTES;
constexpr int SUMS_END = K_AT + NUM_WARPS * Sums::BYTES;
constexpr int P_AT = TILES_END > SUMS_END ? TILES_END : SUMS_END;
constexpr int STATS_AT = P_AT + (DTYPE == 2 ? NUM_WARPS * PTile::BYTES : 0);
constexpr int PAGES_AT = STATS_AT + NUM_WARPS * 16 * 8;            // maximum and sum of each row
constexpr int WORDS_AT = PAGES_AT + (PAGED ? 2 * CHUNKS * 16 : 0);  // 16 bytes: seqlen, scales
constexpr int SCALES_AT = WORDS_AT + 16;  // SCALE_BLOCKS: of three tiles, CHUNKS of K and of V each

// The running softmax of rows g (half 0) and g + 8 (half 1), in units of log2. The four threads of a
// row hold the same maximum; the sum is split among them.
struct Softmax {
    float max[2], sum[2];
#if SCALE_BLOCKS
    float unit[1][2];  // of the row's output (scale_weights)
#endif
};

// One step of the online softmax (FlashAttention 2022, Algorithm 1, lines 10 to 12). In: scores times
// log2(e). Out: 2^(score - max). The output so far and the sum are rescaled to the new maximum.
__device__ __forceinline__ void softmax_step(float (&score)[1][S_TILES][4],
                                             float (&out)[1][O_TILES][4], Softmax& state) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float new_max = state.max[half];
#pragma unroll
        for (int n = 0; n < S_TILES; ++n)
            new_max = fmaxf(new_max, fmaxf(score[0][n][2 * half], score[0][n][2 * half + 1]));
        new_max = fmaxf(new_max, shfl_xor(new_max, 1));
        new_max = fmaxf(new_max, shfl_xor(new_max, 2));
        // A row that has seen no key yet has maximum -inf; 0 keeps (-inf) - (-inf) away.
        const float safe_max = new_max == neg_infinity() ? 0.0f : new_max;
        const float rescale = exp2_approx(state.max[half] - safe_max);
        state.max[half] = new_max;
        float sum = state.sum[half] * rescale;
#pragma unroll
        for (int n = 0; n < S_TILES; ++n)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
                score[0][n][e] = exp2_approx(score[0][n][e] - safe_max);
                sum += score[0][n][e];
            }
        state.sum[half] = sum;
#if SCALE_BLOCKS
        state.unit[0][half] *= rescale;  // scale_weights multiplies the output
#else
#pragma unroll
        for (int n = 0; n < O_TILES; ++n) {
            out[0][n][2 * half] *= rescale;
            out[0][n][2 * half + 1] *= rescale;
        }
#endif
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
flash_decode(Tensor4<const io_t> q, Tensor4<const cache_t> k
#if !LATENT
             , Tensor4<const cache_t> v
#endif
#if SPLIT
             , Tensor4<float> part_out  // (B * splits, H, seqlen_q, head_dim)
             , Tensor4<float> part_lse  // (B, H, seqlen_q, splits)
#else
             , Tensor4<io_t> out, Tensor3<float> lse
#endif
             , int kv_heads, int group, int seqlen_q, int seqlen_k, int head_dim, int splits,
             float scale
#if VALUE_DIM != HEAD_DIM
             , int value_dim
#endif
#if SEQLENS
             , Tensor1<const int> seqlens  // (B,)
#endif
#if PAGED
             , Tensor1<const int> block_table  // (B, columns), dense
             , int columns, int page_size
#endif
#if SCALE_BLOCKS
             , Tensor4<const float> k_scale  // (B or pages, Hkv, blocks, 1)
#if !LATENT
             , Tensor4<const float> v_scale
#endif
             , int scale_block  // keys that share a scale, a multiple of 16
#elif FP8
             , Tensor1<const float> k_scale  // (Hkv,)
#if !LATENT
             , Tensor1<const float> v_scale
#endif
#endif
) {
    // ---- which rows, which keys -----------------------------------------------------------------
    const int all_rows = group * seqlen_q, row_tiles = ceil_div(all_rows, BLOCK_M);
    int place = blockIdx.x;
    const int row0 = place % row_tiles * BLOCK_M;  // neighbours read the same K and V
    place /= row_tiles;
    const int split = place % splits;
    place /= splits;
    const int kv_head = place % kv_heads, batch = place / kv_heads;
    const int rows = min_int(BLOCK_M, all_rows - row0);
    const int warp_row = warp_id() % ROW_WARPS * 16;
#if VALUE_DIM == HEAD_DIM
    const int value_dim = head_dim;
#endif
#if COLUMN_WARPS == 1  // the compiler cannot know that what follows below is 0
    const int warp_key = warp_id() / ROW_WARPS * WARP_KEYS, warp_column = 0;
#else
    const int warp_key = warp_id() / ROW_WARPS % WARPS_N * WARP_KEYS;
    const int warp_column = warp_id() / ROW_WARPS / WARPS_N * O_COLUMNS;
#endif

    unsigned char* shared = shared_memory();
    // One thread reads what all need to know.
    int keys = seqlen_k;
    float key_unit = 1.0f, value_unit = 1.0f;
#if SEQLENS || (FP8 && !SCALE_BLOCKS)
    uint32* const words = reinterpret_cast<uint32*>(shared + WORDS_AT);
    if (threadIdx.x == 0) {
#if SEQLENS
        st_shared(words, uint32(ld_global(seqlens.data + batch)));
#endif
#if FP8 && !SCALE_BLOCKS
        const float of_keys = ld_global(k_scale.data + kv_head);
        st_shared(words + 1, float_bits(of_keys));
#if LATENT
        st_shared(words + 2, float_bits(of_keys));
#else
        st_shared(words + 2, float_bits(ld_global(v_scale.data + kv_head)));
#endif
#endif
    }
    block_sync();
#if SEQLENS
    keys = int(ld_shared(words));
#endif
#if FP8 && !SCALE_BLOCKS
    key_unit = bits_float(ld_shared(words + 1));
    value_unit = bits_float(ld_shared(words + 2));
#endif
#endif
    const Span<BLOCK_N> span(keys, split, splits);

    // Row r of the tile is this query of this head.
    auto head_of = [=](int r) { return kv_head * group + (row0 + r) / seqlen_q; };
    auto query_of = [=](int r) { return (row0 + r) % seqlen_q; };
#if SPLIT
    if (span.first == span.end) return;  // the merging kernel knows
    using out_t = float;
    auto out_row = [&](int r) {
        return part_out.row(int64(batch) * splits + split, head_of(r), query_of(r));
    };
    auto lse_at = [&](int r) { return part_lse.row(batch, head_of(r), query_of(r)) + split; };
#else
    using out_t = io_t;
    auto out_row = [&](int r) { return out.row(batch, head_of(r), query_of(r)); };
    auto lse_at = [&](int r) { return lse.at(batch, head_of(r), query_of(r)); };
#endif

    // ---- loads ----------------------------------------------------------------------------------
#if SCALE_BLOCKS
    // Of a tile, three tiles' worth: one is worked on while another's pages are found.
    auto scales_of = [=](int tile) {
        return reinterpret_cast<float*>(shared + SCALES_AT) + tile % 3 * 2 * CHUNKS;
    };
    // This thread's 16 keys of a tile, `within` into sequence or page `item`; 0 for keys that there
    // are not.
    auto load_scales = [=](int tile, bool valid, int64 item, int64 within) {
        const int64 block = within / scale_block;
        float of_keys = 0.0f, of_values = 0.0f;
        if (valid) {
            of_keys = ld_global(k_scale.row(item, kv_head, block));
#if LATENT
            of_values = of_keys;
#else
            of_values = ld_global(v_scale.row(item, kv_head, block));
#endif
        }
        st_shared(scales_of(tile) + threadIdx.x, of_keys);
        st_shared(scales_of(tile) + CHUNKS + threadIdx.x, of_values);
    };
#else
    auto load_scales = [](int, bool, int64, int64) {};
#endif
#if PAGED
    // Where 16 keys of a tile begin, in elements of k and of v; two tiles' worth.
    int64* const starts = reinterpret_cast<int64*>(shared + PAGES_AT);
    auto find_pages = [&](int tile, int slot) {
        const int64 key = int64(tile) * BLOCK_N + threadIdx.x * CHUNK_KEYS;
        if (threadIdx.x >= CHUNKS) return;
        if (key >= keys) {
            load_scales(tile, false, 0, 0);
            return;
        }
        const int64 page = ld_global(block_table.data + int64(batch) * columns + key / page_size);
        const int64 within = key % page_size;
        int64* const there = starts + (slot * CHUNKS + threadIdx.x) * 2;
        st_shared(there, page * k.stride_b + within * k.stride_n);
#if !LATENT
        st_shared(there + 1, page * v.stride_b + within * v.stride_n);
#endif
        load_scales(tile, true, page, within);
    };
    auto row_start = [&](int which, int row, int slot, int64, int64 stride_n) {
        const int64 chunk = ld_shared(starts + (slot * CHUNKS + row / CHUNK_KEYS) * 2 + which);
        return chunk + row % CHUNK_KEYS * stride_n;
    };
    const cache_t* const k_base = k.row(0, kv_head, 0);
#if !LATENT
    const cache_t* const v_base = v.row(0, kv_head, 0);
#endif
#else
    auto find_pages = [=](int tile, int) {
        const int64 key = int64(tile) * BLOCK_N + threadIdx.x * CHUNK_KEYS;
        if (SCALE_BLOCKS && threadIdx.x < CHUNKS) load_scales(tile, key < keys, batch, key);
    };
    auto row_start = [](int, int row, int, int64 key0, int64 stride_n) {
        return (key0 + row) * stride_n;
    };
    const cache_t* const k_base = k.row(batch, kv_head, 0);
#if !LATENT
    const cache_t* const v_base = v.row(batch, kv_head, 0);
#endif
#endif
    auto k_tile = [&](int stage) { return tile_at<KTile>(shared + K_AT + stage * KTile::BYTES); };
    auto v_tile = [&](int stage) { return tile_at<KTile>(shared + V_AT + stage * KTile::BYTES); };
#if FP8
    constexpr int RAW_CHUNKS = HEAD_DIM / 16, RAW = (BLOCK_N * RAW_CHUNKS + THREADS - 1) / THREADS;
    // Chunk `at` of a tile: 16 values of a row, zeros where there are none.
    auto load_chunk = [&](int which, const cache_t* base, int64 stride_n, int tile, int slot,
                          int at) {
        const int row = at / RAW_CHUNKS, c = at % RAW_CHUNKS;
        const int64 key0 = int64(tile) * BLOCK_N;
        Vec16 values{};
        if (row < BLOCK_N && key0 + row < keys && c * 16 < head_dim)
            values = ld_global(reinterpret_cast<const Vec16*>(
                base + row_start(which, row, slot, key0, stride_n) + c * 16));
        return values;
    };
    auto store_chunk = [&](KTile tile, int at, const Vec16& values) {
        const int row = at / RAW_CHUNKS, c = at % RAW_CHUNKS;
        if (row >= BLOCK_N) return;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            st_shared(reinterpret_cast<Vec16*>(tile.chunk(row, 2 * c + half)),
                      eight_e4m3<io_t>(values, half));
    };
    Vec16 raw[LATENT ? 1 : 2][AHEAD ? RAW : 1];  // a thread's part of the next tiles
    auto load_raw = [&](int which, const cache_t* base, int64 stride_n, int tile, int slot) {
#pragma unroll
        for (int x = 0; x < RAW; ++x)
            raw[which][x] =
                load_chunk(which, base, stride_n, tile, slot, x * THREADS + threadIdx.x);
    };
    auto store_raw = [&](int which, KTile tile) {
#pragma unroll
        for (int x = 0; x < RAW; ++x) store_chunk(tile, x * THREADS + threadIdx.x, raw[which][x]);
    };
    auto copy_raw = [&](int which, const cache_t* base, int64 stride_n, int tile, int slot,
                        KTile to) {
#pragma unroll 2
        for (int x = 0; x < RAW; ++x) {
            const int at = x * THREADS + threadIdx.x;
            store_chunk(to, at, load_chunk(which, base, stride_n, tile, slot, at));
        }
    };
    auto load_kv = [&](int tile, int, int slot) {
        load_raw(0, k_base, k.stride_n, tile, slot);
#if !LATENT
        load_raw(1, v_base, v.stride_n, tile, slot);
#endif
    };
#else
    auto load_rows = [&](int which, KTile target, const cache_t* base, int64 stride_n, int tile,
                         int slot) {
        const int64 key0 = int64(tile) * BLOCK_N;
#pragma unroll 2
        for (int at = threadIdx.x; at < BLOCK_N * KTile::CHUNKS; at += THREADS) {
            const int row = at / KTile::CHUNKS, c = at % KTile::CHUNKS;
            const bool valid = key0 + row < keys && c * KTile::VEC < head_dim;
            const io_t* from = base;
            if (valid) from += row_start(which, row, slot, key0, stride_n) + c * KTile::VEC;
            cp_async_16(target.chunk(row, c), from, valid);
        }
    };
    auto load_kv = [&](int tile, int stage, int slot) {
        load_rows(0, k_tile(stage), k_base, k.stride_n, tile, slot);
#if !LATENT
        load_rows(1, v_tile(stage), v_base, v.stride_n, tile, slot);
#endif
        cp_async_commit();
    };
#endif

    const QTile q_tile = tile_at<QTile>(shared);
    if (span.first < span.end) {
#pragma unroll 1
        for (int at = threadIdx.x; at < BLOCK_M * QTile::CHUNKS; at += THREADS) {
            const int r = at / QTile::CHUNKS, c = at % QTile::CHUNKS;
            const bool valid = r < rows && c * QTile::VEC < head_dim;
            const io_t* from = q.data;
            if (valid) from = q.row(batch, head_of(r), query_of(r)) + c * QTile::VEC;
            cp_async_16(q_tile.chunk(r, c), from, valid);
        }
        cp_async_commit();
        find_pages(span.first, 0);
        if (span.first + 1 < span.end) find_pages(span.first + 1, 1);
#if PAGED
        block_sync();
#endif
        if constexpr (!FP8 || AHEAD) load_kv(span.first, 0, 0);
    }

    // ---- the loop over key tiles ----------------------------------------------------------------
    const float log2_scale = scale * LOG2E * key_unit;
    int visible[2];  // keys, from the first, that this thread's two rows may see
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        visible[half] = keys;
        if constexpr (CAUSAL)
            visible[half] += query_of(warp_row + lane_id() / 4 + 8 * half) + 1 - seqlen_q;
    }
    float acc[1][O_TILES][4];
    clear(acc);
    Softmax state{{neg_infinity(), neg_infinity()}, {0.0f, 0.0f}};
#if SCALE_BLOCKS
    state.unit[0][0] = state.unit[0][1] = 0.0f;
#endif
#if DTYPE != 2
    uint32 q_fragment[1][HEAD_DIM / 16][4];
#endif

    int stage = 0, slot = 0;
    for (int j = span.first; j < span.end; ++j, stage ^= STAGES - 1, slot ^= 1) {
#if !FP8
        cp_async_wait<0>();
#endif
        block_sync();  // every warp is done with the tile before; this one is here, unless FP8
#if FP8
        if constexpr (AHEAD) {
            store_raw(0, k_tile(0));
#if !LATENT
            store_raw(1, v_tile(0));
#endif
        } else {
            copy_raw(0, k_base, k.stride_n, j, slot, k_tile(0));
#if !LATENT
            copy_raw(1, v_base, v.stride_n, j, slot, v_tile(0));
#endif
            if constexpr (PAGED) block_sync();  // before find_pages writes what was read here
        }
#endif
        if constexpr (!FP8 || AHEAD) {
            if (j + 1 < span.end) load_kv(j + 1, stage ^ 1, slot ^ 1);
        }
        if (j + 2 < span.end) find_pages(j + 2, slot);
#if FP8
        cp_async_wait<0>();  // q
        block_sync();
#endif
#if DTYPE != 2
        if constexpr (Q_IN_REGISTERS) {
            if (j == span.first)
#pragma unroll
                for (int s = 0; s < HEAD_DIM / 16; ++s)
                    load_a(q_fragment[0][s], Rows{q_tile.from_row(warp_row)}, 0, s);
        }
#endif
        const int64 key0 = int64(j) * BLOCK_N + warp_key;
        if (key0 >= keys) continue;  // nothing for this warp in a ragged tile
        const KTile own_keys = k_tile(stage).from_row(warp_key);
        const KTile own_values = (LATENT ? k_tile(stage) : v_tile(stage)).from_row(warp_key);
        float score[1][S_TILES][4];
        clear(score);
#if DTYPE != 2
        if constexpr (Q_IN_REGISTERS)
            gemm<HEAD_DIM>(score, Registers{q_fragment}, KMajor{own_keys});
        else
#endif
            gemm<HEAD_DIM>(score, Rows{q_tile.from_row(warp_row)}, KMajor{own_keys});
#if SCALE_BLOCKS
        const float* const scales = scales_of(j) + warp_key / CHUNK_KEYS;
        scale_scores(score, scales, log2_scale);
#else
        multiply(score, log2_scale);
#endif
        if (key0 + WARP_KEYS > keys - (CAUSAL ? seqlen_q - 1 : 0)) {
#pragma unroll
            for (int n = 0; n < S_TILES; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (key0 + 8 * n + lane_id() % 4 * 2 + e % 2 >= visible[e / 2])
                        score[0][n][e] = neg_infinity();
        }
        softmax_step(score, acc, state);
#if SCALE_BLOCKS
        scale_weights(score, acc, state.unit, scales + CHUNKS);
#endif
#if DTYPE != 2
        uint32 p_fragment[1][S_TILES / 2][4];
        round_to_operand(p_fragment, score);
        gemm<WARP_KEYS>(acc, Registers{p_fragment}, NMajor{own_values, warp_column});
#else
        const PTile p_tile = tile_at<PTile>(shared + P_AT + warp_id() * PTile::BYTES);
        store_accumulator(p_tile, 0, score);
        warp_sync();
        gemm<WARP_KEYS>(acc, Rows{p_tile}, NMajor{own_values, 0});
        warp_sync();
#endif
    }

    // ---- the warps of a row together, normalised ------------------------------------------------
    block_sync();  // K and V are not needed any more
    float* const stats = reinterpret_cast<float*>(shared + STATS_AT);
#if SCALE_BLOCKS
    multiply_rows(acc, state.unit);
#endif
    store_accumulator(tile_at<Sums>(shared + K_AT + warp_id() * Sums::BYTES), 0, acc);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = state.sum[half];
        sum += shfl_xor(sum, 1);
        sum += shfl_xor(sum, 2);
        const int r = warp_id() * 16 + lane_id() / 4 + 8 * half;
        if (lane_id() % 4 == 0)
            st_shared(reinterpret_cast<Vec<float, 2>*>(stats + 2 * r),
                      Vec<float, 2>{{state.max[half], sum}});
    }
    block_sync();
    // Maximum, sum and each warp's weight of row r.
    struct Row {
        float max, sum, weight[WARPS_N];
    };
    auto combined = [&](int r) {
        Row row;
        Vec<float, 2> part[WARPS_N];
        row.max = neg_infinity();
#pragma unroll
        for (int w = 0; w < WARPS_N; ++w) {
            const int at = (w * ROW_WARPS + r / 16) * 16 + r % 16;
            part[w] = ld_shared(reinterpret_cast<const Vec<float, 2>*>(stats + 2 * at));
            row.max = fmaxf(row.max, part[w][0]);
        }
        const float safe_max = row.max == neg_infinity() ? 0.0f : row.max;
        row.sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS_N; ++w) {
            row.weight[w] = exp2_approx(part[w][0] - safe_max);
            row.sum += row.weight[w] * part[w][1];
        }
        return row;
    };
    constexpr int VEC = 16 / int(sizeof(out_t)), PIECES = VALUE_DIM / VEC;
#pragma unroll 1
    for (int at = threadIdx.x; at < rows * PIECES; at += THREADS) {
        const int r = at / PIECES, c = at % PIECES;
        if (c * VEC >= value_dim) continue;
        const int owner = COLUMN_WARPS == 1 ? 0 : c * VEC / O_COLUMNS;  // of these columns
        const int first = c * VEC - owner * O_COLUMNS;                  // in its sums
        const Row row = combined(r);
        // A sum of 0 means that nothing was seen; a NaN must stay one.
        const float inverse = row.sum == 0.0f ? 0.0f : value_unit / row.sum;
        float value[VEC];
#pragma unroll
        for (int x = 0; x < VEC; ++x) value[x] = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS_N; ++w) {
            const int warp = (owner * WARPS_N + w) * ROW_WARPS + r / 16;
            const Sums sums = tile_at<Sums>(shared + K_AT + warp * Sums::BYTES);
#pragma unroll
            for (int x = 0; x < VEC; x += 4) {
                const auto four = ld_shared(reinterpret_cast<const Vec<float, 4>*>(
                    sums.chunk(r % 16, (first + x) / 4)));
#pragma unroll
                for (int y = 0; y < 4; ++y)
                    value[x + y] = fmaf(row.weight[w], four[y], value[x + y]);
            }
        }
        Vec<out_t, VEC> rounded;
#pragma unroll
        for (int x = 0; x < VEC; ++x) rounded[x] = from_float<out_t>(value[x] * inverse);
        st_global(reinterpret_cast<Vec<out_t, VEC>*>(out_row(r) + c * VEC), rounded);
    }
    for (int r = threadIdx.x; r < rows; r += THREADS) {
        const Row row = combined(r);
        st_global(lse_at(r), row.sum == 0.0f ? neg_infinity()
                                             : LN2 * (row.max + log2_approx(row.sum)));
    }
}
