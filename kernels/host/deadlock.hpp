// What is said when no thread of a block can go on: who waits where, and for whom.
#pragma once

#include "scheduler.hpp"

namespace host {

inline const char* barrier_name(Site site) { return site.number ? "__syncthreads" : "block_sync"; }

class DeadlockReport {
   public:
    explicit DeadlockReport(const Worker& w) : w_(w) {
        if (w.barrier.arrived) tell_missing();
        for (int i = 0; i < w.warp_count; ++i) tell_warp(static_cast<unsigned>(i));
    }
    const char* text() const { return text_; }

   private:
    static constexpr int ENOUGH = 700;
    const Worker& w_;
    char text_[900] = "";
    int used_ = 0;

    __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
        va_list arguments;
        va_start(arguments, format);
        const int room = static_cast<int>(sizeof text_) - used_;
        used_ += std::min(room - 1, std::vsnprintf(text_ + used_, room, format, arguments));
        va_end(arguments);
    }

    // The threads that have not ended and have not come to the barrier.
    void tell_missing() {
        const Barrier& b = w_.barrier;
        add("%s at %s:%d is missing", barrier_name(b.site), b.site.file, b.site.line);
        const auto missing = [&](int t) {
            const std::uint32_t there = b.waiting[t / 32] | w_.warps[t / 32].exited;
            return t < w_.launch->threads && !(there >> t % 32 & 1u);
        };
        int ranges = 0;
        for (int t = 0; t < w_.launch->threads; ++t) {
            if (!missing(t)) continue;
            const int first = t;
            while (missing(t + 1)) ++t;
            if (++ranges > 8) {
                add(" and others: %d threads in all", w_.live - b.arrived);
                return;
            }
            add(ranges == 1 ? " thread %d" : ", %d", first);
            if (t > first) add("-%d", t);
        }
    }

    void tell(unsigned warp, std::uint32_t lanes, const char* what, Site site) {
        if (!lanes || used_ > ENOUGH) return;
        if (used_) add("; ");
        if (lanes == ~0u)
            add("threads %u-%u", warp * 32, warp * 32 + 31);
        else
            add("lanes %08x of warp %u", lanes, warp);
        add(" wait in %s at %s:%d", what, site.file, site.line);
    }

    void tell_warp(unsigned i) {
        const Warp& warp = w_.warps[i];
        const Barrier& barrier = w_.barrier;
        char what[120];
        tell(i, barrier.waiting[i], barrier_name(barrier.site), barrier.site);
        tell_elsewhere(i);
        tell(i, warp.arrived, wait_name(warp.kind), warp.site);
        tell_masked(i);
        for (const auto& b : w_.mbarriers) {
            std::snprintf(what, sizeof what,
                          "mbarrier_wait (offset %lld: %d of %d arrivals and %d bytes missing)",
                          static_cast<long long>(b.offset), b.pending, b.count, b.bytes);
            tell(i, b.waiting[i], what, b.site);
        }
        for (int id = 1; id < 16; ++id) {
            const NamedBarrier& b = w_.named[id];
            std::snprintf(what, sizeof what, "named barrier %d (%d of %d threads have come)", id,
                          b.arrived, b.threads);
            tell(i, b.waiting[i], what, b.site);
        }
    }

    // Lanes that wait at the same place, in other barriers than the first that was reached.
    void tell_elsewhere(unsigned i) {
        std::uint32_t left = w_.barrier.elsewhere[i];
        while (left) {
            const Site site = w_.fibers[i * 32 + __builtin_ctz(left)].other_barrier;
            std::uint32_t lanes = 0;
            for (std::uint32_t rest = left; rest; rest &= rest - 1) {
                const Site other = w_.fibers[i * 32 + __builtin_ctz(rest)].other_barrier;
                if (other.line == site.line && other.number == site.number) lanes |= rest & -rest;
            }
            char what[40];
            std::snprintf(what, sizeof what, "another %s", barrier_name(site));
            tell(i, lanes, what, site);
            left &= ~lanes;
        }
    }

    // Lanes that wait with the same word and mask.
    void tell_masked(unsigned i) {
        const Warp& warp = w_.warps[i];
        std::uint32_t left = warp.masked;
        while (left) {
            const MaskedWait& wait = warp.masked_waits[__builtin_ctz(left)];
            std::uint32_t lanes = 0;
            for (std::uint32_t rest = left; rest; rest &= rest - 1) {
                const MaskedWait& other = warp.masked_waits[__builtin_ctz(rest)];
                if (other.word == wait.word && other.mask == wait.mask) lanes |= rest & -rest;
            }
            char what[120];
            std::snprintf(what, sizeof what, "%s with mask %08x (lanes %08x have not come)",
                          word_name(wait.word), wait.mask, wait.mask & ~lanes & ~warp.exited);
            tell(i, lanes, what, wait.site);
            left &= ~lanes;
        }
    }
};

inline void fail_deadlock(Worker& w) {
    const std::uint32_t* const elsewhere = w.barrier.elsewhere;
    const bool diverged =
        std::any_of(elsewhere, elsewhere + MAX_WARPS, [](std::uint32_t lanes) { return lanes; });
    const DeadlockReport report(w);
    w.fail(diverged ? "divergence" : "deadlock", -1, 0,
           "%d threads wait for threads that never come: %s", w.live, report.text());
}

}  // namespace host
