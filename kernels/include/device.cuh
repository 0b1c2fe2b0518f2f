// The device vocabulary: every memory access, barrier and warp collective of a kernel goes
// through these functions, so that the same source runs on a GPU (device_ptx.cuh) and, counted
// and checked, on the host (../host/vocabulary.hpp).
//
//   T ld_global<T>(const T* p)             T of 1, 2, 4, 8 or 16 bytes, aligned to its size
//   void st_global<T>(T* p, T v)
//   void atomic_add_global(float* p, float v)
//   int atomic_increment_global(int* p)    returns the value before
//   T ld_shared<T>(const T* p)             pointers into shared_memory()
//   void st_shared<T>(T* p, T v)
//   void cp_async_16(void* smem, const void* gmem, bool valid)   16 bytes; zeros and no read if
//                                          !valid. Visible after cp_async_wait + block_sync.
//   void cp_async_commit(), cp_async_wait<N>()     at most N newest groups may be pending
//   unsigned char* shared_memory()         dynamic shared memory, 16-byte aligned at least
//   void block_sync(), warp_sync()
//   T shfl_xor(T v, int lane_mask), T shfl(T v, int lane)        4-byte T, all 32 lanes take part
//   void ldmatrix_x4(uint32 (&r)[4], const void* row), ldmatrix_x4_trans
//                                          lane l names row l % 8 of matrix l / 8 (16 bytes)
//   void mma_16816(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2], fp16{} or bf16{})
//                                          d += a b, m16n8k16 fragments as in the PTX manual
//   fmaf, fmaxf, fminf                     as in CUDA
//   float mul_rn(a, b)                     a product that is rounded: never part of a fused one
//   float exp2_approx(x), log2_approx(x)   ex2 / lg2 .approx.ftz
//   float reciprocal_approx(x)             rcp.approx.ftz
//   float tanh_approx(x)                   tanh.approx, to 2^-11 of the result
//   float to_float(T), T from_float<T>(x)  round to nearest even
//   uint32 pack2<T>(lo, hi), void unpack2<T>(packed, lo, hi)     lo in the low half
//   float neg_infinity(); uint32 float_bits(x); float bits_float(u)
//   threadIdx.x, blockIdx.x/y/z, gridDim.x/y/z, blockDim.x as in CUDA; blocks are 1-D
//
// Entry points: extern "C" __global__ void __launch_bounds__(threads) name(args).
#pragma once

#ifdef KERNELS_HOST
#include "../host/vocabulary.hpp"
#else
#include "device_ptx.cuh"
#endif

template <class I>
__device__ __forceinline__ I ceil_div(I a, I b) {
    return (a + b - 1) / b;
}
