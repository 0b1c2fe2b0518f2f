// Small matrix products of one warp, acc += A B, in the fragment layout of mma.sync.m16n8k16.
//
// A warp holds an accumulator of 16 * GROUPS rows by 8 * TILES columns as float[GROUPS][TILES][4].
// With g = lane / 4 and t = lane % 4, a thread has, of the 16 x 8 block (group, tile),
//   [0], [1]: row g, columns 2t and 2t + 1        [2], [3]: row g + 8, the same columns.
//
// fp16 and bf16 multiply on tensor cores, operands by ldmatrix. fp32 multiplies with fused
// multiply-adds read from shared memory, in the same layout, so that a kernel's code is the same.
//
// Operands: which values of a tile in shared memory are A[row][k] or B[k][col].
//   Rows{tile}              A[i][x] = tile[i][x]
//   Columns{tile, c}        A[i][x] = tile[x][c + i]            the tile transposed
//   Registers{fragments}    A, already in registers (tensor-core path only)
//   KMajor{tile}            B[x][j] = tile[j][x]                K in Q K^T
//   NMajor{tile, c}         B[x][j] = tile[x][c + j]            V in P V
#pragma once

#include "tile.cuh"

template <class TileT>
struct Rows {
    static constexpr bool IN_REGISTERS = false;
    TileT tile;
};
template <class TileT>
struct Columns {
    static constexpr bool IN_REGISTERS = false;
    TileT tile;
    int col0;
};
template <int GROUPS, int STEPS>
struct Registers {
    static constexpr bool IN_REGISTERS = true;
    uint32 (&fragment)[GROUPS][STEPS][4];
};
template <class TileT>
struct KMajor {
    TileT tile;
};
template <class TileT>
struct NMajor {
    TileT tile;
    int col0;
};
template <class TileT>
Rows(TileT) -> Rows<TileT>;
template <class TileT>
Columns(TileT, int) -> Columns<TileT>;
template <int GROUPS, int STEPS>
Registers(uint32 (&)[GROUPS][STEPS][4]) -> Registers<GROUPS, STEPS>;
template <class TileT>
KMajor(TileT) -> KMajor<TileT>;
template <class TileT>
NMajor(TileT, int) -> NMajor<TileT>;

template <int GROUPS, int TILES>
__device__ __forceinline__ void clear(float (&acc)[GROUPS][TILES][4]) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[g][n][e] = 0.0f;
}

template <int GROUPS, int TILES>
__device__ __forceinline__ void multiply(float (&acc)[GROUPS][TILES][4], float factor) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[g][n][e] *= factor;
}

// Rounds an accumulator to the tile's type and puts it at the tile's first row, column col0.
template <class TileT, int GROUPS, int TILES>
__device__ __forceinline__ void store_accumulator(TileT tile, int col0,
                                                  const float (&acc)[GROUPS][TILES][4]) {
    const int row = lane_id() / 4, col = lane_id() % 4 * 2;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // Eight values are one chunk of 16-bit values, or two of fp32.
                const int down = 16 * g + 8 * half, left = (col0 + 8 * n) / TileT::VEC;
                auto* p = tile.chunk(down, row, left, col / TileT::VEC) + col % TileT::VEC;
                store_pair(p, acc[g][n][2 * half], acc[g][n][2 * half + 1]);
            }
}

#if DTYPE != 2

constexpr int K_STEP = 16;

template <class TileT>
__device__ __forceinline__ void load_a(uint32 (&r)[4], const Rows<TileT>& a, int group, int step) {
    const int l = lane_id();
    ldmatrix_x4(r, a.tile.chunk(16 * group, l & 15, 2 * step, l >> 4));
}
template <class TileT>
__device__ __forceinline__ void load_a(uint32 (&r)[4], const Columns<TileT>& a, int group,
                                       int step) {
    const int l = lane_id();
    ldmatrix_x4_trans(r, a.tile.chunk(16 * step, (l & 7) + (l >> 4) * 8, a.col0 / 8 + 2 * group,
                                      l >> 3 & 1));
}
template <int GROUPS, int STEPS>
__device__ __forceinline__ void load_a(uint32 (&r)[4], const Registers<GROUPS, STEPS>& a, int group,
                                       int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = a.fragment[group][step][i];
}
// B of two neighbouring 8-column tiles: r[0], r[1] for the left one, r[2], r[3] for the right one.
template <class TileT>
__device__ __forceinline__ void load_b(uint32 (&r)[4], const KMajor<TileT>& b, int pair, int step) {
    const int l = lane_id();
    ldmatrix_x4(r, b.tile.chunk(16 * pair, (l & 7) + (l >> 4) * 8, 2 * step, l >> 3 & 1));
}
template <class TileT>
__device__ __forceinline__ void load_b(uint32 (&r)[4], const NMajor<TileT>& b, int pair, int step) {
    const int l = lane_id();
    ldmatrix_x4_trans(r, b.tile.chunk(16 * step, l & 15, b.col0 / 8 + 2 * pair, l >> 4));
}

// acc += A B with a sum over K values. Four steps are one period of the swizzle; to unroll MOST of
// them costs registers and saves waits. An operand in registers is indexed by constants alone.
template <int K, int MOST = 4, int GROUPS, int TILES, class A, class B>
__device__ __forceinline__ void gemm(float (&acc)[GROUPS][TILES][4], const A& a, const B& b) {
    static_assert(K % K_STEP == 0 && TILES % 2 == 0, "16 x 16 blocks");
    constexpr int UNROLL = A::IN_REGISTERS ? K / K_STEP : MOST;
#pragma unroll UNROLL
    for (int step = 0; step < K / K_STEP; ++step) {
        uint32 left[GROUPS][4];
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) load_a(left[g], a, g, step);
#pragma unroll
        for (int pair = 0; pair < TILES / 2; ++pair) {
            uint32 right[4];
            load_b(right, b, pair, step);
            const uint32 even[2] = {right[0], right[1]}, odd[2] = {right[2], right[3]};
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                mma_16816(acc[g][2 * pair], left[g], even, io_t{});
                mma_16816(acc[g][2 * pair + 1], left[g], odd, io_t{});
            }
        }
    }
}

// An accumulator, rounded, as the A operand of the next product: no exchange between threads,
// because two 8-column accumulators side by side are laid out as one 16-column A fragment.
template <int GROUPS, int TILES>
__device__ __forceinline__ void round_to_operand(uint32 (&fragment)[GROUPS][TILES / 2][4],
                                                 const float (&acc)[GROUPS][TILES][4]) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int s = 0; s < TILES / 2; ++s) {
            fragment[g][s][0] = pack2<io_t>(acc[g][2 * s][0], acc[g][2 * s][1]);
            fragment[g][s][1] = pack2<io_t>(acc[g][2 * s][2], acc[g][2 * s][3]);
            fragment[g][s][2] = pack2<io_t>(acc[g][2 * s + 1][0], acc[g][2 * s + 1][1]);
            fragment[g][s][3] = pack2<io_t>(acc[g][2 * s + 1][2], acc[g][2 * s + 1][3]);
        }
}

#else  // fp32

constexpr int K_STEP = 4;

using Float2 = Vec<float, 2>;
using Float4 = Vec<float, 4>;

__device__ __forceinline__ Float4 load_float4(const float* p) {
    return ld_shared(reinterpret_cast<const Float4*>(p));
}
// Rows g (r[0]) and g + 8 (r[1]) of A, K_STEP values along the sum.
template <class TileT>
__device__ __forceinline__ void load_a(float (&r)[2][4], const Rows<TileT>& a, int group,
                                       int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Float4 value =
            load_float4(a.tile.chunk(16 * group + 8 * half, lane_id() / 4, step, 0));
#pragma unroll
        for (int x = 0; x < 4; ++x) r[half][x] = value[x];
    }
}
template <class TileT>
__device__ __forceinline__ void load_a(float (&r)[2][4], const Columns<TileT>& a, int group,
                                       int step) {
#pragma unroll
    for (int x = 0; x < 4; ++x)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int left = (a.col0 + 16 * group + 8 * half) / 4;
            r[half][x] = ld_shared(a.tile.chunk(0, 4 * step + x, left, lane_id() / 16) +
                                   lane_id() / 4 % 4);
        }
}
// Columns 2t (r[0]) and 2t + 1 (r[1]) of an 8-column tile of B.
template <class TileT>
__device__ __forceinline__ void load_b(float (&r)[2][4], const KMajor<TileT>& b, int n, int step) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const Float4 value =
            load_float4(b.tile.chunk(8 * n, lane_id() % 4 * 2 + c, step, 0));
#pragma unroll
        for (int x = 0; x < 4; ++x) r[c][x] = value[x];
    }
}
template <class TileT>
__device__ __forceinline__ void load_b(float (&r)[2][4], const NMajor<TileT>& b, int n, int step) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
        const int t = lane_id() % 4;
        const Float2 value = ld_shared(reinterpret_cast<const Float2*>(
            b.tile.chunk(0, 4 * step + x, b.col0 / 4 + 2 * n, t / 2) + t % 2 * 2));
        r[0][x] = value[0];
        r[1][x] = value[1];
    }
}

template <int K, int MOST = 4, int GROUPS, int TILES, class A, class B>
__device__ __forceinline__ void gemm(float (&acc)[GROUPS][TILES][4], const A& a, const B& b) {
#pragma unroll 1
    for (int step = 0; step < K / K_STEP; ++step) {
        float left[GROUPS][2][4];
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) load_a(left[g], a, g, step);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            float right[2][4];
            load_b(right, b, n, step);
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int x = 0; x < 4; ++x)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        acc[g][n][e] = fmaf(left[g][e / 2][x], right[e % 2][x], acc[g][n][e]);
        }
    }
}

#endif
