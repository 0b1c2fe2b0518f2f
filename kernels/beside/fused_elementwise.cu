// Element-wise chains and layer norm, one kernel an operation and fused into one kernel.
//
// x, residual, tmp, y are dense (rows, cols) in the io type; bias, gamma, beta (cols). A pass is one
// read or write of all elements; N = rows cols (analysis/fusion.py has the bytes):
//
//   chain                           unfused                                     fused
//   y = x s + b                     scale, shift                      4 passes  scale_shift       2
//   y = r + dropout(gelu(x + bias)) bias_add, gelu, dropout, residual_add    9  bias_gelu_dropout_residual  3
//   layer norm                      row_mean, row_variance, normalise, affine 6 layer_norm        2
//
// Study note 003, section 3.2. bias, gamma and beta are read once per ROWS rows: a block keeps them
// on chip while it goes down its rows. The dropout mask is a function of (seed, element) and is
// stored by nobody: Philox word (i mod 4) of counter i / 4 decides element i.
// GELU is the tanh form (Hendrycks & Gimpel 2016). Row statistics and arithmetic are fp32.
//
// Grid: ceil(rows / ROWS) blocks; row_mean, row_variance and normalise one block a row.
// Macros: DTYPE, THREADS, ROWS, VEC (elements an access: 1, or 16 / size of an element where cols
// is a multiple of that).

#include "philox.cuh"
#include "reduce.cuh"

using Piece = Vec<io_t, VEC>;

__device__ __forceinline__ Piece load(const io_t* p) {
    return ld_global(reinterpret_cast<const Piece*>(p));
}
__device__ __forceinline__ void store(io_t* p, Piece v) { st_global(reinterpret_cast<Piece*>(p), v); }

// One element-wise operation on a piece.
template <class Function>
__device__ __forceinline__ Piece map(Piece x, Function f) {
    Piece y;
#pragma unroll
    for (int i = 0; i < VEC; ++i) y.v[i] = from_float<io_t>(f(to_float(x.v[i]), i));
    return y;
}

// Calls body(index of the first element, column) for every piece of the block's ROWS rows. Columns
// outside, rows inside: what depends on the column alone is loaded by `prepare(column)`.
template <class Prepare, class Body>
__device__ __forceinline__ void for_each_piece(int rows, int cols, Prepare prepare, Body body) {
    const int64 first = int64(blockIdx.x) * ROWS;
    const int count = rows - first < ROWS ? int(rows - first) : ROWS;
    for (int c = threadIdx.x * VEC; c < cols; c += THREADS * VEC) {
        const auto kept = prepare(c);
        for (int r = 0; r < count; ++r) body((first + r) * cols + c, kept);
    }
}
struct Nothing {};
__device__ __forceinline__ Nothing nothing(int) { return {}; }

__device__ __forceinline__ float gelu_of(float x) {  // x / (1 + e^-2z), z = sqrt(2/pi)(x + .044715 x³)
    const float z = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp2_approx(-2.0f * LOG2E * z));
}

struct ElementDropout {
    uint64 seed;
    uint32 threshold;  // floor(p 2^32)
    float keep_scale;  // 1 / (1 - p)

    __device__ __forceinline__ float apply(float x, int64 element) const {
        const uint64 counter = uint64(element) / 4;
        const PhiloxWords words = philox_4x32_10(uint32(counter), uint32(counter >> 32), 0, 0,
                                                 uint32(seed), uint32(seed >> 32));
        const uint32 word = words.w[element % 4];
        return word < threshold ? 0.0f : x * keep_scale;
    }
};

__device__ __forceinline__ int64 min_rows(int64 a, int64 b) { return a < b ? a : b; }

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)

// ---- y = x s + b ---------------------------------------------------------------------------------

KERNEL scale(Tensor1<io_t> x, Tensor1<io_t> tmp, int rows, int cols, float s) {
    for_each_piece(rows, cols, nothing, [&](int64 at, Nothing) {
        store(tmp.data + at, map(load(x.data + at), [&](float v, int) { return v * s; }));
    });
}
KERNEL shift(Tensor1<io_t> tmp, Tensor1<io_t> y, int rows, int cols, float b) {
    for_each_piece(rows, cols, nothing, [&](int64 at, Nothing) {
        store(y.data + at, map(load(tmp.data + at), [&](float v, int) { return v + b; }));
    });
}
KERNEL scale_shift(Tensor1<io_t> x, Tensor1<io_t> y, int rows, int cols, float s, float b) {
    for_each_piece(rows, cols, nothing, [&](int64 at, Nothing) {
        store(y.data + at, map(load(x.data + at), [&](float v, int) { return fmaf(v, s, b); }));
    });
}

// ---- y = residual + dropout(gelu(x + bias)) ------------------------------------------------------

KERNEL bias_add(Tensor1<io_t> x, Tensor1<io_t> bias, Tensor1<io_t> tmp, int rows, int cols) {
    for_each_piece(rows, cols, [&](int c) { return load(bias.data + c); },
                   [&](int64 at, Piece b) {
        store(tmp.data + at, map(load(x.data + at), [&](float v, int i) {
            return v + to_float(b.v[i]); }));
    });
}
KERNEL gelu(Tensor1<io_t> tmp, Tensor1<io_t> y, int rows, int cols) {
    for_each_piece(rows, cols, nothing, [&](int64 at, Nothing) {
        store(y.data + at, map(load(tmp.data + at), [&](float v, int) { return gelu_of(v); }));
    });
}
KERNEL dropout(Tensor1<io_t> tmp, Tensor1<io_t> y, int rows, int cols, uint64 seed,
               uint32 threshold, float keep_scale) {
    const ElementDropout drop{seed, threshold, keep_scale};
    for_each_piece(rows, cols, nothing, [&](int64 at, Nothing) {
        store(y.data + at, map(load(tmp.data + at), [&](float v, int i) {
            return drop.apply(v, at + i); }));
    });
}
KERNEL residual_add(Tensor1<io_t> tmp, Tensor1<io_t> residual, Tensor1<io_t> y, int rows, int cols) {
    for_each_piece(rows, cols, nothing, [&](int64 at, Nothing) {
        const Piece r = load(residual.data + at);
        store(y.data + at, map(load(tmp.data + at), [&](float v, int i) {
            return v + to_float(r.v[i]); }));
    });
}
KERNEL bias_gelu_dropout_residual(Tensor1<io_t> x, Tensor1<io_t> bias, Tensor1<io_t> residual,
                                  Tensor1<io_t> y, int rows, int cols, uint64 seed,
                                  uint32 threshold, float keep_scale) {
    const ElementDropout drop{seed, threshold, keep_scale};
    for_each_piece(rows, cols, [&](int c) { return load(bias.data + c); },
                   [&](int64 at, Piece b) {
        const Piece r = load(residual.data + at);
        store(y.data + at, map(load(x.data + at), [&](float v, int i) {
            return drop.apply(gelu_of(v + to_float(b.v[i])), at + i) + to_float(r.v[i]); }));
    });
}

// ---- layer norm ----------------------------------------------------------------------------------

// Sum of f(element) over the block's row.
template <class Function>
__device__ __forceinline__ float row_sum(const io_t* row, int cols, Function f) {
    float sum = 0.0f;
    for (int c = threadIdx.x * VEC; c < cols; c += THREADS * VEC) {
        const Piece piece = load(row + c);
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum += f(to_float(piece.v[i]));
    }
    return block_sum(sum, reinterpret_cast<float*>(shared_memory()));
}

KERNEL row_mean(Tensor1<io_t> x, Tensor1<float> mean, int cols) {
    const int64 row = blockIdx.x;
    const float sum = row_sum(x.data + row * cols, cols, [](float v) { return v; });
    if (threadIdx.x == 0) st_global(mean.data + row, sum / float(cols));
}
KERNEL row_variance(Tensor1<io_t> x, Tensor1<float> mean, Tensor1<float> variance, int cols) {
    const int64 row = blockIdx.x;
    float m = 0.0f;
    if (threadIdx.x % 32 == 0) m = ld_global(mean.data + row);
    m = shfl(m, 0);
    const float sum =
        row_sum(x.data + row * cols, cols, [&](float v) { return (v - m) * (v - m); });
    if (threadIdx.x == 0) st_global(variance.data + row, sum / float(cols));
}
KERNEL normalise(Tensor1<io_t> x, Tensor1<float> mean, Tensor1<float> variance, Tensor1<io_t> tmp,
                 int cols, float eps) {
    const int64 row = blockIdx.x;
    float m = 0.0f, v = 0.0f;
    if (threadIdx.x % 32 == 0) {
        m = ld_global(mean.data + row);
        v = ld_global(variance.data + row);
    }
    m = shfl(m, 0);
    const float r = 1.0f / sqrtf(shfl(v, 0) + eps);
    for (int c = threadIdx.x * VEC; c < cols; c += THREADS * VEC)
        store(tmp.data + row * cols + c, map(load(x.data + row * cols + c), [&](float value, int) {
            return (value - m) * r; }));
}
struct Affine {
    Piece gamma, beta;
};
KERNEL affine(Tensor1<io_t> tmp, Tensor1<io_t> gamma, Tensor1<io_t> beta, Tensor1<io_t> y, int rows,
              int cols) {
    for_each_piece(rows, cols, [&](int c) { return Affine{load(gamma.data + c), load(beta.data + c)}; },
                   [&](int64 at, const Affine& w) {
        store(y.data + at, map(load(tmp.data + at), [&](float v, int i) {
            return fmaf(v, to_float(w.gamma.v[i]), to_float(w.beta.v[i])); }));
    });
}
// One read of x: the row waits in shared memory, fp32, for the mean and the variance about it. gamma
// and beta wait there too, for all rows of the block.
KERNEL layer_norm(Tensor1<io_t> x, Tensor1<io_t> gamma, Tensor1<io_t> beta, Tensor1<io_t> y,
                  int rows, int cols, float eps) {
    float* scratch = reinterpret_cast<float*>(shared_memory());
    float* kept = scratch + WARPS;
    float* weights = kept + cols;  // gamma, then beta
    for (int c = threadIdx.x * VEC; c < cols; c += THREADS * VEC) {
        const Piece g = load(gamma.data + c), b = load(beta.data + c);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {  // each thread reads back only what it wrote
            st_shared(weights + c + i, to_float(g.v[i]));
            st_shared(weights + cols + c + i, to_float(b.v[i]));
        }
    }
    const int64 last = min_rows(int64(blockIdx.x + 1) * ROWS, rows);
    for (int64 row = int64(blockIdx.x) * ROWS; row < last; ++row) {
        const int64 first = row * cols;
        float sum = 0.0f;
        for (int c = threadIdx.x * VEC; c < cols; c += THREADS * VEC) {
            const Piece piece = load(x.data + first + c);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                st_shared(kept + c + i, to_float(piece.v[i]));
                sum += to_float(piece.v[i]);
            }
        }
        const float m = block_sum(sum, scratch) / float(cols);
        sum = 0.0f;
        for (int c = threadIdx.x * VEC; c < cols; c += THREADS * VEC)
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const float d = ld_shared(kept + c + i) - m;
                sum += d * d;
            }
        const float r = 1.0f / sqrtf(block_sum(sum, scratch) / float(cols) + eps);
        for (int c = threadIdx.x * VEC; c < cols; c += THREADS * VEC) {
            Piece out;
#pragma unroll
            for (int i = 0; i < VEC; ++i)
                out.v[i] = from_float<io_t>(fmaf((ld_shared(kept + c + i) - m) * r,
                                                 ld_shared(weights + c + i),
                                                 ld_shared(weights + cols + c + i)));
            store(y.data + first + c, out);
        }
    }
}
