// Blocks that take turns, on the host.
//
// Blocks start in the order of their index, several at a time where there are several cores. So a
// block may wait for an earlier one and for no other: where all earlier ones have finished and the
// counter still shows another turn, nobody will ever pass it on. A wait counts as one read however
// often it looks.
#pragma once

#include <sched.h>

#include "global_memory.hpp"

namespace host {

inline void check_turn_is_alone(Worker& w, const char* what, Site site) {
    if (w.fiber->bulk_issued > w.fiber->bulk_complete)
        w.fail("race", -1, 0,
               "%s at %s:%d while a bulk store of the thread may still be under way: bulk_wait is "
               "missing",
               what, site.file, site.line);
}

template <bool CHECKS>
void count_turn(Worker& w, const int* counter, Direction d, Site site) {
    const auto address = reinterpret_cast<std::uintptr_t>(counter);
    if constexpr (CHECKS) check_global(w, counter, 4, ATOMIC, site);
    w.windows[(address - w.launch->region) >> SLOT_BITS].bytes[d] += 4;
}

template <bool CHECKS>
void turn_wait(const int* counter, int turn, Site site) {
    Worker& w = *current_worker;
    if constexpr (CHECKS) check_turn_is_alone(w, "turn_wait", site);
    if (w.fiber->turn_at)
        w.fail("deadlock", -1, 0, "turn_wait at %s:%d by a thread that holds the turn of %s:%d",
               site.file, site.line, w.fiber->turn_site.file, w.fiber->turn_site.line);
    count_turn<CHECKS>(w, counter, READ, site);
    const auto& shown = *reinterpret_cast<const std::atomic<int>*>(data(counter));
    const std::atomic<bool>* const finished = w.launch->finished.get();
    std::int64_t earlier = 0;  // blocks before this one that have finished
    while (shown.load(std::memory_order_acquire) != turn) {
        while (earlier < w.block && finished[earlier].load(std::memory_order_acquire)) ++earlier;
        const int now = shown.load(std::memory_order_acquire);
        if ((earlier == w.block || w.launch->failed_before(w.block)) && now != turn)
            w.fail("deadlock", -1, 0,
                   "turn_wait at %s:%d for turn %d of a counter that shows %d, and every block "
                   "before this one has finished",
                   site.file, site.line, turn, now);
        w.beat.fetch_add(1, std::memory_order_relaxed);  // waiting is no endless loop
        sched_yield();
    }
    w.fiber->turn_at = counter;
    w.fiber->turn_site = site;
}

template <bool CHECKS>
void turn_pass(int* counter, int turn, Site site) {
    Worker& w = *current_worker;
    if constexpr (CHECKS) check_turn_is_alone(w, "turn_pass", site);
    count_turn<CHECKS>(w, counter, WRITE, site);
    auto& shown = *reinterpret_cast<std::atomic<int>*>(data(counter));
    const int now = shown.load(std::memory_order_relaxed);
    if (w.fiber->turn_at != counter || now != turn)
        w.fail("race", -1, 0,
               "turn_pass at %s:%d of turn %d of a counter that shows %d, %s by the thread",
               site.file, site.line, turn, now,
               w.fiber->turn_at == counter ? "waited for" : "not waited for");
    shown.store(turn + 1, std::memory_order_release);
    w.fiber->turn_at = nullptr;
}

}  // namespace host
