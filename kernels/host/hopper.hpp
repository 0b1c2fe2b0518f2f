// Host form of the Hopper vocabulary (see ../include/device_sm90.cuh). Everything is a call into
// hopper_runtime.hpp; what has to wait switches contexts here.
#pragma once

inline void mbarrier_init(Mbarrier* b, int count, HOST_SITE) {
    host::host_runtime->hopper->mbarrier_init(b, count, site);
}
inline void mbarrier_init_done() { host::host_runtime->hopper->mbarrier_init_done(); }
inline void mbarrier_arrive(Mbarrier* b, HOST_SITE) {
    host::host_runtime->hopper->mbarrier_arrive(b, 0, site);
}
inline void mbarrier_expect(Mbarrier* b, int bytes, HOST_SITE) {
    host::host_runtime->hopper->mbarrier_arrive(b, bytes, site);
}
inline void mbarrier_wait(Mbarrier* b, int parity, HOST_SITE) {
    // Woken, a thread asks again: it takes over what happened before the phase completed.
    for (;;) {
        const host::Switch s = host::host_runtime->hopper->mbarrier_wait(b, parity, site);
        if (!s.to) return;
        host::switch_context(s.from, s.to);
    }
}

inline void tma_load(void* smem, const TensorMap* map, Mbarrier* b, int c0, int c1, int c2, int c3,
                     int c4, HOST_SITE) {
    const int at[5] = {c0, c1, c2, c3, c4};
    host::host_runtime->hopper->tma_load(smem, map, b, at, site);
}
inline void tma_store(const TensorMap* map, const void* smem, int c0, int c1, int c2, int c3,
                      int c4, HOST_SITE) {
    const int at[5] = {c0, c1, c2, c3, c4};
    host::host_runtime->hopper->tma_store(map, smem, at, site);
}
inline void bulk_load(void* smem, const void* gmem, int bytes, Mbarrier* b, HOST_SITE) {
    host::host_runtime->hopper->bulk_load(smem, gmem, bytes, b, site);
}
inline void add_global_x4(float* p, const float* values, HOST_SITE) {
    host::host_runtime->hopper->add_global_x4(p, values, site);
}
inline void bulk_add(float* gmem, const float* smem, int bytes, HOST_SITE) {
    host::host_runtime->hopper->bulk_add(gmem, smem, bytes, site);
}
inline void bulk_commit() { host::host_runtime->hopper->bulk_commit(); }
template <int N>
inline void bulk_wait_read(HOST_SITE) {
    host::host_runtime->hopper->bulk_wait(N, false, site);
}
template <int N>
inline void bulk_wait(HOST_SITE) {
    host::host_runtime->hopper->bulk_wait(N, true, site);
}
inline void turn_wait(const int* counter, int turn, HOST_SITE) {
    host::host_runtime->hopper->turn_wait(counter, turn, site);
}
inline void turn_pass(int* counter, int turn, HOST_SITE) {
    host::host_runtime->hopper->turn_pass(counter, turn, site);
}
// Kernels run one after another here.
inline void previous_kernel_wait() {}
inline void next_kernel_start() {}
inline void tma_fence() { host::host_runtime->hopper->tma_fence(); }

inline void named_sync(int id, int threads, HOST_SITE) {
    host::go(host::host_runtime->hopper->named_barrier(id, threads, true, site));
}
inline void named_arrive(int id, int threads, HOST_SITE) {
    host::go(host::host_runtime->hopper->named_barrier(id, threads, false, site));
}
template <int N>
inline void registers_grow(HOST_SITE) {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg takes multiples of 8 in 24..256");
    host::go(host::host_runtime->hopper->set_registers(N, true, site));
}
template <int N>
inline void registers_shrink(HOST_SITE) {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg takes multiples of 8 in 24..256");
    host::go(host::host_runtime->hopper->set_registers(N, false, site));
}

inline uint64 smem_descriptor(const void* p, int leading_bytes, int stride_bytes) {
    const uint64 address = static_cast<const unsigned char*>(p) - shared_memory();
    return ((address & 0x3ffff) >> 4) | static_cast<uint64>(leading_bytes >> 4) << 16 |
           static_cast<uint64>(stride_bytes >> 4) << 32 | 1ull << 62;
}

inline void wgmma_fence() {}
inline void wgmma_commit(HOST_SITE) { host::go(host::host_runtime->hopper->wgmma_commit(site)); }
template <int N>
inline void wgmma_wait(HOST_SITE) {
    host::go(host::host_runtime->hopper->wgmma_wait(N, site));
}
template <int N>
inline void keep(float (&)[N]) {}
inline uint64 hidden(uint64 descriptor) { return descriptor; }

template <int N>
struct Wgmma {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "n of m64nNk16");
    static constexpr host::Number TYPE = DTYPE == 0 ? host::FP16 : host::BF16;

    template <int TA, int TB>
    static inline void ss(float (&d)[N / 2], uint64 a, uint64 b, HOST_SITE) {
        issue({d, nullptr, a, b, N, TA != 0, TB != 0, false, TYPE}, site);
    }
    template <int TA, int TB>
    static inline void ss_first(float (&d)[N / 2], uint64 a, uint64 b, HOST_SITE) {
        issue({d, nullptr, a, b, N, TA != 0, TB != 0, true, TYPE}, site);
    }
    template <int TB>
    static inline void rs(float (&d)[N / 2], const uint32 (&a)[4], uint64 b, HOST_SITE) {
        issue({d, a, 0, b, N, false, TB != 0, false, TYPE}, site);
    }

   private:
    static inline void issue(const host::WarpgroupProduct& product, host::Site site) {
        host::go(host::host_runtime->hopper->wgmma(product, site));
    }
};

inline void stmatrix_x4(void* row, const uint32 (&r)[4], HOST_SITE) {
    host::go(host::host_runtime->hopper->stmatrix_x4(row, r, false, site));
}
inline void stmatrix_x4_trans(void* row, const uint32 (&r)[4], HOST_SITE) {
    host::go(host::host_runtime->hopper->stmatrix_x4(row, r, true, site));
}
inline bool vote_any(bool v, HOST_SITE) {
    int any = v;
    for (int step = 16; step; step /= 2) any |= shfl_xor(any, step, site);
    return any != 0;
}
