// Standard attention: S and P (and dP, dS) are written to global memory between unfused kernels.
// FlashAttention 2022, Algorithm 0 (forward) and Algorithm 3 (backward, appendix B.4).
//
//   kernel                        computes                                   grid: per head
//   1 standard_scores             S  = scale Q K^T, -inf where masked        tiles (i, j)
//   2 standard_softmax            P  = softmax(S)                            rows
//   3 standard_output             O  = P V                                   tiles i, loop over j
//   1 standard_dv                 dV = P^T dO                                tiles j, loop over i
//   2 standard_dp                 dP = dO V^T                                tiles (i, j)
//   3 standard_softmax_backward   dS = P o (dP - rowsum(P o dP))             rows
//   4 standard_dq                 dQ = scale dS K                            tiles i, loop over j
//   5 standard_dk                 dK = scale dS^T Q                          tiles j, loop over i
//
// Bytes per head, e = size of an element, Tr = ceil(Nq / BLOCK_M), Tc = ceil(Nk / BLOCK_N)
// (analysis/sums/standard.py):
//   S, P, dP, dS        Nq Nk e each time a kernel names one: 4 times forward (S and P, out and
//                       in), 7 times backward (dP and dS out; P in twice, dP once, dS twice)
//   q, dout  read       Tc Nq d e per product that is tiled over keys (scores, dP, dV, dK)
//   k, v     read       Tr Nk d e per product that is tiled over queries (scores, O, dP, dQ)
//   out, dq, dk, dv     once
// The causal mask is applied; tiles it empties are computed all the same, as by a framework.
//
// Limits: heads of K and V as many as of Q; rows of 16-byte multiples, 16-byte aligned; BLOCK_N a
// multiple of 8; a row of S (two in the backward pass) must fit shared memory (standard.py).
// A row that sees no key has P = 0. S, P, dP, dS are rounded to the io type; dS is not scaled.
// Macros: DTYPE, HEAD_DIM, BLOCK_M, BLOCK_N, THREADS, SHARED_BYTES_PAIRS, _QUERIES, _KEYS.

#include "ladder.cuh"

static_assert(BLOCK_N % 8 == 0, "16-byte accesses to rows of S and P");
constexpr int LD_P = BLOCK_N + 4;

// Two (N, d) operands of a product that is BLOCK_M x BLOCK_N.
struct Operands {
    alignas(16) io_t a[pad4(BLOCK_M) * LD];
    alignas(16) io_t b[BLOCK_N * LD];
};
// A tile of an N x N matrix, and the rows it weights.
template <int ROWS>
struct Weighted {
    alignas(16) float p[pad4(BLOCK_M) * LD_P];
    alignas(16) io_t y[pad4(ROWS) * LD];
};
static_assert(sizeof(Operands) == SHARED_BYTES_PAIRS, "standard.py counts other bytes");
static_assert(sizeof(Weighted<BLOCK_N>) == SHARED_BYTES_QUERIES, "standard.py counts other bytes");
static_assert(sizeof(Weighted<BLOCK_M>) == SHARED_BYTES_KEYS, "standard.py counts other bytes");

// Head and tile of this block; `tiles` blocks work on one head.
struct Place {
    int batch, head, tile;
    __device__ __forceinline__ Place(int tiles, int heads)
        : batch(blockIdx.x / tiles / heads),
          head(blockIdx.x / tiles % heads),
          tile(blockIdx.x % tiles) {}
};

// ---- three forms of product ---------------------------------------------------------------------

// C = factor A B^T, one BLOCK_M x BLOCK_N tile of it; -inf where `masked` and not visible.
__device__ __forceinline__ void pairs(Tensor4<io_t> A, Tensor4<io_t> B, Tensor4<io_t> C, int heads,
                                      int seqlen_q, int seqlen_k, float factor, bool masked) {
    Operands& shared = *reinterpret_cast<Operands*>(shared_memory());
    const int tc = ceil_div(seqlen_k, BLOCK_N);
    const Place at(ceil_div(seqlen_q, BLOCK_M) * tc, heads);
    const int row0 = at.tile / tc * BLOCK_M, rows = min(BLOCK_M, seqlen_q - row0);
    const int key0 = at.tile % tc * BLOCK_N, keys = min(BLOCK_N, seqlen_k - key0);
    load_tile<BLOCK_M>(shared.a, A.row(at.batch, at.head, row0), A.stride_n, rows);
    load_tile<BLOCK_N>(shared.b, B.row(at.batch, at.head, key0), B.stride_n, keys);
    block_sync();

    constexpr int MM = micro_rows(BLOCK_M * BLOCK_N / (4 * THREADS));
    constexpr int COLUMNS = BLOCK_N / 4;
    for (int t = threadIdx.x; t < pad4(BLOCK_M) / MM * COLUMNS; t += THREADS) {
        const int r0 = t / COLUMNS * MM, c0 = t % COLUMNS;
        float acc[MM][4];
        product_abt<MM>(acc, shared.a, shared.b, r0, c0, COLUMNS);
#pragma unroll
        for (int a = 0; a < MM; ++a) {
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const int r = r0 + a, c = c0 + b * COLUMNS;
                if (r >= rows || c >= keys) continue;
                const bool hidden = masked && key0 + c > row0 + r + seqlen_k - seqlen_q;
                st_global(C.row(at.batch, at.head, row0 + r) + key0 + c,
                          from_float<io_t>(hidden ? neg_infinity() : factor * acc[a][b]));
            }
        }
    }
}

// A tile of an N x N matrix to shared memory as fp32; zeros beyond its rows and keys.
__device__ __forceinline__ void load_weights(float* p, const io_t* src, int64 stride, int rows,
                                             int keys) {
    for (int t = threadIdx.x; t < pad4(BLOCK_M) * (BLOCK_N / VEC); t += THREADS) {
        const int r = t / (BLOCK_N / VEC), c = t % (BLOCK_N / VEC) * VEC;
        float x[VEC] = {};
        if (r < rows) load_upto(x, src + r * stride + c, keys - c, 0.f);
#pragma unroll
        for (int e = 0; e < VEC; e += 4) {
            st_shared(reinterpret_cast<Quad*>(p + r * LD_P + c + e),
                      Quad{x[e], x[e + 1], x[e + 2], x[e + 3]});
        }
    }
}

// C = factor P Y: BLOCK_M rows of C, a sum over all keys held in registers.
__device__ __forceinline__ void queries(Tensor4<io_t> P, Tensor4<io_t> Y, Tensor4<io_t> C,
                                        int heads, int seqlen_q, int seqlen_k, float factor) {
    Weighted<BLOCK_N>& shared = *reinterpret_cast<Weighted<BLOCK_N>*>(shared_memory());
    const Place at(ceil_div(seqlen_q, BLOCK_M), heads);
    const int row0 = at.tile * BLOCK_M, rows = min(BLOCK_M, seqlen_q - row0);
    constexpr int MM = micro_rows(BLOCK_M * CHUNKS / THREADS);
    constexpr int MICRO_TILES = pad4(BLOCK_M) / MM * CHUNKS;
    constexpr int MINE = (MICRO_TILES + THREADS - 1) / THREADS;
    float acc[MINE][MM][VEC] = {};

    for (int key0 = 0; key0 < seqlen_k; key0 += BLOCK_N) {
        const int keys = min(BLOCK_N, seqlen_k - key0);
        block_sync();
        load_weights(shared.p, P.row(at.batch, at.head, row0) + key0, P.stride_n, rows, keys);
        load_tile<BLOCK_N>(shared.y, Y.row(at.batch, at.head, key0), Y.stride_n, keys);
        block_sync();
#pragma unroll
        for (int u = 0; u < MINE; ++u) {
            const int t = threadIdx.x + u * THREADS;
            if (t >= MICRO_TILES) break;
            product_ab<MM>(acc[u], shared.p, LD_P, shared.y, pad4(keys), t / CHUNKS * MM,
                           t % CHUNKS * VEC);
        }
    }
#pragma unroll
    for (int u = 0; u < MINE; ++u) {
        const int t = threadIdx.x + u * THREADS;
        if (t >= MICRO_TILES) break;
#pragma unroll
        for (int a = 0; a < MM; ++a) {
            const int r = t / CHUNKS * MM + a;
            if (r >= rows) break;
#pragma unroll
            for (int e = 0; e < VEC; ++e) acc[u][a][e] *= factor;
            io_t* row = C.row(at.batch, at.head, row0 + r);
            st_global(as_chunk(row + t % CHUNKS * VEC), narrow(acc[u][a]));
        }
    }
}

// C = factor P^T Y: BLOCK_N rows of C, a sum over all queries held in registers.
__device__ __forceinline__ void keys_of(Tensor4<io_t> P, Tensor4<io_t> Y, Tensor4<io_t> C,
                                        int heads, int seqlen_q, int seqlen_k, float factor) {
    Weighted<BLOCK_M>& shared = *reinterpret_cast<Weighted<BLOCK_M>*>(shared_memory());
    const Place at(ceil_div(seqlen_k, BLOCK_N), heads);
    const int key0 = at.tile * BLOCK_N, keys = min(BLOCK_N, seqlen_k - key0);
    constexpr int MICRO_TILES = BLOCK_N / 4 * CHUNKS;
    constexpr int MINE = (MICRO_TILES + THREADS - 1) / THREADS;
    float acc[MINE][4][VEC] = {};

    for (int row0 = 0; row0 < seqlen_q; row0 += BLOCK_M) {
        const int rows = min(BLOCK_M, seqlen_q - row0);
        block_sync();
        load_weights(shared.p, P.row(at.batch, at.head, row0) + key0, P.stride_n, rows, keys);
        load_tile<BLOCK_M>(shared.y, Y.row(at.batch, at.head, row0), Y.stride_n, rows);
        block_sync();
#pragma unroll
        for (int u = 0; u < MINE; ++u) {
            const int t = threadIdx.x + u * THREADS;
            if (t >= MICRO_TILES) break;
            product_atb(acc[u], shared.p, LD_P, shared.y, rows, t / CHUNKS * 4, t % CHUNKS * VEC);
        }
    }
#pragma unroll
    for (int u = 0; u < MINE; ++u) {
        const int t = threadIdx.x + u * THREADS;
        if (t >= MICRO_TILES) break;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const int c = t / CHUNKS * 4 + b;
            if (c >= keys) break;
#pragma unroll
            for (int e = 0; e < VEC; ++e) acc[u][b][e] *= factor;
            io_t* row = C.row(at.batch, at.head, key0 + c);
            st_global(as_chunk(row + t % CHUNKS * VEC), narrow(acc[u][b]));
        }
    }
}

// ---- forward ------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS)
standard_scores(Tensor4<io_t> q, Tensor4<io_t> k, Tensor4<io_t> s, int heads, int seqlen_q,
                int seqlen_k, int causal, float scale) {
    pairs(q, k, s, heads, seqlen_q, seqlen_k, scale, causal);
}

// Shared memory: the row, to a multiple of 16 bytes, after WARPS floats (to 16 bytes as well).
extern "C" __global__ void __launch_bounds__(THREADS)
standard_softmax(Tensor4<io_t> s, Tensor4<io_t> p, int heads, int seqlen_q, int seqlen_k) {
    float* scratch = reinterpret_cast<float*>(shared_memory());
    io_t* staged = reinterpret_cast<io_t*>(scratch + pad4(WARPS));
    const Place at(seqlen_q, heads);
    const io_t* s_row = s.row(at.batch, at.head, at.tile);
    io_t* p_row = p.row(at.batch, at.head, at.tile);

    // Each thread meets the same chunks in every loop: what it staged, it reads back itself.
    float top = neg_infinity();
    for (int c = threadIdx.x * VEC; c < seqlen_k; c += THREADS * VEC) {
        float x[VEC];
        load_upto(x, s_row + c, seqlen_k - c, neg_infinity());
#pragma unroll
        for (int e = 0; e < VEC; ++e) top = fmaxf(top, x[e]);
        st_shared(as_chunk(staged + c), narrow(x));
    }
    top = block_max(top, scratch);
    const float shift = top == neg_infinity() ? 0.f : top;
    float sum = 0.f;
    for (int c = threadIdx.x * VEC; c < seqlen_k; c += THREADS * VEC) {
        float x[VEC];
        widen(x, ld_shared(as_chunk(staged + c)));
#pragma unroll
        for (int e = 0; e < VEC; ++e) sum += exp_approx(x[e] - shift);
    }
    sum = block_sum(sum, scratch);
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
    for (int c = threadIdx.x * VEC; c < seqlen_k; c += THREADS * VEC) {
        float x[VEC];
        widen(x, ld_shared(as_chunk(staged + c)));
#pragma unroll
        for (int e = 0; e < VEC; ++e) x[e] = exp_approx(x[e] - shift) * inverse;
        store_upto(p_row + c, x, seqlen_k - c);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
standard_output(Tensor4<io_t> p, Tensor4<io_t> v, Tensor4<io_t> out, int heads, int seqlen_q,
                int seqlen_k) {
    queries(p, v, out, heads, seqlen_q, seqlen_k, 1.f);
}

// ---- backward -----------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS)
standard_dv(Tensor4<io_t> p, Tensor4<io_t> dout, Tensor4<io_t> dv, int heads, int seqlen_q,
            int seqlen_k) {
    keys_of(p, dout, dv, heads, seqlen_q, seqlen_k, 1.f);
}

extern "C" __global__ void __launch_bounds__(THREADS)
standard_dp(Tensor4<io_t> dout, Tensor4<io_t> v, Tensor4<io_t> dp, int heads, int seqlen_q,
            int seqlen_k) {
    pairs(dout, v, dp, heads, seqlen_q, seqlen_k, 1.f, false);
}

// Shared memory: both rows, each to a multiple of 16 bytes, after WARPS floats.
extern "C" __global__ void __launch_bounds__(THREADS)
standard_softmax_backward(Tensor4<io_t> p, Tensor4<io_t> dp, Tensor4<io_t> ds, int heads,
                          int seqlen_q, int seqlen_k) {
    float* scratch = reinterpret_cast<float*>(shared_memory());
    io_t* staged_p = reinterpret_cast<io_t*>(scratch + pad4(WARPS));
    io_t* staged_dp = staged_p + ceil_div(seqlen_k, VEC) * VEC;
    const Place at(seqlen_q, heads);
    const io_t* p_row = p.row(at.batch, at.head, at.tile);
    const io_t* dp_row = dp.row(at.batch, at.head, at.tile);
    io_t* ds_row = ds.row(at.batch, at.head, at.tile);

    float sum = 0.f;
    for (int c = threadIdx.x * VEC; c < seqlen_k; c += THREADS * VEC) {
        float x[VEC], y[VEC];
        load_upto(x, p_row + c, seqlen_k - c, 0.f);
        load_upto(y, dp_row + c, seqlen_k - c, 0.f);
#pragma unroll
        for (int e = 0; e < VEC; ++e) sum += x[e] * y[e];
        st_shared(as_chunk(staged_p + c), narrow(x));
        st_shared(as_chunk(staged_dp + c), narrow(y));
    }
    sum = block_sum(sum, scratch);
    for (int c = threadIdx.x * VEC; c < seqlen_k; c += THREADS * VEC) {
        float x[VEC], y[VEC];
        widen(x, ld_shared(as_chunk(staged_p + c)));
        widen(y, ld_shared(as_chunk(staged_dp + c)));
#pragma unroll
        for (int e = 0; e < VEC; ++e) x[e] *= y[e] - sum;
        store_upto(ds_row + c, x, seqlen_k - c);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
standard_dq(Tensor4<io_t> ds, Tensor4<io_t> k, Tensor4<io_t> dq, int heads, int seqlen_q,
            int seqlen_k, float scale) {
    queries(ds, k, dq, heads, seqlen_q, seqlen_k, scale);
}

extern "C" __global__ void __launch_bounds__(THREADS)
standard_dk(Tensor4<io_t> ds, Tensor4<io_t> q, Tensor4<io_t> dk, int heads, int seqlen_q,
            int seqlen_k, float scale) {
    keys_of(ds, q, dk, heads, seqlen_q, seqlen_k, scale);
}
