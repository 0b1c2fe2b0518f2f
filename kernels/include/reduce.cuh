// Maximum and sum over a warp and over a block of THREADS threads.
#pragma once

#include "device.cuh"

static_assert(THREADS % 32 == 0 && THREADS <= 1024, "whole warps, one block");

constexpr int WARPS = THREADS / 32;
constexpr float LOG2E = 1.4426950408889634f;

// e^x, and 0 for x = -inf.
__device__ __forceinline__ float exp_approx(float x) { return exp2_approx(x * LOG2E); }

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x = fmaxf(x, shfl_xor(x, step));
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x += shfl_xor(x, step);
    return x;
}

// Every thread gets the result; scratch holds WARPS floats and is free again afterwards.
__device__ __forceinline__ float block_max(float x, float* scratch) {
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) st_shared(scratch + threadIdx.x / 32, x);
    block_sync();
    for (int w = 0; w < WARPS; ++w) x = fmaxf(x, ld_shared(scratch + w));
    block_sync();
    return x;
}

__device__ __forceinline__ float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) st_shared(scratch + threadIdx.x / 32, x);
    block_sync();
    x = 0.f;
    for (int w = 0; w < WARPS; ++w) x += ld_shared(scratch + w);
    block_sync();
    return x;
}
