// What the first two steps of the ladder share: tiles in shared memory and three small matrix
// products of plain multiply-adds, each thread holding a small tile of the result in registers.
//
// A tile of ROWS real rows occupies pad4(ROWS) rows of shared memory, so that a thread may always
// work on four of them; every row a tensor does not have is zero. Products accumulate in fp32.
// Macros: DTYPE, HEAD_DIM (a multiple of 8, at most 128), THREADS.
#pragma once

#include "device.cuh"
#include "reduce.cuh"

static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM >= 8 && HEAD_DIM <= 128, "head_dim");

constexpr int VEC = 16 / int(sizeof(io_t));  // elements of one 16-byte access
constexpr int CHUNKS = HEAD_DIM / VEC;       // 16-byte accesses of one row
// Distance between rows in shared memory: an odd number of 16-byte chunks, so that the same chunk
// of eight successive rows lies in eight different bank groups.
constexpr int LD = (CHUNKS | 1) * VEC;

using Chunk = Vec<io_t, VEC>;
using Quad = Vec<float, 4>;

__device__ constexpr int pad4(int rows) { return (rows + 3) / 4 * 4; }
// Rows of a micro-tile: as many as keep all threads busy, at most four.
__device__ constexpr int micro_rows(int rows_a_thread) {
    return rows_a_thread >= 4 ? 4 : rows_a_thread >= 2 ? 2 : 1;
}
// ---- 16 bytes at a time -------------------------------------------------------------------------

__device__ __forceinline__ void widen(float (&x)[VEC], const Chunk& chunk) {
#pragma unroll
    for (int e = 0; e < VEC; ++e) x[e] = to_float(chunk[e]);
}

__device__ __forceinline__ Chunk narrow(const float (&x)[VEC]) {
    Chunk chunk;
#pragma unroll
    for (int e = 0; e < VEC; ++e) chunk[e] = from_float<io_t>(x[e]);
    return chunk;
}

__device__ __forceinline__ const Chunk* as_chunk(const io_t* p) {
    return reinterpret_cast<const Chunk*>(p);
}
__device__ __forceinline__ Chunk* as_chunk(io_t* p) { return reinterpret_cast<Chunk*>(p); }

// Up to VEC elements of a row of an N x N matrix, whose length no tile need divide: one access if
// all are there, single elements at the end of the row. What is missing becomes `fill`.
__device__ __forceinline__ void load_upto(float (&x)[VEC], const io_t* p, int count, float fill) {
    if (count >= VEC) {
        widen(x, ld_global(as_chunk(p)));
    } else {
#pragma unroll
        for (int e = 0; e < VEC; ++e) x[e] = e < count ? to_float(ld_global(p + e)) : fill;
    }
}

__device__ __forceinline__ void store_upto(io_t* p, const float (&x)[VEC], int count) {
    if (count >= VEC) {
        st_global(as_chunk(p), narrow(x));
    } else {
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            if (e < count) st_global(p + e, from_float<io_t>(x[e]));
        }
    }
}

// ---- tiles --------------------------------------------------------------------------------------

// The first `rows` rows of a (N, HEAD_DIM) matrix to shared memory; zeros up to pad4(ROWS).
template <int ROWS>
__device__ __forceinline__ void load_tile(io_t* tile, const io_t* src, int64 stride, int rows) {
    for (int c = threadIdx.x; c < pad4(ROWS) * CHUNKS; c += THREADS) {
        const int r = c / CHUNKS, d = c % CHUNKS * VEC;
        Chunk x = {};
        if (r < rows) x = ld_global(as_chunk(src + r * stride + d));
        st_shared(as_chunk(tile + r * LD + d), x);
    }
}

// Zeros to the first `rows` rows of a (N, HEAD_DIM) matrix in global memory.
__device__ __forceinline__ void zero_rows(io_t* dst, int64 stride, int rows) {
    for (int c = threadIdx.x; c < rows * CHUNKS; c += THREADS) {
        st_global(as_chunk(dst + c / CHUNKS * stride + c % CHUNKS * VEC), Chunk{});
    }
}

// ---- products -----------------------------------------------------------------------------------
// A result of ROWS rows is cut into micro-tiles; micro-tile t belongs to thread t % THREADS.

// Rows by keys: acc[a][b] = <A[row0 + a], B[col0 + b * col_step]>, both of HEAD_DIM columns. A
// thread's results lie col_step apart, so that neighbouring threads read neighbouring rows of B.
template <int MM>
__device__ __forceinline__ void product_abt(float (&acc)[MM][4], const io_t* A, const io_t* B,
                                            int row0, int col0, int col_step) {
#pragma unroll
    for (int a = 0; a < MM; ++a) {
#pragma unroll
        for (int b = 0; b < 4; ++b) acc[a][b] = 0.f;
    }
#pragma unroll 1
    for (int d = 0; d < HEAD_DIM; d += VEC) {
        float x[MM][VEC];
#pragma unroll
        for (int a = 0; a < MM; ++a) widen(x[a], ld_shared(as_chunk(A + (row0 + a) * LD + d)));
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            float y[VEC];
            widen(y, ld_shared(as_chunk(B + (col0 + b * col_step) * LD + d)));
#pragma unroll
            for (int a = 0; a < MM; ++a) {
#pragma unroll
                for (int e = 0; e < VEC; ++e) acc[a][b] += x[a][e] * y[e];
            }
        }
    }
}

// Keys summed: acc[a][:] += sum over n of P[row0 + a][n] * V[n][d0 : d0 + VEC]. P is fp32 in shared
// memory with rows ld_p apart; `keys` is a multiple of 4, what lies beyond the real keys is zero.
template <int MM>
__device__ __forceinline__ void product_ab(float (&acc)[MM][VEC], const float* P, int ld_p,
                                           const io_t* V, int keys, int row0, int d0) {
#pragma unroll 1
    for (int n = 0; n < keys; n += 4) {
        Quad p[MM];
#pragma unroll
        for (int a = 0; a < MM; ++a) {
            p[a] = ld_shared(reinterpret_cast<const Quad*>(P + (row0 + a) * ld_p + n));
        }
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            float y[VEC];
            widen(y, ld_shared(as_chunk(V + (n + b) * LD + d0)));
#pragma unroll
            for (int a = 0; a < MM; ++a) {
#pragma unroll
                for (int e = 0; e < VEC; ++e) acc[a][e] += p[a][b] * y[e];
            }
        }
    }
}

// Rows summed: acc[b][:] += sum over r of P[r][key0 + b] * Y[r][d0 : d0 + VEC].
__device__ __forceinline__ void product_atb(float (&acc)[4][VEC], const float* P, int ld_p,
                                            const io_t* Y, int rows, int key0, int d0) {
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
        const Quad p = ld_shared(reinterpret_cast<const Quad*>(P + r * ld_p + key0));
        float y[VEC];
        widen(y, ld_shared(as_chunk(Y + r * LD + d0)));
#pragma unroll
        for (int b = 0; b < 4; ++b) {
#pragma unroll
            for (int e = 0; e < VEC; ++e) acc[b][e] += p[b] * y[e];
        }
    }
}
