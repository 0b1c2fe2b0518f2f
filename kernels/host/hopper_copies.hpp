// Hopper's copies on the host: TMA boxes with the 128-byte swizzle, 1-D bulk copies and additions.
//
// A load writes at once, as an agent of its own: its bytes are ordered only for those who wait on
// its barrier. A store is carried out when its thread waits for it; what it reads is checked when it
// is issued and again then, so that memory overwritten in between is a race.
#pragma once

#include "global_memory.hpp"
#include "hopper_barriers.hpp"
#include "shared_memory.hpp"

namespace host {

// The layout of encode_tensor_map in launch.py.
struct HostTensorMap {
    std::uint64_t pointer, itemsize, columns, rows, heads, batch;
    std::uint64_t stride_n, stride_h, stride_b, box_rows, before, unused[5];
};

constexpr unsigned SWIZZLED_ROW = 128;
inline std::size_t swizzle(std::size_t address) { return address ^ ((address >> 7 & 7) << 4); }

// ---- the copy engine: TMA and bulk copies ----------------------------------------------------------

// 16 bytes arrive in shared memory, ordered after what the issuing thread knows of.
template <bool CHECKS>
void engine_write(Worker& w, const Clock& clock, std::size_t offset, const void* from, Site site) {
    if constexpr (CHECKS) {
        Stamp other = 0;
        const Fault f = w.shadow.access(offset, 16, true, clock, w.engine_thread(), other);
        if (f != Fault::NONE)
            fail_shared(w, f, other, static_cast<std::int64_t>(offset), 16, "copy", site);
    }
    if (from)
        std::memcpy(data(w.shared) + offset, data(from), 16);
    else
        std::memset(data(w.shared) + offset, 0, 16);
    w.shared_traffic[WRITE] += 16;
}

// Starts something asynchronous: writes by the running warp from now on carry a later time.
inline std::uint32_t issue_time(Worker& w) { return w.clock().time = w.tick(); }

constexpr std::uint32_t NOT_YET = ~0u;

// 16 bytes of shared memory are read by the engine or by a product, on behalf of the running thread,
// which issued it at `issued`, or does so now.
template <bool CHECKS>
void engine_read(Worker& w, std::size_t offset, std::uint32_t issued, const char* what, Site site) {
    if constexpr (CHECKS) {
        check_shared(w, w.shared + offset, 16, false, what, site);
        const Stamp unfenced = w.shadow.find_write(offset, [&](Stamp s) {
            const int thread = stamp_thread(s);
            return thread < w.launch->threads && w.fibers[thread].fenced < stamp_time(s);
        });
        if (unfenced)
            w.fail("race", -1, static_cast<std::int64_t>(offset),
                   "%s at %s:%d reads offset %zu of shared memory, which thread %d wrote without a "
                   "tma_fence after it",
                   what, site.file, site.line, offset, stamp_thread(unfenced));
        const Stamp early =
            w.shadow.find_write(offset, [&](Stamp s) { return stamp_time(s) >= issued; });
        if (early)
            w.fail("race", -1, static_cast<std::int64_t>(offset),
                   "%s at %s:%d still had to read offset %zu of shared memory when thread %d "
                   "overwrote it",
                   what, site.file, site.line, offset, stamp_thread(early));
    }
}

inline std::size_t shared_offset(Worker& w, const void* p, std::size_t bytes, const char* what,
                                 Site site) {
    const auto offset = static_cast<const unsigned char*>(p) - w.shared;
    if (offset < 0 || offset + static_cast<std::int64_t>(bytes) > w.launch->shared_bytes)
        w.fail("out of bounds", -1, offset,
               "%s of %zu bytes at %s:%d at offset %td of %" PRId64 " bytes of shared memory", what,
               bytes, site.file, site.line, offset, w.launch->shared_bytes);
    return static_cast<std::size_t>(offset);
}

// Calls f(offset in shared memory, address in the tensor or null) for every 16 bytes of a box.
template <class F>
void each_chunk(Worker& w, const HostTensorMap& map, std::size_t base, const int* at, Site site,
                F f) {
    if (at[0] != 0 || at[2] != 0)
        w.fail("limit", -1, 0, "TMA at %s:%d with column coordinates (%d, %d): boxes start at 0",
               site.file, site.line, at[0], at[2]);
    const std::size_t slabs = map.columns * map.itemsize / SWIZZLED_ROW;
    const bool inside = at[3] >= 0 && at[4] >= 0 && static_cast<std::uint64_t>(at[3]) < map.heads &&
                        static_cast<std::uint64_t>(at[4]) < map.batch;
    for (std::size_t slab = 0; slab < slabs; ++slab)
        for (std::size_t r = 0; r < map.box_rows; ++r) {
            const std::int64_t row = at[1] + static_cast<std::int64_t>(r);
            const bool exists =
                inside && row >= 0 && row < static_cast<std::int64_t>(map.rows);
            const auto from = map.pointer - map.before + row * map.stride_n + at[3] * map.stride_h +
                              at[4] * map.stride_b + slab * SWIZZLED_ROW;
            const std::size_t to = base + (slab * map.box_rows + r) * SWIZZLED_ROW;
            for (unsigned c = 0; c < SWIZZLED_ROW; c += 16)
                f(swizzle(to + c), exists ? reinterpret_cast<char*>(from + c) : nullptr);
        }
}

inline const HostTensorMap& check_map(Worker& w, const void* p, const void* smem, Site site) {
    const auto& map = *static_cast<const HostTensorMap*>(p);
    const std::size_t bytes = map.columns * map.itemsize * map.box_rows;
    const std::size_t base = shared_offset(w, smem, bytes, "TMA box", site);
    // Slabs of a swizzled tile repeat every 1024 bytes; a box of fewer than 8 rows still starts there.
    if (base % 1024)
        w.fail("misaligned", -1, static_cast<std::int64_t>(base),
               "TMA at %s:%d at offset %zu: swizzled tiles start on multiples of 1024", site.file,
               site.line, base);
    return map;
}

inline void complete_copy(Worker& w, MbarrierState& b, const Clock& clock, int bytes, Site site) {
    if (!b.announced)
        w.fail("race", -1, b.offset,
               "copy at %s:%d completes on an mbarrier of which the copy engine has not been told: "
               "mbarrier_init_done is missing",
               site.file, site.line);
    for (int v = 0; v < w.clock_warps; ++v)
        b.gathering[v] = std::max(b.gathering[v], clock.seen[v]);
    b.gathering[w.warp_count] = std::max(b.gathering[w.warp_count], clock.time);
    b.bytes -= bytes;
    if (b.pending == 0 && b.bytes < 0)
        w.fail("deadlock", -1, b.offset,
               "copy at %s:%d brings %d bytes more than its mbarrier expects: the phase never ends",
               site.file, site.line, -b.bytes);
    settle(w, b);
}

template <bool CHECKS>
void tma_load(void* smem, const void* p, void* barrier, const int* at, Site site) {
    Worker& w = *current_worker;
    const HostTensorMap& map = check_map(w, p, smem, site);
    MbarrierState& b = find_mbarrier(w, barrier, site);
    const Clock clock = w.begin_engine_copy();
    const std::size_t base = static_cast<unsigned char*>(smem) - w.shared;
    each_chunk(w, map, base, at, site, [&](std::size_t to, const char* from) {
        if (from) global_access<CHECKS>(from, 16, READ, site);
        engine_write<CHECKS>(w, clock, to, from, site);
    });
    // A clipped box counts in full.
    complete_copy(w, b, clock, static_cast<int>(map.columns * map.itemsize * map.box_rows), site);
}

template <bool CHECKS>
void bulk_load(void* smem, const void* gmem, int bytes, void* barrier, Site site) {
    Worker& w = *current_worker;
    MbarrierState& b = find_mbarrier(w, barrier, site);
    const std::size_t base = shared_offset(w, smem, static_cast<std::size_t>(bytes), "copy", site);
    if (base % 16 || reinterpret_cast<std::uintptr_t>(gmem) % 16 || bytes % 16)
        w.fail("misaligned", -1, static_cast<std::int64_t>(base),
               "bulk copy at %s:%d of %d bytes: addresses and size are multiples of 16", site.file,
               site.line, bytes);
    const Clock clock = w.begin_engine_copy();
    for (int i = 0; i < bytes; i += 16) {
        const char* from = static_cast<const char*>(gmem) + i;
        global_access<CHECKS>(from, 16, READ, site);
        engine_write<CHECKS>(w, clock, base + i, from, site);
    }
    complete_copy(w, b, clock, bytes, site);
}

// ---- bulk stores -----------------------------------------------------------------------------------

template <bool CHECKS>
void tma_store(const void* p, const void* smem, const int* at, Site site) {
    Worker& w = *current_worker;
    BulkStore store;
    store.map = &check_map(w, p, smem, site);
    store.base = static_cast<const unsigned char*>(smem) - w.shared;
    std::copy(at, at + 5, store.at);
    store.group = w.fiber->bulk_group;
    store.site = site;
    each_chunk(w, *store.map, store.base, at, site, [&](std::size_t from, char*) {
        engine_read<CHECKS>(w, from, NOT_YET, "TMA store", site);
    });
    store.issued = issue_time(w);
    w.fiber->bulk_stores.push_back(store);
    w.fiber->bulk_issued = store.group + 1;
    w.fiber->apart = site;
}

template <bool CHECKS>
void bulk_add(float* gmem, const float* smem, int bytes, Site site) {
    Worker& w = *current_worker;
    BulkStore store;
    store.base = shared_offset(w, smem, static_cast<std::size_t>(bytes), "bulk add", site);
    if (store.base % 16 || reinterpret_cast<std::uintptr_t>(gmem) % 16 || bytes % 16)
        w.fail("misaligned", -1, static_cast<std::int64_t>(store.base),
               "bulk add at %s:%d of %d bytes: addresses and size are multiples of 16", site.file,
               site.line, bytes);
    store.target = gmem;
    store.bytes = bytes;
    store.group = w.fiber->bulk_group;
    store.site = site;
    for (int i = 0; i < bytes; i += 16)
        engine_read<CHECKS>(w, store.base + i, NOT_YET, "bulk add", site);
    store.issued = issue_time(w);
    w.fiber->bulk_stores.push_back(store);
    w.fiber->bulk_issued = store.group + 1;
    w.fiber->apart = site;
}

template <bool CHECKS>
void add_global_x4(float* p, const float* values, Site site) {
    if (reinterpret_cast<std::uintptr_t>(p) % 16)
        current_worker->fail("misaligned", -1, 0,
                             "addition of 16 bytes at %s:%d to address %p, no multiple of 16",
                             site.file, site.line, static_cast<void*>(p));
    for (int i = 0; i < 4; ++i) atomic_add<CHECKS>(p + i, values[i], site);
}

inline void bulk_commit() { ++current_worker->fiber->bulk_group; }

template <bool CHECKS>
void bulk_wait(int pending, bool complete, Site site) {
    Worker& w = *current_worker;
    Fiber& fiber = *w.fiber;
    fiber.apart = site;
    // Shared memory may be reused in both cases; that the target has changed is known in one.
    if (complete)
        fiber.bulk_complete = fiber.bulk_group - std::min<std::uint32_t>(pending, fiber.bulk_group);
    std::size_t kept = 0;
    for (const BulkStore& store : fiber.bulk_stores) {
        if (store.group + static_cast<std::uint32_t>(pending) >= fiber.bulk_group) {
            fiber.bulk_stores[kept++] = store;
            continue;
        }
        if (store.map) {
            each_chunk(w, *store.map, store.base, store.at, store.site,
                       [&](std::size_t from, char* to) {
                           engine_read<CHECKS>(w, from, store.issued, "TMA store", store.site);
                           w.shared_traffic[READ] += 16;
                           if (!to) return;
                           global_access<CHECKS>(to, 16, WRITE, store.site);
                           std::memcpy(data(to), data(w.shared) + from, 16);
                       });
        } else {
            for (int i = 0; i < store.bytes; i += 16) {
                engine_read<CHECKS>(w, store.base + i, store.issued, "bulk add", store.site);
                w.shared_traffic[READ] += 16;
                float values[4];
                std::memcpy(values, data(w.shared) + store.base + i, 16);
                for (int k = 0; k < 4; ++k)
                    atomic_add<CHECKS>(store.target + i / 4 + k, values[k], store.site);
            }
        }
    }
    fiber.bulk_stores.resize(kept);
}

inline void tma_fence() {
    Worker& w = *current_worker;
    w.fiber->fenced = w.clock().time;
    w.clock().time = w.tick();  // what the thread writes from here on is not fenced
}

}  // namespace host
