// Hopper's barriers on the host: mbarriers with arrivals, bytes and phases, named barriers, and the
// registers that warpgroups trade.
//
// An arrival of one lane speaks for its warp: what the other lanes did before is released too, which
// is true where the warp came together just before (a wait for products, a warp_sync) and is not
// checked.
#pragma once

#include <algorithm>

#include "scheduler.hpp"

namespace host {

// ---- transaction barriers ------------------------------------------------------------------------

inline MbarrierState& find_mbarrier(Worker& w, const void* p, Site site) {
    const auto offset = static_cast<std::int64_t>(static_cast<const unsigned char*>(p) - w.shared);
    for (auto& b : w.mbarriers) {
        if (b.offset != offset) continue;
        if (!w.clock().ordered(b.set_up, static_cast<int>(w.running)))
            w.fail("race", -1, offset,
                   "mbarrier at %s:%d at offset %" PRId64 " was set up by thread %d, and no barrier "
                   "lies between",
                   site.file, site.line, offset, stamp_thread(b.set_up));
        return b;
    }
    w.fail("uninitialised", -1, offset, "mbarrier at %s:%d at offset %" PRId64 " was never set up",
           site.file, site.line, offset);
}

inline void mbarrier_init(void* p, int count, Site site) {
    Worker& w = *current_worker;
    const auto offset = static_cast<std::int64_t>(static_cast<unsigned char*>(p) - w.shared);
    if (offset < 0 || offset + 8 > w.launch->shared_bytes || offset % 8)
        w.fail("out of bounds", -1, offset, "mbarrier at %s:%d at offset %" PRId64, site.file,
               site.line, offset);
    if (count < 1)
        w.fail("limit", -1, offset, "mbarrier_init at %s:%d with a count of %d", site.file,
               site.line, count);
    w.use_copy_engine();
    for (auto& b : w.mbarriers)
        if (b.offset == offset)
            w.fail("race", -1, offset, "mbarrier at %s:%d is set up twice", site.file, site.line);
    w.mbarriers.push_back(MbarrierState{});
    MbarrierState& b = w.mbarriers.back();
    b.offset = offset;
    b.count = b.pending = count;
    b.set_up = make_stamp(w.clock().time, static_cast<int>(w.running));
}

inline void mbarrier_init_done() {
    Worker& w = *current_worker;
    for (auto& b : w.mbarriers)
        b.announced |= stamp_thread(b.set_up) == static_cast<int>(w.running);
}

// The phase ends when all arrivals and all bytes have come.
inline void settle(Worker& w, MbarrierState& b) {
    if (b.pending != 0 || b.bytes != 0) return;
    ++b.phase;
    b.pending = b.count;
    b.released = b.gathering;
    for (int v = 0; v < MAX_WARPS; ++v) {
        w.warps[v].ready |= b.waiting[v];
        b.waiting[v] = 0;
    }
}

// What the running warp did up to now happens before whoever learns of it through `clock`.
inline void release_to(Worker& w, Seen& seen) {
    Clock& mine = w.clock();
    mine.seen[w.running / 32] = mine.time;
    for (int v = 0; v < w.clock_warps; ++v) seen[v] = std::max(seen[v], mine.seen[v]);
    mine.advance(w.tick(), w.clock_warps);
}
inline void acquire_from(Worker& w, const Seen& seen) {
    Clock& mine = w.clock();
    mine.seen[w.running / 32] = mine.time;
    for (int v = 0; v < w.clock_warps; ++v) mine.seen[v] = std::max(mine.seen[v], seen[v]);
    mine.advance(w.tick(), w.clock_warps);
}

inline void mbarrier_arrive(void* p, int bytes, Site site) {
    Worker& w = *current_worker;
    MbarrierState& b = find_mbarrier(w, p, site);
    if (b.pending == 0)
        w.fail("deadlock", -1, b.offset,
               "arrival at %s:%d at an mbarrier whose %d arrivals have come and whose %d bytes have "
               "not: one arrival too many",
               site.file, site.line, b.count, b.bytes);
    release_to(w, b.gathering);
    b.bytes += bytes;
    --b.pending;
    settle(w, b);
}

inline Switch mbarrier_wait(void* p, int parity, Site site) {
    Worker& w = *current_worker;
    MbarrierState& b = find_mbarrier(w, p, site);
    if (parity != 0 && parity != 1)
        w.fail("limit", -1, b.offset, "mbarrier_wait at %s:%d for parity %d", site.file, site.line,
               parity);
    // The phase of that parity has completed when the current one has the other parity.
    if ((b.phase & 1) != static_cast<unsigned>(parity)) {
        if (b.phase > 0) acquire_from(w, b.released);
        return {};
    }
    b.waiting[w.running / 32] |= 1u << w.lane();
    b.site = site;
    return w.leave();
}

// ---- named barriers, registers ---------------------------------------------------------------------

inline Switch named_barrier(int id, int threads, bool sync, Site site) {
    Worker& w = *current_worker;
    if (id < 1 || id > 15 || threads < 32 || threads % 32 || threads > w.launch->threads)
        w.fail("limit", -1, 0, "named barrier %d of %d threads at %s:%d", id, threads, site.file,
               site.line);
    w.must_be_together("named barrier", site);
    NamedBarrier& b = w.named[id];
    if (b.arrived && b.threads != threads)
        w.fail("divergence", -1, 0,
               "named barrier %d at %s:%d with %d threads, others came with %d at %s:%d", id,
               site.file, site.line, threads, b.threads, b.site.file, b.site.line);
    b.threads = threads;
    b.site = site;
    release_to(w, b.gathering);
    if (sync) b.waiting[w.running / 32] |= 1u << w.lane();
    if (++b.arrived < threads) return sync ? w.leave() : Switch{};
    const std::uint32_t now = w.tick();
    for (int v = 0; v < w.warp_count; ++v) {
        if (!b.waiting[v]) continue;
        Clock& clock = w.warps[v].clock;
        clock.seen[v] = clock.time;
        for (int u = 0; u < w.clock_warps; ++u)
            clock.seen[u] = std::max(clock.seen[u], b.gathering[u]);
        clock.advance(now, w.clock_warps);
        w.warps[v].ready |= b.waiting[v];
    }
    if (sync) w.warp->ready &= ~(1u << w.lane());  // the last one goes on at once
    b = NamedBarrier{};
    return {};
}

// A block gets one allocation of registers for its life; warpgroups trade them.
inline Switch set_registers(int registers, bool grow, Site site) {
    Worker& w = *current_worker;
    if (!w.arrive(Wait::REGISTERS, site)) return w.leave();
    const int groups = w.launch->threads / 128;
    const int at_start = w.registers_at_start();
    int& mine = w.registers[w.running / 32];
    const int before = mine ? mine : at_start;
    if (w.launch->threads % 128)
        w.fail("limit", -1, 0, "setmaxnreg at %s:%d in a block of %d threads: whole warpgroups only",
               site.file, site.line, w.launch->threads);
    if (grow ? registers < before : registers > before)
        w.fail("limit", -1, 0, "setmaxnreg.%s at %s:%d from %d to %d registers",
               grow ? "inc" : "dec", site.file, site.line, before, registers);
    mine = registers;
    int total = 0;
    for (int g = 0; g < groups; ++g) {
        // A group that has not asked yet may still shrink: it counts when it does.
        total += *std::max_element(w.registers + 4 * g, w.registers + 4 * g + 4);
    }
    if (total > groups * at_start)
        w.fail("deadlock", -1, 0,
               "setmaxnreg at %s:%d: warpgroups hold %d registers a thread together, the block has "
               "%d",
               site.file, site.line, total, groups * at_start);
    w.finish_collective();
    return {};
}

}  // namespace host
