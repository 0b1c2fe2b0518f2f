// FlashAttention forward on Hopper: O = softmax(scale Q K^T) V with TMA, wgmma and warpgroups that
// do different work.
//
// Paper: FlashAttention-3 (Shah et al. 2024), Algorithm 1 (producer and consumers), Algorithm 2 (the
// scores of the next tile are multiplied while the softmax of this one runs).
//
// Loop order: one thread block per (batch, head, query tile i). Warpgroup 0 is the producer: one of
// its threads keeps a ring of STAGES K and V tiles filled by TMA. Each of the CONSUMERS other
// warpgroups owns 64 rows of Q and walks the key tiles from the last to the first, so that the
// masked ones, which cost more, come while the ring fills (SAWTOOTH: from the first to the last in
// every second wave of blocks, for the same bytes). P never leaves registers: the layout of
// the accumulator of Q K^T is that of the A operand of P V.
//
// Reads and writes, in bytes, e = 2, rows without padding (analysis/sums/flash.py, as the sm_80 form):
//   q     read   rows_i D e    once per query tile that visits a key tile
//   k, v  read   rows_j D e    each, per visited (i, j)
//   out   write  Nq D e        per head
//   lse   write  Nq 4          per head; natural logarithm, -inf for a row that sees no key
//   ALIBI  alibi_slopes  read  4  once per query tile that visits a key tile
//
// WINDOW: the producer and the consumers walk the same list of key tiles (window.cuh), sinks last;
// what lies outside is never loaded. All warpgroups of a block walk all of it, so that turns stay
// balanced.
//
// OPTIMISTIC softmax (bf16, whose exponents reach as far as fp32's): the maximum is looked for in the
// masked tiles and the first one without a mask, and stays the reference afterwards. exp(s - m) / sum
// is softmax for any m; what a stale m can do is overflow. So a tile whose sums have grown beyond
// 2^40 or whose output is not finite is flagged, and a second launch, the exact kernel, does flagged
// tiles again. It has as many blocks as the device has multiprocessors: each reads the flags of every
// gridDim.x-th tile, at most REPAIR_TILES, and does those that are set one after another.
//
//   flags write 16 CONSUMERS per query tile (a word a warp); the repair reads them, and moves what
//   the exact kernel moves for the flagged tiles
//
// Limits: fp16 and bf16; head_dim == HEAD_DIM, 64, 128 or 256; no key mask, dropout, block mask or bias
// (the sm_80 form has them); strides are multiples of 16 bytes.

// ---- constants that shape the code (-D) ----------------------------------------------------------
// DTYPE      0 fp16, 1 bf16
// HEAD_DIM   64, 128 or 256
// BLOCK_N    rows of K and V a tile, a multiple of 16
// CONSUMERS  2 or 3 warpgroups of 64 query rows
// CAUSAL     1: query r sees key c when c <= r + seqlen_k - seqlen_q
// STAGES     K and V tiles in flight
// SHARED_BYTES  dynamic shared memory of the launch, kernels/hopper_forms.py
// PINGPONG   1: warpgroups issue their products in turn. Default 0.
// OPTIMISTIC 0: exact; 1: with the stale reference, flagging; 2: exact, flagged tiles only. Default 0.
// SAWTOOTH   1: every second wave of blocks walks the keys upwards, and finds in L2 what the wave
//            before it read last. Default 0; not with OPTIMISTIC, which looks at the masked tiles first.
// WINDOW     1: a query sees few keys around its diagonal, and sinks; window.cuh. Default 0
// SOFTCAP, ALIBI   scores.cuh. Default 0; like WINDOW not with OPTIMISTIC

#ifndef SAWTOOTH
#define SAWTOOTH 0
#endif
#if SAWTOOTH && OPTIMISTIC
#error the stale reference is taken from the tiles that a walk upwards meets last
#endif
#ifndef OPTIMISTIC
#define OPTIMISTIC 0
#endif
#ifndef PINGPONG
#define PINGPONG 0
#endif

#include "forward_sm90.cuh"

// Dynamic shared memory, in this order, from a 1024-byte boundary.
constexpr int K_AT = CONSUMERS * Q_BYTES;
constexpr int V_AT = K_AT + STAGES * KV_BYTES;
constexpr int BARRIERS_AT = V_AT + STAGES * KV_BYTES;
struct Barriers {
    Mbarrier q_full, q_empty;
    Mbarrier k_full[STAGES], k_empty[STAGES];
    Mbarrier v_full[STAGES], v_empty[STAGES];
};

constexpr int REPAIR_TILES = 256;  // of a block
constexpr int FLAGGED_AT = BARRIERS_AT + static_cast<int>(sizeof(Barriers));  // a word for each
constexpr int SLOPE_AT = FLAGGED_AT;
static_assert(FLAGGED_AT + (OPTIMISTIC == 2 ? 4 * REPAIR_TILES : 0) + (ALIBI ? 4 : 0) + 1023 ==
                  SHARED_BYTES,
              "hopper_forms.py counts others");
static_assert(REPAIR_TILES <= THREADS, "a thread reads the flags of one tile");

#if OPTIMISTIC == 1
#define ENTRY flash_forward_sm90_optimistic
#elif OPTIMISTIC == 2
#define ENTRY flash_forward_sm90_repair
#else
#define ENTRY flash_forward_sm90
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
ENTRY(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                   const __grid_constant__ TensorMap v_map,
                   const __grid_constant__ TensorMap out_map, Tensor3<float> lse, int batch,
                   int heads, int group, int seqlen_q, int seqlen_k, float scale,
                   int heads_per_group
#if SOFTCAP
                   , float softcap, float rate  // the cap, and scale / softcap
#endif
#if ALIBI
                   , Tensor3<const float> alibi_slopes  // (B, H, 1)
#endif
#if OPTIMISTIC
                   , Tensor1<int> flags  // a word a consumer warp, in the order of the blocks
#endif
#if SAWTOOTH
                   , int wave  // blocks that run at a time
#endif
#if WINDOW
                   , int window_left, int window_right, int sinks
#endif
) {
    unsigned char* const shared = shared_memory_1024();
    Barriers* const barriers = reinterpret_cast<Barriers*>(shared + BARRIERS_AT);
    const int query_tiles = ceil_div(seqlen_q, BLOCK_M);
    const int warpgroup = shfl(static_cast<int>(threadIdx.x) / WARPGROUP, 0);
    auto coord_of_tile = [&](int number) {
        return tile_coord(number, query_tiles, heads, batch, heads_per_group);
    };
#if WINDOW
    const Window window{window_left, window_right, sinks};
#else
    const Window window{};
#endif
    // Key tile of round `it` of a walk.
#if SAWTOOTH
    const bool up = blockIdx.x / wave % 2;
    auto key_tile = [=](int it, const KeyRange& range) {
        return range.list.at(up ? it : range.tiles - 1 - it);
    };
#else
    auto key_tile = [](int it, const KeyRange& range) {
        return range.list.at(range.tiles - 1 - it);
    };
#endif

#if OPTIMISTIC == 2
    // This block looks after tiles blockIdx.x, blockIdx.x + gridDim.x, …: a thread reads the flags of
    // one. A block_sync follows.
    const int block = blockIdx.x, blocks = gridDim.x;
    const int tiles_here = ceil_div(query_tiles * heads * batch - block, blocks);
    int* const flagged = reinterpret_cast<int*>(shared + FLAGGED_AT);
    if (static_cast<int>(threadIdx.x) < tiles_here) {
        const int number = block + static_cast<int>(threadIdx.x) * blocks;
        const int* const words = flags.data + static_cast<int64>(number) * 4 * CONSUMERS;
        int any = 0;
#pragma unroll
        for (int w = 0; w < 4 * CONSUMERS; ++w) any |= ld_global(words + w);
        st_shared(flagged + threadIdx.x, any);
    }
    auto to_do = [&](int i) { return ld_shared(flagged + i) != 0; };
    auto tile_number = [&](int i) { return block + i * blocks; };
#else
    constexpr int tiles_here = 1;
    auto to_do = [&](int) { return true; };
    auto tile_number = [&](int) { return static_cast<int>(blockIdx.x); };

    const TileCoord my_tile = coord_of_tile(blockIdx.x);
    const int my_row0 = my_tile.tile * BLOCK_M;
    if (KeyRange(my_tile.tile, seqlen_q, seqlen_k, window).tiles == 0) {  // these rows see nothing
        for (int x = threadIdx.x; x < CONSUMERS * Q_BYTES / 16; x += THREADS)
            st_shared(reinterpret_cast<Vec16*>(shared) + x, Vec16{});
        for (int r = threadIdx.x; r < min_int(BLOCK_M, seqlen_q - my_row0); r += THREADS)
            st_global(lse.at(my_tile.batch, my_tile.head, my_row0 + r), neg_infinity());
#if OPTIMISTIC == 1
        if (threadIdx.x < 4 * CONSUMERS)
            st_global(flags.data + static_cast<int64>(blockIdx.x) * 4 * CONSUMERS + threadIdx.x, 0);
#endif
        tma_fence();
        block_sync();
        if (threadIdx.x == 0) {
            for (int w = 0; w < CONSUMERS; ++w)
                tma_store(&out_map, shared + w * Q_BYTES, 0, my_row0 + 64 * w, 0, my_tile.head,
                          my_tile.batch);
            bulk_commit();
            bulk_wait<0>();
        }
        return;
    }
#endif

    if (threadIdx.x == 0) {
        mbarrier_init(&barriers->q_full, 1);
        mbarrier_init(&barriers->q_empty, CONSUMERS);
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(&barriers->k_full[s], 1);
            mbarrier_init(&barriers->v_full[s], 1);
            // One arrival a warp: a warp's wait for its products says nothing of the others.
            mbarrier_init(&barriers->k_empty[s], 4 * CONSUMERS);
            mbarrier_init(&barriers->v_empty[s], 4 * CONSUMERS);
        }
        mbarrier_init_done();
    }
    block_sync();

    if (warpgroup == 0) {
        // ---- producer ----------------------------------------------------------------------------
        registers_shrink<CONSUMERS == 2 ? 24 : 32>();
        if (threadIdx.x != 0) return;
        int earlier = 0, tile_iter = 0;  // key tiles of earlier query tiles, and these
        for (int i = 0; i < tiles_here; ++i) {
            if (!to_do(i)) continue;
            const TileCoord coord = coord_of_tile(tile_number(i));
            const int row0 = coord.tile * BLOCK_M, kv_head = coord.head / group;
            const KeyRange range(coord.tile, seqlen_q, seqlen_k, window);
            const int end = range.tiles;
            if (OPTIMISTIC == 2) mbarrier_wait(&barriers->q_empty, tile_iter & 1 ^ 1);
#if ALIBI
            // Before the arrival on q_full, which it goes out with.
            st_shared(reinterpret_cast<float*>(shared + SLOPE_AT),
                      ld_global(alibi_slopes.at(coord.batch, coord.head, 0)));
#endif
            mbarrier_expect(&barriers->q_full, CONSUMERS * Q_BYTES);
            for (int w = 0; w < CONSUMERS; ++w)
                tma_load(shared + w * Q_BYTES, &q_map, &barriers->q_full, 0, row0 + 64 * w, 0,
                         coord.head, coord.batch);
            auto load_k = [&](int it) {
                const PipelineState slot(earlier + it);
                mbarrier_wait(&barriers->k_empty[slot.stage], slot.phase ^ 1);
                mbarrier_expect(&barriers->k_full[slot.stage], KV_BYTES);
                tma_load(shared + K_AT + slot.stage * KV_BYTES, &k_map,
                         &barriers->k_full[slot.stage], 0, key_tile(it, range) * BLOCK_N, 0, kv_head,
                         coord.batch);
            };
            auto load_v = [&](int it) {
                const PipelineState slot(earlier + it);
                mbarrier_wait(&barriers->v_empty[slot.stage], slot.phase ^ 1);
                mbarrier_expect(&barriers->v_full[slot.stage], KV_BYTES);
                tma_load(shared + V_AT + slot.stage * KV_BYTES, &v_map,
                         &barriers->v_full[slot.stage], 0, key_tile(it, range) * BLOCK_N, 0, kv_head,
                         coord.batch);
            };
            // In the order of use: the scores of the next tile come before P V of this one.
            load_k(0);
            for (int it = 1; it < end; ++it) {
                load_k(it);
                load_v(it - 1);
            }
            load_v(end - 1);
            earlier += end;
            ++tile_iter;
        }
        return;
    }

    // ---- consumers -------------------------------------------------------------------------------
    registers_grow<CONSUMERS == 2 ? 240 : 160>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    unsigned char* const q = shared + (warpgroup - 1) * Q_BYTES;
    // Scores that are changed come with their scale.
    const float log2_scale = CHANGED ? LOG2E : scale * LOG2E;
#if SOFTCAP
    const ScoreChange change{scale, seqlen_k - seqlen_q, softcap, rate};
#else
    const ScoreChange change{scale, seqlen_k - seqlen_q};
#endif

    auto k_of = [&](const PipelineState& s) { return shared + K_AT + s.stage * KV_BYTES; };
    auto v_of = [&](const PipelineState& s) { return shared + V_AT + s.stage * KV_BYTES; };
    auto release = [&](Mbarrier* empty) {
        if (lane == 0) mbarrier_arrive(empty);
    };

    int earlier = 0, tile_iter = 0;  // key tiles of earlier query tiles, and these
    for (int i = 0; i < tiles_here; ++i) {
        if (!to_do(i)) continue;
        const TileCoord coord = coord_of_tile(tile_number(i));
        const int row0 = coord.tile * BLOCK_M;
        const int row = row0 + (warpgroup - 1) * 64 + 16 * warp + lane / 4;
        const KeyRange range(coord.tile, seqlen_q, seqlen_k, window);
        const int end = range.tiles;
        float out_acc[OUTPUTS];
#pragma unroll
        for (int n = 0; n < OUTPUTS; ++n) out_acc[n] = 0.0f;
        Softmax state;
        float rescale[2];

        mbarrier_wait(&barriers->q_full, tile_iter & 1);
        const float slope = slope_of(shared + SLOPE_AT);

        auto change_and_mask = [&](float(&score)[SCORES], int it) {
            if constexpr (CHANGED)
                change_scores(score, change, slope, row,
                              key_tile(it, range) * BLOCK_N + lane % 4 * 2);
#if WINDOW
            if (needs_mask(window, row0 + (warpgroup - 1) * 64, key_tile(it, range) * BLOCK_N,
                           seqlen_q, seqlen_k))
#else
            if (SAWTOOTH ? key_tile(it, range) >= end - range.masked : it < range.masked)
#endif
                mask_scores(score, row, key_tile(it, range) * BLOCK_N + lane % 4 * 2, seqlen_q,
                            seqlen_k, window);
        };

        // For the K of a round at the end of the round before, between its softmax and its wait for
        // P V. ptxas would move the latter above the whole softmax, which P V is to run under; it
        // moves nothing over the loop of a barrier's wait.
        auto wait_for_k = [&](int it) {
            if (it >= end) return;
            const PipelineState slot(earlier + it);
            mbarrier_wait(&barriers->k_full[slot.stage], slot.phase);
        };
        uint32 p[BLOCK_N / 16][4];
        {
            float score[SCORES];
            const PipelineState slot(earlier);
            mbarrier_wait(&barriers->k_full[slot.stage], slot.phase);
            wgmma_fence();
            issue_scores(score, q, k_of(slot));
            wgmma_wait<0>();
            keep(score);
            release(&barriers->k_empty[slot.stage]);
            change_and_mask(score, 0);
            softmax_step(score, state, rescale, log2_scale);
            round_weights(p, score);
            wait_for_k(1);
        }
        warp_scheduler_open(warpgroup);
        for (int it = 1; it < end; ++it) {
            float score[SCORES];
            const PipelineState slot(earlier + it), before(earlier + it - 1);
            warp_scheduler_wait(warpgroup);
            wgmma_fence();
            issue_scores(score, q, k_of(slot));
            if constexpr (RESCALE_EARLY) multiply_rows(out_acc, rescale);
            mbarrier_wait(&barriers->v_full[before.stage], before.phase);
            wgmma_fence();  // without it ptxas puts one into a branch, and may serialise
            issue_output(out_acc, p, v_of(before));
            warp_scheduler_arrive(warpgroup);
            wgmma_wait<1>();
            keep(score);
            release(&barriers->k_empty[slot.stage]);
            change_and_mask(score, it);
            const bool looks = !OPTIMISTIC_NOW || it <= range.masked;  // for the maximum
            bool moved = false;
            if (looks) {
                moved = softmax_step(score, state, rescale, log2_scale);
            } else {
                optimistic_step(score, state, log2_scale);
                rescale[0] = rescale[1] = 1.0f;
            }
            wait_for_k(it + 1);
            wgmma_wait<0>();
            keep(out_acc);
            release(&barriers->v_empty[before.stage]);
            if (moved && !RESCALE_EARLY) multiply_rows(out_acc, rescale);
            round_weights(p, score);
        }
        {
            const PipelineState slot(earlier + end - 1);
            if constexpr (RESCALE_EARLY) multiply_rows(out_acc, rescale);
            mbarrier_wait(&barriers->v_full[slot.stage], slot.phase);
            wgmma_fence();
            issue_output(out_acc, p, v_of(slot));
            wgmma_wait<0>();
            keep(out_acc);
            if (OPTIMISTIC == 2) release(&barriers->v_empty[slot.stage]);
        }

#if OPTIMISTIC == 1
        const int overflowed = has_overflowed(out_acc, state);
        if (lane == 0)
            st_global(flags.data + (static_cast<int64>(blockIdx.x) * CONSUMERS + warpgroup - 1) * 4 +
                          warp,
                      overflowed);
#endif
        normalise(out_acc, state, lse, coord, row, seqlen_q, CHANGED ? 1.0f : scale);
        // Through this warpgroup's part of Q, which nobody reads any more.
        outputs_to_shared(q, out_acc);
        tma_fence();
        named_sync(warpgroup, WARPGROUP);
        if (threadIdx.x % WARPGROUP == 0) {
            tma_store(&out_map, q, 0, row0 + 64 * (warpgroup - 1), 0, coord.head, coord.batch);
            bulk_commit();
            bulk_wait<0>();
            if (OPTIMISTIC == 2) mbarrier_arrive(&barriers->q_empty);
        }
        warp_sync();  // a named barrier wants the whole warp at once
        warp_scheduler_close(warpgroup);
        earlier += end;
        ++tile_iter;
    }
}
