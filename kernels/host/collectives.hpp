// The arithmetic of warp collectives on the registers of 32 lanes, with the fragment layouts of
// the PTX manual ("Matrix fragments for mma.m16n8k16", "ldmatrix").
//
// Lane l has g = l / 4 and q = l % 4. Each 32-bit register holds two values, the first in the low
// half.
//   A (16 x 16)  a0 (row g, columns 2q, 2q+1), a1 (g+8, 2q..), a2 (g, 2q+8..), a3 (g+8, 2q+8..)
//   B (16 x 8)   b0 (rows 2q, 2q+1 of column g), b1 (rows 2q+8..)
//   D (16 x 8)   d0, d1 (g, 2q..), d2, d3 (g+8, 2q..)
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__) && defined(__AVX2__)
#include <immintrin.h>
#endif

#include "interface.hpp"

namespace host {

typedef float F8 __attribute__((vector_size(32)));
typedef std::uint32_t U8 __attribute__((vector_size(32)));

inline float half_bits_to_float(std::uint32_t h) {
    std::uint32_t magnitude = h & 0x7fffu;
    float x;
    if (magnitude >= 0x7c00u) {
        magnitude = 0x7f800000u | (magnitude & 0x3ffu) << 13;
        std::memcpy(&x, &magnitude, 4);
    } else {
        magnitude <<= 13;
        std::memcpy(&x, &magnitude, 4);
        x *= 5.192296858534828e33f;  // 2^112 rebases the exponent, subnormals included
    }
    return h & 0x8000u ? -x : x;
}

// Low and high halves of eight registers as floats.
template <Number TYPE>
inline void split(U8 packed, F8& low, F8& high) {
    if constexpr (TYPE == BF16) {
        low = reinterpret_cast<F8>(packed << 16);
        high = reinterpret_cast<F8>(packed & 0xffff0000u);
    } else {
#if defined(__F16C__) && defined(__AVX2__)
        const __m256i v = reinterpret_cast<__m256i>(packed);
        const __m256i lo = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
        const __m256i hi = _mm256_srli_epi32(v, 16);
        // packus works within 128-bit halves: bring the two wanted quarters together.
        const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);
        low = reinterpret_cast<F8>(_mm256_cvtph_ps(_mm256_castsi256_si128(both)));
        high = reinterpret_cast<F8>(_mm256_cvtph_ps(_mm256_extracti128_si256(both, 1)));
#else
        for (int i = 0; i < 8; ++i) {
            low[i] = half_bits_to_float(packed[i] & 0xffffu);
            high[i] = half_bits_to_float(packed[i] >> 16);
        }
#endif
    }
}

// The fragments of 32 lanes as matrices. Pairs are values of one register: A(i, 2p) and A(i, 2p+1).
struct Operands {
    alignas(32) float a_low[16][8], a_high[16][8];  // A: row, pair of columns
    F8 b_low[8], b_high[8];                         // B: pair of rows, column
    alignas(32) float sums[16][8];                  // D
};

#if defined(__F16C__) && defined(__AVX2__)

// Four lanes of one row group at a time, as transposes of 4 x 4 registers.
template <Number TYPE>
inline void gather(Operands& m, float* const* d, const std::uint32_t* const* a,
                   const std::uint32_t* const* b) {
    __m256i columns[8];  // B transposed: column g, pairs of rows
    for (int g = 0; g < 8; ++g) {
        __m128i r[4], c[4];
        __m128 s[4];
        for (int q = 0; q < 4; ++q) {
            r[q] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a[4 * g + q]));
            c[q] = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b[4 * g + q]));
            s[q] = _mm_loadu_ps(d[4 * g + q]);
        }
        const __m128i r01l = _mm_unpacklo_epi32(r[0], r[1]), r23l = _mm_unpacklo_epi32(r[2], r[3]);
        const __m128i r01h = _mm_unpackhi_epi32(r[0], r[1]), r23h = _mm_unpackhi_epi32(r[2], r[3]);
        const __m256i upper = _mm256_set_m128i(_mm_unpacklo_epi64(r01h, r23h),   // a2
                                               _mm_unpacklo_epi64(r01l, r23l));  // a0
        const __m256i lower = _mm256_set_m128i(_mm_unpackhi_epi64(r01h, r23h),   // a3
                                               _mm_unpackhi_epi64(r01l, r23l));  // a1
        split<TYPE>(reinterpret_cast<U8>(upper), *reinterpret_cast<F8*>(m.a_low[g]),
                    *reinterpret_cast<F8*>(m.a_high[g]));
        split<TYPE>(reinterpret_cast<U8>(lower), *reinterpret_cast<F8*>(m.a_low[g + 8]),
                    *reinterpret_cast<F8*>(m.a_high[g + 8]));
        const __m128i c01 = _mm_unpacklo_epi32(c[0], c[1]), c23 = _mm_unpacklo_epi32(c[2], c[3]);
        columns[g] = _mm256_set_m128i(_mm_unpackhi_epi64(c01, c23), _mm_unpacklo_epi64(c01, c23));
        _mm256_store_ps(m.sums[g],
                        _mm256_set_m128(_mm_movelh_ps(s[2], s[3]), _mm_movelh_ps(s[0], s[1])));
        _mm256_store_ps(m.sums[g + 8],
                        _mm256_set_m128(_mm_movehl_ps(s[3], s[2]), _mm_movehl_ps(s[1], s[0])));
    }
    // Transpose the 8 x 8 pairs: rows of B are wanted along a vector.
    __m256i t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(columns[i], columns[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(columns[i], columns[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int p = 0; p < 4; ++p) {
        split<TYPE>(reinterpret_cast<U8>(_mm256_permute2x128_si256(u[p], u[p + 4], 0x20)),
                    m.b_low[p], m.b_high[p]);
        split<TYPE>(reinterpret_cast<U8>(_mm256_permute2x128_si256(u[p], u[p + 4], 0x31)),
                    m.b_low[p + 4], m.b_high[p + 4]);
    }
}

#else

template <Number TYPE>
inline void gather(Operands& m, float* const* d, const std::uint32_t* const* a,
                   const std::uint32_t* const* b) {
    alignas(32) std::uint32_t rows[16][8], pairs[8][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, q = lane % 4;
        rows[g][q] = a[lane][0];
        rows[g + 8][q] = a[lane][1];
        rows[g][q + 4] = a[lane][2];
        rows[g + 8][q + 4] = a[lane][3];
        pairs[q][g] = b[lane][0];
        pairs[q + 4][g] = b[lane][1];
        std::memcpy(&m.sums[g][2 * q], d[lane], 8);
        std::memcpy(&m.sums[g + 8][2 * q], d[lane] + 2, 8);
    }
    for (int p = 0; p < 8; ++p)
        split<TYPE>(*reinterpret_cast<const U8*>(pairs[p]), m.b_low[p], m.b_high[p]);
    for (int i = 0; i < 16; ++i)
        split<TYPE>(*reinterpret_cast<const U8*>(rows[i]), *reinterpret_cast<F8*>(m.a_low[i]),
                    *reinterpret_cast<F8*>(m.a_high[i]));
}

#endif

// D += A B in fp32, products and sums fused, k ascending.
template <Number TYPE>
void multiply(float* const* d, const std::uint32_t* const* a, const std::uint32_t* const* b) {
    Operands m;
    gather<TYPE>(m, d, a, b);
    // Eight rows at a time keep their sums in registers.
    for (int half = 0; half < 16; half += 8) {
        F8 s[8];
        for (int i = 0; i < 8; ++i) s[i] = *reinterpret_cast<const F8*>(m.sums[half + i]);
        for (int p = 0; p < 8; ++p)
            for (int i = 0; i < 8; ++i) {
                s[i] += m.a_low[half + i][p] * m.b_low[p];
                s[i] += m.a_high[half + i][p] * m.b_high[p];
            }
        for (int i = 0; i < 8; ++i) *reinterpret_cast<F8*>(m.sums[half + i]) = s[i];
    }
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, q = lane % 4;
        std::memcpy(d[lane], &m.sums[g][2 * q], 8);
        std::memcpy(d[lane] + 2, &m.sums[g + 8][2 * q], 8);
    }
}

// Matrix m has its row i (8 values of 16 bits) at rows[8 m + i]. Lane l receives, in register m,
// elements (g, 2q) and (g, 2q+1); transposed: (2q, g) and (2q+1, g).
inline void load_matrices(std::uint32_t* const* r, const void* const* rows, bool transposed) {
    alignas(16) std::uint16_t tile[32][8];
    for (int i = 0; i < 32; ++i) std::memcpy(tile[i], data(rows[i]), 16);
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, q = lane % 4;
        for (int m = 0; m < 4; ++m) {
            if (transposed)
                r[lane][m] = tile[8 * m + 2 * q][g] |
                             static_cast<std::uint32_t>(tile[8 * m + 2 * q + 1][g]) << 16;
            else
                std::memcpy(&r[lane][m], &tile[8 * m + g][2 * q], 4);
        }
    }
}

}  // namespace host
