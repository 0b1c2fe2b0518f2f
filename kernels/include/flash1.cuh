// What the two passes of FlashAttention 2022 share: the three forms, and fp32 buffers of an
// unfinished O or dQ. Macros: FORM (0 as printed, 1 first key tile unread, 2 as released), BLOCK_N.
#pragma once

#include "ladder.cuh"

constexpr bool SKIP_FIRST_READ = FORM != 0, RELEASED = FORM == 2;
constexpr float LN2 = 0.6931471805599453f;
constexpr int LD_P = pad4(BLOCK_N) + 4;

// The last key tile of which a query tile sees anything.
__device__ __forceinline__ int last_key_tile(int row0, int rows, int seqlen_q, int seqlen_k,
                                             int causal) {
    const int last_key = causal ? row0 + rows - 1 + seqlen_k - seqlen_q : seqlen_k - 1;
    return min(last_key, seqlen_k - 1) / BLOCK_N;
}

// VEC fp32 numbers of a 16-byte aligned row, as many as an access of the io type holds elements.
__device__ __forceinline__ void load_floats(float (&x)[VEC], const float* p) {
#pragma unroll
    for (int e = 0; e < VEC; e += 4) {
        const Quad quad = ld_global(reinterpret_cast<const Quad*>(p + e));
#pragma unroll
        for (int f = 0; f < 4; ++f) x[e + f] = quad[f];
    }
}

__device__ __forceinline__ void store_floats(float* p, const float (&x)[VEC]) {
#pragma unroll
    for (int e = 0; e < VEC; e += 4) {
        Quad quad;
#pragma unroll
        for (int f = 0; f < 4; ++f) quad[f] = x[e + f];
        st_global(reinterpret_cast<Quad*>(p + e), quad);
    }
}
