// Hopper on the host: transaction barriers, TMA, bulk copies, named barriers, warpgroup products.
//
// What is asynchronous happens as late as the rules allow. A product is executed when its warp waits
// for it, a bulk store when its thread waits for it; what they read is checked when they are issued
// and again when they are executed, so that a buffer overwritten in between is a race. A TMA load
// writes at once, as an agent of its own: the bytes are ordered only for those who wait on its
// barrier. Writes by ordinary stores are visible to TMA and to products only after a tma_fence by
// the thread that wrote them.
#pragma once

#include <algorithm>

#include "collectives.hpp"
#include "global_memory.hpp"
#include "scheduler.hpp"
#include "shared_memory.hpp"

namespace host {

// The layout of encode_tensor_map in launch.py.
struct HostTensorMap {
    std::uint64_t pointer, itemsize, columns, rows, heads, batch;
    std::uint64_t stride_n, stride_h, stride_b, box_rows, unused[6];
};

constexpr unsigned SWIZZLED_ROW = 128;
inline std::size_t swizzle(std::size_t address) { return address ^ ((address >> 7 & 7) << 4); }

// ---- transaction barriers ------------------------------------------------------------------------

inline MbarrierState& find_mbarrier(Worker& w, const void* p, Site site) {
    const auto offset = static_cast<std::int64_t>(static_cast<const unsigned char*>(p) - w.shared);
    for (auto& b : w.mbarriers)
        if (b.offset == offset) return b;
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
        std::memcpy(w.shared + offset, from, 16);
    else
        std::memset(w.shared + offset, 0, 16);
    w.shared_traffic[WRITE] += 16;
}

// 16 bytes of shared memory are read by the engine or by a product, on behalf of the running thread.
template <bool CHECKS>
void engine_read(Worker& w, std::size_t offset, const char* what, Site site) {
    if constexpr (CHECKS) {
        check_shared(w, w.shared + offset, 16, false, what, site);
        const Stamp unfenced =
            w.shadow.unfenced_writer(offset, w.launch->threads,
                                     [&](int thread) { return w.fibers[thread].fenced; });
        if (unfenced)
            w.fail("race", -1, static_cast<std::int64_t>(offset),
                   "%s at %s:%d reads offset %zu of shared memory, which thread %d wrote without a "
                   "tma_fence after it",
                   what, site.file, site.line, offset, stamp_thread(unfenced));
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
            const auto from = map.pointer + row * map.stride_n + at[3] * map.stride_h +
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
        engine_read<CHECKS>(w, from, "TMA store", site);
    });
    w.fiber->bulk_stores.push_back(store);
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
    for (int i = 0; i < bytes; i += 16) engine_read<CHECKS>(w, store.base + i, "bulk add", site);
    w.fiber->bulk_stores.push_back(store);
}

inline void bulk_commit() { ++current_worker->fiber->bulk_group; }

template <bool CHECKS>
void bulk_wait(int pending, Site) {
    Worker& w = *current_worker;
    Fiber& fiber = *w.fiber;
    std::size_t kept = 0;
    for (const BulkStore& store : fiber.bulk_stores) {
        if (store.group + static_cast<std::uint32_t>(pending) >= fiber.bulk_group) {
            fiber.bulk_stores[kept++] = store;
            continue;
        }
        if (store.map) {
            each_chunk(w, *store.map, store.base, store.at, store.site,
                       [&](std::size_t from, char* to) {
                           engine_read<CHECKS>(w, from, "TMA store", store.site);
                           w.shared_traffic[READ] += 16;
                           if (!to) return;
                           global_access<CHECKS>(to, 16, WRITE, store.site);
                           std::memcpy(to, w.shared + from, 16);
                       });
        } else {
            for (int i = 0; i < store.bytes; i += 16) {
                engine_read<CHECKS>(w, store.base + i, "bulk add", store.site);
                w.shared_traffic[READ] += 16;
                float values[4];
                std::memcpy(values, w.shared + store.base + i, 16);
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
}

// ---- named barriers, registers ---------------------------------------------------------------------

inline Switch named_barrier(int id, int threads, bool sync, Site site) {
    Worker& w = *current_worker;
    if (id < 1 || id > 15 || threads < 32 || threads % 32 || threads > w.launch->threads)
        w.fail("limit", -1, 0, "named barrier %d of %d threads at %s:%d", id, threads, site.file,
               site.line);
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
    const int at_start = std::min(255, 65536 / w.launch->threads) / 8 * 8;
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

// ---- warpgroup products ----------------------------------------------------------------------------

// Where a 16-byte piece of an operand lies: element (mn, k) for k = 0..7 of a K-major operand's row,
// or (mn..mn + 7, k) of an MN-major one (PTX ISA, "Strides", 128-byte swizzle).
struct Descriptor {
    std::size_t start, leading, stride;

    Descriptor(Worker& w, std::uint64_t bits, Site site)
        : start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4),
          stride((bits >> 32 & 0x3fff) << 4) {
        if (bits >> 62 != 1)
            w.fail("limit", -1, 0, "wgmma at %s:%d: descriptor with swizzle mode %d, only 1 (128 "
                   "bytes) is known",
                   site.file, site.line, static_cast<int>(bits >> 62));
        if (bits >> 49 & 7)
            w.fail("limit", -1, 0, "wgmma at %s:%d: descriptor with a base offset", site.file,
                   site.line);
    }
    std::size_t k_major(unsigned mn, unsigned k) const {
        return swizzle(start + mn / 8 * stride + mn % 8 * SWIZZLED_ROW + k * 2);
    }
    std::size_t mn_major(unsigned mn, unsigned k) const {
        return swizzle(start + mn / 64 * leading + k / 8 * stride + k % 8 * SWIZZLED_ROW +
                       mn % 64 * 2);
    }
};

// Rows first..first + rows - 1 of an operand, 16 deep, as out[row][k].
template <bool CHECKS>
void fetch_operand(Worker& w, const Descriptor& d, bool transposed, unsigned first, unsigned rows,
                   std::uint16_t (*out)[16], Site site) {
    for (unsigned i = 0; i < rows * 2; ++i) {
        const unsigned mn = first + (transposed ? i % (rows / 8) * 8 : i / 2);
        const unsigned k = transposed ? i / (rows / 8) : i % 2 * 8;
        const std::size_t at = transposed ? d.mn_major(mn, k) : d.k_major(mn, k);
        if (at + 16 > w.shared_bytes)
            w.fail("out of bounds", -1, static_cast<std::int64_t>(at),
                   "wgmma at %s:%d reads offset %zu of %zu bytes of shared memory", site.file,
                   site.line, at, w.shared_bytes);
        engine_read<CHECKS>(w, at, "wgmma", site);
        if (!out) continue;
        std::uint16_t values[8];
        std::memcpy(values, w.shared + at, 16);
        for (unsigned e = 0; e < 8; ++e) {
            if (transposed)
                out[mn - first + e][k] = values[e];
            else
                out[mn - first][k + e] = values[e];
        }
    }
}

template <bool CHECKS>
void execute(Worker& w, const WarpProduct& p) {
    const WarpgroupProduct& m = p.lanes[0];
    std::uint16_t b[256][16];
    fetch_operand<CHECKS>(w, Descriptor(w, m.b, p.site), m.transposed_b, 0, m.n, b, p.site);
    std::uint32_t a_registers[32][4], b_registers[32][2];
    const std::uint32_t* a_of[32];
    const std::uint32_t* b_of[32];
    float* d_of[32];
    if (m.a_registers) {
        for (int l = 0; l < 32; ++l) a_of[l] = p.lanes[l].a_registers;
    } else {
        std::uint16_t a[16][16];
        fetch_operand<CHECKS>(w, Descriptor(w, m.a, p.site), m.transposed_a, p.warp * 16, 16, a,
                              p.site);
        for (int l = 0; l < 32; ++l) {
            const int g = l / 4, q = l % 4 * 2;
            std::memcpy(&a_registers[l][0], &a[g][q], 4);
            std::memcpy(&a_registers[l][1], &a[g + 8][q], 4);
            std::memcpy(&a_registers[l][2], &a[g][q + 8], 4);
            std::memcpy(&a_registers[l][3], &a[g + 8][q + 8], 4);
            a_of[l] = a_registers[l];
        }
    }
    for (unsigned column = 0; column < m.n; column += 8) {
        for (int l = 0; l < 32; ++l) {
            const int g = l / 4, q = l % 4 * 2;
            std::memcpy(&b_registers[l][0], &b[column + g][q], 4);
            std::memcpy(&b_registers[l][1], &b[column + g][q + 8], 4);
            b_of[l] = b_registers[l];
            d_of[l] = p.lanes[l].d + column / 2;
            if (m.first) std::memset(d_of[l], 0, 16);
        }
        if (m.type == FP16)
            multiply<FP16>(d_of, a_of, b_of);
        else
            multiply<BF16>(d_of, a_of, b_of);
    }
}

template <bool CHECKS>
Switch wgmma(const WarpgroupProduct& product, Site site) {
    Worker& w = *current_worker;
    Warp& warp = *w.warp;
    warp.in[w.lane()] = &product;
    if (!w.arrive(Wait::WGMMA, site)) return w.leave();
    const unsigned index = w.running / 32;
    if (w.launch->threads % 128)
        w.fail("limit", -1, 0, "wgmma at %s:%d in a block of %d threads: whole warpgroups only",
               site.file, site.line, w.launch->threads);
    WarpProduct p;
    p.warp = index % 4;
    p.group = warp.product_group;
    p.site = site;
    for (int l = 0; l < 32; ++l) p.lanes[l] = *static_cast<const WarpgroupProduct*>(warp.in[l]);
    const WarpgroupProduct& m = p.lanes[0];
    for (const auto& lane : p.lanes)
        if (lane.a != m.a || lane.b != m.b)
            w.fail("divergence", -1, 0, "wgmma at %s:%d with different descriptors in a warp",
                   site.file, site.line);
    if constexpr (CHECKS) {
        fetch_operand<CHECKS>(w, Descriptor(w, m.b, site), m.transposed_b, 0, m.n, nullptr, site);
        if (!m.a_registers)
            fetch_operand<CHECKS>(w, Descriptor(w, m.a, site), m.transposed_a, p.warp * 16, 16,
                                  nullptr, site);
    }
    warp.products.push_back(p);
    w.finish_collective();
    return {};
}

inline Switch wgmma_commit(Site site) {
    Worker& w = *current_worker;
    if (!w.arrive(Wait::WGMMA_COMMIT, site)) return w.leave();
    ++w.warp->product_group;
    w.finish_collective();
    return {};
}

template <bool CHECKS>
Switch wgmma_wait(int pending, Site site) {
    Worker& w = *current_worker;
    if (!w.arrive(Wait::WGMMA_WAIT, site)) return w.leave();
    Warp& warp = *w.warp;
    std::size_t kept = 0;
    for (std::size_t i = 0; i < warp.products.size(); ++i) {
        if (warp.products[i].group + static_cast<std::uint32_t>(pending) >= warp.product_group)
            warp.products[kept++] = warp.products[i];
        else
            execute<CHECKS>(w, warp.products[i]);
    }
    warp.products.resize(kept);
    // The lanes meet here: what each read through the products is done for all.
    Clock& c = w.clock();
    c.seen[w.running / 32] = c.time;
    c.advance(w.tick(), w.clock_warps);
    w.finish_collective();
    return {};
}

// The inverse of ldmatrix: lane l's registers hold fragment elements, rows are addressed by lanes.
template <bool CHECKS>
Switch stmatrix_x4(void* row, const unsigned* r, bool transposed, Site site) {
    Worker& w = *current_worker;
    if constexpr (CHECKS) check_shared(w, row, 16, true, "stmatrix", site);
    w.shared_traffic[WRITE] += 16;
    Warp& warp = *w.warp;
    warp.out[w.lane()] = row;
    warp.in[w.lane()] = r;
    if (!w.arrive(Wait::STMATRIX, site)) return w.leave();
    for (int lane = 0; lane < 32; ++lane) {
        const auto* registers = static_cast<const std::uint32_t*>(warp.in[lane]);
        const int g = lane / 4, q = lane % 4 * 2;
        for (int m = 0; m < 4; ++m) {
            std::uint16_t pair[2];
            std::memcpy(pair, &registers[m], 4);
            for (int e = 0; e < 2; ++e) {
                const int line = transposed ? q + e : g, column = transposed ? g : q + e;
                std::memcpy(static_cast<char*>(warp.out[8 * m + line]) + 2 * column, &pair[e], 2);
            }
        }
    }
    w.finish_collective();
    return {};
}

template <bool CHECKS>
constexpr HopperRuntime HOPPER = {
    mbarrier_init,    mbarrier_arrive,    mbarrier_wait,       tma_load<CHECKS>,
    tma_store<CHECKS>, bulk_load<CHECKS>, bulk_add<CHECKS>,    bulk_commit,
    bulk_wait<CHECKS>, tma_fence,         named_barrier,       set_registers,
    wgmma<CHECKS>,     wgmma_commit,      wgmma_wait<CHECKS>,  stmatrix_x4<CHECKS>,
};

}  // namespace host
