// Happens-before between the threads of a block, by vector clocks of warps.
//
// A block counts its synchronisations; that count is its time. A warp stamps its accesses with the
// time of its own last synchronisation and knows, for every other warp, up to which time it is
// ordered after it. Two lanes of one warp are ordered only across a warp_sync or a barrier.
#pragma once

#include <cstdint>

namespace host {

constexpr int MAX_WARPS = 32;
constexpr std::uint32_t THREAD_BITS = 10;
constexpr std::uint32_t MAX_TIME = (1u << 22) - 2;
constexpr std::uint32_t IN_FLIGHT = (1u << 22) - 1;  // the time of an unfinished cp_async

// When and by whom: time << 10 | thread; 0 is never.
using Stamp = std::uint32_t;

inline Stamp make_stamp(std::uint32_t time, int thread) {
    return time << THREAD_BITS | static_cast<std::uint32_t>(thread);
}
inline std::uint32_t stamp_time(Stamp s) { return s >> THREAD_BITS; }
inline int stamp_thread(Stamp s) { return static_cast<int>(s & ((1u << THREAD_BITS) - 1)); }

struct Clock {
    std::uint32_t time;             // of the warp's last synchronisation
    std::uint32_t seen[MAX_WARPS];  // accesses of warp v up to seen[v] happen before ours
    Stamp limit;                    // stamps below happen before, whoever made them

    void start() {
        time = 1;
        for (auto& s : seen) s = 0;
        limit = make_stamp(1, 0);
    }

    // Takes over the time of a new synchronisation; `seen` has been joined already.
    void advance(std::uint32_t now, int warps) {
        time = now;
        std::uint32_t least = seen[0];
        for (int v = 1; v < warps; ++v) least = seen[v] < least ? seen[v] : least;
        limit = make_stamp(least + 1, 0);
    }

    // Does the stamped access happen before what `thread` does now?
    bool ordered(Stamp s, int thread) const {
        if (s < limit) return true;
        if (stamp_time(s) == IN_FLIGHT) return false;
        return stamp_thread(s) == thread || stamp_time(s) <= seen[stamp_thread(s) / 32];
    }

    // The same for reads by any lane of the warps in `mask`, the last of them at `time`.
    bool ordered_after_warps(std::uint32_t mask, std::uint32_t read_time) const {
        for (; mask; mask &= mask - 1)
            if (read_time > seen[__builtin_ctz(mask)]) return false;
        return true;
    }
};

}  // namespace host
