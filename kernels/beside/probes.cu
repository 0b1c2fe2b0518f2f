// Probes of the four ceilings a kernel's time is bounded by, and of the memory hierarchy.
//
//   probe_read        HBM: every block streams its share of a buffer far larger than L2.
//   probe_copy        HBM, both ways.
//   probe_tile_read   SM boundary: every block reads the whole of a buffer that fits in L2, tile by
//                     tile with cp.async, as an attention kernel reads K and V. The bytes bypass
//                     L1, so all of them cross from L2 to the SM.
//   probe_shared      shared memory: 16-byte loads without bank conflicts.
//   probe_mma         tensor cores through mma.sync m16n8k16, operands in registers.
//   probe_exp2        the special-function units: ex2.
//   probe_chase       latency: one thread follows a chain of indices through global memory.
//
// Reads:  probe_read, probe_copy: n 16-byte vectors once. probe_tile_read: grid x n vectors.
//         probe_chase: 4 bytes a step.
// Writes: probe_copy: n vectors. The others: one float a thread, so that no work is dead.
// Limits: the vector count n is a multiple of the block size; blocks are 1-D.

#include "device.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
probe_read(Tensor1<const Vec16> in, Tensor1<float> out, int64 n) {
    const int64 stride = static_cast<int64>(gridDim.x) * THREADS;
    const int64 first = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    uint32 seen = 0;
    for (int64 i = first; i < n; i += stride) {
        const Vec16 v = ld_global(in.data + i);
        seen ^= v[0] ^ v[1] ^ v[2] ^ v[3];
    }
    st_global(out.data + first, bits_float(seen));
}

extern "C" __global__ void __launch_bounds__(THREADS)
probe_copy(Tensor1<const Vec16> in, Tensor1<Vec16> out, int64 n) {
    const int64 stride = static_cast<int64>(gridDim.x) * THREADS;
    for (int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x; i < n; i += stride) {
        st_global(out.data + i, ld_global(in.data + i));
    }
}

// Two tiles of STEPS vectors a thread: while one is awaited, the next is on its way.
extern "C" __global__ void __launch_bounds__(THREADS)
probe_tile_read(Tensor1<const Vec16> in, Tensor1<float> out, int64 n) {
    constexpr int tile = THREADS * STEPS;
    Vec16* shared = reinterpret_cast<Vec16*>(shared_memory());
    const int64 tiles = n / tile;
    // Blocks start at different tiles, so that they do not all ask for the same line at once.
    const int64 start = tiles > 0 ? blockIdx.x % tiles : 0;
    auto fetch = [&](int64 t) {
        if (t < tiles) {
            const int64 from = (start + t) % tiles * tile;
            for (int s = 0; s < STEPS; ++s) {
                const int at = s * THREADS + threadIdx.x;
                cp_async_16(shared + (t % 2) * tile + at, in.data + from + at, true);
            }
        }
        cp_async_commit();
    };
    fetch(0);
    uint32 seen = 0;
    for (int64 t = 0; t < tiles; ++t) {
        fetch(t + 1);
        cp_async_wait<1>();
        // Each thread looks at what it fetched itself; one look a tile keeps the loads needed.
        seen ^= ld_shared(shared + (t % 2) * tile + threadIdx.x)[0];
    }
    cp_async_wait<0>();
    st_global(out.data + static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x, bits_float(seen));
}

extern "C" __global__ void __launch_bounds__(THREADS)
probe_shared(Tensor1<float> out, int rounds) {
    Vec16* shared = reinterpret_cast<Vec16*>(shared_memory());
    for (int s = 0; s < STEPS; ++s) {
        Vec16 v;
        v[0] = v[1] = v[2] = v[3] = threadIdx.x + s;
        st_shared(shared + s * THREADS + threadIdx.x, v);
    }
    block_sync();
    uint32 seen = 0;
    for (int r = 0; r < rounds; ++r) {
        for (int s = 0; s < STEPS; ++s) {
            // The round shifts the warp's place, so no load repeats the one before it.
            const int at = (s * THREADS + threadIdx.x + 32 * r) % (STEPS * THREADS);
            const Vec16 v = ld_shared(shared + at);
            seen += v[0] ^ v[1] ^ v[2] ^ v[3];
        }
    }
    st_global(out.data + static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x, bits_float(seen));
}

// 2 * 16 * 8 * 16 FLOPs a warp, STEPS independent accumulators, a round.
extern "C" __global__ void __launch_bounds__(THREADS)
probe_mma(Tensor1<float> out, int rounds) {
    float d[STEPS][4] = {};
    const uint32 one = pack2<io_t>(1.0f, 1.0f);
    const uint32 a[4] = {one, one, one, one};
    const uint32 b[2] = {one, one};
    for (int r = 0; r < rounds; ++r) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            mma_16816(d[s], a, b, io_t{});
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        sum += d[s][0] + d[s][1] + d[s][2] + d[s][3];
    }
    st_global(out.data + static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x, sum);
}

// STEPS independent chains x -> 2^x of values that stay in [-1, 2] a round.
extern "C" __global__ void __launch_bounds__(THREADS)
probe_exp2(Tensor1<float> out, int rounds) {
    float x[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        x[s] = -1.0f / (1 + s + threadIdx.x);
    }
    for (int r = 0; r < rounds; ++r) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            x[s] = exp2_approx(-x[s]);
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        sum += x[s];
    }
    st_global(out.data + static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x, sum);
}

extern "C" __global__ void __launch_bounds__(THREADS)
probe_chase(Tensor1<const uint32> next, Tensor1<uint32> out, int steps) {
    if (threadIdx.x == 0) {
        uint32 at = 0;
        for (int s = 0; s < steps; ++s) {
            at = ld_global(next.data + at);
        }
        st_global(out.data, at);
    }
}
