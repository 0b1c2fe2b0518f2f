// K and V of e4m3 (kernels/fp8.py) for a kernel that multiplies 16-bit tiles. The codes arrive in
// tiles of bytes; each thread converts the chunks that it has copied itself, which is exact. One
// scale serves SCALE_KEYS keys at least: K's multiplies columns of the scores, V's columns of P.
#pragma once

#include "e4m3.cuh"
#include "fragments.cuh"
#include "tile.cuh"

constexpr int SCALE_KEYS = 16;

// After cp_async_wait, of what load_tile_async of as many THREADS has copied to `codes`.
template <int THREADS, class TileT, class CodesT>
__device__ __forceinline__ void convert_own_chunks(TileT tile, CodesT codes) {
    auto* const nowhere = codes.data;
    for_each_chunk<THREADS>(codes, nowhere, 0, [&](int row, int c, uint8* shared, uint8*) {
        const Vec16 sixteen = ld_shared(reinterpret_cast<const Vec16*>(shared));
#pragma unroll
        for (int half = 0; half < 2; ++half)
            st_shared(reinterpret_cast<Vec16*>(tile.chunk(row, 2 * c + half)),
                      eight_e4m3<typename TileT::value_type>(sixteen, half));
    });
}

// The scales of a head's keys: one of K and one of V for `block` of them.
template <int KEYS>
struct KeyScales {
    static constexpr int COUNT = KEYS / SCALE_KEYS;  // of a tile, of K and as many of V
    static constexpr int BYTES = 2 * COUNT * 4;
    const float *k, *v;
    int block, seqlen_k;

    // Of a tile, what this thread brings; 0 for keys that there are not.
    __device__ __forceinline__ float load(int tile) const {
        const int which = threadIdx.x / COUNT;
        const int64 key = int64(tile) * KEYS + threadIdx.x % COUNT * SCALE_KEYS;
        if (which > 1 || key >= seqlen_k) return 0.0f;
        return ld_global((which == 0 ? k : v) + key / block);
    }
    __device__ __forceinline__ void publish(float* shared, float brought) const {
        if (threadIdx.x < 2 * COUNT) st_shared(shared + threadIdx.x, brought);
    }
};

// Columns of the scores times `factor` and the scale of their key.
template <int GROUPS, int TILES>
__device__ __forceinline__ void scale_scores(float (&score)[GROUPS][TILES][4], const float* scales,
                                             float factor) {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        const float unit = factor * ld_shared(scales + n * 8 / SCALE_KEYS);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int e = 0; e < 4; ++e) score[g][n][e] *= unit;
    }
}

// Rows g (half 0) and g + 8 (half 1) of each group of an accumulator, each times its factor.
template <int GROUPS, int TILES>
__device__ __forceinline__ void multiply_rows(float (&acc)[GROUPS][TILES][4],
                                              const float (&factor)[GROUPS][2]) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[g][n][e] *= factor[g][e / 2];
}

// Columns of P times the scale of their value, in units of the row's largest such product so far:
// at most 1, it is rounded to 16 bits as P ever is, whatever the scales of keys that the row does
// not see or hardly weighs. `out` is in the same unit. The caller has multiplied `unit`, and not
// `out`, by what the softmax rescales the output with.
template <int GROUPS, int TILES, int COLUMNS>
__device__ __forceinline__ void scale_weights(float (&p)[GROUPS][TILES][4],
                                              float (&out)[GROUPS][COLUMNS][4],
                                              float (&unit)[GROUPS][2], const float* scales) {
    constexpr float SMALLEST = 1.17549435e-38f;  // whose reciprocal is finite
    float factor[GROUPS][2], inverse[GROUPS][2];
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        const float scale = ld_shared(scales + 8 * n / SCALE_KEYS);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int e = 0; e < 4; ++e) p[g][n][e] *= scale;
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = fmaxf(unit[g][half], SMALLEST);
#pragma unroll
            for (int n = 0; n < TILES; ++n)
                largest = fmaxf(largest, fmaxf(fabsf(p[g][n][2 * half]),
                                               fabsf(p[g][n][2 * half + 1])));
            largest = fmaxf(largest, shfl_xor(largest, 1));
            largest = fmaxf(largest, shfl_xor(largest, 2));
            inverse[g][half] = 1.0f / largest;
            factor[g][half] = unit[g][half] * inverse[g][half];
            unit[g][half] = largest;
        }
    multiply_rows(p, inverse);
    multiply_rows(out, factor);
}
