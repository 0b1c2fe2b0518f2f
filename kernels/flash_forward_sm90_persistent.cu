// FlashAttention forward on Hopper for short sequences: thread blocks that stay and take query
// tiles one after another, without a gap between the products of one tile and those of the next.
//
// Paper: FlashAttention-3 (Shah et al. 2024), Algorithm 2, carried across the end of a query tile.
//
// In flash_forward_sm90.cu every query tile begins with a wait for Q and K and a softmax that
// nothing covers, and ends with a product and a store that nothing covers. With few key tiles a
// query tile, that is much of the time. Here the first scores of the next tile are multiplied
// together with the last P V of this one, and its softmax and the store of this one's O run under
// the products of the other warpgroups. That takes a second Q buffer and an O buffer beside them.
//
// Loop order: as many thread blocks as the device has multiprocessors. Block b begins with query
// tile b in the order of tile_coord; its producer takes each further one from a counter in memory. A
// fixed stride would need no counter, but under a causal mask one block's tiles would all be longer
// than its neighbour's: counting key tiles, the last block would end a quarter behind the mean (16
// heads of 128, N = 1k to 4k, 16k tokens, 132 blocks). A launch of its own sets the counter to 0
// before each launch, so nothing is left over from one to the next. This kernel may start before
// that one has ended: all but the counter was there before it, and the counter is asked first when
// the block's first tile is under way.
//
// The producer stores the tile's number before it arrives on q_full, and the consumers read it before
// they arrive on q_empty: the barriers that guard Q guard the number. A number past the last tile ends the block.
//
// Each row is computed as in flash_forward_sm90.cu, operation for operation: the results are equal
// bit for bit. A query tile that sees no key takes one key tile from beyond the last row, where TMA
// brings zeros and moves nothing.
//
// Reads and writes, in bytes: those of flash_forward_sm90.cu, and
//   tile_counter  atomic  4   per query tile; write 4 before
//
// OPTIMISTIC softmax as there; its repair is that file's, which knows tiles by the same numbers.
//
// PACKED (packed_sm90.cuh): sequences of different lengths, all tokens one after another. The counter
// gives out numbers of tiles of all of them. The producer searches the table for a number's sequence
// while the products of the tile before it run, asks for the next number where there are no rows, and
// passes on what the consumers need to know. Boxes of TMA end where the sequence does, so that a tile
// loads and stores what it would if the sequence were alone, and its bits are those.
//   cu_seqlens_q  read  12  at most per step of a number's search, and 8
//   cu_seqlens_k  read  8   per number
//
// Deadlock is avoided by order: the producer brings everything in the order in which the consumers
// want it, Q, then K and the V before it in turn, and waits only for places that they gave back before
// they wanted the last thing that it brought.
//
// Limits: those of flash_forward_sm90.cu; no window, softcap or ALiBi. A block would keep the walks
// of two query tiles, each of two intervals, in the few registers that its roles leave.

// ---- constants that shape the code (-D) ----------------------------------------------------------
// DTYPE, HEAD_DIM, BLOCK_N, CONSUMERS, CAUSAL, STAGES, SHARED_BYTES, PINGPONG   as in flash_forward_sm90.cu
// OPTIMISTIC 0: exact; 1: with the stale reference, flagging. Default 0.
// PACKED     1: the arguments cu_seqlens_q, cu_seqlens_k and numbers, of a head; `batch` sequences;
//            seqlen_q and seqlen_k are the longest. Default 0; not with OPTIMISTIC.

#ifndef OPTIMISTIC
#define OPTIMISTIC 0
#endif
#ifndef PINGPONG
#define PINGPONG 0
#endif

#include "forward_sm90.cuh"
#include "packed_sm90.cuh"

#if PACKED && OPTIMISTIC
#error packed sequences go with the exact softmax
#endif

// What the producer passes on: the number of a query tile, and of packed sequences what it found.
#if PACKED
struct alignas(32) Taken {
    int number, head;
    SequenceTile at;
};
#else
struct Taken {
    int number;
};
#endif

// Dynamic shared memory, in this order, from a 1024-byte boundary.
constexpr int K_AT = 2 * CONSUMERS * Q_BYTES;
constexpr int V_AT = K_AT + STAGES * KV_BYTES;
constexpr int OUT_AT = V_AT + STAGES * KV_BYTES;
constexpr int BARRIERS_AT = OUT_AT + CONSUMERS * Q_BYTES;

struct Barriers {
    Mbarrier q_full[2], q_empty[2];
    Mbarrier k_full[STAGES], k_empty[STAGES];
    Mbarrier v_full[STAGES], v_empty[STAGES];
    Taken taken[2];  // whose Q it is
};
static_assert(BARRIERS_AT + sizeof(Barriers) + 1023 == SHARED_BYTES, "hopper_forms.py counts others");
static_assert(!WINDOW && !CHANGED, "those have a block a query tile");

// A query tile, its coordinates, and its walk over the key tiles first, first - 1, …
struct TileWork {
    TileCoord coord;  // of packed sequences `batch` is the sequence's first row: lse has rows as items
    int row0, tiles, masked, first;
    bool empty;
#if PACKED
    int seqlen_q, seqlen_k;
#endif
    __device__ __forceinline__ TileWork(const TileCoord& coord, int seqlen_q, int seqlen_k)
        : coord(coord),
          row0(coord.tile * BLOCK_M) {
        const KeyRange range(coord.tile, seqlen_q, seqlen_k, Window{});
        empty = range.tiles == 0;
        tiles = empty ? 1 : range.tiles;
        masked = empty ? 1 : range.masked;
        first = empty ? ceil_div(seqlen_k, BLOCK_N) : range.tiles - 1;
#if PACKED
        this->seqlen_q = seqlen_q, this->seqlen_k = seqlen_k;
#endif
    }
};

// Before each launch of the kernel below.
extern "C" __global__ void __launch_bounds__(32, 1)
flash_forward_sm90_clear_counter(Tensor1<int> tile_counter) {
    next_kernel_start();
    if (threadIdx.x == 0) st_global(tile_counter.data, 0);
}

#if OPTIMISTIC
#define ENTRY flash_forward_sm90_persistent_optimistic
#else
#define ENTRY flash_forward_sm90_persistent
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
ENTRY(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
      const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map,
      Tensor3<float> lse, int batch, int heads, int group, int seqlen_q, int seqlen_k, float scale,
      int heads_per_group, Tensor1<int> tile_counter
#if OPTIMISTIC
      , Tensor1<int> flags  // a word a consumer warp, in the order of the tiles
#endif
#if PACKED
      , Tensor1<const int> cu_seqlens_q, Tensor1<const int> cu_seqlens_k, int numbers
#endif
) {
    unsigned char* const shared = shared_memory_1024();
    Barriers* const barriers = reinterpret_cast<Barriers*>(shared + BARRIERS_AT);
#if PACKED
    const int all = numbers * heads;
    auto work_of = [&](const Taken& taken) {
        return TileWork({taken.at.tile, taken.head, taken.at.own0}, taken.at.own, taken.at.other);
    };
    auto queries_of = [&](const TileWork& work) { return work.seqlen_q; };
    auto keys_of = [&](const TileWork& work) { return work.seqlen_k; };
    // Where the sequence's first row and item are in a tensor map.
    auto query0_of = [&](const TileWork& work) { return seqlen_q - work.seqlen_q; };
    auto query_item_of = [&](const TileWork& work) { return work.coord.batch + work.seqlen_q; };
    auto key0_of = [&](const TileWork& work) { return seqlen_k - work.seqlen_k; };
#else
    const int query_tiles = ceil_div(seqlen_q, BLOCK_M);
    const int all = query_tiles * heads * batch;
    auto coord_of = [&](const Taken& taken) {
        return tile_coord(taken.number, query_tiles, heads, batch, heads_per_group);
    };
    auto work_of = [&](const Taken& taken) {
        return TileWork(coord_of(taken), seqlen_q, seqlen_k);
    };
    auto queries_of = [&](const TileWork&) { return seqlen_q; };
    auto keys_of = [&](const TileWork&) { return seqlen_k; };
    auto query0_of = [](const TileWork&) { return 0; };
    auto query_item_of = [](const TileWork& work) { return work.coord.batch; };
    auto key0_of = query0_of;
#endif
    const int warpgroup = shfl(static_cast<int>(threadIdx.x) / WARPGROUP, 0);

    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; ++s) {
            mbarrier_init(&barriers->q_full[s], 1);
            mbarrier_init(&barriers->q_empty[s], 4 * CONSUMERS);
        }
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
        // Coordinates and key range of a tile need more registers than the 24 of the one-tile form.
        registers_shrink<CONSUMERS == 2 ? 40 : 32>();
        if (threadIdx.x != 0) return;
        auto pass_on = [&](const Taken& taken, int buffer) {
            Taken* const to = &barriers->taken[buffer];
            st_shared(&to->number, taken.number);
#if PACKED
            st_shared(&to->head, taken.head);
            st_shared(&to->at.tile, taken.at.tile);
            st_shared(&to->at.own0, taken.at.own0);
            st_shared(&to->at.own, taken.at.own);
            st_shared(&to->at.other, taken.at.other);
#endif
        };
        int number = blockIdx.x, it = 0;  // key tiles so far, over all query tiles
        // Of the key tile whose V comes next.
        int v_key0 = 0, v_head = 0, v_batch = 0;
        auto load_v = [&] {
            const PipelineState slot(it - 1);
            mbarrier_wait(&barriers->v_empty[slot.stage], slot.phase ^ 1);
            mbarrier_expect(&barriers->v_full[slot.stage], KV_BYTES);
            tma_load(shared + V_AT + slot.stage * KV_BYTES, &v_map, &barriers->v_full[slot.stage],
                     0, v_key0, 0, v_head, v_batch);
        };
        for (int tile_iter = 0;; ++tile_iter) {
            const int buffer = tile_iter % 2;
#if PACKED
            Taken taken{number, 0, {}};
            for (; number < all; number = gridDim.x + atomic_increment_global(tile_counter.data)) {
                const TileCoord coord = tile_coord(number, numbers, heads, 1, heads_per_group);
                taken = {number, coord.head,
                         sequence_tile<BLOCK_M>(cu_seqlens_q.data, cu_seqlens_k.data, batch,
                                                coord.tile)};
                if (taken.at.tile * BLOCK_M < taken.at.own) break;
                previous_kernel_wait();
            }
            taken.number = number;
#else
            const Taken taken{number};
#endif
            mbarrier_wait(&barriers->q_empty[buffer], tile_iter / 2 % 2 ^ 1);
            pass_on(taken, buffer);
            if (number >= all) {
                mbarrier_arrive(&barriers->q_full[buffer]);
                if (!PACKED || it > 0) load_v();
                return;
            }
            const TileWork work = work_of(taken);
            const int kv_head = work.coord.head / group;
            mbarrier_expect(&barriers->q_full[buffer], CONSUMERS * Q_BYTES);
            for (int w = 0; w < CONSUMERS; ++w)
                tma_load(shared + (buffer * CONSUMERS + w) * Q_BYTES, &q_map,
                         &barriers->q_full[buffer], 0,
                         query0_of(work) + (work.empty ? queries_of(work) : work.row0 + 64 * w), 0,
                         work.coord.head, query_item_of(work));
#if PACKED
            const int key_item = taken.at.other0 + taken.at.other;
#else
            const int key_item = work.coord.batch;
#endif
            // In the order of use: each K, also a query tile's first, before the V before it.
            for (int n = 0; n < work.tiles; ++n) {
                const PipelineState slot(it);
                const int key0 = key0_of(work) + (work.first - n) * BLOCK_N;
                // Asked for now, needed after the copies: the answer is slow.
                if (n + 1 == work.tiles) {
                    if (tile_iter == 0) previous_kernel_wait();  // for the zero that it begins with
                    number = gridDim.x + atomic_increment_global(tile_counter.data);
                }
                mbarrier_wait(&barriers->k_empty[slot.stage], slot.phase ^ 1);
                mbarrier_expect(&barriers->k_full[slot.stage], KV_BYTES);
                tma_load(shared + K_AT + slot.stage * KV_BYTES, &k_map,
                         &barriers->k_full[slot.stage], 0, key0, 0, kv_head, key_item);
                if (it > 0) load_v();
                v_key0 = key0, v_head = kv_head, v_batch = key_item;
                ++it;
            }
        }
    }

    // ---- consumers -------------------------------------------------------------------------------
    registers_grow<CONSUMERS == 2 ? 232 : 160>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int row_in_tile = (warpgroup - 1) * 64 + 16 * warp + lane / 4;
    const float log2_scale = scale * LOG2E;

    auto q_of = [&](int tile_iter) {
        return shared + (tile_iter % 2 * CONSUMERS + warpgroup - 1) * Q_BYTES;
    };
    auto k_of = [&](const PipelineState& s) { return shared + K_AT + s.stage * KV_BYTES; };
    auto v_of = [&](const PipelineState& s) { return shared + V_AT + s.stage * KV_BYTES; };
    auto release = [&](Mbarrier* empty) {
        if (lane == 0) mbarrier_arrive(empty);
    };
    // A round's K is waited for at the end of the round before, as in flash_forward_sm90.cu: between
    // its softmax and its wait for P V, which ptxas would move above the softmax otherwise. Where the
    // sums are wanted much later, it would leave exponentials for after that wait too: so the wait for K
    // wants them (zero_behind).
    const int zero = min_int(seqlen_k, 0);
    auto wait_for_k = [&](int it, int behind = 0) {
        const PipelineState slot(it);
        mbarrier_wait(&barriers->k_full[slot.stage], slot.phase ^ behind);
    };
    // Waits for the Q of an iteration and returns whose it is, the same in all lanes.
    auto take = [&](int tile_iter) {
        mbarrier_wait(&barriers->q_full[tile_iter % 2], tile_iter / 2 % 2);
        const Taken* const from = &barriers->taken[tile_iter % 2];
        auto same = [](const int* word) { return shfl(ld_shared(word), 0); };
#if PACKED
        return Taken{same(&from->number), same(&from->head),
                     {same(&from->at.tile), same(&from->at.own0), same(&from->at.own), 0,
                      same(&from->at.other)}};
#else
        return Taken{same(&from->number)};
#endif
    };
    auto mask = [&](float(&score)[SCORES], const TileWork& work, int n) {
        if (n < work.masked)
            mask_scores(score, work.row0 + row_in_tile, (work.first - n) * BLOCK_N + lane % 4 * 2,
                        queries_of(work), keys_of(work), Window{});
    };
    // O = acc / sum through this warpgroup's O buffer, once the store before has read it.
    auto finish = [&](float(&out_acc)[OUTPUTS], const Softmax& state, const TileWork& work,
                      int number) {
#if OPTIMISTIC
        const int overflowed = has_overflowed(out_acc, state);
        if (lane == 0)
            st_global(flags.data + (static_cast<int64>(number) * CONSUMERS + warpgroup - 1) * 4 +
                          warp,
                      overflowed);
#endif
        normalise(out_acc, state, lse, work.coord, work.row0 + row_in_tile,
                  queries_of(work), scale);
        unsigned char* const o = shared + OUT_AT + (warpgroup - 1) * Q_BYTES;
        if (threadIdx.x % WARPGROUP == 0) bulk_wait_read<0>();
        warp_sync();  // a named barrier wants the whole warp at once, as a product does
        named_sync(warpgroup, WARPGROUP);
        outputs_to_shared(o, out_acc);
        tma_fence();
        named_sync(warpgroup, WARPGROUP);
        if (threadIdx.x % WARPGROUP == 0) {
            tma_store(&out_map, o, 0, query0_of(work) + work.row0 + 64 * (warpgroup - 1), 0,
                      work.coord.head, query_item_of(work));
            bulk_commit();
        }
        warp_sync();
    };

    Taken taken = take(0);
    if (PACKED && taken.number >= all) return;  // every number that the block was given had no rows
    TileWork work = work_of(taken);
    float out_acc[OUTPUTS];
    uint32 p[BLOCK_N / 16][4];
    Softmax state;
    float rescale[2];
    int it = 0;  // key tile in hand, counted over all query tiles
    {
        float score[SCORES];
        const PipelineState slot(it);
        wait_for_k(it);
        wgmma_fence();
        issue_scores(score, q_of(0), k_of(slot));
        wgmma_wait<0>();
        keep(score);
        release(&barriers->k_empty[slot.stage]);
        mask(score, work, 0);
        softmax_step(score, state, rescale, log2_scale);
        round_weights(p, score);
        if (work.tiles > 1) wait_for_k(1);
    }
    // It ends at the break below. Without a bound, ptxas takes the loop for one whose warps
    // diverge, and moves every descriptor through vector registers.
    warp_scheduler_open(warpgroup);
    for (int tile_iter = 0; tile_iter < all; ++tile_iter) {
        unsigned char* const q = q_of(tile_iter);
        // Without the shuffle ptxas does not know that all lanes have the same, to the same effect.
        const int tiles = PACKED ? shfl(work.tiles, 0) : work.tiles;
#pragma unroll
        for (int n = 0; n < OUTPUTS; ++n) out_acc[n] = 0.0f;
        for (int n = 1; n < tiles; ++n) {
            float score[SCORES];
            const PipelineState before(it), slot(++it);
            warp_scheduler_wait(warpgroup);
            wgmma_fence();
            issue_scores(score, q, k_of(slot));
            mbarrier_wait(&barriers->v_full[before.stage], before.phase);
            wgmma_fence();  // without it ptxas puts one into a branch, and serialises
            issue_output(out_acc, p, v_of(before));
            warp_scheduler_arrive(warpgroup);
            wgmma_wait<1>();
            keep(score);
            release(&barriers->k_empty[slot.stage]);
            mask(score, work, n);
            const bool looks = !OPTIMISTIC_NOW || n <= work.masked;  // for the maximum
            bool moved = false;
            if (looks)
                moved = softmax_step(score, state, rescale, log2_scale);
            else
                optimistic_step(score, state, log2_scale);
            if (n + 1 < tiles) wait_for_k(it + 1, zero_behind(state, zero));
            wgmma_wait<0>();
            keep(out_acc);
            release(&barriers->v_empty[before.stage]);
            if (moved) multiply_rows(out_acc, rescale);
            round_weights(p, score);
        }
        release(&barriers->q_empty[tile_iter % 2]);

        // From tile to tile: the first scores of the next one, the last product of this one.
        const PipelineState before(it), slot(++it);
        const Taken next_taken = take(tile_iter + 1);
        if (next_taken.number >= all) {
            mbarrier_wait(&barriers->v_full[before.stage], before.phase);
            wgmma_fence();
            issue_output(out_acc, p, v_of(before));
            wgmma_wait<0>();
            keep(out_acc);
            finish(out_acc, state, work, taken.number);
            break;
        }
        const TileWork next = work_of(next_taken);
        Softmax next_state;
        float score[SCORES];
        wait_for_k(it);
        warp_scheduler_wait(warpgroup);
        wgmma_fence();
        issue_scores(score, q_of(tile_iter + 1), k_of(slot));
        mbarrier_wait(&barriers->v_full[before.stage], before.phase);
        wgmma_fence();
        issue_output(out_acc, p, v_of(before));
        warp_scheduler_arrive(warpgroup);
        wgmma_wait<1>();
        keep(score);
        release(&barriers->k_empty[slot.stage]);
        mask(score, next, 0);
        softmax_step(score, next_state, rescale, log2_scale);
        // Long past: the next tile may have no second K to wait for.
        mbarrier_wait(&barriers->v_full[before.stage],
                      before.phase ^ zero_behind(next_state, zero));
        if (next.tiles > 1) wait_for_k(it + 1);
        wgmma_wait<0>();
        keep(out_acc);
        release(&barriers->v_empty[before.stage]);
        round_weights(p, score);
        finish(out_acc, state, work, taken.number);
        taken = next_taken;
        work = next;
        state = next_state;
    }
    warp_scheduler_close(warpgroup);
    if (threadIdx.x % WARPGROUP == 0) bulk_wait<0>();
}
