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
    std::int32_t tensor;  // index into the tensor arguments, or -1
    std::int32_t thread;  // or -1
    std::int64_t block;   // linear, or -1
    std::int64_t offset;  // bytes into the tensor or into shared memory
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
    bool checks;
    std::vector<Tensor> tensors;
    std::uintptr_t region;
    const Runtime* runtime;

    std::atomic<std::int64_t> next_block{0};
    std::atomic<bool> failed{false};
    std::mutex mutex;
    Failure* failure;
};

enum class Wait { WARP_SYNC, SHUFFLE, LDMATRIX, MMA };
inline const char* wait_name(Wait w) {
    static const char* const names[] = {"warp_sync", "shuffle", "ldmatrix", "mma"};
    return names[static_cast<int>(w)];
}

struct Copy {  // a cp_async that has not been waited for
    unsigned char* to;
    const void* from;  // null: zeros
    std::uint32_t group;
};

struct alignas(64) Fiber {
    Context context;
    Thread info;
    std::uint32_t group = 0;  // the open cp_async group
    std::vector<Copy> copies;
};

struct Warp {
    std::uint32_t ready, exited;
    // The collective in progress: which lanes have come, and their registers.
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

// What an OS thread knows of a tensor: bytes moved, and the row that the last access fell into.
// Reads of at least `quick_bytes` inside that row need no further check.
struct Window {
    std::uintptr_t begin = 0, end = 0;
    unsigned quick_bytes = ~0u;
    std::uint64_t bytes[3] = {};
};

constexpr std::size_t STACK_BYTES = 64 * 1024;
constexpr std::uint64_t CANARY = 0x5afe57ac4b0770a5u;

struct Worker;
// One per OS thread; read at every call of the vocabulary.
inline thread_local Worker* current_worker = nullptr;

struct Worker {
    Launch* launch = nullptr;
    std::int64_t block = 0;
    unsigned running = 0;    // thread index
    Fiber* fiber = nullptr;  // of the running thread
    Warp* warp = nullptr;
    int live = 0;
    int warp_count = 0;
    std::uint32_t time = 0;  // synchronisations of the block so far
    std::uint64_t random_state = 0;
    Context main;
    std::unique_ptr<Fiber[]> fibers{new Fiber[1024]};
    Warp warps[MAX_WARPS];
    Barrier barrier;
    unsigned char* stacks = nullptr;
    unsigned char* shared = nullptr;
    std::size_t shared_capacity = 0, shared_bytes = 0;
    SharedShadow shadow;
    std::uint64_t shared_traffic[2] = {};  // bytes read from and written to shared memory
    Window windows[SLOTS];

    unsigned lane() const { return running % 32; }
    Clock& clock() { return warp->clock; }

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
        for (auto& window : windows) window = Window{};
        std::memset(shared_traffic, 0, sizeof shared_traffic);
        shared_bytes = static_cast<std::size_t>(l.shared_bytes);
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
    [[noreturn]] void fail(const char* kind, int tensor, std::int64_t offset, const char* format,
                           ...) __attribute__((format(printf, 5, 6))) {
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
        switch_context(&fiber->context, &main);
        __builtin_unreachable();
    }

    // ---- choosing who runs -------------------------------------------------------------------

    static int nth_bit(std::uint32_t mask, int n) {
        for (; n > 0; --n) mask &= mask - 1;
        return __builtin_ctz(mask);
    }
    int draw(int n) {
        random_state = random_state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<int>((random_state >> 33) % static_cast<unsigned>(n));
    }

    void run_lane(unsigned warp_index, unsigned l) {
        warp = &warps[warp_index];
        warp->ready &= ~(1u << l);
        running = warp_index * 32 + l;
        fiber = &fibers[running];
    }

    // Another warp, or any thread when a seed was given. False: nobody is ready.
    bool pick_elsewhere() {
        const unsigned mine = running / 32;
        const unsigned count = static_cast<unsigned>(warp_count);
        const unsigned shift = launch->random ? static_cast<unsigned>(draw(warp_count)) : 1u;
        for (unsigned i = 0; i < count; ++i) {
            const unsigned w = (mine + shift + i) % count;
            const std::uint32_t ready = warps[w].ready;
            if (!ready) continue;
            run_lane(w, launch->random ? nth_bit(ready, draw(__builtin_popcount(ready)))
                                       : __builtin_ctz(ready));
            return true;
        }
        return false;
    }

    // Leaves the running thread, which waits, for the next one: of the same warp if one is ready.
    Switch leave() {
        Fiber* from = fiber;
        const std::uint32_t ready = warp->ready;
        if (ready && !launch->random) {
            const unsigned l = __builtin_ctz(ready);
            warp->ready = ready & (ready - 1);
            running = (running & ~31u) | l;
            fiber = &fibers[running];
        } else if (!pick_elsewhere()) {
            fail_deadlock();
        }
        return {&from->context, &fiber->context};
    }

    [[noreturn]] void fail_deadlock() {
        char text[900] = "";
        int used = 0;
        auto tell = [&](unsigned w, std::uint32_t lanes, const char* what, Site site) {
            if (!lanes || used > 700) return;
            used += std::snprintf(text + used, sizeof text - used, "%s", used ? "; " : "");
            if (lanes == ~0u)
                used += std::snprintf(text + used, sizeof text - used, "threads %u-%u", w * 32,
                                      w * 32 + 31);
            else
                used += std::snprintf(text + used, sizeof text - used, "lanes %08x of warp %u",
                                      lanes, w);
            used += std::snprintf(text + used, sizeof text - used, " wait in %s at %s:%d", what,
                                  site.file, site.line);
        };
        for (int w = 0; w < warp_count; ++w) {
            tell(w, barrier.waiting[w], "block_sync", barrier.site);
            tell(w, warps[w].arrived, wait_name(warps[w].kind), warps[w].site);
        }
        fail("deadlock", -1, 0, "%d threads wait for threads that never come: %s", live, text);
    }

    // ---- barriers ----------------------------------------------------------------------------

    std::uint32_t tick() {
        if (++time < MAX_TIME) return time;
        if (launch->checks)
            fail("limit", -1, 0, "more than %u synchronisations in a block: run without checks",
                 MAX_TIME);
        return time = MAX_TIME;
    }

    Switch block_sync(Site site) {
        if (barrier.arrived == 0) barrier.site = site;
        if (barrier.site.line != site.line)
            fail("divergence", -1, 0,
                 "block_sync at %s:%d while other threads of the block wait in block_sync at %s:%d",
                 site.file, site.line, barrier.site.file, barrier.site.line);
        ++barrier.arrived;
        if (barrier.arrived == live) {
            complete_barrier();
            return {};
        }
        barrier.waiting[running / 32] |= 1u << lane();
        return leave();
    }

    void complete_barrier() {
        // Every warp is ordered after everything that any warp did before.
        const std::uint32_t now = tick();
        for (int w = 0; w < warp_count; ++w) {
            for (int v = 0; v < warp_count; ++v) warps[w].clock.seen[v] = now - 1;
            warps[w].clock.advance(now, warp_count);
            warps[w].ready |= barrier.waiting[w];
            barrier.waiting[w] = 0;
        }
        barrier.arrived = 0;
    }

    // ---- warp collectives --------------------------------------------------------------------

    // Announces the running lane at a collective. True: it is the last one, does the work for all
    // lanes and calls finish_collective. False: it must leave().
    bool arrive(Wait kind, Site site) {
        Warp& w = *warp;
        if (!w.arrived) {
            if (w.exited) fail_partial(kind, site);
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

    [[noreturn]] void fail_partial(Wait kind, Site site) {
        fail("divergence", -1, 0, "%s at %s:%d, but lanes (mask %08x) of the warp have exited",
             wait_name(kind), site.file, site.line, warp->exited);
    }

    void finish_collective() {
        warp->arrived = 0;
        warp->ready = ~(1u << lane());
    }

    Switch warp_sync(Site site) {
        if (!arrive(Wait::WARP_SYNC, site)) return leave();
        Clock& c = clock();
        c.seen[running / 32] = c.time;
        c.advance(tick(), warp_count);
        finish_collective();
        return {};
    }

    // ---- a block -----------------------------------------------------------------------------

    static void fiber_main() {
        Worker& w = *current_worker;
        w.launch->entry(w.launch->params);
        w.exit_thread();
    }

    [[noreturn]] void exit_thread() {
        warp->exited |= 1u << lane();
        if (warp->arrived)
            fail("divergence", -1, 0,
                 "exits while lanes (mask %08x) of the warp wait in %s at %s:%d", warp->arrived,
                 wait_name(warp->kind), warp->site.file, warp->site.line);
        --live;
        if (live == 0) {
            switch_context(&fiber->context, &main);
        } else {
            // Exited threads do not count at a barrier.
            if (barrier.arrived == live) complete_barrier();
            const Switch s = leave();
            switch_context(s.from, s.to);
        }
        __builtin_unreachable();
    }

    std::uint64_t* canary(int thread) {
        return reinterpret_cast<std::uint64_t*>(stacks + thread * STACK_BYTES);
    }

    void run_block(std::int64_t linear) {
        block = linear;
        live = launch->threads;
        time = 1;
        random_state = launch->seed + static_cast<std::uint64_t>(linear) * 0x9e3779b97f4a7c15u;
        barrier = Barrier{};
        const Dim3 index = block_index(linear);
        for (int t = 0; t < launch->threads; ++t) {
            Fiber& f = fibers[t];
            f.info = {{static_cast<unsigned>(t), 0, 0},
                      index,
                      {static_cast<unsigned>(launch->threads), 1, 1},
                      launch->grid};
            f.group = 0;
            f.copies.clear();
            // Stacks start at different cache sets: 32 lanes touch the same frame in turn.
            const std::size_t colour = static_cast<std::size_t>(t) * 1088 % 16384;
            *canary(t) = CANARY;
            start_context(&f.context, canary(t), STACK_BYTES - colour, fiber_main);
        }
        for (int w = 0; w < warp_count; ++w) {
            warps[w].exited = warps[w].arrived = 0;
            warps[w].ready = 0xffffffffu;
            warps[w].clock.start();
        }
        std::memset(shared, 0xff, launch->shared_bytes);  // NaN, should anybody read it
        if (launch->checks) shadow.reset(launch->shared_bytes);
        run_lane(0, 0);
        switch_context(&main, &fiber->context);
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
