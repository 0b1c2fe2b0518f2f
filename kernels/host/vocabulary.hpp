// Host form of the device vocabulary (see ../include/device.cuh): CUDA's words for the system's
// C++ compiler. Arithmetic is here; memory, barriers and collectives are calls into runtime.cpp.
//
// No standard header is included, so that a kernel compiles quickly.
#pragma once

// inline: of a source with several entry points, only the one that HOST_ENTRY names is compiled.
#define __global__ inline
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

#include "../include/types.cuh"
#include "interface.hpp"

namespace host {
static const Runtime* host_runtime;  // set before each launch
// GCC and Clang evaluate these builtins, used as default arguments, where the call stands.
#define HOST_SITE ::host::Site site = {__builtin_FILE(), __builtin_LINE()}
}  // namespace host

namespace host {
__attribute__((always_inline)) inline void go(Switch s) {
    if (s.to) switch_context(s.from, s.to);
}
}  // namespace host

#define threadIdx (::host::host_runtime->thread()->thread_index)
#define blockIdx (::host::host_runtime->thread()->block_index)
#define blockDim (::host::host_runtime->thread()->block_size)
#define gridDim (::host::host_runtime->thread()->grid_size)

// ---- bits and math -----------------------------------------------------------------------------

inline uint32 float_bits(float x) {
    uint32 u;
    __builtin_memcpy(&u, &x, 4);
    return u;
}
inline float bits_float(uint32 u) {
    float x;
    __builtin_memcpy(&x, &u, 4);
    return x;
}
// Ends the launch with an error, as on a GPU.
[[noreturn]] inline void __trap() { __builtin_trap(); }
inline float neg_infinity() { return -__builtin_inff(); }

template <class T>
inline T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
inline T max(T a, T b) {
    return a < b ? b : a;
}
// IEEE minimum and maximum: a NaN loses to a number. Written out because the library call is slow.
inline float fmaxf(float a, float b) { return a > b || b != b ? a : b; }
inline float fminf(float a, float b) { return a < b || b != b ? a : b; }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float mul_rn(float a, float b) {
    float product = a * b;
    // The compiler may fuse a product into a sum that follows; not through this.
#if defined(__x86_64__)
    asm("" : "+x"(product));
#else
    asm("" : "+w"(product));
#endif
    return product;
}
inline float sqrtf(float x) { return __builtin_sqrtf(x); }
inline float expf(float x) { return __builtin_expf(x); }
inline float logf(float x) { return __builtin_logf(x); }

inline float exp2_approx(float x) {
    // ex2.approx.ftz: 2^x to 2^-22 relative, results below 2^-126 are 0. No branch and no call, so
    // that a loop over a fragment vectorises. x = n + f with |f| <= 1/2; series of e^(f ln 2).
    float bounded = x < -127.0f ? -127.0f : x;
    bounded = bounded > 128.0f ? 128.0f : bounded;
    const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float rounded = (bounded + shifter) - shifter;
    const float f = (bounded - rounded) * 0.693147180559945f;
    float y = 1.0f / 5040.0f;
    y = y * f + 1.0f / 720.0f;
    y = y * f + 1.0f / 120.0f;
    y = y * f + 1.0f / 24.0f;
    y = y * f + 1.0f / 6.0f;
    y = y * f + 0.5f;
    y = y * f + 1.0f;
    y = y * f + 1.0f;
    // 2^n in two factors, because 2^128 is no float and y 2^-127 may still be a normal one.
    const int n = static_cast<int>(rounded == rounded ? rounded : 0.0f);
    const int half = n >> 1;
    const float scaled = y * bits_float(static_cast<uint32>(half + 127) << 23) *
                         bits_float(static_cast<uint32>(n - half + 127) << 23);
    const float result = x < -126.0f ? 0.0f : scaled;
    return x != x ? x : result;
}
inline float log2_approx(float x) {
    // lg2.approx.ftz: subnormal inputs count as 0.
    return __builtin_log2f(__builtin_fabsf(x) < 1.17549435e-38f ? 0.0f : x);
}
inline float reciprocal_approx(float x) {
    // rcp.approx.ftz: to 1 ulp; subnormal inputs count as 0, and so do subnormal results.
    const float y = 1.0f / (__builtin_fabsf(x) < 1.17549435e-38f ? 0.0f * x : x);
    return __builtin_fabsf(y) < 1.17549435e-38f ? 0.0f * y : y;
}
inline float tanh_approx(float x) {
    // tanh.approx: to 2^-11 of the result, says the PTX manual and no more. So close to that that a
    // bound which only a better unit would keep is missed here: too large or too small by 255/256 of
    // it, as a hash of |x| has it, so that two scores may differ by twice as much. Never beyond 1,
    // and 1 where tanh rounds to it.
    const float t = __builtin_tanhf(x);
    const uint32 hash = (float_bits(x) & 0x7fffffffu) * 2654435769u;
    const float wrong = (hash >> 31 ? 255.0f : -255.0f) / (256.0f * 2048.0f);
    const float moved = t + t * wrong;
    if (t == 1.0f || t == -1.0f) return t;
    return moved > 1.0f ? 1.0f : moved < -1.0f ? -1.0f : moved;
}

// ---- 16-bit floating point ---------------------------------------------------------------------

namespace host {

#if defined(__F16C__) && !defined(__clang__)
#define HOST_F16C 1
#elif defined(__aarch64__)
#define HOST_HALF __fp16
#elif defined(__F16C__)
#define HOST_HALF _Float16
#endif

inline float half_to_float(uint16 h) {
#if defined(HOST_F16C)
    typedef short Halves __attribute__((vector_size(16)));
    return __builtin_ia32_vcvtph2ps(Halves{static_cast<short>(h)})[0];
#elif defined(HOST_HALF)
    HOST_HALF x;
    __builtin_memcpy(&x, &h, 2);
    return x;
#else
    const uint32 sign = static_cast<uint32>(h & 0x8000u) << 16;
    const uint32 magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    // Subnormals and normals alike: exponents are rebased by a multiplication, exactly.
    const float scaled = bits_float(magnitude << 13) * bits_float((127 + 112) << 23);
    return bits_float(sign | float_bits(scaled));
#endif
}

inline uint16 float_to_half(float x) {
    if (x != x) return 0x7fff;  // as cvt.rn.f16.f32
#if defined(HOST_F16C)
    typedef float Floats __attribute__((vector_size(16)));
    return static_cast<uint16>(__builtin_ia32_vcvtps2ph(Floats{x}, 0)[0]);
#elif defined(HOST_HALF)
    const HOST_HALF h = static_cast<HOST_HALF>(x);
    uint16 bits;
    __builtin_memcpy(&bits, &h, 2);
    return bits;
#else
    const uint32 u = float_bits(x);
    const uint32 sign = u >> 16 & 0x8000u;
    const uint32 magnitude = u & 0x7fffffffu;
    if (magnitude >= 0x47800000u) return static_cast<uint16>(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        // Subnormal half: adding 0.5 aligns the bits and rounds to even in hardware.
        const float aligned = bits_float(magnitude) + 0.5f;
        return static_cast<uint16>(sign | (float_bits(aligned) - 0x3f000000u));
    }
    const uint32 rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return static_cast<uint16>(sign | (rounded - 0x38000000u) >> 13);
#endif
}

inline uint16 float_to_bfloat(float x) {
    const uint32 u = float_bits(x);
    const uint32 rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    return static_cast<uint16>(x != x ? 0x7fffu : rounded);  // as cvt.rn.bf16.f32
}

template <class T>
struct Same {
    using type = T;
};

}  // namespace host

inline float to_float(float x) { return x; }
inline float to_float(fp16 x) { return host::half_to_float(x.bits); }
inline float to_float(bf16 x) { return bits_float(static_cast<uint32>(x.bits) << 16); }

template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
    return x;
}
template <>
inline fp16 from_float<fp16>(float x) {
    return {host::float_to_half(x)};
}
template <>
inline bf16 from_float<bf16>(float x) {
    return {host::float_to_bfloat(x)};
}

template <class T>
inline uint32 pack2(float lo, float hi) {
    return from_float<T>(lo).bits | static_cast<uint32>(from_float<T>(hi).bits) << 16;
}
template <class T>
inline void unpack2(uint32 packed, float& lo, float& hi) {
    lo = to_float(T{static_cast<uint16>(packed)});
    hi = to_float(T{static_cast<uint16>(packed >> 16)});
}

// ---- memory ------------------------------------------------------------------------------------

template <class T>
inline T ld_global(const T* p, HOST_SITE) {
    host::host_runtime->global_access(p, sizeof(T), host::READ, site);
    return *host::data(p);
}
template <class T>
inline void st_global(T* p, typename host::Same<T>::type v, HOST_SITE) {
    host::host_runtime->global_access(p, sizeof(T), host::WRITE, site);
    *host::data(p) = v;
}
inline void atomic_add_global(float* p, float v, HOST_SITE) {
    host::host_runtime->atomic_add(p, v, site);
}
inline int atomic_increment_global(int* p, HOST_SITE) {
    host::host_runtime->global_access(p, sizeof(int), host::ATOMIC, site);
    return __atomic_fetch_add(host::data(p), 1, __ATOMIC_RELAXED);
}
template <class T>
inline T ld_shared(const T* p, HOST_SITE) {
    host::host_runtime->shared_access(p, sizeof(T), host::READ, site);
    return *host::data(p);
}
template <class T>
inline void st_shared(T* p, typename host::Same<T>::type v, HOST_SITE) {
    host::host_runtime->shared_access(p, sizeof(T), host::WRITE, site);
    *host::data(p) = v;
}
inline unsigned char* shared_memory() { return host::host_runtime->shared_memory(); }

inline void cp_async_16(void* smem, const void* gmem, bool valid, HOST_SITE) {
    host::host_runtime->cp_async_16(smem, gmem, valid, site);
}
inline void cp_async_commit() { host::host_runtime->cp_async_commit(); }
template <int N>
inline void cp_async_wait() {
    host::host_runtime->cp_async_wait(N);
}

// ---- barriers and warp collectives -------------------------------------------------------------

inline void block_sync(HOST_SITE) { host::go(host::host_runtime->block_sync(site)); }
inline void warp_sync(HOST_SITE) { host::go(host::host_runtime->warp_sync(site)); }

template <class T>
inline T shfl(T v, int lane, HOST_SITE) {
    static_assert(sizeof(T) == 4, "shuffles move 4 bytes");
    uint32 bits;
    __builtin_memcpy(&bits, &v, 4);
    host::go(host::host_runtime->shuffle(&bits, lane & 31, site));
    __builtin_memcpy(&v, &bits, 4);
    return v;
}
template <class T>
inline T shfl_xor(T v, int lane_mask, HOST_SITE) {
    return shfl(v, static_cast<int>(threadIdx.x & 31u) ^ lane_mask, site);
}
inline void ldmatrix_x4(uint32 (&r)[4], const void* row, HOST_SITE) {
    host::go(host::host_runtime->ldmatrix_x4(r, row, false, site));
}
inline void ldmatrix_x4_trans(uint32 (&r)[4], const void* row, HOST_SITE) {
    host::go(host::host_runtime->ldmatrix_x4(r, row, true, site));
}
inline void mma_16816(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2], fp16, HOST_SITE) {
    host::go(host::host_runtime->mma_16816(d, a, b, host::FP16, site));
}
inline void mma_16816(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2], bf16, HOST_SITE) {
    host::go(host::host_runtime->mma_16816(d, a, b, host::BF16, site));
}

// ---- entry -------------------------------------------------------------------------------------

namespace host {

template <class...>
struct Types {};

template <class... All, class... Got>
inline void call(void (*kernel)(All...), void**, Types<>, Got&... got) {
    kernel(got...);
}
template <class... All, class First, class... Rest, class... Got>
inline void call(void (*kernel)(All...), void** params, Types<First, Rest...>, Got&... got) {
    call(kernel, params + 1, Types<Rest...>{}, got..., *static_cast<First*>(params[0]));
}

template <class... All>
Types<All...> types(void (*)(All...));

template <class... All>
inline int parameter_sizes(Types<All...>, unsigned* sizes) {
    const unsigned list[] = {static_cast<unsigned>(sizeof(All))..., 0u};
    for (unsigned i = 0; i < sizeof...(All); ++i) sizes[i] = list[i];
    return sizeof...(All);
}

}  // namespace host

// Makes `kernel` callable by the runtime: parameters as an array of pointers, as cuLaunchKernel
// takes them, and their sizes so that the launcher can refuse a wrong argument list.
#define HOST_ENTRY(kernel)                                                                   \
    extern "C" __attribute__((visibility("default"))) void host_entry(void** params) {       \
        ::host::call(kernel, params, decltype(::host::types(kernel)){});                     \
    }                                                                                        \
    extern "C" __attribute__((visibility("default"))) int host_parameters(unsigned* sizes) { \
        return ::host::parameter_sizes(decltype(::host::types(kernel)){}, sizes);            \
    }                                                                                        \
    extern "C" __attribute__((visibility("default"))) void* host_runtime_slot() {            \
        return &::host::host_runtime;                                                        \
    }
