// What a kernel compiled for the host and the runtime that executes it agree on.
//
// A kernel is a shared object of its own. It holds no state but a pointer to the runtime's table of
// functions, set before each launch; checked and unchecked runs differ only in that table.
#pragma once

#include "fiber.hpp"

namespace host {

// Pointers into tensors and shared memory that a kernel sees lead to addresses that nobody may
// touch: a dereference that is not counted is a fault, and named (faults.hpp). What they stand for
// lies this far on. Tensors have a slot of 2^SLOT_BITS bytes each; shared memory has the last one.
constexpr int SLOT_BITS = 36;
constexpr int SLOTS = 64;
constexpr unsigned long long DATA_DISTANCE = (SLOTS + 1ull) << SLOT_BITS;
template <class T>
__attribute__((always_inline)) inline T* data(T* p) {
    return reinterpret_cast<T*>(reinterpret_cast<unsigned long>(p) + DATA_DISTANCE);
}

struct Dim3 {
    unsigned x, y, z;
};

// One thread of a block as the kernel sees it.
struct Thread {
    Dim3 thread_index, block_index, block_size, grid_size;
};

enum Direction { READ = 0, WRITE = 1, ATOMIC = 2 };
enum Number { FP16 = 0, BF16 = 1 };

// Where in the source a call stands, for messages.
struct Site {
    const char* file;
    int line;
    int number = 0;  // tells the barriers of one line apart (counted.cuh); 0: not numbered
};

// CUDA's words for a warp whose first argument is a mask of lanes (counted.cuh).
enum class Word { SYNCWARP, SHUFFLE, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR, ALL, ANY, BALLOT };

// What the lanes of such a mask brought. A lane that did not come has all bits set.
struct Brought {
    unsigned lanes;
    unsigned long long values[32];
};

// Answer of a call that may have to wait: the caller then switches contexts. Null: go on.
struct Switch {
    Context* from;
    Context* to;
};

// One lane's part of a warpgroup product m64nNk16 (hopper_runtime.hpp).
struct WarpgroupProduct {
    float* d;
    const unsigned* a_registers;  // null: A is in shared memory
    unsigned long long a, b;      // descriptors
    unsigned n;
    bool transposed_a, transposed_b;
    bool first;  // d = A B instead of d += A B
    Number type;
};

struct HopperRuntime {
    void (*mbarrier_init)(void* b, int count, Site site);
    void (*mbarrier_init_done)();
    void (*mbarrier_arrive)(void* b, int bytes, Site site);
    Switch (*mbarrier_wait)(void* b, int parity, Site site);
    void (*tma_load)(void* smem, const void* map, void* b, const int* at, Site site);
    void (*tma_store)(const void* map, const void* smem, const int* at, Site site);
    void (*bulk_load)(void* smem, const void* gmem, int bytes, void* b, Site site);
    void (*bulk_add)(float* gmem, const float* smem, int bytes, Site site);
    void (*add_global_x4)(float* p, const float* values, Site site);
    void (*bulk_commit)();
    void (*bulk_wait)(int pending, bool complete, Site site);
    void (*turn_wait)(const int* counter, int turn, Site site);
    void (*turn_pass)(int* counter, int turn, Site site);
    void (*tma_fence)();
    Switch (*named_barrier)(int id, int threads, bool sync, Site site);
    Switch (*set_registers)(int registers, bool grow, Site site);
    Switch (*wgmma)(const WarpgroupProduct& product, Site site);
    Switch (*wgmma_commit)(Site site);
    Switch (*wgmma_wait)(int pending, Site site);
    Switch (*stmatrix_x4)(void* row, const unsigned* r, bool transposed, Site site);
};

struct Runtime {
    const Thread* (*thread)();
    // Check and count an access of `bytes` at `p`; the caller then moves the data.
    void (*global_access)(const void* p, unsigned bytes, Direction direction, Site site);
    void (*shared_access)(const void* p, unsigned bytes, Direction direction, Site site);
    void (*atomic_add)(float* p, float value, Site site);
    void (*cp_async_16)(void* shared, const void* global, bool valid, Site site);
    void (*cp_async_commit)();
    void (*cp_async_wait)(int pending);
    unsigned char* (*shared_memory)();
    Switch (*block_sync)(Site site);
    Switch (*warp_sync)(Site site);
    // Warp collectives: pointers to the lane's registers; the last lane to arrive does the work.
    Switch (*shuffle)(unsigned* value, int source_lane, Site site);
    Switch (*ldmatrix_x4)(unsigned* r, const void* row, bool transposed, Site site);
    Switch (*mma_16816)(float* d, const unsigned* a, const unsigned* b, Number type, Site site);
    // Waits for the lanes of the mask and for no others.
    Switch (*exchange)(Word word, unsigned mask, unsigned long long value, Brought* all, Site site);
    const HopperRuntime* hopper;
};

}  // namespace host
