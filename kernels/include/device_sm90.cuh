// The Hopper part of the device vocabulary: bulk tensor copies (TMA), transaction barriers,
// warpgroup matrix products (wgmma). Needs sm_90a; the host form is ../host/hopper.hpp.
//
//   TensorMap                     128 bytes, passed as `const __grid_constant__ TensorMap`
//   Mbarrier                      8 bytes in shared memory: arrivals, pending bytes, phase
//     mbarrier_init(b, count), mbarrier_init_done()    by one thread; then a block barrier
//     mbarrier_arrive(b), mbarrier_expect(b, bytes)    the latter arrives and adds pending bytes
//     mbarrier_wait(b, parity)    until the phase of that parity has completed
//   tma_load(smem, map, b, c0..c4), tma_store(map, smem, c0..c4)        rank 5, 128-byte swizzle
//   bulk_load(smem, gmem, bytes, b), bulk_add(gmem, smem, bytes)        1-D; the latter fp32 +=
//   add_global_x4(p, values)      p[0..3] += values[0..3], 16-byte aligned, by the calling thread
//   bulk_commit(), bulk_wait_read<N>(), bulk_wait<N>()     of the stores of the calling thread
//   turn_wait(counter, turn), turn_pass(counter, turn)     blocks take turns: until *counter == turn,
//                                 then after it turn + 1; what was added before (and waited for by
//                                 bulk_wait<0>) comes before what the next one adds
//   previous_kernel_wait()        until the kernel launched before has ended and its writes are seen;
//                                 at once unless this one was launched with pdl
//   next_kernel_start()           lets a kernel that was launched so start, once every block of this
//                                 one has come here or ended; says nothing about memory
//   tma_fence()                   makes this thread's shared memory writes visible to TMA and wgmma
//   named_sync(id, threads), named_arrive(id, threads)     id 1..15
//   registers_grow<N>(), registers_shrink<N>()             by whole warpgroups
//   Wgmma<N>, wgmma_fence(), wgmma_commit(), wgmma_wait<N>(), keep(registers)
//   shared_memory_1024()          dynamic shared memory from the next 1024-byte boundary
//   smem_descriptor(pointer, leading_bytes, stride_bytes)  128-byte swizzle
//   hidden(descriptor)            the same, unknown to the compiler
//   stmatrix_x4(pointer, r), stmatrix_x4_trans(pointer, r)
//   bool vote_any(bool v)         whether any of the 32 lanes says so; all take part
#pragma once

#include "device.cuh"

struct alignas(64) TensorMap {
    uint64 opaque[16];
};
struct alignas(8) Mbarrier {
    uint64 state;
};

// Swizzled tiles need 1024-byte alignment, which the launch does not promise: reserve 1023 more.
__device__ __forceinline__ unsigned char* shared_memory_1024() {
#ifdef KERNELS_HOST
    return shared_memory();  // the host backend's is aligned
#else
    unsigned char* const base = shared_memory();
    return base + (0u - device_detail::shared_address(base)) % 1024;
#endif
}

#ifdef KERNELS_HOST
#include "../host/hopper.hpp"
#else

__device__ __forceinline__ void mbarrier_init(Mbarrier* b, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(device_detail::shared_address(b)),
                 "r"(count)
                 : "memory");
}
__device__ __forceinline__ void mbarrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(device_detail::shared_address(b))
                 : "memory");
}
__device__ __forceinline__ void mbarrier_expect(Mbarrier* b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     device_detail::shared_address(b)),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void mbarrier_wait(Mbarrier* b, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}" ::"r"(device_detail::shared_address(b)),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void tma_load(void* smem, const TensorMap* map, Mbarrier* b, int c0,
                                         int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(device_detail::shared_address(smem)),
        "l"(map), "r"(device_detail::shared_address(b)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap* map, const void* smem, int c0, int c1,
                                          int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group "
        "[%1, {%2, %3, %4, %5, %6}], [%0];" ::"r"(device_detail::shared_address(smem)),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}
__device__ __forceinline__ void bulk_load(void* smem, const void* gmem, int bytes, Mbarrier* b) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(device_detail::shared_address(smem)),
        "l"(__cvta_generic_to_global(gmem)), "r"(bytes), "r"(device_detail::shared_address(b))
        : "memory");
}
__device__ __forceinline__ void bulk_add(float* gmem, const float* smem, int bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
            __cvta_generic_to_global(gmem)),
        "r"(device_detail::shared_address(smem)), "r"(bytes)
        : "memory");
}
__device__ __forceinline__ void add_global_x4(float* p, const float* values) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                     __cvta_generic_to_global(p)),
                 "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
                 : "memory");
}
__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
template <int N>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void previous_kernel_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// The counter is read and written in the generic proxy, bulk additions are in the async proxy: the
// proxy fences order the one after the other.
__device__ __forceinline__ void turn_wait(const int* counter, int turn) {
    int now;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                     : "=r"(now)
                     : "l"(__cvta_generic_to_global(counter))
                     : "memory");
    } while (now != turn);
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ __forceinline__ void turn_pass(int* counter, int turn) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(counter)),
                 "r"(turn + 1)
                 : "memory");
}
__device__ __forceinline__ void tma_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
template <int N>
__device__ __forceinline__ void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// A memory clobber does not order register arithmetic: without this, the compiler may move work on
// an accumulator above the wait for it.
template <int N>
__device__ __forceinline__ void keep(float (&registers)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Start address, leading and stride byte offset in units of 16 bytes; 128-byte swizzle in bit 62.
__device__ __forceinline__ uint64 smem_descriptor(const void* p, int leading_bytes,
                                                  int stride_bytes) {
    const uint64 address = device_detail::shared_address(p);
    return ((address & 0x3ffff) >> 4) | static_cast<uint64>(leading_bytes >> 4) << 16 |
           static_cast<uint64>(stride_bytes >> 4) << 32 | 1ull << 62;
}

// Hides the value: what is added to it stays an addition of 64 bits. Of a descriptor whose low bits the
// compiler knows it sets bits in each half instead, in twice as many instructions.
__device__ __forceinline__ uint64 hidden(uint64 descriptor) {
    asm("" : "+l"(descriptor));
    return descriptor;
}

__device__ __forceinline__ void stmatrix_x4(void* row, const uint32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     device_detail::shared_address(row)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(void* row, const uint32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     device_detail::shared_address(row)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

__device__ __forceinline__ bool vote_any(bool v) {
    return __any_sync(0xffffffffu, v);
}

#include "wgmma_ptx.cuh"
#endif
