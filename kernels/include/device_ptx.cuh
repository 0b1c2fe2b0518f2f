// GPU form of the device vocabulary (see device.cuh): sm_80 and newer, inline PTX.
#pragma once

#include "types.cuh"

__device__ __forceinline__ uint32 float_bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float bits_float(uint32 u) { return __uint_as_float(u); }
__device__ __forceinline__ float neg_infinity() { return bits_float(0xff800000u); }

// ---- memory ------------------------------------------------------------------------------------

namespace device_detail {
// One register image per size, so that a load of 16 bytes is one instruction whatever T is.
template <int BYTES>
struct Image;
template <>
struct Image<1> {
    using type = unsigned char;
};
template <>
struct Image<2> {
    using type = unsigned short;
};
template <>
struct Image<4> {
    using type = unsigned int;
};
template <>
struct Image<8> {
    using type = uint2;
};
template <>
struct Image<16> {
    using type = uint4;
};

template <class T>
__device__ __forceinline__ T load(const T* p) {
    typename Image<sizeof(T)>::type image =
        *reinterpret_cast<const typename Image<sizeof(T)>::type*>(p);
    T value;
    memcpy(&value, &image, sizeof(T));
    return value;
}

template <class T>
__device__ __forceinline__ void store(T* p, const T& value) {
    typename Image<sizeof(T)>::type image;
    memcpy(&image, &value, sizeof(T));
    *reinterpret_cast<typename Image<sizeof(T)>::type*>(p) = image;
}

__device__ __forceinline__ uint32 shared_address(const void* p) {
    return static_cast<uint32>(__cvta_generic_to_shared(p));
}

// Argument type that takes no part in deduction: T comes from the pointer.
template <class T>
struct Same {
    using type = T;
};
}  // namespace device_detail

template <class T>
__device__ __forceinline__ T ld_global(const T* p) {
    return device_detail::load(p);
}
template <class T>
__device__ __forceinline__ void st_global(T* p, typename device_detail::Same<T>::type v) {
    device_detail::store(p, v);
}
__device__ __forceinline__ void atomic_add_global(float* p, float v) { atomicAdd(p, v); }
__device__ __forceinline__ int atomic_increment_global(int* p) { return atomicAdd(p, 1); }

template <class T>
__device__ __forceinline__ T ld_shared(const T* p) {
    return device_detail::load(p);
}
template <class T>
__device__ __forceinline__ void st_shared(T* p, typename device_detail::Same<T>::type v) {
    device_detail::store(p, v);
}

__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
    return dynamic_shared_memory;
}

__device__ __forceinline__ void cp_async_16(void* smem, const void* gmem, bool valid) {
    // A source size of 0 makes the hardware write zeros and read nothing.
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(device_detail::shared_address(smem)),
                 "l"(__cvta_generic_to_global(gmem)), "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- barriers and warp collectives ---------------------------------------------------------------

__device__ __forceinline__ void block_sync() { __syncthreads(); }
__device__ __forceinline__ void warp_sync() { __syncwarp(); }

template <class T>
__device__ __forceinline__ T shfl_xor(T v, int lane_mask) {
    return __shfl_xor_sync(0xffffffffu, v, lane_mask);
}
template <class T>
__device__ __forceinline__ T shfl(T v, int lane) {
    return __shfl_sync(0xffffffffu, v, lane);
}

__device__ __forceinline__ void ldmatrix_x4(uint32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(device_detail::shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(device_detail::shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32 (&a)[4],
                                          const uint32 (&b)[2], fp16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32 (&a)[4],
                                          const uint32 (&b)[2], bf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- arithmetic ----------------------------------------------------------------------------------

__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(fp16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ __forceinline__ float to_float(bf16 x) {
    return bits_float(static_cast<uint32>(x.bits) << 16);
}

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) {
    fp16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

template <class T>
__device__ __forceinline__ uint32 pack2(float lo, float hi);
template <>
__device__ __forceinline__ uint32 pack2<fp16>(float lo, float hi) {
    uint32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}
template <>
__device__ __forceinline__ uint32 pack2<bf16>(float lo, float hi) {
    uint32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}

template <class T>
__device__ __forceinline__ void unpack2(uint32 packed, float& lo, float& hi) {
    lo = to_float(T{static_cast<uint16>(packed)});
    hi = to_float(T{static_cast<uint16>(packed >> 16)});
}
