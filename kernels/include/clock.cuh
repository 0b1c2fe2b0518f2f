// Time and place of a block, for kernels that note their progress.
//
//   int64 global_nanoseconds()   a clock that all SMs share; on the host the order of calls
//   int multiprocessor()         the SM that runs this block; on the host the block modulo 2
#pragma once

#include "device.cuh"

#ifdef KERNELS_HOST

namespace host {
static int64 calls_of_clock;
}
inline int64 global_nanoseconds() {
    return __atomic_add_fetch(&host::calls_of_clock, int64(1), __ATOMIC_SEQ_CST);
}
inline int multiprocessor() { return static_cast<int>(blockIdx.x % 2); }

#else

__device__ __forceinline__ int64 global_nanoseconds() {
    uint64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return static_cast<int64>(now);
}
__device__ __forceinline__ int multiprocessor() {
    uint32 id;
    asm("mov.u32 %0, %%smid;" : "=r"(id));
    return static_cast<int>(id);
}

#endif
