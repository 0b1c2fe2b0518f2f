// What a running block is made of: its threads (fibers) and warps, barriers, and what its copy engines
// and tensor cores still have to do.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "clocks.hpp"
#include "fiber.hpp"
#include "interface.hpp"

namespace host {

enum class Wait {
    WARP_SYNC, SHUFFLE, LDMATRIX, MMA, STMATRIX, REGISTERS, WGMMA, WGMMA_COMMIT, WGMMA_WAIT
};
inline const char* wait_name(Wait w) {
    static const char* const names[] = {
        "warp_sync",  "shuffle", "ldmatrix",     "mma",       "stmatrix",
        "setmaxnreg", "wgmma",   "wgmma_commit", "wgmma_wait"};
    return names[static_cast<int>(w)];
}

inline const char* word_name(Word w) {
    static const char* const names[] = {
        "__syncwarp",      "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync",
        "__shfl_xor_sync", "__all_sync",  "__any_sync",     "__ballot_sync"};
    return names[static_cast<int>(w)];
}

// A lane that waits for the lanes of its mask.
struct MaskedWait {
    Word word;
    std::uint32_t mask;
    std::uint64_t value;
    Brought* all;
    Site site;
};

struct Copy {  // a cp_async that has not been waited for
    unsigned char* to;
    const void* from;  // null: zeros
    std::uint32_t group;
    Site site;
};

// What Hopper's asynchronous units still have to do, and its barriers (hopper_runtime.hpp).
using Seen = std::array<std::uint32_t, MAX_WARPS>;  // as Clock::seen

struct BulkStore {  // a TMA store or a bulk addition that has not been waited for
    const struct HostTensorMap* map = nullptr;  // null: an addition of `bytes` to `target`
    int at[5] = {};
    float* target = nullptr;
    int bytes = 0;
    std::size_t base = 0;  // in shared memory
    std::uint32_t group = 0;
    std::uint32_t issued = 0;  // later writes to what it reads come too early
    Site site{};
};

struct WarpProduct {  // a warpgroup product, one warp's 16 rows of it
    WarpgroupProduct lanes[32];
    unsigned warp;  // of its warpgroup
    std::uint32_t group;
    std::uint32_t issued;
    Site site;
};

struct MbarrierState {
    std::int64_t offset;  // in shared memory
    int count, pending;   // arrivals a phase, and how many are still to come
    int bytes = 0;        // still to come
    unsigned phase = 0;   // phases completed
    Stamp set_up = 0;
    bool announced = false;  // to the copy engine, by mbarrier_init_done
    Seen gathering{}, released{};
    std::array<std::uint32_t, MAX_WARPS> waiting{};  // lanes
    Site site{};
};

struct NamedBarrier {
    int arrived = 0, threads = 0;
    Seen gathering{};
    std::array<std::uint32_t, MAX_WARPS> waiting{};  // lanes
    Site site{};
};

struct alignas(64) Fiber {
    Context context;
    Thread info;
    std::uint32_t group = 0;  // the open cp_async group
    std::vector<Copy> copies;
    std::uint32_t fenced = 0;      // its writes up to this time have been fenced
    std::uint32_t bulk_group = 0;  // the open bulk group
    std::vector<BulkStore> bulk_stores;
    // Bulk groups up to here hold a store; have been waited for until they were complete.
    std::uint32_t bulk_issued = 0, bulk_complete = 0;
    Site other_barrier{};  // where it waits while others wait in another barrier of the block
    Site apart{};  // of a bulk store or its wait since the warp last came together; no file: none
    const int* turn_at = nullptr;  // the counter whose turn the thread holds
    Site turn_site{};
};

struct Warp {
    std::uint32_t ready, exited;
    // The collective in progress: which lanes have come, and their registers.
    std::uint32_t arrived;
    Wait kind;
    Site site;
    void* out[32];
    const void* in[32];
    const void* in2[32];
    int number[32];
    std::uint32_t masked;  // lanes that wait for those of their own masks
    MaskedWait masked_waits[32];
    Clock clock;
    std::uint32_t product_group;  // the open wgmma group
    std::vector<WarpProduct> products;
};

struct Barrier {
    int arrived;
    Site site;
    std::uint32_t waiting[MAX_WARPS];    // lanes
    std::uint32_t elsewhere[MAX_WARPS];  // lanes that wait in another barrier of the block
};

// What an OS thread knows of a tensor: bytes moved, and the row that the last access fell into.
// Reads of at least `quick_bytes` inside that row need no further check.
struct Window {
    std::uintptr_t begin = 0, end = 0;
    unsigned quick_bytes = ~0u;
    std::uint64_t bytes[3] = {};
};

}  // namespace host
