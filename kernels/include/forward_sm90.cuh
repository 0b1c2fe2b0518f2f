// What the two forms of the Hopper forward share: the softmax of a key tile, the products, the
// order of the tiles, the way of the results to memory. flash_forward_sm90.cu and
// flash_forward_sm90_persistent.cu define the macros and say what they mean.
#pragma once

#include "device_sm90.cuh"
#include "scores.cuh"
#include "tile_order.cuh"
#include "window.cuh"

constexpr int BLOCK_M = 64 * CONSUMERS;
constexpr int WARPGROUP = 128;
constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
// A tile lies in slabs of 64 columns: rows of 128 bytes, swizzled within groups of eight.
constexpr int Q_BYTES = 64 * HEAD_DIM * 2;  // the part of one warpgroup, of Q and of O
constexpr int KV_BYTES = BLOCK_N * HEAD_DIM * 2;
constexpr int SCORES = BLOCK_N / 2;  // accumulator registers a thread
constexpr int OUTPUTS = HEAD_DIM / 2;
constexpr bool OPTIMISTIC_NOW = OPTIMISTIC == 1;
constexpr float LIMIT = 1099511627776.0f;  // 2^40; fp32 and bf16 end at 2^128
// The output so far takes half of the registers and more: it is rescaled under the scores' products,
// where the next weights need none.
constexpr bool RESCALE_EARLY = HEAD_DIM > 128;
// At 256 the output is rescaled early, where it costs little. A stale reference of its own has OPTIMISTIC.
constexpr bool LAZY = !RESCALE_EARLY && !OPTIMISTIC_NOW;
constexpr float LAG = 8.0f;
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128 || HEAD_DIM == 256, "head dimension");
static_assert(!OPTIMISTIC || DTYPE == 1, "a stale reference needs the exponents of bf16");
static_assert(!OPTIMISTIC || !(WINDOW || CHANGED), "the repair knows neither");
static_assert(!BIAS, "a stored bias is the sm_80 form's");
static_assert(CONSUMERS == 2 || CONSUMERS == 3, "consumer warpgroups");

// Iteration `it` of a ring of STAGES buffers: which one, and the parity of its barriers' phase.
struct PipelineState {
    int stage, phase;
    __device__ __forceinline__ explicit PipelineState(int it)
        : stage(it % STAGES), phase(it / STAGES & 1) {}
};

// The running softmax of the two rows a thread shares in, g and g + 8 of its warp's 16. The four
// threads of a row hold the same maximum; the sum is split among them until the end.
struct Softmax {
    float max[2] = {neg_infinity(), neg_infinity()};
    float sum[2] = {0.0f, 0.0f};
};

// Where a product is added to something, the code says whether it is rounded in between: the forms
// of the forward give equal bits only if no compiler is left to choose.

// Online softmax (FlashAttention 2022, Algorithm 1, lines 10 to 12). In: scores. Out: scores hold
// exp(score - max). Returns whether the maximum has moved: then what there is of the output must be
// multiplied by rescale. LAZY (FlashAttention-4): it moves only when a score of the warp's 16 rows
// exceeds it by LAG binary orders. exp(score - m) / sum is softmax for any m, and a stale m makes
// weights of up to 2^LAG, far from overflow in fp16 too. All 16 rows move or none: products want the
// warp as one.
__device__ __forceinline__ bool softmax_step(float (&score)[SCORES], Softmax& state,
                                             float (&rescale)[2], float log2_scale) {
    float top[2], shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        top[half] = state.max[half];
#pragma unroll
        for (int n = 2 * half; n < SCORES; n += 4)
            top[half] = fmaxf(top[half], fmaxf(score[n], score[n + 1]));
        top[half] = fmaxf(top[half], shfl_xor(top[half], 1));
        top[half] = fmaxf(top[half], shfl_xor(top[half], 2));
    }
    bool moves = true;
    // (-inf) - (-inf) compares as false: a row that has seen no key yet needs nothing.
    if constexpr (LAZY)
        moves = vote_any((top[0] - state.max[0]) * log2_scale > LAG ||
                         (top[1] - state.max[1]) * log2_scale > LAG);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (!moves) top[half] = state.max[half];
        // Its maximum is -inf; 0 keeps (-inf) - (-inf) away.
        shift[half] = top[half] == neg_infinity() ? 0.0f : top[half] * log2_scale;
    }
    if (moves) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rescale[half] = exp2_approx(fmaf(state.max[half], log2_scale, -shift[half]));
            state.sum[half] = mul_rn(state.sum[half], rescale[half]);
            state.max[half] = top[half];
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = state.sum[half];
#pragma unroll
        for (int n = 2 * half; n < SCORES; n += 4) {
            score[n] = exp2_approx(fmaf(score[n], log2_scale, -shift[half]));
            score[n + 1] = exp2_approx(fmaf(score[n + 1], log2_scale, -shift[half]));
            sum += score[n] + score[n + 1];
        }
        state.sum[half] = sum;
    }
    return moves;
}

// The same against a maximum that is not looked for any more: no comparison, no rescaling.
__device__ __forceinline__ void optimistic_step(float (&score)[SCORES], Softmax& state,
                                                float log2_scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float shift = state.max[half] * log2_scale;
        float sum = state.sum[half];
#pragma unroll
        for (int n = 2 * half; n < SCORES; n += 4) {
            score[n] = exp2_approx(fmaf(score[n], log2_scale, -shift));
            score[n + 1] = exp2_approx(fmaf(score[n + 1], log2_scale, -shift));
            sum += score[n] + score[n + 1];
        }
        state.sum[half] = sum;
    }
}

// 0, which the compiler does not know: whoever needs it comes behind the sums, and so behind the
// exponentials. zero: an expression that is 0 in every launch.
__device__ __forceinline__ int zero_behind(const Softmax& state, int zero) {
    return (float_bits(state.sum[0]) ^ float_bits(state.sum[1])) & zero;
}

// Products -> scores, of rows row, row + 8; key is the column of score[0].
__device__ __forceinline__ void change_scores(float (&score)[SCORES], const ScoreChange& change,
                                              float slope, int row, int key) {
    float passed;  // only the backward pass has a use for it
    const float first = float(row + change.offset - key);  // whole numbers, exact up to 2^24
#pragma unroll
    for (int n = 0; n < SCORES; ++n) {
        const float distance = fabsf(first + float(n / 2 % 2 * 8 - n / 4 * 8 - n % 2));
        score[n] = change.at(score[n], distance, slope, passed);
    }
}

// How many of this thread's columns, key + 8 j and key + 8 j + 1 in their order, lie before `bound`.
__device__ __forceinline__ int columns_before(int bound, int key) {
    const int left = max_int(bound - key, 0);
    return left / 8 * 2 + min_int(left % 8, 2);
}

// The lowest `count` bits, none and all where it lies beyond.
__device__ __forceinline__ uint32 low_bits(int count) {
    return count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1u;
}

// Sets what rows row, row + 8 may not see to -inf; key is the column of score[0]. A bit for each
// column of this thread: seven of them become predicates at a time (R2P), where a comparison for
// each would be an instruction for each.
__device__ __forceinline__ void mask_scores(float (&score)[SCORES], int row, int key, int seqlen_q,
                                            int seqlen_k, const Window& window) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int visible = seqlen_k;
        if constexpr (CAUSAL)
            visible = min_int(visible, row + 8 * half + 1 + seqlen_k - seqlen_q);
#if WINDOW
        const int diagonal = row + 8 * half + seqlen_k - seqlen_q;
        const int sinks = columns_before(min_int(window.sinks, visible), key);
        const int hidden = columns_before(window.first(diagonal), key);
        visible = min_int(visible, window.end(diagonal));
#endif
        const int seen = columns_before(visible, key);
#pragma unroll
        for (int first = 0; first < SCORES / 2; first += 32) {
#if WINDOW
            const uint32 bits = (low_bits(seen - first) & ~low_bits(hidden - first)) |
                                low_bits(sinks - first);
#else
            const uint32 bits = low_bits(seen - first);
#endif
#pragma unroll
            for (int b = 0; b < min_int(32, SCORES / 2 - first); ++b)
                if (!(bits >> b & 1u)) score[(first + b) / 2 * 4 + 2 * half + b % 2] = neg_infinity();
        }
    }
}

// score = Q K^T for 64 rows of Q; both K-major: 16 columns further is 32 bytes on in the slab.
__device__ __forceinline__ void issue_scores(float (&score)[SCORES], const unsigned char* q,
                                             const unsigned char* k) {
    const uint64 a = smem_descriptor(q, 16, 1024), b = smem_descriptor(k, 16, 1024);
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
        const uint64 a_step = a + (step / 4 * 64 * 128 + step % 4 * 32) / 16;
        const uint64 b_step = b + (step / 4 * BLOCK_N * 128 + step % 4 * 32) / 16;
        if (step == 0)
            Wgmma<BLOCK_N>::template ss_first<0, 0>(score, a_step, b_step);
        else
            Wgmma<BLOCK_N>::template ss<0, 0>(score, a_step, b_step);
    }
    wgmma_commit();
}

// out += P V with P in registers; V is N-major: 16 keys further is 16 rows of 128 bytes on.
__device__ __forceinline__ void issue_output(float (&out)[OUTPUTS],
                                             const uint32 (&p)[BLOCK_N / 16][4],
                                             const unsigned char* v) {
    const uint64 b = smem_descriptor(v, BLOCK_N * 128, 1024);
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step)
        Wgmma<HEAD_DIM>::template rs<1>(out, p[step], b + step * 16 * 128 / 16);
    wgmma_commit();
}

__device__ __forceinline__ void round_weights(uint32 (&p)[BLOCK_N / 16][4],
                                              const float (&score)[SCORES]) {
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            p[step][i] = pack2<io_t>(score[8 * step + 2 * i], score[8 * step + 2 * i + 1]);
}

__device__ __forceinline__ void multiply_rows(float (&out)[OUTPUTS], const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < OUTPUTS; ++n) out[n] *= factor[n / 2 % 2];
}

struct TileCoord {
    int tile, head, batch;
};

// Blocks start in the order of their index. Heads go in groups whose K and V fit in L2 together;
// within a group all heads of a query tile are neighbours, and a causal mask's longest tiles go
// first, so that the short ones fill the gaps at the end.
__device__ __forceinline__ TileCoord tile_coord(int block, int tiles, int heads, int batch,
                                                int heads_per_group) {
    const int group = block / (tiles * heads_per_group);
    const int rest = block % (tiles * heads_per_group);
    const int here = min_int(heads_per_group, heads * batch - group * heads_per_group);
    const int tile = rest / here, bh = group * heads_per_group + rest % here;
    return {CAUSAL ? tiles - 1 - tile : tile, bh % heads, bh / heads};
}

// Which key tiles a query tile meets, how many, and, without a window, how many of them, the first
// ones walked from the end, need a mask.
struct KeyRange {
    KeyTiles list;
    int tiles, masked;
    __device__ __forceinline__ KeyRange(int tile, int seqlen_q, int seqlen_k,
                                        const Window& window)
        : list(key_tiles_of<BLOCK_M, BLOCK_N, CAUSAL>(tile, seqlen_q, seqlen_k, window)),
          tiles(list.count) {
        // Keys that even the first row of the tile sees: key tiles within them need no mask.
        int seen_by_all = seqlen_k;
        if constexpr (CAUSAL)
            seen_by_all =
                min_int(seqlen_k, max_int(tile * BLOCK_M + 1 + seqlen_k - seqlen_q, 0));
        masked = tiles - min_int(tiles, seen_by_all / BLOCK_N);
    }
};

// With a window: whether the keys from key0 on need a mask for the 64 rows from row0 on.
__device__ __forceinline__ bool needs_mask(const Window& window, int row0, int key0, int seqlen_q,
                                           int seqlen_k) {
    const int diagonal = row0 + seqlen_k - seqlen_q;
    return key0 + BLOCK_N > seqlen_k || (CAUSAL && key0 + BLOCK_N - 1 > diagonal) ||
           window.hides_any(diagonal, 64, key0, BLOCK_N);
}

// ---- ping-pong -----------------------------------------------------------------------------------

// PINGPONG (FlashAttention-3, §3.1): consumer warpgroups issue the products of a key tile in turn,
// so that the softmax of one runs under the products of the others. Warpgroup w waits at named
// barrier CONSUMERS + w for the one before it; the first one begins by opening its own. Every
// warpgroup must pass the barrier equally often, also where it could skip a masked tile; otherwise
// the next one deadlocks.
__device__ __forceinline__ void warp_scheduler_open(int warpgroup) {
    if (PINGPONG && warpgroup == 1) named_arrive(CONSUMERS + 1, 2 * WARPGROUP);
}
__device__ __forceinline__ void warp_scheduler_wait(int warpgroup) {
    if constexpr (PINGPONG) named_sync(CONSUMERS + warpgroup, 2 * WARPGROUP);
}
__device__ __forceinline__ void warp_scheduler_arrive(int warpgroup) {
    if constexpr (PINGPONG)
        named_arrive(CONSUMERS + warpgroup % CONSUMERS + 1, 2 * WARPGROUP);
}
// Consumes the last, unmatched arrival, so that the barrier ends balanced.
__device__ __forceinline__ void warp_scheduler_close(int warpgroup) {
    if (PINGPONG && warpgroup == 1) named_sync(CONSUMERS + 1, 2 * WARPGROUP);
}

// ---- results -------------------------------------------------------------------------------------

// Whether a stale reference let sums or outputs of the warp's 16 rows grow too large. All lanes.
__device__ __forceinline__ int has_overflowed(const float (&out)[OUTPUTS], const Softmax& state) {
    // Not a number fails the comparison too; 0 * x is 0 unless x is infinite or not a number.
    float finite = 0.0f;
#pragma unroll
    for (int n = 0; n < OUTPUTS; ++n) finite += out[n] * 0.0f;
    int overflowed = !(state.sum[0] < LIMIT) || !(state.sum[1] < LIMIT) || !(finite == 0.0f);
#pragma unroll
    for (int step = 16; step; step /= 2) overflowed |= shfl_xor(overflowed, step);
    return overflowed;
}

// out = out / sum, and the log-sum-exp of rows row, row + 8 to memory; a row without keys has 0 and
// -inf.
__device__ __forceinline__ void normalise(float (&out)[OUTPUTS], const Softmax& state,
                                          const Tensor3<float>& lse, const TileCoord& coord,
                                          int row, int seqlen_q, float scale) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = state.sum[half];
        sum += shfl_xor(sum, 1);
        sum += shfl_xor(sum, 2);
        factor[half] = sum > 0.0f ? 1.0f / sum : 0.0f;
        if (threadIdx.x % 4 == 0 && row + 8 * half < seqlen_q)
            st_global(lse.at(coord.batch, coord.head, row + 8 * half),
                      sum > 0.0f ? fmaf(LN2, log2_approx(sum), mul_rn(state.max[half], scale))
                                 : neg_infinity());
    }
    multiply_rows(out, factor);
}

// The warp's 16 rows of its warpgroup's 64, rounded, into slabs of 64 columns at o.
__device__ __forceinline__ void outputs_to_shared(unsigned char* o,
                                                  const float (&out)[OUTPUTS]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 16; ++c) {
        uint32 r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) r[i] = pack2<io_t>(out[8 * c + 2 * i], out[8 * c + 2 * i + 1]);
        const int in_tile = 16 * warp + lane % 16, chunk = 2 * c + lane / 16;
        stmatrix_x4(o + chunk / 8 * 64 * 128 + in_tile * 128 + (chunk % 8 ^ in_tile % 8) * 16, r);
    }
}
