// FlashAttention 2022, Algorithm 4 (backward), as the paper writes it: P is computed again from
// Q, K and the saved l, m; nothing of size N x N is read.
//
//   for j in key tiles:                       K_j, V_j to shared memory; dK_j = dV_j = 0 there
//     for i in query tiles:                   Q_i, O_i, dO_i, dQ_i, l_i, m_i from global memory
//       P     = exp(scale Q_i K_j^T - m_i) / l_i
//       dV_j += P^T dO_i
//       dP    = dO_i V_j^T
//       D_i   = rowsum(dO_i o O_i)          = rowsum(P o dP) over the whole row
//       dS    = P o (dP - D_i)
//       dQ_i += scale dS K_j                back to global memory
//       dK_j += scale dS^T Q_i
//     dK_j, dV_j to global memory
//
// Grid: one block per (batch, head). Bytes per head, e = size of an element,
// Tc = ceil(Nk / BLOCK_N), without a mask; a causal tile pair with nothing visible is passed over
// (analysis/sums/flash1.py):
//   FORM                    0, as printed     1, first tile unread   2, as released in 2022
//   k, v     read           Nk d e each       Nk d e each            Nk d e each
//   dk, dv   write          Nk d e each       Nk d e each            Nk d e each
//   q, dout  read           Tc Nq d e each    Tc Nq d e each         Tc Nq d e each
//   l, m     read           Tc Nq 4 each      Tc Nq 4 each           lse alone: Tc Nq 4
//   out      read           Tc Nq d e         Nq d e                 Nq d e
//   delta    write          -                 Nq 4                   Nq 4
//   delta    read           -                 (Tc - 1) Nq 4          (Tc - 1) Nq 4
//   dq       read           Tc Nq d e         (Tc - 1) Nq d e        -
//   dq       write          Tc Nq d e         Tc Nq d e              Nq d e
//   dq_tmp   read           -                 -                      (Tc - 1) Nq d 4
//   dq_tmp   write          -                 -                      (Tc - 1) Nq d 4
//   flash1_backward_init    Nq d e            not launched           not launched
// For Nq = Nk = N in 16 bits, without statistics: 5 Tc + 4 (and 1), 4 Tc + 4, 6 Tc + 2 units of
// N d e. In forms 1 and 2 the first key tile keeps D for the others. In form 2, as in the authors'
// code, an unfinished dQ stays in fp32 in dq_tmp and l holds the log-sum-exp.
//
// Limits: heads of K and V as many as of Q; rows of 16-byte multiples, 16-byte aligned; in forms 0
// and 1 dQ is rounded to the io type at every key tile. Shared memory: SHARED_BYTES, flash1.py.
// Macros: DTYPE, HEAD_DIM, BLOCK_M (Br), BLOCK_N (Bc), FORM, SHARED_BYTES, THREADS.
// The launch bounds ask for one block a multiprocessor: shared memory allows few, and without the 1
// the compiler spills registers to make room for more.

#include "flash1.cuh"

struct Shared {
    alignas(16) io_t k[pad4(BLOCK_N) * LD];
    alignas(16) io_t v[pad4(BLOCK_N) * LD];
    alignas(16) io_t q[pad4(BLOCK_M) * LD];
    alignas(16) io_t dout[pad4(BLOCK_M) * LD];
    alignas(16) float dk[pad4(BLOCK_N) * HEAD_DIM];
    alignas(16) float dv[pad4(BLOCK_N) * HEAD_DIM];
    alignas(16) float p[pad4(BLOCK_M) * LD_P];  // P, then dS
    float m[pad4(BLOCK_M)];
    float inverse_l[pad4(BLOCK_M)];  // 1 / l, and 0 for a row that sees no key or does not exist
    float delta[pad4(BLOCK_M)];      // D
};
static_assert(sizeof(Shared) == SHARED_BYTES, "flash1.py counts other bytes than the kernel uses");

// dQ = 0. Grid: batch * heads * query tiles.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash1_backward_init(Tensor4<io_t> dq, int heads, int seqlen_q) {
    const int tiles = ceil_div(seqlen_q, BLOCK_M);
    const int i = blockIdx.x % tiles, head = blockIdx.x / tiles % heads;
    const int batch = blockIdx.x / tiles / heads;
    const int row0 = i * BLOCK_M;
    zero_rows(dq.row(batch, head, row0), dq.stride_n, min(BLOCK_M, seqlen_q - row0));
}

// Micro-tiles of the products whose result is BLOCK_M rows by BLOCK_N keys.
constexpr int MM = micro_rows(BLOCK_M * BLOCK_N / (4 * THREADS));
constexpr int COLUMNS = pad4(BLOCK_N) / 4;

// P from the saved statistics; 0 where the key does not exist or lies after the query and,
// by inverse_l, in rows that do not exist.
__device__ __forceinline__ void probabilities(Shared& shared, int row0, int key0, int seqlen_q,
                                              int seqlen_k, int causal, float scale) {
    for (int t = threadIdx.x; t < pad4(BLOCK_M) / MM * COLUMNS; t += THREADS) {
        const int r0 = t / COLUMNS * MM, c0 = t % COLUMNS;
        float s[MM][4];
        product_abt<MM>(s, shared.q, shared.k, r0, c0, COLUMNS);
#pragma unroll
        for (int a = 0; a < MM; ++a) {
            const float m = ld_shared(shared.m + r0 + a);
            const float inverse_l = ld_shared(shared.inverse_l + r0 + a);
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const int c = c0 + b * COLUMNS, key = key0 + c;
                bool visible = c < BLOCK_N && key < seqlen_k;
                if (causal) visible = visible && key <= row0 + r0 + a + seqlen_k - seqlen_q;
                // Rounded as in the forward pass: the row's maximum gives e^0 = 1, exactly.
                const float p = visible ? exp_approx(mul_rn(s[a][b], scale) - m) * inverse_l : 0.f;
                st_shared(shared.p + (r0 + a) * LD_P + c, p);
            }
        }
    }
}

// dS = P o (dO V^T - D), over P.
__device__ __forceinline__ void score_gradients(Shared& shared) {
    for (int t = threadIdx.x; t < pad4(BLOCK_M) / MM * COLUMNS; t += THREADS) {
        const int r0 = t / COLUMNS * MM, c0 = t % COLUMNS;
        float dp[MM][4];
        product_abt<MM>(dp, shared.dout, shared.v, r0, c0, COLUMNS);
#pragma unroll
        for (int a = 0; a < MM; ++a) {
            const float delta = ld_shared(shared.delta + r0 + a);
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                float* p = shared.p + (r0 + a) * LD_P + c0 + b * COLUMNS;
                st_shared(p, ld_shared(p) * (dp[a][b] - delta));
            }
        }
    }
}

// dV and dK: sum += P^T Y, with the sum in shared memory for the whole inner loop.
__device__ __forceinline__ void add_product(float* sum, const float* p, const io_t* y) {
    for (int t = threadIdx.x; t < pad4(BLOCK_N) / 4 * CHUNKS; t += THREADS) {
        const int key0 = t / CHUNKS * 4, d0 = t % CHUNKS * VEC;
        float acc[4][VEC] = {};
        product_atb(acc, p, LD_P, y, BLOCK_M, key0, d0);
#pragma unroll
        for (int b = 0; b < 4; ++b) {
#pragma unroll
            for (int e = 0; e < VEC; e += 4) {
                Quad* s = reinterpret_cast<Quad*>(sum + (key0 + b) * HEAD_DIM + d0 + e);
                Quad x = ld_shared(s);
#pragma unroll
                for (int f = 0; f < 4; ++f) x[f] += acc[b][e + f];
                st_shared(s, x);
            }
        }
    }
}

// D = rowsum(dO o O), one warp a row.
__device__ __forceinline__ void row_products(Shared& shared, const io_t* out, int64 stride,
                                             int rows) {
    const int lane = threadIdx.x % 32;
    for (int r = threadIdx.x / 32; r < rows; r += WARPS) {
        float sum = 0.f;
        for (int c = lane; c < CHUNKS; c += 32) {
            float x[VEC], y[VEC];
            widen(x, ld_global(as_chunk(out + r * stride + c * VEC)));
            widen(y, ld_shared(as_chunk(shared.dout + r * LD + c * VEC)));
#pragma unroll
            for (int e = 0; e < VEC; ++e) sum += x[e] * y[e];
        }
        sum = warp_sum(sum);
        if (lane == 0) st_shared(shared.delta + r, sum);
    }
}

// A finished gradient tile, times `factor`.
__device__ __forceinline__ void store_sum(io_t* dst, int64 stride, const float* sum, int rows,
                                          float factor) {
    for (int t = threadIdx.x; t < rows * CHUNKS; t += THREADS) {
        const int r = t / CHUNKS, d0 = t % CHUNKS * VEC;
        float x[VEC];
#pragma unroll
        for (int e = 0; e < VEC; ++e) x[e] = factor * ld_shared(sum + r * HEAD_DIM + d0 + e);
        st_global(as_chunk(dst + r * stride + d0), narrow(x));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash1_backward(Tensor4<io_t> q, Tensor4<io_t> k, Tensor4<io_t> v, Tensor4<io_t> out,
                Tensor4<io_t> dout, Tensor3<float> l, Tensor3<float> m, Tensor3<float> delta,
                Tensor4<float> dq_tmp, Tensor4<io_t> dq, Tensor4<io_t> dk, Tensor4<io_t> dv,
                int heads, int seqlen_q, int seqlen_k, int causal, float scale) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    const int batch = blockIdx.x / heads, head = blockIdx.x % heads;

    for (int j = 0; j * BLOCK_N < seqlen_k; ++j) {
        const int key0 = j * BLOCK_N, keys = min(BLOCK_N, seqlen_k - key0);
        const bool first_pass = SKIP_FIRST_READ && j == 0;
        const bool reads_out = !SKIP_FIRST_READ || j == 0;
        // The first query that sees a key of this tile; queries before it are passed over.
        const int first_query = causal ? max(0, key0 - (seqlen_k - seqlen_q)) : 0;
        const int first_tile = first_query / BLOCK_M;

        block_sync();  // dK and dV of the last key tile are stored
        load_tile<BLOCK_N>(shared.k, k.row(batch, head, key0), k.stride_n, keys);
        load_tile<BLOCK_N>(shared.v, v.row(batch, head, key0), v.stride_n, keys);
        for (int c = threadIdx.x; c < pad4(BLOCK_N) * HEAD_DIM / 4; c += THREADS) {
            st_shared(reinterpret_cast<Quad*>(shared.dk) + c, Quad{});
            st_shared(reinterpret_cast<Quad*>(shared.dv) + c, Quad{});
        }

        for (int i = first_pass ? 0 : first_tile; i * BLOCK_M < seqlen_q; ++i) {
            const int row0 = i * BLOCK_M, rows = min(BLOCK_M, seqlen_q - row0);
            if (i < first_tile) {  // not as printed: rows without any key get their dQ here
                zero_rows(dq.row(batch, head, row0), dq.stride_n, rows);
                continue;
            }
            block_sync();  // the last query tile is done with Q, dO and dS
            load_tile<BLOCK_M>(shared.q, q.row(batch, head, row0), q.stride_n, rows);
            load_tile<BLOCK_M>(shared.dout, dout.row(batch, head, row0), dout.stride_n, rows);
            for (int r = threadIdx.x; r < pad4(BLOCK_M); r += THREADS) {
                const bool real = r < rows;
                const float first = real ? ld_global(l.at(batch, head, row0 + r))
                                    : RELEASED ? neg_infinity() : 0.f;
                // exp(s - lse) is exp(s - m) / l with m = lse and l = 1.
                const float sum = !RELEASED ? first : first == neg_infinity() ? 0.f : 1.f;
                st_shared(shared.inverse_l + r, sum > 0.f ? 1.f / sum : 0.f);
                if (RELEASED) {
                    st_shared(shared.m + r, sum > 0.f ? first : 0.f);
                } else {
                    st_shared(shared.m + r, real ? ld_global(m.at(batch, head, row0 + r)) : 0.f);
                }
                const float* kept = delta.at(batch, head, row0 + r);
                st_shared(shared.delta + r, real && !reads_out ? ld_global(kept) : 0.f);
            }
            block_sync();
            if (reads_out) {
                row_products(shared, out.row(batch, head, row0), out.stride_n, rows);
            }
            probabilities(shared, row0, key0, seqlen_q, seqlen_k, causal, scale);
            block_sync();
            if (first_pass) {
                for (int r = threadIdx.x; r < rows; r += THREADS) {
                    st_global(delta.at(batch, head, row0 + r), ld_shared(shared.delta + r));
                }
            }
            add_product(shared.dv, shared.p, shared.dout);
            block_sync();  // dS takes the place of P
            score_gradients(shared);
            block_sync();

            const bool last_pass = j == last_key_tile(row0, rows, seqlen_q, seqlen_k, causal);

            // dQ, MMQ rows by one 16-byte chunk a thread.
            constexpr int MMQ = micro_rows(BLOCK_M * CHUNKS / THREADS);
            for (int t = threadIdx.x; t < pad4(BLOCK_M) / MMQ * CHUNKS; t += THREADS) {
                const int r0 = t / CHUNKS * MMQ, d0 = t % CHUNKS * VEC;
                float sum[MMQ][VEC] = {};
                product_ab<MMQ>(sum, shared.p, LD_P, shared.k, pad4(keys), r0, d0);
#pragma unroll
                for (int a = 0; a < MMQ; ++a) {
                    if (r0 + a >= rows) break;
                    Chunk* dq_chunk = as_chunk(dq.row(batch, head, row0 + r0 + a) + d0);
                    float* unfinished = dq_tmp.row(batch, head, row0 + r0 + a) + d0;
                    float old[VEC] = {};
                    if (!first_pass && RELEASED) load_floats(old, unfinished);
                    if (!first_pass && !RELEASED) widen(old, ld_global(dq_chunk));
#pragma unroll
                    for (int e = 0; e < VEC; ++e) sum[a][e] = old[e] + scale * sum[a][e];
                    if (RELEASED && !last_pass) {
                        store_floats(unfinished, sum[a]);
                    } else {
                        st_global(dq_chunk, narrow(sum[a]));
                    }
                }
            }
            add_product(shared.dk, shared.p, shared.q);
        }
        block_sync();
        store_sum(dk.row(batch, head, key0), dk.stride_n, shared.dk, keys, scale);
        store_sum(dv.row(batch, head, key0), dv.stride_n, shared.dv, keys, 1.f);
    }
}
