// What happens to a score between the product and the softmax, and to its gradient on the way back.
// With x = q·k, query r, key c, in this order, each only where its macro is set:
//   s = scale x
//   SOFTCAP  s <- softcap tanh(s / softcap)                     (Gemma 2, 2024; FlashAttention-2)
//   ALIBI    s <- s - slope |r + seqlen_k - seqlen_q - c|       (Press et al. 2022; FlashAttention-2)
//   BIAS     s <- s + bias[r][c]
// The gradient passes what is added unchanged, so that it is the bias's own; tanh multiplies it by
// 1 - tanh².
//
// Bytes: alibi_slopes, 4 for a query tile that visits a key tile, or for a visit where keys are
// outside. softcap moves nothing, and costs a special-function operation a score in bf16, two in fp16
// and fp32. bias, an element for each pair that causal mask and window leave in a visited tile, in
// every kernel that makes scores; its gradient, an element for each such pair. A pair is read and
// written by one thread.
#pragma once

#include "tile.cuh"
#include "window.cuh"

#ifndef SOFTCAP
#define SOFTCAP 0  // 1: scores are capped
#endif
#ifndef ALIBI
#define ALIBI 0  // 1: a distance times the head's slope is taken off
#endif
#ifndef BIAS
#define BIAS 0  // 1: a bias (B, H, seqlen_q, seqlen_k) is added; stride 0 shares it
#endif
#ifndef BIAS_GRADIENT
#define BIAS_GRADIENT 0  // 1: dS is written in the io type, 2: added up in fp32, 3: written in fp32
#endif

// Scores leave change_scores (and add_bias) as the softmax takes them, scale included.
constexpr bool CHANGED = SOFTCAP || ALIBI || BIAS;

// For fp32. (e^2x - 1) / (e^2x + 1), and below 3/4, where that cancels, Lambert's continued fraction of
// tanh as far as x^5: its error there is below 1e-8. One division; relative error below 2^-20. The
// derivative is 1 - tanh², and 4 e^2x / (e^2x + 1)² where that would cancel.
__device__ __forceinline__ float tanh_of(float x, float& derivative) {
    const float a = fabsf(x), z = mul_rn(a, a);
    const bool small = a < 0.75f;
    // Beyond 20 the quotient is 1. A NaN stays one.
    const float e = exp2_approx((a > 20.0f ? 20.0f : a) * (2.0f * LOG2E));
    const float above = small ? mul_rn(a, fmaf(z, z + 105.0f, 945.0f)) : e - 1.0f;
    const float below = small ? fmaf(z, fmaf(z, 15.0f, 420.0f), 945.0f) : e + 1.0f;
    const float inverse = reciprocal_approx(below);
    const float t = mul_rn(above, inverse);
    derivative = small ? fmaf(-t, t, 1.0f) : mul_rn(mul_rn(e, inverse), 4.0f * inverse);
    return x < 0.0f ? -t : t;
}

// Every operation is rounded by itself, so that all passes find the same s.
struct ScoreChange {
    float scale;
    int offset;  // seqlen_k - seqlen_q
    float softcap, rate;  // the cap, and scale / softcap

    // softcap tanh(y), y = rate x, and its derivative by scale x, 1 - tanh², in the accuracy of io_t:
    //   bf16  tanh.approx, to 2^-11 of s; to round s to bf16 costs up to 2^-8
    //   fp16  1 - 2 / (1 + e^2y), to 2^-21 of the cap; where that is coarse, below y = 2^-8, s = scale x,
    //         which is no further from tanh: to 2^-13 of s. To round s to fp16 costs up to 2^-11, but
    //         2^-12 where tanh is nearly 1 and 1 - tanh² hangs on it: half of what tanh.approx would
    //         (tests/sm80/test_softcap_accuracy.py)
    //   fp32  to 2^-20
    __device__ __forceinline__ float capped(float x, float& passed) const {
        if constexpr (DTYPE == 1) {
            const float t = tanh_approx(mul_rn(x, rate));
            passed = fmaf(-t, t, 1.0f);
            return mul_rn(softcap, t);
        } else if constexpr (DTYPE == 0) {
            constexpr float BINARY = 2.0f * LOG2E;  // e^2y = 2^(BINARY y)
            const float exponent = mul_rn(x, rate * BINARY);
            const float share = reciprocal_approx(1.0f + exp2_approx(exponent));
            passed = mul_rn(4.0f * share, 1.0f - share);
            const float s = fmaf(-2.0f * softcap, share, softcap);
            return fabsf(exponent) < BINARY / 256.0f ? mul_rn(x, scale) : s;
        } else {
            return mul_rn(softcap, tanh_of(mul_rn(x, rate), passed));
        }
    }

    // The score that the softmax takes; `passed` is its derivative after s = scale x.
    __device__ __forceinline__ float operator()(float x, int query, int key, float slope,
                                                float& passed) const {
        const int distance = query + offset - key;
        return at(x, float(distance < 0 ? -distance : distance), slope, passed);
    }
    // The same of a distance that the caller keeps as a number, exact up to 2^24.
    __device__ __forceinline__ float at(float x, float distance, float slope, float& passed) const {
        float s;
        if constexpr (SOFTCAP)
            s = capped(x, passed);
        else
            s = mul_rn(x, scale);
        if constexpr (ALIBI) s = fmaf(-slope, distance, s);
        return s;
    }
};

// Products -> scores, in the accumulator layout of fragments.cuh. down0 and right0 are the
// coordinates of the fragment's first element: of a query and a key, or with KEYS_DOWN (scores
// transposed) of a key and a query. `passed` receives the derivatives, with SOFTCAP alone.
template <bool KEYS_DOWN, int GROUPS, int TILES>
__device__ __forceinline__ void change_scores(float (&s)[GROUPS][TILES][4],
                                              float (&passed)[GROUPS][TILES][4],
                                              const ScoreChange& change, float slope, int down0,
                                              int right0) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int down = down0 + 16 * g + e / 2 * 8 + lane_id() / 4;
                const int right = right0 + 8 * n + lane_id() % 4 * 2 + e % 2;
                s[g][n][e] = change(s[g][n][e], KEYS_DOWN ? right : down, KEYS_DOWN ? down : right,
                                    slope, passed[g][n][e]);
            }
}

// The slope that a block keeps in shared memory; 0 without one.
__device__ __forceinline__ float slope_of(const unsigned char* shared) {
    return ALIBI ? ld_shared(reinterpret_cast<const float*>(shared)) : 0.0f;
}

// A (seqlen_q, seqlen_k) matrix of one head.
template <class T>
struct Pairs {
    T* data;
    int64 stride_n;
    int seqlen_q, seqlen_k;
    Window window;
};

// Calls body(address, g, n, e) for the elements of a fragment (as in change_scores) that are pairs
// of a query with a key it may see.
template <bool KEYS_DOWN, int GROUPS, int TILES, class T, class Body>
__device__ __forceinline__ void for_each_pair(const Pairs<T>& pairs, int down0, int right0,
                                              Body body) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int down = down0 + 16 * g + e / 2 * 8 + lane_id() / 4;
                const int right = right0 + 8 * n + lane_id() % 4 * 2 + e % 2;
                const int query = KEYS_DOWN ? right : down, key = KEYS_DOWN ? down : right;
                int visible = pairs.seqlen_k;  // keys, from the first, that the query may see
                if constexpr (CAUSAL)
                    visible = min_int(visible, query + 1 + pairs.seqlen_k - pairs.seqlen_q);
                const int diagonal = query + pairs.seqlen_k - pairs.seqlen_q;
                if (query < pairs.seqlen_q && key < visible && !pairs.window.hides(diagonal, key))
                    body(pairs.data + query * pairs.stride_n + key, g, n, e);
            }
}

// The bias of a fragment's pairs, 0 elsewhere. Loaded before the product and added after it, so that
// the product hides the way to memory.
template <bool KEYS_DOWN, int GROUPS, int TILES>
__device__ __forceinline__ void load_bias(io_t (&bias)[GROUPS][TILES][4],
                                          const Pairs<const io_t>& pairs, int down0, int right0) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) bias[g][n][e] = io_t{};
    for_each_pair<KEYS_DOWN, GROUPS, TILES>(
        pairs, down0, right0,
        [&](const io_t* at, int g, int n, int e) { bias[g][n][e] = ld_global(at); });
}

template <int GROUPS, int TILES>
__device__ __forceinline__ void add_bias(float (&s)[GROUPS][TILES][4],
                                         const io_t (&bias)[GROUPS][TILES][4]) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[g][n][e] += to_float(bias[g][n][e]);
}

// The type that the gradient of a bias leaves a kernel in.
template <int FORM>
struct BiasGradient {
    using type = float;
};
template <>
struct BiasGradient<1> {
    using type = io_t;
};
using bias_gradient_t = BiasGradient<BIAS_GRADIENT>::type;

// Sends dS where the gradient of the bias is made.
template <bool KEYS_DOWN, int GROUPS, int TILES>
__device__ __forceinline__ void send_bias_gradient(const float (&ds)[GROUPS][TILES][4],
                                                   const Pairs<bias_gradient_t>& pairs, int down0,
                                                   int right0) {
    for_each_pair<KEYS_DOWN, GROUPS, TILES>(
        pairs, down0, right0, [&](bias_gradient_t* at, int g, int n, int e) {
            if constexpr (BIAS_GRADIENT == 2)
                atomic_add_global(reinterpret_cast<float*>(at), ds[g][n][e]);
            else
                st_global(at, from_float<bias_gradient_t>(ds[g][n][e]));
        });
}

// dS o what the changes let through; nothing to do where they only add.
template <int GROUPS, int TILES>
__device__ __forceinline__ void pass_back(float (&ds)[GROUPS][TILES][4],
                                          const float (&passed)[GROUPS][TILES][4]) {
    if constexpr (SOFTCAP) {
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int n = 0; n < TILES; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) ds[g][n][e] = mul_rn(ds[g][n][e], passed[g][n][e]);
    }
}
