// Milakov & Gimelshein 2018: softmax of every row of x (rows, cols), and how often each form must
// touch memory. Every pass reads the row from global memory again, as for rows too long to keep.
//
//   entry                  passes over the row                              accesses an element
//   softmax_naive (Alg. 1) d = sum e^x;  y = e^x / d                        2 reads, 1 write
//   softmax_safe (Alg. 2)  m = max x;  d = sum e^(x-m);  y = e^(x-m) / d    3 reads, 1 write
//   softmax_online (Alg. 3) m and d in one pass;  y = e^(x-m) / d           2 reads, 1 write
//   softmax_online_topk    m, d and the TOPK largest in one pass (Alg. 4)   1 read
//   topk                   the TOPK largest of a finished softmax           1 read
//
// so safe softmax followed by top-k costs 5 accesses, online followed by top-k 4, fused 1 (plus
// 8 TOPK bytes a row for the answer). softmax_naive overflows for x > 88 in fp32: its fault.
//
// Grid: one block per row. x and y are contiguous, in the io type; the arithmetic is fp32.
// A row of nothing but -inf gives y = 0. Top-k: ordered by value, equal values by index; entries
// beyond the row's length have value 0 and index -1.
// Macros: DTYPE, THREADS, TOPK (1 to 32; 1 where no top-k is asked for).

#include "reduce.cuh"

// Running maximum m and sum d of e^(x - m); pairs are combined in any order by `merge`.
struct Normaliser {
    float m = neg_infinity(), d = 0.f;

    // Lines 4 and 5 of Algorithm 3.
    __device__ __forceinline__ void add(float x) { merge({x, x == neg_infinity() ? 0.f : 1.f}); }

    __device__ __forceinline__ void merge(Normaliser other) {
        const float top = fmaxf(m, other.m);
        const float shift = top == neg_infinity() ? 0.f : top;
        d = d * exp_approx(m - shift) + other.d * exp_approx(other.m - shift);
        m = top;
    }
    __device__ __forceinline__ float probability(float x) const {
        return d > 0.f ? exp_approx(x - m) / d : 0.f;
    }
};

// Every thread gets the block's normaliser; scratch holds 2 WARPS floats and is free afterwards.
__device__ __forceinline__ Normaliser block_merge(Normaliser n, float* scratch) {
#pragma unroll
    for (int step = 16; step; step /= 2) {
        Normaliser other;
        other.m = shfl_xor(n.m, step);
        other.d = shfl_xor(n.d, step);
        n.merge(other);
    }
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
        st_shared(scratch + 2 * warp, n.m);
        st_shared(scratch + 2 * warp + 1, n.d);
    }
    block_sync();
    n = Normaliser{};
    for (int w = 0; w < WARPS; ++w) {
        Normaliser other;
        other.m = ld_shared(scratch + 2 * w);
        other.d = ld_shared(scratch + 2 * w + 1);
        n.merge(other);
    }
    block_sync();
    return n;
}

__device__ __forceinline__ void store_softmax(io_t* y, const io_t* x, int cols, Normaliser n) {
    for (int c = threadIdx.x; c < cols; c += THREADS) {
        st_global(y + c, from_float<io_t>(n.probability(to_float(ld_global(x + c)))));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
softmax_naive(Tensor1<io_t> x, Tensor1<io_t> y, int cols) {
    float* scratch = reinterpret_cast<float*>(shared_memory());
    const io_t* x_row = x.data + int64(blockIdx.x) * cols;
    Normaliser n;
    n.m = 0.f;  // nothing is subtracted
    for (int c = threadIdx.x; c < cols; c += THREADS) {
        n.d += exp_approx(to_float(ld_global(x_row + c)));
    }
    n.d = block_sum(n.d, scratch);
    store_softmax(y.data + int64(blockIdx.x) * cols, x_row, cols, n);
}

extern "C" __global__ void __launch_bounds__(THREADS)
softmax_safe(Tensor1<io_t> x, Tensor1<io_t> y, int cols) {
    float* scratch = reinterpret_cast<float*>(shared_memory());
    const io_t* x_row = x.data + int64(blockIdx.x) * cols;
    Normaliser n;
    for (int c = threadIdx.x; c < cols; c += THREADS) {
        n.m = fmaxf(n.m, to_float(ld_global(x_row + c)));
    }
    n.m = block_max(n.m, scratch);
    const float shift = n.m == neg_infinity() ? 0.f : n.m;
    for (int c = threadIdx.x; c < cols; c += THREADS) {
        n.d += exp_approx(to_float(ld_global(x_row + c)) - shift);
    }
    n.d = block_sum(n.d, scratch);
    store_softmax(y.data + int64(blockIdx.x) * cols, x_row, cols, n);
}

extern "C" __global__ void __launch_bounds__(THREADS)
softmax_online(Tensor1<io_t> x, Tensor1<io_t> y, int cols) {
    float* scratch = reinterpret_cast<float*>(shared_memory());
    const io_t* x_row = x.data + int64(blockIdx.x) * cols;
    Normaliser n;
    for (int c = threadIdx.x; c < cols; c += THREADS) n.add(to_float(ld_global(x_row + c)));
    n = block_merge(n, scratch);
    store_softmax(y.data + int64(blockIdx.x) * cols, x_row, cols, n);
}

// ---- top-k --------------------------------------------------------------------------------------

struct Entry {
    float value = neg_infinity();
    int index = -1;  // none

    __device__ __forceinline__ bool before(const Entry& other) const {
        if (index < 0 || other.index < 0) return index >= 0 && other.index < 0;
        return value > other.value || (value == other.value && index < other.index);
    }
};

// The TOPK first entries of one thread, in order; lines 8 to 15 of Algorithm 4.
struct TopK {
    Entry entry[TOPK];

    __device__ __forceinline__ void add(Entry x) {
        if (!x.before(entry[TOPK - 1])) return;
        entry[TOPK - 1] = x;
#pragma unroll
        for (int i = TOPK - 1; i > 0; --i) {
            if (entry[i].before(entry[i - 1])) {
                const Entry e = entry[i];
                entry[i] = entry[i - 1];
                entry[i - 1] = e;
            }
        }
    }
    __device__ __forceinline__ void drop_first() {
#pragma unroll
        for (int i = 0; i + 1 < TOPK; ++i) entry[i] = entry[i + 1];
        entry[TOPK - 1] = Entry{};
    }
};

// TOPK rounds: the block finds the first of all heads, its owner drops it.
__device__ __forceinline__ void store_topk(TopK& mine, Normaliser n, bool normalise, float* values,
                                           int* indices, float* scratch) {
    int* scratch_index = reinterpret_cast<int*>(scratch + WARPS);
    for (int round = 0; round < TOPK; ++round) {
        Entry first = mine.entry[0];
#pragma unroll
        for (int step = 16; step; step /= 2) {
            Entry other;
            other.value = shfl_xor(first.value, step);
            other.index = shfl_xor(first.index, step);
            if (other.before(first)) first = other;
        }
        if (threadIdx.x % 32 == 0) {
            st_shared(scratch + threadIdx.x / 32, first.value);
            st_shared(scratch_index + threadIdx.x / 32, first.index);
        }
        block_sync();
        first = Entry{};
        for (int w = 0; w < WARPS; ++w) {
            Entry other;
            other.value = ld_shared(scratch + w);
            other.index = ld_shared(scratch_index + w);
            if (other.before(first)) first = other;
        }
        block_sync();
        if (first.index >= 0 && first.index == mine.entry[0].index) mine.drop_first();
        if (threadIdx.x == 0) {
            const float value = normalise ? n.probability(first.value) : first.value;
            st_global(values + round, first.index < 0 ? 0.f : value);
            st_global(indices + round, first.index);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
softmax_online_topk(Tensor1<io_t> x, Tensor1<float> values, Tensor1<int> indices, int cols) {
    float* scratch = reinterpret_cast<float*>(shared_memory());
    const io_t* x_row = x.data + int64(blockIdx.x) * cols;
    Normaliser n;
    TopK mine;
    for (int c = threadIdx.x; c < cols; c += THREADS) {
        const float value = to_float(ld_global(x_row + c));
        n.add(value);
        mine.add({value, c});
    }
    n = block_merge(n, scratch);
    const int64 out = int64(blockIdx.x) * TOPK;
    store_topk(mine, n, true, values.data + out, indices.data + out, scratch);
}

extern "C" __global__ void __launch_bounds__(THREADS)
topk(Tensor1<io_t> y, Tensor1<float> values, Tensor1<int> indices, int cols) {
    float* scratch = reinterpret_cast<float*>(shared_memory());
    const io_t* y_row = y.data + int64(blockIdx.x) * cols;
    TopK mine;
    for (int c = threadIdx.x; c < cols; c += THREADS) mine.add({to_float(ld_global(y_row + c)), c});
    const int64 out = int64(blockIdx.x) * TOPK;
    store_topk(mine, Normaliser{}, false, values.data + out, indices.data + out, scratch);
}
