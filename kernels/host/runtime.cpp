// The runtime behind vocabulary.hpp: counted and checked memory, and the launch itself.
//
// Compiled once; loaded by backend.py through ctypes. The rules that the checks hold a kernel to
// are listed in __init__.py.
#include <cinttypes>
#include <thread>

#include "collectives.hpp"
#include "scheduler.hpp"

namespace host {
namespace {

const char* verb(Direction d) {
    static const char* const names[] = {"read", "write", "atomic add"};
    return names[d];
}

// ---- global memory -------------------------------------------------------------------------------

struct Place {
    int slot;
    Tensor* tensor;
    std::int64_t offset;
};

[[noreturn]] void fail_stray(Worker& w, const void* p, unsigned bytes, Direction d, Site site) {
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

void check_bounds(Worker& w, const Place& at, const void* p, unsigned bytes, Direction d,
                  Site site) {
    const Tensor& t = *at.tensor;
    if (reinterpret_cast<std::uintptr_t>(p) & (bytes - 1))  // sizes are powers of 2
        w.fail("misaligned", at.slot, at.offset, "%s of %u bytes at %s:%d is not aligned to its size",
               verb(d), bytes, site.file, site.line);
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

[[noreturn]] void fail_race(Worker& w, const Place& at, unsigned bytes, Direction d, Site site,
                            GlobalStamp other, const char* other_verb) {
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

bool reads_ordered(Worker& w, GlobalStamp s) {
    if (global_block(s) != static_cast<std::uint64_t>(w.block)) return false;
    const Clock& c = w.clock();
    const Stamp stamp = global_stamp(s);
    if (global_kind(s) == ONE_THREAD || stamp < c.limit) return c.ordered(stamp, w.running);
    // Of several readers only the latest time is kept: ask for all warps it may have been.
    const std::uint32_t all = w.warp_count == 32 ? ~0u : (1u << w.warp_count) - 1;
    const std::uint32_t warps =
        global_kind(s) == ONE_WARP ? 1u << stamp_thread(stamp) / 32 : all;
    return c.ordered_after_warps(warps, stamp_time(stamp));
}

// The readers of an element once the running thread has read it too.
GlobalStamp with_reader(Worker& w, GlobalStamp before) {
    const Stamp now = make_stamp(w.clock().time, w.running);
    const GlobalStamp me = make_global(w.block, ONE_THREAD, now);
    if (before == 0 || before == me) return me;
    if (global_block(before) != static_cast<std::uint64_t>(w.block))
        return make_global(MANY_BLOCKS - 1, WARPS, now);
    if (reads_ordered(w, before)) return me;
    const Stamp latest = std::max(now, global_stamp(before));
    const bool one_warp = global_kind(before) != WARPS &&
                          stamp_thread(global_stamp(before)) / 32 == static_cast<int>(w.running / 32);
    return make_global(w.block, one_warp ? ONE_WARP : WARPS, latest);
}

void check_element_read(Worker& w, const Place& at, std::int64_t e, unsigned bytes, Site site) {
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

void check_element_write(Worker& w, const Place& at, std::int64_t e, unsigned bytes, Site site) {
    const Tensor& t = *at.tensor;
    const GlobalStamp me =
        make_global(w.block, ONE_THREAD, make_stamp(w.clock().time, w.running));
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

void check_access(Worker& w, const Place& at, unsigned bytes, Direction d, Site site) {
    static const char* const passed_as[] = {"read-only", "write-only", "read-write", "atomic"};
    const Tensor& t = *at.tensor;
    const bool allowed = d == READ    ? t.access != ACCESS_ATOMIC
                         : d == WRITE ? t.access == ACCESS_W || t.access == ACCESS_RW
                                      : t.access == ACCESS_ATOMIC;
    if (!allowed)
        w.fail("access", at.slot, at.offset, "%s of %u bytes at %s:%d of a tensor passed as %s",
               verb(d), bytes, site.file, site.line, passed_as[t.access]);
    if ((bytes | at.offset) & (t.itemsize - 1))
        w.fail("access", at.slot, at.offset, "%s of %u bytes at %s:%d is a part of a %d-byte element",
               verb(d), bytes, site.file, site.line, t.itemsize);
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

__attribute__((noinline)) void check_global(Worker& w, const void* p, unsigned bytes, Direction d,
                                            Site site) {
    const Place at = locate(w, p, bytes, d, site);
    check_bounds(w, at, p, bytes, d, site);
    check_access(w, at, bytes, d, site);
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
void atomic_add(float* p, float value, Site site) {
    global_access<CHECKS>(p, 4, ATOMIC, site);
    auto* bits = reinterpret_cast<std::atomic<std::uint32_t>*>(p);
    std::uint32_t before = bits->load(std::memory_order_relaxed), after;
    do {
        float sum;
        std::memcpy(&sum, &before, 4);
        sum += value;
        std::memcpy(&after, &sum, 4);
    } while (!bits->compare_exchange_weak(before, after, std::memory_order_relaxed));
}

// ---- shared memory -------------------------------------------------------------------------------

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

[[noreturn]] void fail_shared(Worker& w, Fault fault, Stamp other, std::int64_t offset,
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

__attribute__((noinline)) void check_shared_slowly(Worker& w, const void* p, unsigned bytes,
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
void shared_access(const void* p, unsigned bytes, Direction d, Site site) {
    Worker& w = *current_worker;
    w.shared_traffic[d] += bytes;
    if constexpr (CHECKS) check_shared(w, p, bytes, d == WRITE, d == WRITE ? "write" : "read", site);
}

unsigned char* shared_memory() { return current_worker->shared; }

template <bool CHECKS>
void cp_async_16(void* shared, const void* global, bool valid, Site site) {
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
    fiber.copies.push_back({static_cast<unsigned char*>(shared), valid ? global : nullptr,
                            fiber.group});
}

void cp_async_commit() { ++current_worker->fiber->group; }

// Data arrives as late as the rules allow: at the wait.
template <bool CHECKS>
void cp_async_wait(int pending) {
    Worker& w = *current_worker;
    Fiber& fiber = *w.fiber;
    std::size_t kept = 0;
    for (const Copy& copy : fiber.copies) {
        if (copy.group + static_cast<std::uint32_t>(pending) >= fiber.group) {
            fiber.copies[kept++] = copy;
            continue;
        }
        if (copy.from)
            std::memcpy(copy.to, copy.from, 16);
        else
            std::memset(copy.to, 0, 16);
        if constexpr (CHECKS) w.shadow.end_copy(copy.to - w.shared, w.clock(), w.running);
    }
    fiber.copies.resize(kept);
}

// ---- collectives ---------------------------------------------------------------------------------

Switch block_sync(Site site) { return current_worker->block_sync(site); }
Switch warp_sync(Site site) { return current_worker->warp_sync(site); }

Switch shuffle(unsigned* value, int source_lane, Site site) {
    Worker& w = *current_worker;
    Warp& warp = *w.warp;
    warp.out[w.lane()] = value;
    warp.number[w.lane()] = source_lane;
    if (!w.arrive(Wait::SHUFFLE, site)) return w.leave();
    std::uint32_t values[32];
    for (int l = 0; l < 32; ++l) values[l] = *static_cast<std::uint32_t*>(warp.out[l]);
    for (int l = 0; l < 32; ++l)
        *static_cast<std::uint32_t*>(warp.out[l]) = values[warp.number[l]];
    w.finish_collective();
    return {};
}

template <bool CHECKS>
Switch ldmatrix_x4(unsigned* r, const void* row, bool transposed, Site site) {
    Worker& w = *current_worker;
    if constexpr (CHECKS) check_shared(w, row, 16, false, "ldmatrix", site);
    w.shared_traffic[READ] += 16;
    Warp& warp = *w.warp;
    warp.out[w.lane()] = r;
    warp.in[w.lane()] = row;
    if (!w.arrive(Wait::LDMATRIX, site)) return w.leave();
    load_matrices(reinterpret_cast<std::uint32_t* const*>(warp.out), warp.in, transposed);
    w.finish_collective();
    return {};
}

Switch mma_16816(float* d, const unsigned* a, const unsigned* b, Number type, Site site) {
    Worker& w = *current_worker;
    Warp& warp = *w.warp;
    const unsigned lane = w.lane();
    warp.out[lane] = d;
    warp.in[lane] = a;
    warp.in2[lane] = b;
    if (!w.arrive(Wait::MMA, site)) return w.leave();
    auto* out = reinterpret_cast<float* const*>(warp.out);
    auto* in = reinterpret_cast<const std::uint32_t* const*>(warp.in);
    auto* in2 = reinterpret_cast<const std::uint32_t* const*>(warp.in2);
    if (type == FP16)
        multiply<FP16>(out, in, in2);
    else
        multiply<BF16>(out, in, in2);
    w.finish_collective();
    return {};
}

const Thread* thread() { return &current_worker->fiber->info; }

template <bool CHECKS>
constexpr Runtime RUNTIME = {thread,
                             global_access<CHECKS>,
                             shared_access<CHECKS>,
                             atomic_add<CHECKS>,
                             cp_async_16<CHECKS>,
                             cp_async_commit,
                             cp_async_wait<CHECKS>,
                             shared_memory,
                             block_sync,
                             warp_sync,
                             shuffle,
                             ldmatrix_x4<CHECKS>,
                             mma_16816};

// ---- launch --------------------------------------------------------------------------------------

Slots slots;
std::vector<std::unique_ptr<Worker>> workers;  // kept: their stacks are warm

// A launch outside any block: bad arguments, no memory, unwritten output.
void refuse(Failure& f, const char* kind, int tensor, std::int64_t offset, const char* text) {
    std::snprintf(f.kind, sizeof f.kind, "%s", kind);
    std::snprintf(f.text, sizeof f.text, "%s", text);
    f.tensor = tensor;
    f.offset = offset;
    f.block = f.thread = -1;
}

bool place_tensors(Launch& launch, TensorArgument* arguments, int count, bool checks,
                   ZeroedMemory& zeroed) {
    launch.tensors.resize(count);
    launch.region = slots.region();
    for (int i = 0; i < count; ++i) {
        Tensor& t = launch.tensors[i];
        TensorArgument& a = arguments[i];
        t.set_view(a);
        const bool written = t.access != ACCESS_R;
        if (written && t.overlapping && t.extent) {
            refuse(*launch.failure, "access", i, 0, "a written tensor with overlapping elements");
            return false;
        }
        t.base = slots.commit(i, a.pointer, t.extent);
        if (t.base && checks && t.extent && (t.access == ACCESS_W || t.access == ACCESS_RW)) {
            const std::size_t bytes = t.elements() * sizeof(GlobalStamp);
            t.writes = static_cast<std::atomic<GlobalStamp>*>(zeroed.take(bytes));
            t.reads = static_cast<std::atomic<GlobalStamp>*>(zeroed.take(bytes));
        }
        if (!t.base || (checks && (t.writes == nullptr) != (t.reads == nullptr))) {
            refuse(*launch.failure, "limit", i, 0, "no memory for a copy of the tensor");
            return false;
        }
        const auto* user = reinterpret_cast<const char*>(a.pointer);
        if (t.access == ACCESS_W)
            t.each_row([&](std::int64_t at) { std::memset(t.base + at, 0xff, t.row_bytes); });
        else
            t.each_row(
                [&](std::int64_t at) { std::memcpy(t.base + at, user + at, t.row_bytes); });
        *static_cast<void**>(launch.params[a.parameter]) = t.base;
    }
    return true;
}

bool find_unwritten(Launch& launch) {
    for (std::size_t i = 0; i < launch.tensors.size(); ++i) {
        const Tensor& t = launch.tensors[i];
        if (t.access != ACCESS_W || !t.writes) continue;
        std::int64_t missing = -1, total = 0;
        t.each_row([&](std::int64_t at) {
            for (std::int64_t e = at / t.itemsize; e < (at + t.row_bytes) / t.itemsize; ++e)
                if (t.writes[e].load(std::memory_order_relaxed) == 0 && total++ == 0)
                    missing = e * t.itemsize;
        });
        if (missing >= 0) {
            char text[128];
            std::snprintf(text, sizeof text,
                          "%" PRId64 " elements were not written, this is the first", total);
            refuse(*launch.failure, "unwritten", static_cast<int>(i), missing, text);
            return true;
        }
    }
    return false;
}

// Scratch memory remembers from launch to launch which elements hold something.
void mark_initialised(const Tensor& t) {
    std::uint8_t* initialised = t.argument->initialised;
    if (!initialised || (t.access != ACCESS_W && t.access != ACCESS_RW)) return;
    t.each_row([&](std::int64_t at) {
        for (std::int64_t e = at / t.itemsize; e < (at + t.row_bytes) / t.itemsize; ++e)
            if (!t.writes || t.writes[e].load(std::memory_order_relaxed) != 0) initialised[e] = 1;
    });
}

void run(Launch& launch, Worker& worker, bool checks) {
    current_worker = &worker;
    while (!launch.failed.load(std::memory_order_relaxed)) {
        const std::int64_t block = launch.next_block.fetch_add(1);
        if (block >= launch.blocks) break;
        worker.run_block(block, checks);
    }
    current_worker = nullptr;
}

}  // namespace

struct LaunchArguments {  // backend.py holds the same layout
    void (*entry)(void**);
    const Runtime** runtime_of_kernel;
    void** params;
    TensorArgument* tensors;
    std::int32_t tensor_count;
    std::int32_t threads;
    std::uint32_t grid[3];
    std::int32_t os_threads;
    std::int64_t shared_bytes;
    std::int32_t checks;
    std::int32_t random;
    std::uint64_t seed;
    std::uint64_t* shared_traffic;  // out: bytes read, written, over all blocks
};

// 0: done and written back. 1: `failure` says why; no tensor was touched.
extern "C" __attribute__((visibility("default"))) int host_launch(const LaunchArguments* a,
                                                                  Failure* failure) {
    Launch launch;
    launch.failure = failure;
    launch.entry = a->entry;
    launch.params = a->params;
    launch.grid = {a->grid[0], a->grid[1], a->grid[2]};
    launch.blocks = std::int64_t{1} * a->grid[0] * a->grid[1] * a->grid[2];
    launch.threads = a->threads;
    launch.shared_bytes = a->shared_bytes;
    launch.random = a->random != 0;
    launch.seed = a->seed;
    const bool checks = a->checks != 0;
    *a->runtime_of_kernel = checks ? &RUNTIME<true> : &RUNTIME<false>;

    const int os_threads =
        static_cast<int>(std::min<std::int64_t>(std::max(1, a->os_threads), launch.blocks));
    launch.parallel = os_threads > 1;
    if (a->tensor_count > SLOTS || launch.blocks >= static_cast<std::int64_t>(MANY_BLOCKS) - 1) {
        refuse(*failure, "limit", -1, 0, "too many tensors or blocks");
        return 1;
    }
    if (!slots.reserve()) {
        refuse(*failure, "limit", -1, 0, "no address space (4 TiB are reserved, not used)");
        return 1;
    }
    ZeroedMemory zeroed;
    if (!place_tensors(launch, a->tensors, a->tensor_count, checks, zeroed)) return 1;
    while (static_cast<int>(workers.size()) < os_threads)
        workers.push_back(std::make_unique<Worker>());
    for (int i = 0; i < os_threads; ++i)
        if (!workers[i]->prepare(launch)) {
            refuse(*failure, "limit", -1, 0, "no memory for stacks");
            return 1;
        }

    std::vector<std::thread> threads;
    for (int i = 1; i < os_threads; ++i)
        threads.emplace_back([&, i] { run(launch, *workers[i], checks); });
    run(launch, *workers[0], checks);
    for (auto& t : threads) t.join();

    if (launch.failed || (checks && find_unwritten(launch))) return 1;
    for (std::size_t i = 0; i < launch.tensors.size(); ++i) {
        const Tensor& t = launch.tensors[i];
        auto* user = reinterpret_cast<char*>(t.argument->pointer);
        if (t.access != ACCESS_R)
            t.each_row(
                [&](std::int64_t at) { std::memcpy(user + at, t.base + at, t.row_bytes); });
        mark_initialised(t);
        for (int d = 0; d < 3; ++d) {
            t.argument->bytes[d] = 0;
            for (int k = 0; k < os_threads; ++k) t.argument->bytes[d] += workers[k]->windows[i].bytes[d];
        }
    }
    for (int d = 0; d < 2; ++d) {
        a->shared_traffic[d] = 0;
        for (int k = 0; k < os_threads; ++k) a->shared_traffic[d] += workers[k]->shared_traffic[d];
    }
    slots.release();
    return 0;
}

}  // namespace host
