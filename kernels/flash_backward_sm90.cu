// FlashAttention backward on Hopper: dQ, dK, dV with P recomputed, by TMA, wgmma and warpgroups
// that do different work.
//
// Paper: FlashAttention-2 (Dao 2023), Algorithm 2, in the form of FlashAttention-3 (Shah et al.
// 2024), Algorithm 3 (a warp of its own adds dQ to memory).
//
// Loop order: one thread block per (batch, key/value head, key tile j of 128 keys); inside it the
// query heads of the group and, for each, the query tiles i that see the key tile (SAWTOOTH: all of
// them the other way round in every second wave of blocks, for the same bytes). K and V stay in
// shared memory, dK and dV in registers. Of warpgroup 0, warp 0 loads Q, dO and their statistics by
// TMA, and warp 1 adds finished dQ tiles to memory. Warpgroups 1 and 2 own 64 keys each:
//
//   S^T = K Q^T,  dP^T = V dO^T           transposed, so that P^T and dS^T come out in the layout of
//   P^T = exp2(S^T - lse),                the A operand of the next products and stay in registers
//   dS^T = P^T o (dP^T - delta)
//   dV += P^T dO,  dK += dS^T Q
//   dQ = dS K                             both warpgroups' dS, through shared memory; or, with tiles of
//                                         80 queries, dQ^T = K^T dS^T, 64 of HEAD_DIM a warpgroup
//
// DQ_FROM_REGISTERS: the consumers add dQ to memory themselves, 16 bytes a thread and instruction.
// Shared memory, which sets the pace of this kernel (analysis/sm_ceilings.py), is then spared dQ's
// way in and out; whether the additions cost less where they go instead, no card has said yet.
//
// Reads and writes, in bytes, e = 2; padded: a ragged tile's statistics and dQ count as full tiles
// (analysis/sums/flash_sm90.py):
//   k, v read rows_j D e if a query sees them; per visit q, dout read rows_i D e, stats read
//   2 BLOCK_M 4, dq_accum atomic BLOCK_M D 4; dk, dv write rows_j D e
//   DETERMINISTIC: turns, 4 bytes a query tile, read and write one per visit (a GPU looks again, in
//   L2, while it waits: that is not counted)
// What comes before and after is in flash_backward_sm90_rows.cu.
//
// WINDOW: the loader, the warp that adds dQ and the consumers walk the same query tiles
// (window.cuh); what lies outside is never loaded, and a key tile that no query sees loads nothing
// and writes zeros. Tiles that the window does not cut are not masked.
//
// PACKED (packed_sm90.cuh): sequences of different lengths, all tokens one after another. Blocks have
// numbers among the key tiles of all sequences, and query tiles are numbered too: statistics and dQ
// lie in the order of their numbers. A key tile of a sequence without queries loads nothing and writes
// zeros. Boxes of TMA end where the sequence does.
//   cu_seqlens_k  read  12  at most per step of a block's search, and 8; cu_seqlens_q  read  8
//
// DETERMINISTIC: the key tiles that visit a query tile take turns, from the last one to the first, and
// add their dQ when the counter of the query tile says so. A turn is passed on when the addition has
// been carried out. Blocks start in the order of the turns, so that whoever is waited for has
// started: no number of resident blocks can deadlock. From the last key tile on, because under the
// causal mask it starts at the last query tiles, where it is the first: nobody waits to start.
//
// The kernel may start before the preprocess has ended. It sets up its barriers and loads K and V;
// then the two warps that touch what the preprocess writes wait for its end, and all others wait for
// what those two bring.
//
// Turns and early starts together: every wait is for a block that has started, so no circle can
// close. The postprocess takes no multiprocessor from a block that is waited for: next_kernel_start
// lets it in when every block of this grid has come there or ended, so all of them have started. The
// preprocess lets this grid in the same way and itself waits for nobody: it ends while blocks here
// wait for it. In between, blocks of this grid start in the order of the turns; places that others
// still hold delay the start of the later ones, not of one that they wait for. That order is what
// DETERMINISTIC rests on however it is launched: cards start blocks by index, CUDA does not promise
// it.
//
// Limits: fp16 and bf16; head_dim == HEAD_DIM, 64 or 128; no key mask, dropout or block mask (the
// sm_80 form has them); strides are multiples of 16 bytes; without DETERMINISTIC dQ is added in no fixed order.

// ---- constants that shape the code (-D) ----------------------------------------------------------
// DTYPE      0 fp16, 1 bf16
// HEAD_DIM   64 (BLOCK_M 128) or 128 (BLOCK_M 64 or 80)
// BLOCK_M    query rows a tile; HEAD_DIM * BLOCK_M = 8192, so that dQ is 64 x 64 a warpgroup. 80 fill
//            shared memory; they are no multiple of the 64 rows that a product has, so dQ is
//            multiplied transposed
// CAUSAL     1: query r sees key c when c <= r + seqlen_k - seqlen_q
// PACKED     1: the arguments cu_seqlens_q, cu_seqlens_k and query_numbers, of a head; `batch`
//            sequences; seqlen_q and seqlen_k are the longest. Default 0; not with DQ_FROM_REGISTERS,
//            SAWTOOTH, WINDOW, SOFTCAP, ALIBI.
// WINDOW     1: queries see few keys around their diagonal, and sinks; window.cuh. Default 0.
// SHARED_BYTES  dynamic shared memory of the launch, kernels/hopper_forms.py
// DETERMINISTIC  1: dQ is added in a fixed order. Default 0.
// DQ_FROM_REGISTERS  1: dQ is added from registers. Default 0; not with DETERMINISTIC.
// SAWTOOTH   1: every second wave of blocks makes its visits from the last to the first, and finds in
//            L2 what the wave before it touched last. Default 0; not with turns, for which a wave
//            would wait where it meets the one before, and not with DQ_FROM_REGISTERS.

#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#endif
#ifndef DQ_FROM_REGISTERS
#define DQ_FROM_REGISTERS 0
#endif
#ifndef SAWTOOTH
#define SAWTOOTH 0
#endif
#if SAWTOOTH && (DQ_FROM_REGISTERS || DETERMINISTIC)
#error a sawtooth is for tiles of dQ that are added as a whole, in no order
#endif
#if DQ_FROM_REGISTERS && DETERMINISTIC
#error turns are taken by the warp that adds whole tiles, which DQ_FROM_REGISTERS does without
#endif

#include "backward_sm90.cuh"
#include "packed_sm90.cuh"
#include "scores.cuh"
#include "tile_order.cuh"
#include "window.cuh"

constexpr int BLOCK_N = 128;
constexpr int STAGES = 2;
constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int KV_BYTES = BLOCK_N * HEAD_DIM * 2;
constexpr int Q_BYTES = BLOCK_M * HEAD_DIM * 2;
constexpr int DS_BYTES = BLOCK_M * BLOCK_N * 2;  // slabs of 64 keys, one a warpgroup
constexpr int SCORES = BLOCK_M / 2;              // registers a thread of S^T and of dP^T
constexpr int GRADS = HEAD_DIM / 2;              // registers a thread of dK and of dV

// Dynamic shared memory, in this order, from a 1024-byte boundary.
constexpr int V_AT = KV_BYTES;
constexpr int Q_AT = V_AT + KV_BYTES;
constexpr int DO_AT = Q_AT + STAGES * Q_BYTES;
constexpr int DS_AT = DO_AT + STAGES * Q_BYTES;  // two buffers, in turn
constexpr int DQ_AT = DS_AT + 2 * DS_BYTES;
constexpr int LSE_AT = DQ_AT + (DQ_FROM_REGISTERS ? 0 : CONSUMERS * DQ_FLOATS * 4);
constexpr int DELTA_AT = LSE_AT + STAGES * BLOCK_M * 4;
constexpr int SLOPE_AT = DELTA_AT + STAGES * BLOCK_M * 4;
constexpr int BARRIERS_AT = SLOPE_AT + (ALIBI ? STAGES * 4 : 0);

struct Barriers {
    Mbarrier kv_full;
    Mbarrier q_full[STAGES], q_empty[STAGES];    // Q, lse and the head's slope
    Mbarrier do_full[STAGES], do_empty[STAGES];  // dO and delta
};
constexpr int PACKED_AT = BARRIERS_AT + static_cast<int>(sizeof(Barriers));
static_assert(PACKED_AT + (PACKED ? SEQUENCE_BYTES : 0) + 1023 == SHARED_BYTES, "hopper_forms.py counts others");
#if PACKED && (DQ_FROM_REGISTERS || SAWTOOTH || WINDOW || SOFTCAP || ALIBI)
#error packed sequences go with nothing but a causal mask and turns
#endif

// Named barriers; 0 is the block's.
constexpr int DS_READY = 1;   // both warpgroups have written their part of dS
constexpr int DQ_EMPTY = 2;   // + warpgroup: its dQ buffer may be written
constexpr int DQ_FULL = 4;    // + warpgroup: its dQ buffer may be added to memory
constexpr int GRADS_READY = 6;  // + warpgroup: dK and dV are in shared memory

struct PipelineState {
    int stage, phase;
    __device__ __forceinline__ explicit PipelineState(int it)
        : stage(it % STAGES), phase(it / STAGES & 1) {}
};

// acc = A B^T over the head dimension: 64 rows of A from a tile of BLOCK_N rows, B a tile of BLOCK_M.
__device__ __forceinline__ void issue_transposed_scores(float (&acc)[SCORES],
                                                        const unsigned char* a_tile,
                                                        const unsigned char* b_tile) {
    const uint64 a = hidden(smem_descriptor(a_tile, 16, 1024));
    const uint64 b = hidden(smem_descriptor(b_tile, 16, 1024));
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
        const uint64 a_step = a + (step / 4 * BLOCK_N * 128 + step % 4 * 32) / 16;
        const uint64 b_step = b + (step / 4 * BLOCK_M * 128 + step % 4 * 32) / 16;
        if (step == 0)
            Wgmma<BLOCK_M>::template ss_first<0, 0>(acc, a_step, b_step);
        else
            Wgmma<BLOCK_M>::template ss<0, 0>(acc, a_step, b_step);
    }
    wgmma_commit();
}

// acc += A B with A (64 keys x BLOCK_M) in registers and B a tile of BLOCK_M rows.
__device__ __forceinline__ void issue_key_gradient(float (&acc)[GRADS],
                                                   const uint32 (&a)[BLOCK_M / 16][4],
                                                   const unsigned char* b_tile) {
    const uint64 b = hidden(smem_descriptor(b_tile, BLOCK_M * 128, 1024));
#pragma unroll
    for (int step = 0; step < BLOCK_M / 16; ++step)
        Wgmma<HEAD_DIM>::template rs<1>(acc, a[step], b + step * 16 * 128 / 16);
    wgmma_commit();
}

// One warpgroup's 64 x 64 of dQ = dS K: the left or right half of the columns, or the upper or
// lower half of the rows; or its 64 x 80 of dQ^T = K^T dS^T.
__device__ __forceinline__ void issue_query_gradient(float (&acc)[DQ_REGISTERS],
                                                     const unsigned char* ds,
                                                     const unsigned char* k, int half) {
    if constexpr (DQ_TRANSPOSED) {
        const uint64 a = hidden(smem_descriptor(k + half * BLOCK_N * 128, BLOCK_N * 128, 1024));
        const uint64 b = hidden(smem_descriptor(ds, 16, 1024));
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; ++step) {
            const uint64 a_step = a + step * 16 * 128 / 16;
            const uint64 b_step = b + (step / 4 * BLOCK_M * 128 + step % 4 * 32) / 16;
            if (step == 0)
                Wgmma<DQ_COLUMNS>::template ss_first<1, 0>(acc, a_step, b_step);
            else
                Wgmma<DQ_COLUMNS>::template ss<1, 0>(acc, a_step, b_step);
        }
        wgmma_commit();
        return;
    }
    const uint64 a = hidden(smem_descriptor(ds + (BLOCK_M == 128 ? half * 64 * 128 : 0), 16, 1024));
    const uint64 b = hidden(
        smem_descriptor(k + (BLOCK_M == 64 ? half * BLOCK_N * 128 : 0), BLOCK_N * 128, 1024));
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step) {
        const uint64 a_step = a + (step / 4 * BLOCK_M * 128 + step % 4 * 32) / 16;
        const uint64 b_step = b + step * 16 * 128 / 16;
        if (step == 0)
            Wgmma<DQ_COLUMNS>::template ss_first<0, 1>(acc, a_step, b_step);
        else
            Wgmma<DQ_COLUMNS>::template ss<0, 1>(acc, a_step, b_step);
    }
    wgmma_commit();
}

__device__ __forceinline__ void round_to_operand(uint32 (&a)[BLOCK_M / 16][4],
                                                 const float (&acc)[SCORES]) {
#pragma unroll
    for (int step = 0; step < BLOCK_M / 16; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[step][i] = pack2<io_t>(acc[8 * step + 2 * i], acc[8 * step + 2 * i + 1]);
}

// 64 rows of a gradient, rounded, to `tile`: slabs of 64 columns, 64 rows each, swizzled.
__device__ __forceinline__ void stage_gradient(unsigned char* tile, const float (&acc)[GRADS],
                                               float factor) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 16; ++c) {
        uint32 r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            r[i] = pack2<io_t>(acc[8 * c + 2 * i] * factor, acc[8 * c + 2 * i + 1] * factor);
        const int chunk = 2 * c + lane / 16;
        stmatrix_x4(tile + chunk / 8 * 64 * 128 + row * 128 + (chunk % 8 ^ row % 8) * 16, r);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash_backward_sm90(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                    const __grid_constant__ TensorMap v_map,
                    const __grid_constant__ TensorMap dout_map,
                    const __grid_constant__ TensorMap dk_map,
                    const __grid_constant__ TensorMap dv_map, Tensor1<const float> lse2,
                    Tensor1<const float> delta, Tensor1<float> dq_accum, int batch, int kv_heads,
                    int group, int seqlen_q, int seqlen_k, float scale,
                    float log2_scale,  // scale * LOG2E: as a parameter it costs no register
                    int heads_per_group
#if SOFTCAP
                    , float softcap, float rate  // the cap, and scale / softcap
#endif
#if ALIBI
                    , Tensor3<const float> alibi_slopes  // (B, H, 1)
#endif
#if DETERMINISTIC
                    , Tensor1<int> turns  // of the query tiles: which key tile's it is to add
#endif
#if SAWTOOTH
                    , int wave  // blocks that run at a time
#endif
#if WINDOW
                    , int window_left, int window_right, int sinks
#endif
#if PACKED
                    , Tensor1<const int> cu_seqlens_q, Tensor1<const int> cu_seqlens_k,
                    int query_numbers
#endif
) {
    next_kernel_start();
    unsigned char* const shared = shared_memory_1024();
    Barriers* const barriers = reinterpret_cast<Barriers*>(shared + BARRIERS_AT);
#if PACKED
    const int key_tiles = gridDim.x / kv_heads;  // numbers of all sequences, as if of one
    constexpr int items = 1;
#else
    const int query_tiles = ceil_div(seqlen_q, BLOCK_M);
    const int key_tiles = ceil_div(seqlen_k, BLOCK_N);
    const int items = batch;
#endif
    // Heads go in groups whose Q, dO and dQ fit in L2 together. Within a group the heads of a key
    // tile are neighbours, and tile 0, which the most queries see, starts first; where turns are
    // taken, the last tile, whose turn is the first.
    const int in_group = key_tiles * heads_per_group;
    const int first_head = static_cast<int>(blockIdx.x) / in_group * heads_per_group;
    const int heads_here = min_int(heads_per_group, kv_heads * items - first_head);
    const int rest = static_cast<int>(blockIdx.x) % in_group;
    const int place = rest / heads_here, bh = first_head + rest % heads_here;
    const int kv_head = bh % kv_heads;
#if PACKED
    const int number = DETERMINISTIC ? key_tiles - 1 - place : place;
    const SequenceTile mine = block_sequence_tile<BLOCK_N>(cu_seqlens_k.data, cu_seqlens_q.data,
                                                           batch, number, shared + PACKED_AT);
    const int j = mine.tile;
    if (j * BLOCK_N >= mine.own) return;
    // Where the sequence's first rows and its items are in tensor maps.
    const int query_base = seqlen_q - mine.other, query_item = mine.other0 + mine.other;
    const int key_base = seqlen_k - mine.own, key_item = mine.own0 + mine.own;
    const int longest_k = seqlen_k;
    seqlen_q = mine.other, seqlen_k = mine.own;
    const int query_tiles = ceil_div(seqlen_q, BLOCK_M);
    // Tiles of a head in the statistics and in dQ, and which of them is the sequence's first.
    const int head_tiles = query_numbers;
    const int first_tile = mine.other0 / BLOCK_M + number - j - mine.own0 / BLOCK_N;
    constexpr int b = 0;
#else
    const int j = DETERMINISTIC ? key_tiles - 1 - place : place;
    const int b = bh / kv_heads;
    const int query_item = b, key_item = b, head_tiles = query_tiles;
    constexpr int query_base = 0, key_base = 0, first_tile = 0;
#endif
    const int key0 = j * BLOCK_N;
#if WINDOW
    const Window window{window_left, window_right, sinks};
#else
    const Window window{};
#endif
    // The query tiles of a head that see the key tile. Without a window that is at least one: the
    // last query sees every key.
    const QueryTiles tiles =
        query_tiles_of<BLOCK_M, BLOCK_N, CAUSAL>(j, seqlen_q, seqlen_k, window);
    const int i0 = tiles.first;
#if PACKED
    // Added up, as a product would lie in vector registers, of which the consumers have none left.
    int count = 0;
#pragma unroll 1
    for (int h = 0; h < group; ++h) count += tiles.end - i0;
#else
    const int count = group * (tiles.end - i0);
#endif
    const int skipped = i0 + head_tiles - tiles.end;  // from a head's last visit to the next's first
    const int end_row = WINDOW ? tiles.end * BLOCK_M : seqlen_q;
    // Visits go up, from the first head's tile i0, or down, from the last head's last tile.
#if SAWTOOTH
    const bool down = blockIdx.x / wave % 2;
    const int step = down ? -1 : 1, start = down ? tiles.end - 1 : i0;
    const int first_of_group = down ? group - 1 : 0;
#else
    constexpr int step = 1, first_of_group = 0;
    const int start = i0;
#endif
    auto past_head = [=](int row0) { return row0 >= end_row || (SAWTOOTH && row0 < i0 * BLOCK_M); };
    const int warpgroup = shfl(static_cast<int>(threadIdx.x) / WARPGROUP, 0);

    if (threadIdx.x == 0) {
        mbarrier_init(&barriers->kv_full, 1);
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(&barriers->q_full[s], ALIBI ? 2 : 1);
            mbarrier_init(&barriers->do_full[s], 1);
            mbarrier_init(&barriers->q_empty[s], 4 * CONSUMERS);
            mbarrier_init(&barriers->do_empty[s], 4 * CONSUMERS);
        }
        mbarrier_init_done();
    }
    block_sync();
    const int lane = threadIdx.x % 32;

    if (warpgroup == 0) {
        registers_shrink<24>();
        if ((WINDOW || PACKED) && count == 0) return;  // nobody looks at these keys: dK and dV are zeros
        const int warp = shfl(static_cast<int>(threadIdx.x) / 32, 0);
        if (warp == 0 && lane == 0) {
            // ---- loader --------------------------------------------------------------------------
            mbarrier_expect(&barriers->kv_full, 2 * KV_BYTES);
            tma_load(shared, &k_map, &barriers->kv_full, 0, key_base + key0, 0, kv_head, key_item);
            tma_load(shared + V_AT, &v_map, &barriers->kv_full, 0, key_base + key0, 0, kv_head,
                     key_item);
            previous_kernel_wait();  // for lse2 and delta
            int head = kv_head * group + first_of_group, row0 = start * BLOCK_M;
            int64 at = ((static_cast<int64>(b) * kv_heads * group + head) * head_tiles + first_tile) *
                           BLOCK_M +
                       row0;  // of the tile's first row in the statistics
#pragma unroll 1
            for (int it = 0; it < count; ++it) {
                const PipelineState slot(it);
                mbarrier_wait(&barriers->q_empty[slot.stage], slot.phase ^ 1);
                mbarrier_expect(&barriers->q_full[slot.stage], Q_BYTES + BLOCK_M * 4);
                tma_load(shared + Q_AT + slot.stage * Q_BYTES, &q_map,
                         &barriers->q_full[slot.stage], 0, query_base + row0, 0, head, query_item);
                bulk_load(shared + LSE_AT + slot.stage * BLOCK_M * 4, lse2.data + at, BLOCK_M * 4,
                          &barriers->q_full[slot.stage]);
                mbarrier_wait(&barriers->do_empty[slot.stage], slot.phase ^ 1);
                mbarrier_expect(&barriers->do_full[slot.stage], Q_BYTES + BLOCK_M * 4);
                tma_load(shared + DO_AT + slot.stage * Q_BYTES, &dout_map,
                         &barriers->do_full[slot.stage], 0, query_base + row0, 0, head, query_item);
                bulk_load(shared + DELTA_AT + slot.stage * BLOCK_M * 4, delta.data + at,
                          BLOCK_M * 4, &barriers->do_full[slot.stage]);
                row0 += step * BLOCK_M;
                at += step * BLOCK_M;
                if (past_head(row0)) {  // on to the next head of the group
                    head += step;
                    row0 = start * BLOCK_M;
                    at += step * skipped * BLOCK_M;
                }
            }
        }
#if ALIBI
        if (warp == 2 && lane == 0) {
            // ---- the head's slope, with its Q: by another warp, for want of registers in the loader ----
#pragma unroll 1
            for (int it = 0; it < count; ++it) {
                const PipelineState slot(it);
                const int head = kv_head * group + first_of_group + step * (it / (tiles.end - i0));
                mbarrier_wait(&barriers->q_empty[slot.stage], slot.phase ^ 1);
                st_shared(reinterpret_cast<float*>(shared + SLOPE_AT) + slot.stage,
                          ld_global(alibi_slopes.at(b, head, 0)));
                mbarrier_arrive(&barriers->q_full[slot.stage]);
            }
        }
#endif
#if !DQ_FROM_REGISTERS
        // Packed, the loader has no register left for the number of its warp.
        if (PACKED ? threadIdx.x / 32 == 1 : warp == 1) {
            // ---- dQ to memory --------------------------------------------------------------------
            previous_kernel_wait();  // for the zeros that dQ and the turns begin with
            const float* const buffers = reinterpret_cast<const float*>(shared + DQ_AT);
            int tile = start;
            int64 at = ((static_cast<int64>(b) * kv_heads + kv_head) * group + first_of_group) *
                           head_tiles + first_tile + tile;
            for (int w = 0; w < CONSUMERS; ++w) named_arrive(DQ_EMPTY + w, WARPGROUP + 32);
#pragma unroll 1
            for (int it = 0; it < count; ++it) {
#if DETERMINISTIC
                const KeyTiles others =
                    key_tiles_of<BLOCK_M, BLOCK_N, CAUSAL>(tile, seqlen_q, seqlen_k, window);
                const int turn = others.count - 1 - others.place(j);
                if (lane == 0) turn_wait(turns.data + at, turn);
                warp_sync();
#endif
                for (int w = 0; w < CONSUMERS; ++w) {
                    named_sync(DQ_FULL + w, WARPGROUP + 32);
                    if (lane == 0) {
                        bulk_add(dq_accum.data + at * TILE_FLOATS + w * DQ_FLOATS,
                                 buffers + w * DQ_FLOATS, DQ_FLOATS * 4);
                        bulk_commit();
                    }
                    warp_sync();  // a named barrier wants the whole warp at once
                }
                if (it + 1 < count) {
                    if (lane == 0) bulk_wait_read<1>();
                    warp_sync();
                    named_arrive(DQ_EMPTY, WARPGROUP + 32);
                    if (lane == 0) bulk_wait_read<0>();
                    warp_sync();
                    named_arrive(DQ_EMPTY + 1, WARPGROUP + 32);
                }
#if DETERMINISTIC
                if (lane == 0) {
                    bulk_wait<0>();  // until it has been added, not only read
                    turn_pass(turns.data + at, turn);
                }
#endif
                at += step;
                tile += step;
                if (tile == tiles.end || (SAWTOOTH && tile < i0)) {
                    tile = start;
                    at += step * skipped;
                }
            }
            if (lane == 0) bulk_wait<0>();
        }
#endif
        return;
    }

    // ---- consumers -------------------------------------------------------------------------------
    registers_grow<240>();
    const int half = warpgroup - 1, warp = threadIdx.x / 32 % 4;
    const int key = key0 + 64 * half + 16 * warp + lane / 4;  // and key + 8
    const int column = lane % 4 * 2;  // of a query in its group of 8: column and column + 1
    const unsigned char* const k = shared + half * 64 * 128;
    const unsigned char* const v = shared + V_AT + half * 64 * 128;
#if DQ_FROM_REGISTERS
    previous_kernel_wait();  // for the zeros that dQ begins with
    const int64 first_visit = (static_cast<int64>(b) * kv_heads + kv_head) * group * query_tiles + i0;
    // This thread's first four floats of its part of dQ.
    float* dq_tile = dq_accum.data + first_visit * TILE_FLOATS + half * DQ_FLOATS +
                     static_cast<int>(threadIdx.x) % WARPGROUP * 4;
#else
    float* const dq_buffer = reinterpret_cast<float*>(shared + DQ_AT) + half * DQ_FLOATS;
#endif

#if SOFTCAP
    const ScoreChange change{scale, seqlen_k - seqlen_q, softcap, rate};
#else
    const ScoreChange change{scale, seqlen_k - seqlen_q};
#endif

    float dk_acc[GRADS], dv_acc[GRADS];
#pragma unroll
    for (int n = 0; n < GRADS; ++n) dk_acc[n] = dv_acc[n] = 0.0f;
    if (!(WINDOW || PACKED) || count > 0) mbarrier_wait(&barriers->kv_full, 0);

    int row0 = start * BLOCK_M;
    for (int it = 0; it < count; ++it) {
        const PipelineState slot(it);
        const unsigned char* const q = shared + Q_AT + slot.stage * Q_BYTES;
        const unsigned char* const dout = shared + DO_AT + slot.stage * Q_BYTES;
        const float* const lse_of = reinterpret_cast<const float*>(shared + LSE_AT) +
                                    slot.stage * BLOCK_M + column;
        const float* const delta_of = reinterpret_cast<const float*>(shared + DELTA_AT) +
                                      slot.stage * BLOCK_M + column;
        unsigned char* const ds = shared + DS_AT + it % 2 * DS_BYTES;

        float score[SCORES], dp[SCORES];
        mbarrier_wait(&barriers->q_full[slot.stage], slot.phase);
        wgmma_fence();
        issue_transposed_scores(score, k, q);
        mbarrier_wait(&barriers->do_full[slot.stage], slot.phase);
        wgmma_fence();
        issue_transposed_scores(dp, v, dout);

        wgmma_wait<1>();
        keep(score);
        // Only tiles on the mask's edge and the last keys need comparisons; a row past the end of Q
        // and a row that sees nothing have lse = +inf, which makes P zero by itself.
        const bool masked = key0 + BLOCK_N > seqlen_k ||
                            (CAUSAL && key0 + BLOCK_N - 1 > row0 + seqlen_k - seqlen_q) ||
                            window.hides_any(row0 + seqlen_k - seqlen_q, BLOCK_M, key0, BLOCK_N);
        // Whether a query sees a key of this thread, if the tile is masked.
        auto hidden = [&](int n) {
            const int query = row0 + n / 4 * 8 + column + n % 2, its = key + n / 2 % 2 * 8;
            const int visible =
                CAUSAL ? min_int(seqlen_k, query + 1 + seqlen_k - seqlen_q) : seqlen_k;
            return its >= visible || window.hides_query(its - (seqlen_k - seqlen_q), query, its);
        };
        auto lse_pair_of = [&](int n) {
            return ld_shared(reinterpret_cast<const Vec<float, 2>*>(lse_of + 2 * n));
        };
        const float slope = slope_of(shared + SLOPE_AT + slot.stage * 4);  // 0 without ALIBI
        // How far the first pair's query is from its key.
        const float distance = ALIBI ? float(row0 + column + seqlen_k - seqlen_q - key) : 0.0f;
        auto changed = [&](int n, float& passed) {
            const int further = n / 4 * 8 + n % 2 - n / 2 % 2 * 8;
            return change.at(score[n], fabsf(distance + float(further)), slope, passed);
        };
        uint32 operand[BLOCK_M / 16][4];
#if SOFTCAP
        // P goes to dV at once and stays as P times the derivative of the cap, in the same registers.
#pragma unroll
        for (int n = 0; n < SCORES; n += 4) {
            const auto lse_pair = lse_pair_of(n);
            float p[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float passed;
                p[e] = exp2_approx(fmaf(changed(n + e, passed), LOG2E, -lse_pair[e % 2]));
                score[n + e] = p[e] * passed;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
                operand[n / 8][n % 8 / 2 + half] = pack2<io_t>(p[2 * half], p[2 * half + 1]);
        }
        if (masked) {
#pragma unroll
            for (int n = 0; n < SCORES; ++n)
                if (hidden(n)) {
                    score[n] = 0.0f;
                    operand[n / 8][n % 8 / 2] &= n % 2 ? 0x0000ffffu : 0xffff0000u;
                }
        }
#else
#if ALIBI
#pragma unroll
        for (int n = 0; n < SCORES; ++n) {
            float passed;
            score[n] = changed(n, passed);
        }
#endif
        if (masked) {
#pragma unroll
            for (int n = 0; n < SCORES; ++n)
                if (hidden(n)) score[n] = neg_infinity();
        }
#pragma unroll
        for (int n = 0; n < SCORES; n += 4) {
            const auto lse_pair = lse_pair_of(n);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                score[n + e] = exp2_approx(
                    fmaf(score[n + e], CHANGED ? LOG2E : log2_scale, -lse_pair[e % 2]));
        }
#endif
        // Long past. ptxas would move the wait for dP above the exponentials, which dP is to run under;
        // it moves nothing over the loop of a barrier's wait.
        mbarrier_wait(&barriers->kv_full, 0);
        if constexpr (!SOFTCAP) round_to_operand(operand, score);

        wgmma_wait<0>();
        keep(dp);
        wgmma_fence();
        issue_key_gradient(dv_acc, operand, dout);

        // dS^T = P^T o (dP^T - delta), over P, while dV is multiplied.
#pragma unroll
        for (int n = 0; n < SCORES; n += 4) {
            const auto delta_pair =
                ld_shared(reinterpret_cast<const Vec<float, 2>*>(delta_of + 2 * n));
#pragma unroll
            for (int e = 0; e < 4; ++e) dp[n + e] = score[n + e] * (dp[n + e] - delta_pair[e % 2]);
        }
        uint32 ds_operand[BLOCK_M / 16][4];
        round_to_operand(ds_operand, dp);
        // Transposed into this warpgroup's slab of 64 keys: rows are queries. 16 of them further the
        // swizzle is the same: one address, and the rest is in the instruction.
        unsigned char* const my_ds = ds + half * BLOCK_M * 128 + (lane % 8 + lane / 16 * 8) * 128 +
                                     ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
        for (int c = 0; c < BLOCK_M / 16; ++c) stmatrix_x4_trans(my_ds + c * 16 * 128, ds_operand[c]);
        tma_fence();
        named_sync(DS_READY, CONSUMERS * WARPGROUP);

        float dq[DQ_REGISTERS];
        wgmma_fence();
        issue_query_gradient(dq, ds, shared, half);
        issue_key_gradient(dk_acc, ds_operand, q);

        wgmma_wait<1>();
        keep(dq);
        if (lane == 0) mbarrier_arrive(&barriers->do_empty[slot.stage]);
        // In the order of the accumulator; the postprocess puts it right.
#if DQ_FROM_REGISTERS
#pragma unroll
        for (int c = 0; c < DQ_REGISTERS / 4; ++c)
            add_global_x4(dq_tile + c * WARPGROUP * 4, &dq[4 * c]);
        dq_tile += TILE_FLOATS;
#else
        named_sync(DQ_EMPTY + half, WARPGROUP + 32);
#pragma unroll
        for (int c = 0; c < DQ_REGISTERS / 4; ++c) {
            Vec<float, 4> four;
#pragma unroll
            for (int e = 0; e < 4; ++e) four[e] = dq[4 * c + e];
            st_shared(reinterpret_cast<Vec<float, 4>*>(dq_buffer) + c * WARPGROUP +
                          threadIdx.x % WARPGROUP,
                      four);
        }
        tma_fence();
        named_arrive(DQ_FULL + half, WARPGROUP + 32);
#endif

        wgmma_wait<0>();
        keep(dk_acc);
        keep(dv_acc);
        if (lane == 0) mbarrier_arrive(&barriers->q_empty[slot.stage]);
        row0 += step * BLOCK_M;
        if (past_head(row0)) {  // on to the next head of the group
            row0 = start * BLOCK_M;
#if DQ_FROM_REGISTERS
            dq_tile += skipped * TILE_FLOATS;
#endif
        }
    }

    // ---- dK and dV leave through the memory of K and V, once both warpgroups have read all of K ----
    named_sync(DS_READY, CONSUMERS * WARPGROUP);
    constexpr int PART = 64 * HEAD_DIM * 2;
    stage_gradient(shared + half * PART, dk_acc, scale);
    stage_gradient(shared + V_AT + half * PART, dv_acc, 1.0f);
    tma_fence();
    named_sync(GRADS_READY + half, WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0) {
#if PACKED
        const SequenceTile again = sequence_tile_again(shared + PACKED_AT);
        const int row = longest_k - again.own + again.tile * BLOCK_N + 64 * half;
        const int item = again.own0 + again.own;
#else
        const int row = key0 + 64 * half, item = b;
#endif
        tma_store(&dk_map, shared + half * PART, 0, row, 0, kv_head, item);
        tma_store(&dv_map, shared + V_AT + half * PART, 0, row, 0, kv_head, item);
        bulk_commit();
        bulk_wait<0>();
    }
}
