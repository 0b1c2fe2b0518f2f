// Counted and checked access to shared memory, cp_async included.
#pragma once

#include <cinttypes>
#include <cstring>

#include "global_memory.hpp"
#include "scheduler.hpp"

namespace host {

inline std::int64_t check_shared_bounds(Worker& w, const void* p, unsigned bytes, const char* what,
                                        Site site) {
    const std::int64_t offset = static_cast<const unsigned char*>(p) - w.shared;
    if (offset < 0 || offset + static_cast<std::int64_t>(bytes) > w.launch->shared_bytes)
        w.fail("out of bounds", -1, offset,
               "%s of %u bytes at %s:%d at offset %" PRId64 " of %" PRId64
               " bytes of dynamic shared memory",
               what, bytes, site.file, site.line, offset, w.launch->shared_bytes);
    if (offset & (bytes - 1))
        w.fail("misaligned", -1, offset,
               "%s of %u bytes at %s:%d at offset %" PRId64
               " of shared memory is not aligned to its size",
               what, bytes, site.file, site.line, offset);
    return offset;
}

[[noreturn]] inline void fail_shared(Worker& w, Fault fault, Stamp other, std::int64_t offset,
                                     unsigned bytes, const char* what, Site site) {
    if (fault == Fault::UNINITIALISED)
        w.fail("uninitialised", -1, offset,
               "%s of %u bytes at %s:%d at offset %" PRId64
               " of shared memory, which was never written",
               what, bytes, site.file, site.line, offset);
    const char* other_what = fault == Fault::RACE_WITH_WRITE  ? "write"
                             : fault == Fault::RACE_WITH_READ ? "read"
                                                              : "unfinished cp_async";
    w.fail("race", -1, offset,
           "%s of %u bytes at %s:%d at offset %" PRId64
           " of shared memory is not ordered after the %s by thread %d",
           what, bytes, site.file, site.line, offset, other_what, stamp_thread(other));
}

__attribute__((noinline)) inline void check_shared_slowly(Worker& w, const void* p, unsigned bytes,
                                                          bool write, const char* what, Site site) {
    const std::int64_t offset = check_shared_bounds(w, p, bytes, what, site);
    Stamp other = 0;
    const Fault f = w.shadow.access(offset, bytes, write, w.clock(), w.running, other);
    if (f != Fault::NONE) fail_shared(w, f, other, offset, bytes, what, site);
}

inline void check_shared(Worker& w, const void* p, unsigned bytes, bool write, const char* what,
                         Site site) {
    const auto offset = static_cast<std::size_t>(static_cast<const unsigned char*>(p) - w.shared);
    const Clock& clock = w.clock();
    const bool inside = offset < w.shared_bytes && offset + bytes <= w.shared_bytes;
    if (!inside || offset & (bytes - 1) ||
        !w.shadow.quick_access(offset, bytes, write, clock, make_stamp(clock.time, w.running)))
        check_shared_slowly(w, p, bytes, write, what, site);
}

template <bool CHECKS>
inline void shared_access(const void* p, unsigned bytes, Direction d, Site site) {
    Worker& w = *current_worker;
    w.shared_traffic[d] += bytes;
    if constexpr (CHECKS)
        check_shared(w, p, bytes, d == WRITE, d == WRITE ? "write" : "read", site);
}

inline unsigned char* shared_memory() { return current_worker->shared; }

template <bool CHECKS>
inline void cp_async_16(void* shared, const void* global, bool valid, Site site) {
    Worker& w = *current_worker;
    if (valid) global_access<CHECKS>(global, 16, READ, site);
    if constexpr (CHECKS) {
        const std::int64_t offset = check_shared_bounds(w, shared, 16, "cp_async", site);
        Stamp other = 0;
        const Fault f = w.shadow.begin_copy(offset, w.clock(), w.running, other);
        if (f != Fault::NONE) fail_shared(w, f, other, offset, 16, "cp_async", site);
    }
    w.shared_traffic[WRITE] += 16;
    Fiber& fiber = *w.fiber;
    fiber.copies.push_back(
        {static_cast<unsigned char*>(shared), valid ? global : nullptr, fiber.group, site});
}

inline void cp_async_commit() { ++current_worker->fiber->group; }

// Data arrives as late as the rules allow: at the wait.
template <bool CHECKS>
inline void cp_async_wait(int pending) {
    Worker& w = *current_worker;
    Fiber& fiber = *w.fiber;
    std::size_t kept = 0;
    for (const Copy& copy : fiber.copies) {
        if (copy.group + static_cast<std::uint32_t>(pending) >= fiber.group) {
            fiber.copies[kept++] = copy;
            continue;
        }
        // The source is being read until now: nobody may have overwritten it.
        if constexpr (CHECKS)
            if (copy.from && is_written(w, copy.from))
                check_global(w, copy.from, 16, READ, copy.site);
        if (copy.from)
            std::memcpy(data(copy.to), data(copy.from), 16);
        else
            std::memset(data(copy.to), 0, 16);
        if constexpr (CHECKS) w.shadow.end_copy(copy.to - w.shared, w.clock(), w.running);
    }
    fiber.copies.resize(kept);
}

}  // namespace host
