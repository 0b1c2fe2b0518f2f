// Counted and checked access to tensors: bounds, alignment, permission, initialisation, races.
#pragma once

#include <cinttypes>
#include <cstring>

#include "scheduler.hpp"

namespace host {

inline const char* verb(Direction d) {
    static const char* const names[] = {"read", "write", "atomic add"};
    return names[d];
}

struct Place {
    int slot;
    Tensor* tensor;
    std::int64_t offset;
};

[[noreturn]] inline void fail_stray(Worker& w, const void* p, unsigned bytes, Direction d,
                                    Site site) {
    const auto* c = static_cast<const unsigned char*>(p);
    if (c >= w.shared && c < w.shared + w.shared_capacity)
        w.fail("out of bounds", -1, 0, "global %s of %u bytes at %s:%d of a shared memory address",
               verb(d), bytes, site.file, site.line);
    w.fail("out of bounds", -1, 0, "%s of %u bytes at %s:%d of address %p, which is in no tensor",
           verb(d), bytes, site.file, site.line, p);
}

inline Place locate(Worker& w, const void* p, unsigned bytes, Direction d, Site site) {
    const auto address = reinterpret_cast<std::uintptr_t>(p);
    const std::uintptr_t slot = (address - w.launch->region) >> SLOT_BITS;
    if (slot >= w.launch->tensors.size()) fail_stray(w, p, bytes, d, site);
    Tensor& t = w.launch->tensors[slot];
    return {static_cast<int>(slot), &t, static_cast<const char*>(p) - t.base};
}

inline void check_bounds(Worker& w, const Place& at, const void* p, unsigned bytes, Direction d,
                         Site site) {
    const Tensor& t = *at.tensor;
    if (reinterpret_cast<std::uintptr_t>(p) & (bytes - 1))  // sizes are powers of 2
        w.fail("misaligned", at.slot, at.offset,
               "%s of %u bytes at %s:%d is not aligned to its size", verb(d), bytes, site.file,
               site.line);
    std::int64_t row = 0;
    if (at.offset < 0 || at.offset + static_cast<std::int64_t>(bytes) > t.extent)
        w.fail("out of bounds", at.slot, at.offset,
               "%s of %u bytes at %s:%d outside the tensor's %" PRId64 " bytes", verb(d), bytes,
               site.file, site.line, t.extent);
    if (!t.find_row(at.offset, row) || at.offset + bytes > row + t.row_bytes)
        w.fail("out of bounds", at.slot, at.offset,
               "%s of %u bytes at %s:%d between the rows of a strided view", verb(d), bytes,
               site.file, site.line);
    Window& window = w.windows[at.slot];
    window.begin = reinterpret_cast<std::uintptr_t>(t.base) + row;
    window.end = window.begin + t.row_bytes;
    const bool plain = t.access == ACCESS_R && !t.argument->initialised;
    window.quick_bytes = plain ? t.itemsize : ~0u;
}

[[noreturn]] inline void fail_race(Worker& w, const Place& at, unsigned bytes, Direction d,
                                   Site site, GlobalStamp other, const char* other_verb) {
    char who[96];
    const std::uint64_t b = global_block(other);
    if (b + 1 == MANY_BLOCKS)
        std::snprintf(who, sizeof who, "several blocks");
    else if (global_kind(other) != ONE_THREAD)
        std::snprintf(who, sizeof who, "several threads of block %" PRIu64, b);
    else
        std::snprintf(who, sizeof who, "block %" PRIu64 " thread %d", b,
                      stamp_thread(global_stamp(other)));
    w.fail("race", at.slot, at.offset, "%s of %u bytes at %s:%d is not ordered after the %s by %s",
           verb(d), bytes, site.file, site.line, other_verb, who);
}

// Is the write or single read `s` ordered before the running thread?
inline bool ordered(Worker& w, GlobalStamp s) {
    return global_block(s) == static_cast<std::uint64_t>(w.block) &&
           w.clock().ordered(global_stamp(s), w.running);
}

inline bool reads_ordered(Worker& w, GlobalStamp s) {
    if (global_block(s) != static_cast<std::uint64_t>(w.block)) return false;
    const Clock& c = w.clock();
    const Stamp stamp = global_stamp(s);
    if (global_kind(s) == ONE_THREAD || stamp < c.limit) return c.ordered(stamp, w.running);
    // Of several readers only the latest time is kept: ask for all warps it may have been.
    const std::uint32_t all = w.warp_count == 32 ? ~0u : (1u << w.warp_count) - 1;
    const std::uint32_t warps = global_kind(s) == ONE_WARP ? 1u << stamp_thread(stamp) / 32 : all;
    return c.ordered_after_warps(warps, stamp_time(stamp));
}

// The readers of an element once the running thread has read it too.
inline GlobalStamp with_reader(Worker& w, GlobalStamp before) {
    const Stamp now = make_stamp(w.clock().time, w.running);
    const GlobalStamp me = make_global(w.block, ONE_THREAD, now);
    if (before == 0 || before == me) return me;
    if (global_block(before) != static_cast<std::uint64_t>(w.block))
        return make_global(MANY_BLOCKS - 1, WARPS, now);
    if (reads_ordered(w, before)) return me;
    const Stamp latest = std::max(now, global_stamp(before));
    const bool one_warp = global_kind(before) != WARPS && stamp_thread(global_stamp(before)) / 32 ==
                                                              static_cast<int>(w.running / 32);
    return make_global(w.block, one_warp ? ONE_WARP : WARPS, latest);
}

inline void check_element_read(Worker& w, const Place& at, std::int64_t e, unsigned bytes,
                               Site site) {
    const Tensor& t = *at.tensor;
    const std::uint8_t* initialised = t.argument->initialised;
    bool written = t.access != ACCESS_W && (!initialised || initialised[e]);
    if (t.writes) {
        // The read is announced before writes are looked at, and a writer does the reverse: of two
        // blocks that collide, at least one sees the other.
        auto& reads = t.reads[e];
        GlobalStamp before = reads.load(std::memory_order_relaxed);
        GlobalStamp after = with_reader(w, before);
        if (!w.launch->parallel) {
            reads.store(after, std::memory_order_relaxed);
        } else {
            while (before != after && !reads.compare_exchange_weak(before, after))
                after = with_reader(w, before);
        }
        const GlobalStamp writer = t.writes[e].load();
        if (writer != 0) {
            if (!ordered(w, writer)) fail_race(w, at, bytes, READ, site, writer, "write");
            written = true;
        }
    }
    if (!written)
        w.fail("uninitialised", at.slot, e * t.itemsize,
               "read of %u bytes at %s:%d of an element that was never written", bytes, site.file,
               site.line);
}

inline void check_element_write(Worker& w, const Place& at, std::int64_t e, unsigned bytes,
                                Site site) {
    const Tensor& t = *at.tensor;
    const GlobalStamp me = make_global(w.block, ONE_THREAD, make_stamp(w.clock().time, w.running));
    GlobalStamp writer;
    if (w.launch->parallel) {
        writer = t.writes[e].exchange(me);
    } else {
        writer = t.writes[e].load(std::memory_order_relaxed);
        t.writes[e].store(me, std::memory_order_relaxed);
    }
    if (writer != 0 && !ordered(w, writer)) fail_race(w, at, bytes, WRITE, site, writer, "write");
    const GlobalStamp reader = t.reads[e].load();
    if (reader != 0 && !reads_ordered(w, reader))
        fail_race(w, at, bytes, WRITE, site, reader, "read");
}

inline void check_access(Worker& w, const Place& at, unsigned bytes, Direction d, Site site) {
    static const char* const passed_as[] = {"read-only", "write-only", "read-write", "atomic"};
    const Tensor& t = *at.tensor;
    const bool allowed = d == READ    ? t.access != ACCESS_ATOMIC
                         : d == WRITE ? t.access == ACCESS_W || t.access == ACCESS_RW
                                      : t.access == ACCESS_ATOMIC;
    if (!allowed)
        w.fail("access", at.slot, at.offset, "%s of %u bytes at %s:%d of a tensor passed as %s",
               verb(d), bytes, site.file, site.line, passed_as[t.access]);
    if ((bytes | at.offset) & (t.itemsize - 1))
        w.fail("access", at.slot, at.offset,
               "%s of %u bytes at %s:%d is a part of a %d-byte element", verb(d), bytes, site.file,
               site.line, t.itemsize);
    if (!t.writes && !t.argument->initialised) return;
    const std::int64_t first = at.offset >> t.item_shift;
    const std::int64_t last = first + (bytes >> t.item_shift);
    for (std::int64_t e = first; e < last; ++e) {
        if (d == WRITE)
            check_element_write(w, at, e, bytes, site);
        else
            check_element_read(w, at, e, bytes, site);
    }
}

__attribute__((noinline)) inline void check_global(Worker& w, const void* p, unsigned bytes,
                                                   Direction d, Site site) {
    const Place at = locate(w, p, bytes, d, site);
    check_bounds(w, at, p, bytes, d, site);
    check_access(w, at, bytes, d, site);
}

// May the launch write the tensor that `p`, which has been checked, points into?
inline bool is_written(Worker& w, const void* p) {
    const std::uintptr_t slot =
        (reinterpret_cast<std::uintptr_t>(p) - w.launch->region) >> SLOT_BITS;
    return w.launch->tensors[slot].writes != nullptr;
}

template <bool CHECKS>
inline void global_access(const void* p, unsigned bytes, Direction d, Site site) {
    Worker& w = *current_worker;
    const auto address = reinterpret_cast<std::uintptr_t>(p);
    const std::uintptr_t slot = (address - w.launch->region) >> SLOT_BITS;
    if (slot >= SLOTS) fail_stray(w, p, bytes, d, site);
    Window& window = w.windows[slot];
    window.bytes[d] += bytes;
    if constexpr (CHECKS) {
        const bool quick = d == READ && bytes >= window.quick_bytes && address >= window.begin &&
                           address + bytes <= window.end && !(address & (bytes - 1));
        if (!quick) check_global(w, p, bytes, d, site);
    }
}

template <bool CHECKS>
inline void atomic_add(float* p, float value, Site site) {
    global_access<CHECKS>(p, 4, ATOMIC, site);
    auto* bits = reinterpret_cast<std::atomic<std::uint32_t>*>(data(p));
    std::uint32_t before = bits->load(std::memory_order_relaxed), after;
    do {
        float sum;
        std::memcpy(&sum, &before, 4);
        sum += value;
        std::memcpy(&after, &sum, 4);
    } while (!bits->compare_exchange_weak(before, after, std::memory_order_relaxed));
}

}  // namespace host
