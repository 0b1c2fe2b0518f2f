// Runs the threads of a block as fibers of one OS thread.
//
// A fiber runs until it must wait: in a barrier, or in a warp collective that other lanes have not
// reached. Whoever arrives last does the collective's work, makes the others ready and goes on.
// With a seed, the next fiber is drawn at random instead of in lane order.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "clocks.hpp"
#include "fiber.hpp"
#include "interface.hpp"
#include "shared_shadow.hpp"
#include "tensors.hpp"

namespace host {

// The first error of a launch, as the launcher reads it (backend.py holds the same layout).
struct Failure {
    char kind[32];
    char text[1024];
    std::int32_t tensor;     // index into the tensor arguments, or -1
    std::int32_t thread;     // or -1
    std::int64_t block;      // linear, or -1
    std::int64_t offset;     // bytes into the tensor or into shared memory
};

struct Launch {
    void (*entry)(void**);
    void** params;
    Dim3 grid;
    int threads;
    std::int64_t shared_bytes;
    std::int64_t blocks;
    bool random;
    std::uint64_t seed;
    bool parallel;  // more than one OS thread
    std::vector<Tensor> tensors;
    std::uintptr_t region;
    const Runtime* runtime;

    std::atomic<std::int64_t> next_block{0};
    std::atomic<bool> failed{false};
    std::mutex mutex;
    Failure* failure;
};

enum class Wait { NOTHING, BLOCK_SYNC, WARP_SYNC, SHUFFLE, LDMATRIX, MMA };
inline const char* wait_name(Wait w) {
    static const char* const names[] = {"nothing", "block_sync", "warp_sync",
                                        "shuffle", "ldmatrix",   "mma"};
    return names[static_cast<int>(w)];
}

struct Copy {  // a cp_async that has not been waited for
    unsigned char* to;
    const void* from;  // null: zeros
    std::uint32_t group;
};

struct Fiber {
    Context context;
    Thread info;
    Wait waiting = Wait::NOTHING;
    Site site = {nullptr, 0};
    std::uint32_t group = 0;  // the open cp_async group
    std::vector<Copy> copies;
};

struct Warp {
    std::uint32_t ready, exited;
    // The collective in progress.
    std::uint32_t arrived;
    Wait kind;
    Site site;
    void* out[32];
    const void* in[32];
    const void* in2[32];
    int number[32];
    Clock clock;
};

struct Barrier {
    int arrived;
    Site site;
    std::uint32_t waiting[MAX_WARPS];  // lanes
};

constexpr std::size_t STACK_BYTES = 64 * 1024;
constexpr std::uint64_t CANARY = 0x5afe57ac4b0770a5u;

struct Worker;
// One per OS thread; read at every call of the vocabulary.
inline thread_local Worker* current_worker = nullptr;

struct Worker {
    Launch* launch = nullptr;
    std::int64_t block = 0;
    int running = 0;  // thread index
    int live = 0;
    int warp_count = 0;
    std::uint32_t time = 0;  // synchronisations of the block so far
    std::uint32_t ready_warps = 0;
    std::uint64_t random_state = 0;
    Context main;
    std::unique_ptr<Fiber[]> fibers{new Fiber[1024]};
    Warp warps[MAX_WARPS];
    Barrier barrier;
    unsigned char* stacks = nullptr;
    unsigned char* shared = nullptr;
    std::size_t shared_capacity = 0;
    SharedShadow shadow;
    std::uint64_t bytes[SLOTS][3] = {};
    // The row that the last checked access to each tensor fell into.
    std::int64_t row_begin[SLOTS], row_end[SLOTS];

    Fiber& fiber() { return fibers[running]; }
    Warp& warp() { return warps[running / 32]; }
    int lane() const { return running % 32; }
    Clock& clock() { return warps[running / 32].clock; }

    // False: no memory.
    bool prepare(Launch& l) {
        launch = &l;
        if (!stacks) {
            void* p = mmap(nullptr, STACK_BYTES * 1024, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (p == MAP_FAILED) return false;
            stacks = static_cast<unsigned char*>(p);
#ifdef MADV_HUGEPAGE
            madvise(p, STACK_BYTES * 1024, MADV_HUGEPAGE);  // a switch then rarely misses the TLB
#endif
        }
        if (!shared || shared_capacity < static_cast<std::size_t>(l.shared_bytes)) {
            if (shared) munmap(shared, shared_capacity);
            shared_capacity = (l.shared_bytes + 65535) / 65536 * 65536 + 65536;
            void* p = mmap(nullptr, shared_capacity, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (p == MAP_FAILED) return false;
            shared = static_cast<unsigned char*>(p);
        }
        std::memset(bytes, 0, sizeof bytes);
        std::memset(row_begin, 0, sizeof row_begin);
        std::memset(row_end, 0, sizeof row_end);
        warp_count = l.threads / 32;
        return true;
    }

    Dim3 block_index(std::int64_t linear) const {
        const Dim3& g = launch->grid;
        return {static_cast<unsigned>(linear % g.x), static_cast<unsigned>(linear / g.x % g.y),
                static_cast<unsigned>(linear / g.x / g.y)};
    }

    // ---- errors ------------------------------------------------------------------------------

    // Records the launch's first error and leaves the block: its fibers are abandoned where they
    // stand. Kernels own nothing, so nothing leaks.
    [[noreturn]] void fail(const char* kind, int tensor, std::int64_t offset, const char* format, ...)
        __attribute__((format(printf, 5, 6))) {
        {
            std::lock_guard<std::mutex> lock(launch->mutex);
            if (!launch->failed.exchange(true)) {
                Failure& f = *launch->failure;
                std::snprintf(f.kind, sizeof f.kind, "%s", kind);
                va_list arguments;
                va_start(arguments, format);
                std::vsnprintf(f.text, sizeof f.text, format, arguments);
                va_end(arguments);
                f.tensor = tensor;
                f.offset = offset;
                f.block = block;
                f.thread = running;
            }
        }
        switch_context(fiber().context, main);
        __builtin_unreachable();
    }

    // ---- choosing who runs -------------------------------------------------------------------

    void make_ready(int warp_index, std::uint32_t lanes) {
        warps[warp_index].ready |= lanes;
        if (warps[warp_index].ready) ready_warps |= 1u << warp_index;
    }

    static int nth_bit(std::uint32_t mask, int n) {
        for (; n > 0; --n) mask &= mask - 1;
        return __builtin_ctz(mask);
    }
    int draw(int n) {
        random_state = random_state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<int>((random_state >> 33) % static_cast<unsigned>(n));
    }

    // Takes the next ready thread out of the ready sets: the running warp first. -1: none.
    int pick() {
        int w = running / 32;
        if (launch->random) {
            if (!ready_warps) return -1;
            w = nth_bit(ready_warps, draw(__builtin_popcount(ready_warps)));
        } else if (!warps[w].ready) {
            if (!ready_warps) return -1;
            const std::uint32_t later = w == 31 ? 0 : ready_warps >> (w + 1) << (w + 1);
            w = __builtin_ctz(later ? later : ready_warps);
        }
        std::uint32_t& ready = warps[w].ready;
        const int l = launch->random ? nth_bit(ready, draw(__builtin_popcount(ready)))
                                     : __builtin_ctz(ready);
        ready &= ~(1u << l);
        if (!ready) ready_warps &= ~(1u << w);
        return w * 32 + l;
    }

    // Suspends the running fiber until somebody makes it ready.
    void wait(Wait what, Site site) {
        Fiber& me = fiber();
        me.waiting = what;
        me.site = site;
        const int next = pick();
        if (next < 0) fail_deadlock();
        running = next;
        switch_context(me.context, fibers[next].context);
        me.waiting = Wait::NOTHING;
    }

    [[noreturn]] void fail_deadlock() {
        // Threads that wait for the same thing at the same place, as ranges.
        char text[900];
        int used = 0;
        const int threads = launch->threads;
        std::vector<bool> told(threads, false);
        for (int t = 0; t < threads && used < 700; ++t) {
            const Fiber& f = fibers[t];
            if (told[t] || f.waiting == Wait::NOTHING) continue;
            used += std::snprintf(text + used, sizeof text - used, "%sthreads", used ? "; " : "");
            for (int u = t; u < threads && used < 700; ++u) {
                auto same = [&](int v) {
                    return fibers[v].waiting == f.waiting && fibers[v].site.line == f.site.line;
                };
                if (told[u] || !same(u)) continue;
                int end = u;
                while (end + 1 < threads && same(end + 1)) ++end;
                for (int v = u; v <= end; ++v) told[v] = true;
                used += std::snprintf(text + used, sizeof text - used,
                                      u == end ? " %d" : " %d-%d", u, end);
                u = end;
            }
            used += std::snprintf(text + used, sizeof text - used, " wait in %s at %s:%d",
                                  wait_name(f.waiting), f.site.file, f.site.line);
        }
        fail("deadlock", -1, 0, "%d threads wait for threads that never come: %s", live, text);
    }

    // ---- barriers ----------------------------------------------------------------------------

    std::uint32_t tick() {
        if (++time >= MAX_TIME)
            fail("limit", -1, 0,
                 "more than %u synchronisations in a block: run without checks", MAX_TIME);
        return time;
    }

    void block_sync(Site site) {
        if (barrier.arrived == 0) barrier.site = site;
        if (barrier.site.line != site.line)
            fail("divergence", -1, 0,
                 "block_sync at %s:%d while other threads of the block wait in block_sync at %s:%d",
                 site.file, site.line, barrier.site.file, barrier.site.line);
        ++barrier.arrived;
        if (barrier.arrived == live) {
            complete_barrier();
            return;
        }
        barrier.waiting[running / 32] |= 1u << lane();
        wait(Wait::BLOCK_SYNC, site);
    }

    void complete_barrier() {
        // Every warp is ordered after everything that any warp did before.
        const std::uint32_t now = tick();
        for (int w = 0; w < warp_count; ++w) {
            for (int v = 0; v < warp_count; ++v) warps[w].clock.seen[v] = now - 1;
            warps[w].clock.advance(now, warp_count);
            make_ready(w, barrier.waiting[w]);
            barrier.waiting[w] = 0;
        }
        barrier.arrived = 0;
    }

    // ---- warp collectives --------------------------------------------------------------------

    // Announces the running lane at a collective. True: it is the last one, does the work for all
    // lanes and calls finish_collective. False: it must wait() next.
    bool arrive(Wait kind, Site site) {
        Warp& w = warp();
        if (w.exited)
            fail("divergence", -1, 0, "%s at %s:%d, but lanes (mask %08x) of the warp have exited",
                 wait_name(kind), site.file, site.line, w.exited);
        if (!w.arrived) {
            w.kind = kind;
            w.site = site;
        } else if (w.kind != kind || w.site.line != site.line) {
            fail("divergence", -1, 0,
                 "%s at %s:%d while other lanes (mask %08x) of the warp wait in %s at %s:%d",
                 wait_name(kind), site.file, site.line, w.arrived, wait_name(w.kind), w.site.file,
                 w.site.line);
        }
        w.arrived |= 1u << lane();
        return w.arrived == 0xffffffffu;
    }

    void finish_collective() {
        Warp& w = warp();
        w.arrived = 0;
        make_ready(running / 32, ~(1u << lane()));
    }

    void warp_sync(Site site) {
        if (!arrive(Wait::WARP_SYNC, site)) return wait(Wait::WARP_SYNC, site);
        Clock& c = clock();
        c.seen[running / 32] = c.time;
        c.advance(tick(), warp_count);
        finish_collective();
    }

    // ---- a block -----------------------------------------------------------------------------

    static void fiber_main() {
        Worker& w = *current_worker;
        w.launch->entry(w.launch->params);
        w.exit_thread();
    }

    [[noreturn]] void exit_thread() {
        Warp& w = warp();
        w.exited |= 1u << lane();
        if (w.arrived)
            fail("divergence", -1, 0, "exits while lanes (mask %08x) of the warp wait in %s at %s:%d",
                 w.arrived, wait_name(w.kind), w.site.file, w.site.line);
        --live;
        // Exited threads do not count at a barrier.
        if (live > 0 && barrier.arrived == live) complete_barrier();
        Fiber& me = fiber();
        if (live == 0) {
            switch_context(me.context, main);
        } else {
            const int next = pick();
            if (next < 0) fail_deadlock();
            running = next;
            switch_context(me.context, fibers[next].context);
        }
        __builtin_unreachable();
    }

    std::uint64_t* canary(int thread) {
        return reinterpret_cast<std::uint64_t*>(stacks + thread * STACK_BYTES);
    }

    void run_block(std::int64_t linear, bool checks) {
        block = linear;
        live = launch->threads;
        time = 1;
        random_state = launch->seed + static_cast<std::uint64_t>(linear) * 0x9e3779b97f4a7c15u;
        barrier = Barrier{};
        ready_warps = 0;
        const Dim3 index = block_index(linear);
        for (int t = 0; t < launch->threads; ++t) {
            Fiber& f = fibers[t];
            f.info = {{static_cast<unsigned>(t), 0, 0},
                      index,
                      {static_cast<unsigned>(launch->threads), 1, 1},
                      launch->grid};
            f.waiting = Wait::NOTHING;
            f.group = 0;
            f.copies.clear();
            // Stacks start at different cache sets: 32 lanes touch the same frame in turn.
            const std::size_t colour = static_cast<std::size_t>(t) * 1088 % 16384;
            *canary(t) = CANARY;
            start_context(f.context, canary(t), STACK_BYTES - colour, fiber_main);
        }
        for (int w = 0; w < warp_count; ++w) {
            warps[w].ready = warps[w].exited = warps[w].arrived = 0;
            warps[w].clock.start();
            make_ready(w, 0xffffffffu);
        }
        std::memset(shared, 0xff, launch->shared_bytes);  // NaN, should anybody read it
        if (checks) shadow.reset(launch->shared_bytes);
        running = 0;
        running = pick();
        switch_context(main, fiber().context);
        for (int t = 0; t < launch->threads; ++t)
            if (*canary(t) != CANARY && !launch->failed.exchange(true)) {
                std::snprintf(launch->failure->kind, sizeof launch->failure->kind, "limit");
                std::snprintf(launch->failure->text, sizeof launch->failure->text,
                              "more than %zu bytes of local variables", STACK_BYTES);
                launch->failure->tensor = -1;
                launch->failure->block = block;
                launch->failure->thread = t;
            }
    }
};

}  // namespace host
