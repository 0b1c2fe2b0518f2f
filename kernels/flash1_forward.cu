// FlashAttention 2022, Algorithm 1 and 2 (forward), as the paper writes it.
//
//   for j in key tiles:                       K_j, V_j to shared memory
//     for i in query tiles:                   Q_i, O_i, l_i, m_i from global memory
//       S   = scale Q_i K_j^T                 masked with -inf                       (line 9)
//       m~  = rowmax(S)   P~ = exp(S - m~)    l~ = rowsum(P~)                        (line 10)
//       m'  = max(m_i, m~)
//       l'  = e^(m_i - m') l_i + e^(m~ - m') l~                                      (line 11)
//       O_i = (l_i e^(m_i - m') O_i + e^(m~ - m') P~ V_j) / l'                       (line 12)
//       l_i, m_i = l', m'                     back to global memory                  (line 13)
//
// The old row sum l_i in line 12 is there because O_i is stored normalised. O, l and m make a round
// trip through global memory at every step; FlashAttention-2 swaps the loops to avoid that.
//
// Grid: one block per (batch, head). Bytes per head, e = size of an element,
// Tc = ceil(Nk / BLOCK_N), without a mask; a causal tile pair with nothing visible is passed over
// (analysis/sums/flash1.py):
//   FORM                0, as printed        1, first tile unread  2, as released in 2022
//   k, v      read      Nk d e each          Nk d e each           Nk d e each
//   q         read      Tc Nq d e            Tc Nq d e             Tc Nq d e
//   out       read      Tc Nq d e            (Tc - 1) Nq d e       -
//   out       write     Tc Nq d e            Tc Nq d e             Nq d e
//   out_tmp   read      -                    -                     (Tc - 1) Nq d 4
//   out_tmp   write     -                    -                     (Tc - 1) Nq d 4
//   l, m      read      Tc Nq 4 each         (Tc - 1) Nq 4 each    lse alone: (Tc - 1) Nq 4
//   l, m      write     Tc Nq 4 each         Tc Nq 4 each          lse alone: Tc Nq 4
//   flash1_init         Nq d e + 2 Nq 4      not launched          not launched
// For Nq = Nk = N in 16 bits, without statistics: 3 Tc + 2 (and 1), 3 Tc + 1, 5 Tc - 1 units of N d e.
//
// Form 2 follows the authors' code: an unfinished O stays in fp32 in out_tmp, the last key tile that a
// query tile sees writes out, and a row has one statistic, the log-sum-exp (in the argument l). In
// forms 0 and 1 O is rounded to the io type at every key tile.
//
// Limits: heads of K and V as many as of Q; rows of 16-byte multiples, 16-byte aligned. Statistics
// are fp32. SHARED_BYTES: flash1.py.
// Macros: DTYPE, HEAD_DIM, BLOCK_M (Br), BLOCK_N (Bc), FORM, SHARED_BYTES, THREADS.
// The launch bounds ask for one block a multiprocessor: shared memory allows few, and without the 1
// the compiler spills registers to make room for more.

#include "flash1.cuh"

struct Shared {
    alignas(16) io_t k[pad4(BLOCK_N) * LD];
    alignas(16) io_t v[pad4(BLOCK_N) * LD];
    alignas(16) io_t q[pad4(BLOCK_M) * LD];
    alignas(16) float p[pad4(BLOCK_M) * LD_P];  // S, then P~
    float tile_max[pad4(BLOCK_M)];              // m~
    float tile_sum[pad4(BLOCK_M)];              // l~
    float keep[pad4(BLOCK_M)];                  // l e^(m - m') / l', the factor of the old O
    float gain[pad4(BLOCK_M)];                  // e^(m~ - m') / l', the factor of P~ V
};
static_assert(sizeof(Shared) == SHARED_BYTES, "flash1.py counts other bytes than the kernel uses");

// Line 2: O = 0, l = 0, m = -inf. Grid: batch * heads * query tiles.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash1_init(Tensor4<io_t> out, Tensor3<float> l, Tensor3<float> m, int heads, int seqlen_q) {
    const int tiles = ceil_div(seqlen_q, BLOCK_M);
    const int i = blockIdx.x % tiles, head = blockIdx.x / tiles % heads;
    const int batch = blockIdx.x / tiles / heads;
    const int row0 = i * BLOCK_M, rows = min(BLOCK_M, seqlen_q - row0);
    zero_rows(out.row(batch, head, row0), out.stride_n, rows);
    for (int r = threadIdx.x; r < rows; r += THREADS) {
        st_global(l.at(batch, head, row0 + r), 0.f);
        st_global(m.at(batch, head, row0 + r), neg_infinity());
    }
}

// Line 9: S = scale Q K^T, -inf where the key does not exist or lies after the query.
__device__ __forceinline__ void scores(Shared& shared, int row0, int key0, int seqlen_q,
                                       int seqlen_k, int causal, float scale) {
    constexpr int MM = micro_rows(BLOCK_M * BLOCK_N / (4 * THREADS));
    constexpr int COLUMNS = pad4(BLOCK_N) / 4;
    for (int t = threadIdx.x; t < pad4(BLOCK_M) / MM * COLUMNS; t += THREADS) {
        const int r0 = t / COLUMNS * MM, c0 = t % COLUMNS;
        float s[MM][4];
        product_abt<MM>(s, shared.q, shared.k, r0, c0, COLUMNS);
#pragma unroll
        for (int a = 0; a < MM; ++a) {
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const int c = c0 + b * COLUMNS, key = key0 + c;
                bool visible = c < BLOCK_N && key < seqlen_k;
                if (causal) visible = visible && key <= row0 + r0 + a + seqlen_k - seqlen_q;
                st_shared(shared.p + (r0 + a) * LD_P + c,
                          visible ? s[a][b] * scale : neg_infinity());
            }
        }
    }
}

// Line 10: m~, P~ and l~, one warp a row. A row that sees nothing here has m~ = -inf, P~ = 0.
__device__ __forceinline__ void tile_softmax(Shared& shared, int rows) {
    const int lane = threadIdx.x % 32;
    for (int r = threadIdx.x / 32; r < rows; r += WARPS) {
        float* p = shared.p + r * LD_P;
        float tile_max = neg_infinity();
        for (int c = lane; c < pad4(BLOCK_N); c += 32) {
            tile_max = fmaxf(tile_max, ld_shared(p + c));
        }
        tile_max = warp_max(tile_max);
        const float shift = tile_max == neg_infinity() ? 0.f : tile_max;
        float tile_sum = 0.f;
        for (int c = lane; c < pad4(BLOCK_N); c += 32) {
            const float x = exp_approx(ld_shared(p + c) - shift);
            st_shared(p + c, x);
            tile_sum += x;
        }
        tile_sum = warp_sum(tile_sum);
        if (lane == 0) {
            st_shared(shared.tile_max + r, tile_max);
            st_shared(shared.tile_sum + r, tile_sum);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash1_forward(Tensor4<io_t> q, Tensor4<io_t> k, Tensor4<io_t> v, Tensor4<io_t> out,
               Tensor3<float> l, Tensor3<float> m, Tensor4<float> out_tmp, int heads, int seqlen_q,
               int seqlen_k, int causal, float scale) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    const int batch = blockIdx.x / heads, head = blockIdx.x % heads;

    for (int j = 0; j * BLOCK_N < seqlen_k; ++j) {
        const int key0 = j * BLOCK_N, keys = min(BLOCK_N, seqlen_k - key0);
        const bool first_pass = SKIP_FIRST_READ && j == 0;
        // The first query that sees a key of this tile; queries before it are passed over.
        const int first_query = causal ? max(0, key0 - (seqlen_k - seqlen_q)) : 0;
        const int first_tile = first_query / BLOCK_M;

        block_sync();  // the last query tile is done with K and V
        load_tile<BLOCK_N>(shared.k, k.row(batch, head, key0), k.stride_n, keys);
        load_tile<BLOCK_N>(shared.v, v.row(batch, head, key0), v.stride_n, keys);

        for (int i = first_pass ? 0 : first_tile; i * BLOCK_M < seqlen_q; ++i) {
            const int row0 = i * BLOCK_M, rows = min(BLOCK_M, seqlen_q - row0);
            if (i < first_tile) {  // not as printed: rows without any key get their state here
                zero_rows(out.row(batch, head, row0), out.stride_n, rows);
                for (int r = threadIdx.x; r < rows; r += THREADS) {
                    st_global(l.at(batch, head, row0 + r), RELEASED ? neg_infinity() : 0.f);
                    if (!RELEASED) st_global(m.at(batch, head, row0 + r), neg_infinity());
                }
                continue;
            }
            const bool last_pass = j == last_key_tile(row0, rows, seqlen_q, seqlen_k, causal);
            load_tile<BLOCK_M>(shared.q, q.row(batch, head, row0), q.stride_n, rows);
            block_sync();
            scores(shared, row0, key0, seqlen_q, seqlen_k, causal, scale);
            block_sync();
            tile_softmax(shared, rows);
            block_sync();

            // Lines 11 and 13, one thread a row.
            for (int r = threadIdx.x; r < rows; r += THREADS) {
                float* l_row = l.at(batch, head, row0 + r);
                float* m_row = RELEASED ? l_row : m.at(batch, head, row0 + r);
                // A log-sum-exp stands for a row whose maximum is it and whose sum is 1.
                const float l_old = first_pass ? 0.f : RELEASED ? 1.f : ld_global(l_row);
                const float m_old = first_pass ? neg_infinity() : ld_global(m_row);
                const float tile_max = ld_shared(shared.tile_max + r);
                const float m_new = fmaxf(m_old, tile_max);
                // No key seen yet: the differences below would be (-inf) - (-inf).
                const float shift = m_new == neg_infinity() ? 0.f : m_new;
                const float old_weight = l_old * exp_approx(m_old - shift);
                const float tile_weight = exp_approx(tile_max - shift);
                const float l_new = old_weight + tile_weight * ld_shared(shared.tile_sum + r);
                const float inverse = l_new > 0.f ? 1.f / l_new : 0.f;
                st_shared(shared.keep + r, old_weight * inverse);
                st_shared(shared.gain + r, tile_weight * inverse);
                if (RELEASED) {
                    st_global(l_row, l_new > 0.f ? shift + log2_approx(l_new) * LN2 : m_new);
                } else {
                    st_global(l_row, l_new);
                    st_global(m_row, m_new);
                }
            }
            block_sync();

            // Line 12, MM rows by one 16-byte chunk a thread.
            constexpr int MM = micro_rows(BLOCK_M * CHUNKS / THREADS);
            for (int t = threadIdx.x; t < pad4(BLOCK_M) / MM * CHUNKS; t += THREADS) {
                const int r0 = t / CHUNKS * MM, d0 = t % CHUNKS * VEC;
                float pv[MM][VEC] = {};
                product_ab<MM>(pv, shared.p, LD_P, shared.v, pad4(keys), r0, d0);
#pragma unroll
                for (int a = 0; a < MM; ++a) {
                    if (r0 + a >= rows) break;
                    Chunk* o = as_chunk(out.row(batch, head, row0 + r0 + a) + d0);
                    const float keep = ld_shared(shared.keep + r0 + a);
                    const float gain = ld_shared(shared.gain + r0 + a);
                    float* unfinished = out_tmp.row(batch, head, row0 + r0 + a) + d0;
                    float o_old[VEC] = {};
                    if (!first_pass && RELEASED) load_floats(o_old, unfinished);
                    if (!first_pass && !RELEASED) widen(o_old, ld_global(o));
#pragma unroll
                    for (int e = 0; e < VEC; ++e) pv[a][e] = keep * o_old[e] + gain * pv[a][e];
                    if (RELEASED && !last_pass) {
                        store_floats(unfinished, pv[a]);
                    } else {
                        st_global(o, narrow(pv[a]));
                    }
                }
            }
        }
    }
}
