// One function of the Hopper vocabulary at a time, chosen by `what`, on the host and on a GPU.
// Results are the raw bytes of shared memory or the registers of each thread, so that the layouts
// are judged outside. 128 threads.
#define ROWS 64  // of a box
#include "device_sm90.cuh"

// As launch.py encodes them: shared memory as words to and from an array.
__device__ __forceinline__ void fill(unsigned char* shared, const uint32* from, int words) {
    for (int i = threadIdx.x; i < words; i += 128)
        st_shared(reinterpret_cast<uint32*>(shared) + i, ld_global(from + i));
}
__device__ __forceinline__ void dump(const unsigned char* shared, uint32* to, int words) {
    for (int i = threadIdx.x; i < words; i += 128)
        st_global(to + i, ld_shared(reinterpret_cast<const uint32*>(shared) + i));
}

constexpr int N = 128;  // of the product m64nNk16

template <int TA, int TB>
__device__ void multiply(float* to, uint64 a, uint64 b) {
    float d[N / 2];
    wgmma_fence();
    Wgmma<N>::template ss_first<TA, TB>(d, a, b);
    Wgmma<N>::template ss<TA, TB>(d, a, b);  // twice the product
    wgmma_commit();
    wgmma_wait<0>();
    keep(d);
    for (int i = 0; i < N / 2; ++i) st_global(to + threadIdx.x * (N / 2) + i, d[i]);
}

extern "C" __global__ void __launch_bounds__(128)
hopper_vocabulary(const __grid_constant__ TensorMap source, const __grid_constant__ TensorMap target,
                  Tensor1<const uint32> words, Tensor1<uint32> bytes, Tensor1<float> floats,
                  Tensor1<float> sums, int what, int count, int row, int head, int batch, int a_at,
                  int a_leading, int a_stride, int b_at, int b_leading, int b_stride) {
    unsigned char* const shared = shared_memory_1024();
    Mbarrier* const full = reinterpret_cast<Mbarrier*>(shared + 64 * 1024);
    const int t = threadIdx.x, lane = t % 32;
    if (t == 0) {
        mbarrier_init(full, 1);
        mbarrier_init_done();
    }
    block_sync();

    if (what == 0) {  // a box into shared memory
        if (t == 0) {
            mbarrier_expect(full, 4 * count);
            tma_load(shared, &source, full, 0, row, 0, head, batch);
        }
        mbarrier_wait(full, 0);
        dump(shared, bytes.data, count);
        return;
    }
    if (what == 1) {  // and out of it
        fill(shared, words.data, count);
        tma_fence();
        block_sync();
        if (t == 0) {
            tma_store(&target, shared, 0, row, 0, head, batch);
            bulk_commit();
            bulk_wait<0>();
        }
        return;
    }
    if (what == 2) {  // bytes in, floats added in memory
        if (t == 0) {
            mbarrier_expect(full, 4 * count);
            bulk_load(shared, words.data, 4 * count, full);
        }
        mbarrier_wait(full, 0);
        dump(shared, bytes.data, count);
        if (t == 0) {
            bulk_add(sums.data, reinterpret_cast<const float*>(shared), 2 * count);
            bulk_commit();
            bulk_wait_read<0>();
            bulk_add(sums.data, reinterpret_cast<const float*>(shared), 4 * count);
            bulk_commit();
            bulk_wait<0>();
        }
        // And 16 bytes a thread, all threads to the same 8 times 4 floats behind.
        const float four[4] = {1.0f, 2.0f, 3.0f, static_cast<float>(t / 8)};
        add_global_x4(sums.data + 512 + t % 8 * 4, four);
        return;
    }
    if (what == 3 || what == 4) {  // 8 x 8 matrices into rows that the lanes name
        uint32 r[4];
        for (int i = 0; i < 4; ++i) r[i] = ld_global(words.data + 4 * t + i);
        unsigned char* const to = shared + 16 * ld_global(words.data + 512 + t);
        for (int i = t; i < count; i += 128) st_shared(reinterpret_cast<uint32*>(shared) + i, 0u);
        block_sync();
        if (what == 3)
            stmatrix_x4(to, r);
        else
            stmatrix_x4_trans(to, r);
        block_sync();
        dump(shared, bytes.data, count);
        return;
    }
    if (what == 5) {  // the descriptor's bits
        if (t == 0) {
            const uint64 bits = smem_descriptor(shared + a_at, a_leading, a_stride) -
                                smem_descriptor(shared, 0, 0);
            st_global(bytes.data, static_cast<uint32>(bits));
            st_global(bytes.data + 1, static_cast<uint32>(bits >> 32));
            st_global(bytes.data + 2, static_cast<uint32>(smem_descriptor(shared, 0, 0) >> 32));
        }
        return;
    }
    if (what == 12) {  // thread `row` says so, and its warp hears it
        st_global(bytes.data + t, static_cast<uint32>(vote_any(t == row)));
        return;
    }
    // Products of operands that lie in shared memory as the caller wants them to.
    fill(shared, words.data, count);
    tma_fence();
    block_sync();
    const uint64 a = smem_descriptor(shared, a_leading, a_stride) + a_at / 16;
    const uint64 b = smem_descriptor(shared, b_leading, b_stride) + b_at / 16;
    if (what == 6) multiply<0, 0>(floats.data, a, b);
    if (what == 7) multiply<0, 1>(floats.data, a, b);
    if (what == 8) multiply<1, 0>(floats.data, a, b);
    if (what == 9) multiply<1, 1>(floats.data, a, b);
    if (what == 10) {  // A from registers
        uint32 r[4];
        for (int i = 0; i < 4; ++i) r[i] = ld_global(words.data + count + 4 * t + i);
        float d[N / 2];
        for (int i = 0; i < N / 2; ++i) d[i] = static_cast<float>(i);
        wgmma_fence();
        Wgmma<N>::template rs<0>(d, r, b);
        wgmma_commit();
        wgmma_wait<0>();
        keep(d);
        for (int i = 0; i < N / 2; ++i) st_global(floats.data + t * (N / 2) + i, d[i]);
    }
    if (what == 11 && lane >= 0) {  // a warpgroup's registers are not there before the wait
        float d[N / 2], early = 0.0f;
        for (int i = 0; i < N / 2; ++i) d[i] = 0.0f;
        wgmma_fence();
        Wgmma<N>::template ss<0, 0>(d, a, b);
        wgmma_commit();
#ifdef KERNELS_HOST
        for (int i = 0; i < N / 2; ++i) early += d[i] * d[i];
#endif
        wgmma_wait<0>();
        keep(d);
        st_global(floats.data + t * (N / 2), early);
        for (int i = 1; i < N / 2; ++i) st_global(floats.data + t * (N / 2) + i, d[i]);
    }
}
