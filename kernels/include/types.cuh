// Types shared by the GPU and the host form of the device vocabulary.
//
// No CUDA and no C++ standard header is included: NVRTC needs no include path but this folder,
// and a kernel compiles for the host in about a second.
#pragma once

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

// 16-bit floating point values as bits. Arithmetic is done in float: to_float / from_float.
struct fp16 {
    uint16 bits;
};
struct bf16 {
    uint16 bits;
};

// N values moved by one instruction; sizeof must be 1, 2, 4, 8 or 16 bytes, aligned to its size.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
    T v[N];
    __device__ __forceinline__ T& operator[](int i) { return v[i]; }
    __device__ __forceinline__ const T& operator[](int i) const { return v[i]; }
};
using Vec4 = Vec<uint32, 1>;    // 4 bytes
using Vec8 = Vec<uint32, 2>;    // 8 bytes
using Vec16 = Vec<uint32, 4>;   // 16 bytes

// Views as the launchers pass them: by value, strides in elements, last dimension contiguous.
template <class T>
struct Tensor4 {  // (B, H, N, D)
    T* data;
    int64 stride_b, stride_h, stride_n;
    __device__ __forceinline__ T* row(int64 b, int64 h, int64 n) const {
        return data + b * stride_b + h * stride_h + n * stride_n;
    }
};
template <class T>
struct Tensor3 {  // (B, H, N): one value per row
    T* data;
    int64 stride_b, stride_h;
    __device__ __forceinline__ T* at(int64 b, int64 h, int64 n) const {
        return data + b * stride_b + h * stride_h + n;
    }
};
template <class T>
struct Tensor1 {  // anything flat
    T* data;
};

// The input and output type of a kernel: -D DTYPE=0 fp16, 1 bf16, 2 fp32.
#ifdef DTYPE
#if DTYPE == 0
using io_t = fp16;
#elif DTYPE == 1
using io_t = bf16;
#elif DTYPE == 2
using io_t = float;
#else
#error "DTYPE must be 0 (fp16), 1 (bf16) or 2 (fp32)"
#endif
#endif
