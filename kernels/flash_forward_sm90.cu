// FlashAttention forward on Hopper: O = softmax(scale Q K^T) V with TMA, wgmma and warpgroups that
// do different work.
//
// Paper: FlashAttention-3 (Shah et al. 2024), Algorithm 1 (producer and consumers), Algorithm 2
// (OVERLAP: the scores of the next tile are multiplied while the softmax of this one runs).
//
// Loop order: one thread block per (batch, head, query tile i). Warpgroup 0 is the producer: one of
// its threads keeps a ring of STAGES K and V tiles filled by TMA. Each of the CONSUMERS other
// warpgroups owns 64 rows of Q and walks the key tiles from the last to the first, so that the
// masked ones, which cost more, come while the ring fills. P never leaves registers: the layout of
// the accumulator of Q K^T is that of the A operand of P V.
//
// Reads and writes, in bytes, e = 2, rows without padding (analysis/sums/flash.py, as the sm_80 form):
//   q     read   rows_i D e    once per query tile that visits a key tile
//   k, v  read   rows_j D e    each, per visited (i, j)
//   out   write  Nq D e        per head
//   lse   write  Nq 4          per head; natural logarithm, -inf for a row that sees no key
//
// OPTIMISTIC softmax (bf16, whose exponents reach as far as fp32's): the maximum is looked for in the
// masked tiles and the first one without a mask, and stays the reference afterwards. exp(s - m) / sum
// is softmax for any m; what a stale m can do is overflow. So a tile whose sums have grown beyond
// 2^40 or whose output is not finite is flagged, and a second launch, the exact kernel, does flagged
// tiles again. That one leaves the others at once.
//
//   flags write 16 CONSUMERS per query tile (a word a warp); the repair reads them, and moves what
//   the exact kernel moves for the flagged tiles
//
// Limits: fp16 and bf16; head_dim == HEAD_DIM, 64, 128 or 256; no key mask, dropout or block mask (the
// sm_80 form has them); strides are multiples of 16 bytes.

// ---- constants that shape the code (-D) ----------------------------------------------------------
// DTYPE      0 fp16, 1 bf16
// HEAD_DIM   64, 128 or, with OVERLAP, 256
// BLOCK_N    rows of K and V a tile, a multiple of 16
// CONSUMERS  2 or 3 warpgroups of 64 query rows
// CAUSAL     1: query r sees key c when c <= r + seqlen_k - seqlen_q
// OVERLAP    1: multiply the next scores during the softmax, for BLOCK_N / 2 more registers
// STAGES     K and V tiles in flight
// PINGPONG   1: with OVERLAP, warpgroups issue their products in turn. Default 0.
// OPTIMISTIC 0: exact; 1: with the stale reference, flagging; 2: exact, flagged tiles only. Default 0.

#ifndef OPTIMISTIC
#define OPTIMISTIC 0
#endif
#ifndef PINGPONG
#define PINGPONG 0
#endif

#include "forward_sm90.cuh"

static_assert(OVERLAP || !RESCALE_EARLY, "the loop without OVERLAP rescales late");
static_assert(OVERLAP || !PINGPONG, "turns are taken in the loop with OVERLAP");

// Dynamic shared memory, in this order, from a 1024-byte boundary.
constexpr int K_AT = CONSUMERS * Q_BYTES;
constexpr int V_AT = K_AT + STAGES * KV_BYTES;
constexpr int BARRIERS_AT = V_AT + STAGES * KV_BYTES;

struct Barriers {
    Mbarrier q_full;
    Mbarrier k_full[STAGES], k_empty[STAGES];
    Mbarrier v_full[STAGES], v_empty[STAGES];
};

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
#if OPTIMISTIC
                   , Tensor1<int> flags  // a word a consumer warp, in the order of the blocks
#endif
) {
    unsigned char* const shared = shared_memory_1024();
#if OPTIMISTIC
    int* const my_flags = flags.data + static_cast<int64>(blockIdx.x) * 4 * CONSUMERS;
#endif
#if OPTIMISTIC == 2
    if (threadIdx.x == 0) {
        int any = 0;
        for (int w = 0; w < 4 * CONSUMERS; ++w) any |= ld_global(my_flags + w);
        st_shared(reinterpret_cast<int*>(shared), any);
    }
    block_sync();
    if (ld_shared(reinterpret_cast<const int*>(shared)) == 0) return;
    block_sync();
#endif
    Barriers* const barriers = reinterpret_cast<Barriers*>(shared + BARRIERS_AT);
    const Place place = place_of(blockIdx.x, ceil_div(seqlen_q, BLOCK_M), heads, batch,
                                 heads_per_group);
    const int row0 = place.tile * BLOCK_M;
    const Walk walk(place.tile, seqlen_q, seqlen_k);
    const int end = walk.tiles;
    const int warpgroup = shfl(static_cast<int>(threadIdx.x) / WARPGROUP, 0);

    if (end == 0) {  // these rows see nothing
        for (int x = threadIdx.x; x < CONSUMERS * Q_BYTES / 16; x += THREADS)
            st_shared(reinterpret_cast<Vec16*>(shared) + x, Vec16{});
        for (int r = threadIdx.x; r < min_int(BLOCK_M, seqlen_q - row0); r += THREADS)
            st_global(lse.at(place.batch, place.head, row0 + r), neg_infinity());
#if OPTIMISTIC == 1
        if (threadIdx.x < 4 * CONSUMERS) st_global(my_flags + threadIdx.x, 0);
#endif
        tma_fence();
        block_sync();
        if (threadIdx.x == 0) {
            for (int w = 0; w < CONSUMERS; ++w)
                tma_store(&out_map, shared + w * Q_BYTES, 0, row0 + 64 * w, 0, place.head,
                          place.batch);
            bulk_commit();
            bulk_wait<0>();
        }
        return;
    }

    if (threadIdx.x == 0) {
        mbarrier_init(&barriers->q_full, 1);
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
        if (threadIdx.x == 0) {
            const int kv_head = place.head / group;
            mbarrier_expect(&barriers->q_full, CONSUMERS * Q_BYTES);
            for (int w = 0; w < CONSUMERS; ++w)
                tma_load(shared + w * Q_BYTES, &q_map, &barriers->q_full, 0, row0 + 64 * w, 0,
                         place.head, place.batch);
            for (int it = 0; it < end; ++it) {
                const Slot slot(it);
                const int key0 = (end - 1 - it) * BLOCK_N;
                mbarrier_wait(&barriers->k_empty[slot.stage], slot.parity ^ 1);
                mbarrier_expect(&barriers->k_full[slot.stage], KV_BYTES);
                tma_load(shared + K_AT + slot.stage * KV_BYTES, &k_map,
                         &barriers->k_full[slot.stage], 0, key0, 0, kv_head, place.batch);
                mbarrier_wait(&barriers->v_empty[slot.stage], slot.parity ^ 1);
                mbarrier_expect(&barriers->v_full[slot.stage], KV_BYTES);
                tma_load(shared + V_AT + slot.stage * KV_BYTES, &v_map,
                         &barriers->v_full[slot.stage], 0, key0, 0, kv_head, place.batch);
            }
        }
        return;
    }

    // ---- consumers -------------------------------------------------------------------------------
    registers_grow<CONSUMERS == 2 ? 240 : 160>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    unsigned char* const q = shared + (warpgroup - 1) * Q_BYTES;
    const int warp_row = row0 + (warpgroup - 1) * 64 + 16 * warp;
    const int row = warp_row + lane / 4;
    const float log2_scale = scale * LOG2E;

    auto k_of = [&](const Slot& s) { return shared + K_AT + s.stage * KV_BYTES; };
    auto v_of = [&](const Slot& s) { return shared + V_AT + s.stage * KV_BYTES; };
    auto release = [&](Mbarrier* empty) {
        if (lane == 0) mbarrier_arrive(empty);
    };

    float out_acc[OUTPUTS];
#pragma unroll
    for (int n = 0; n < OUTPUTS; ++n) out_acc[n] = 0.0f;
    Softmax state;
    float rescale[2];

    mbarrier_wait(&barriers->q_full, 0);

    auto mask = [&](float(&score)[SCORES], int it) {
        if (it < walk.masked)
            mask_scores(score, row, (end - 1 - it) * BLOCK_N + lane % 4 * 2, seqlen_q, seqlen_k);
    };

#if OVERLAP
    uint32 p[BLOCK_N / 16][4];
    {
        float score[SCORES];
        const Slot slot(0);
        mbarrier_wait(&barriers->k_full[slot.stage], slot.parity);
        wgmma_fence();
        issue_scores(score, q, k_of(slot));
        wgmma_wait<0>();
        keep(score);
        release(&barriers->k_empty[slot.stage]);
        mask(score, 0);
        softmax_step(score, state, rescale, log2_scale);
        round_weights(p, score);
    }
    open_turns(warpgroup);
    for (int it = 1; it < end; ++it) {
        float score[SCORES];
        const Slot slot(it), before(it - 1);
        mbarrier_wait(&barriers->k_full[slot.stage], slot.parity);
        begin_turn(warpgroup);
        wgmma_fence();
        issue_scores(score, q, k_of(slot));
        if constexpr (RESCALE_EARLY) multiply_rows(out_acc, rescale);
        mbarrier_wait(&barriers->v_full[before.stage], before.parity);
        if constexpr (RESCALE_EARLY) wgmma_fence();
        issue_output(out_acc, p, v_of(before));
        end_turn(warpgroup);
        wgmma_wait<1>();
        keep(score);
        release(&barriers->k_empty[slot.stage]);
        mask(score, it);
        const bool looks = !OPTIMISTIC_NOW || it <= walk.masked;  // for the maximum
        if (looks) {
            softmax_step(score, state, rescale, log2_scale);
        } else {
            optimistic_step(score, state, log2_scale);
            rescale[0] = rescale[1] = 1.0f;
        }
        wgmma_wait<0>();
        keep(out_acc);
        release(&barriers->v_empty[before.stage]);
        if (looks && !RESCALE_EARLY) multiply_rows(out_acc, rescale);
        round_weights(p, score);
    }
    {
        const Slot slot(end - 1);
        if constexpr (RESCALE_EARLY) multiply_rows(out_acc, rescale);
        mbarrier_wait(&barriers->v_full[slot.stage], slot.parity);
        wgmma_fence();
        issue_output(out_acc, p, v_of(slot));
        wgmma_wait<0>();
        keep(out_acc);
    }
#else
    for (int it = 0; it < end; ++it) {
        float score[SCORES];
        const Slot slot(it);
        mbarrier_wait(&barriers->k_full[slot.stage], slot.parity);
        wgmma_fence();
        issue_scores(score, q, k_of(slot));
        wgmma_wait<0>();
        keep(score);
        release(&barriers->k_empty[slot.stage]);
        mask(score, it);
        if (!OPTIMISTIC_NOW || it <= walk.masked) {
            softmax_step(score, state, rescale, log2_scale);
            multiply_rows(out_acc, rescale);
        } else {
            optimistic_step(score, state, log2_scale);
        }
        uint32 p[BLOCK_N / 16][4];
        round_weights(p, score);
        mbarrier_wait(&barriers->v_full[slot.stage], slot.parity);
        wgmma_fence();
        issue_output(out_acc, p, v_of(slot));
        wgmma_wait<0>();
        keep(out_acc);
        release(&barriers->v_empty[slot.stage]);
    }
#endif

#if OPTIMISTIC == 1
    const int overflowed = has_overflowed(out_acc, state);
    if (lane == 0) st_global(my_flags + 4 * (warpgroup - 1) + warp, overflowed);
#endif
    normalise(out_acc, state, lse, place, row, seqlen_q, scale);
    // Through this warpgroup's part of Q, which nobody reads any more.
    outputs_to_shared(q, out_acc);
    tma_fence();
    named_sync(warpgroup, WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0) {
        tma_store(&out_map, q, 0, row0 + 64 * (warpgroup - 1), 0, place.head, place.batch);
        bulk_commit();
        bulk_wait<0>();
    }
    close_turns(warpgroup);
}
