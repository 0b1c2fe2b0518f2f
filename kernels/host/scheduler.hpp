// Runs the threads of a block as fibers of one OS thread.
//
// A fiber runs until it must wait: in a barrier, or in a warp collective that other lanes have not
// reached. Whoever arrives last does the collective's work, makes the others ready and goes on.
// With a seed, the next fiber is drawn at random instead of in lane order.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "block_state.hpp"
#include "clocks.hpp"
#include "fiber.hpp"
#include "interface.hpp"
#include "launch.hpp"
#include "shared_shadow.hpp"
#include "tensors.hpp"

namespace host {

constexpr std::size_t STACK_BYTES = 64 * 1024;
// Below each stack lies memory that nobody may touch: a frame that a kernel may have (compiler.py)
// cannot reach over it.
constexpr std::size_t GUARD_BYTES = 32 * 1024;
constexpr std::size_t STACK_STEP = STACK_BYTES + GUARD_BYTES;
constexpr std::size_t STACKS_BYTES = 1024 * STACK_STEP;
constexpr std::uint64_t CANARY = 0x5afe57ac4b0770a5u;

struct Worker;
[[noreturn]] void fail_deadlock(Worker& w);  // deadlock.hpp
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
    int clock_warps = 0;  // warps, and the copy engine where a kernel uses it
    std::vector<MbarrierState> mbarriers;
    NamedBarrier named[16];
    int registers[MAX_WARPS];  // a thread, as asked for by setmaxnreg; 0 as launched
    unsigned char* stacks = nullptr;
    int guarded_stacks = 0;
    unsigned char* shared = nullptr;  // as the kernel sees it; the bytes are at data(shared)
    std::size_t shared_capacity = 0, shared_bytes = 0;
    // For faults and the watchdog (faults.hpp).
    std::atomic<std::uint32_t> beat{0};  // counts what a waiting thread does
    std::atomic<int> os_thread{0};       // its number while it runs blocks
    unsigned char* fault_stack = nullptr;  // the top of it
    Failure fault{};
    SharedShadow shadow;
    std::uint64_t shared_traffic[2] = {};  // bytes read from and written to shared memory
    Window windows[SLOTS];

    unsigned lane() const { return running % 32; }
    Clock& clock() { return warp->clock; }

    // False: no memory. `index`: among the workers.
    bool prepare(Launch& l, Slots& slots, int index) {
        launch = &l;
        if (!stacks) {
            void* p = mmap(nullptr, STACKS_BYTES, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (p == MAP_FAILED) return false;
            stacks = static_cast<unsigned char*>(p);
        }
        for (; guarded_stacks < l.threads; ++guarded_stacks)
            if (mprotect(canary(guarded_stacks), STACK_BYTES, PROT_READ | PROT_WRITE) != 0) {
                // The system allows so many pieces of memory only: do without guards.
                if (mprotect(stacks, STACKS_BYTES, PROT_READ | PROT_WRITE) != 0) return false;
                guarded_stacks = 1024;
                break;
            }
        if (!shared || shared_capacity < static_cast<std::size_t>(l.shared_bytes)) {
            shared_capacity = (l.shared_bytes + 65535) / 65536 * 65536 + 65536;
            shared = slots.shared(index, shared_capacity);
            if (!shared) return false;
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

    // ---- the copy engine ---------------------------------------------------------------------

    // For race detection the copy engine is an extra warp: its writes are visible only to threads that
    // waited on the mbarrier.
    int engine_thread() const { return warp_count * 32; }

    void use_copy_engine() {
        if (clock_warps > warp_count) return;
        if (warp_count >= MAX_WARPS)
            fail("limit", -1, 0, "mbarriers in a block of %d threads: the limit here is %d",
                 launch->threads, (MAX_WARPS - 1) * 32);
        clock_warps = warp_count + 1;
        shadow.tell_readers_apart();
    }

    // The clock of a copy that the running thread starts now.
    Clock begin_engine_copy() {
        Clock c = clock();
        c.seen[running / 32] = c.time;
        c.advance(tick(), clock_warps);
        return c;
    }

    // ---- errors ------------------------------------------------------------------------------

    void note_failure(int thread, const char* kind, int tensor, std::int64_t offset,
                      const char* format, ...) __attribute__((format(printf, 6, 7))) {
        va_list arguments;
        va_start(arguments, format);
        launch->note_failure(block, thread, kind, tensor, offset, format, arguments);
        va_end(arguments);
    }

    // Records the error and leaves the block: its fibers are abandoned where they stand. Kernels
    // own nothing, so nothing leaks. Without a kind: another block has told why.
    [[noreturn]] void fail(const char* kind, int tensor, std::int64_t offset, const char* format,
                           ...) __attribute__((format(printf, 5, 6))) {
        if (*kind) {
            va_list arguments;
            va_start(arguments, format);
            launch->note_failure(block, static_cast<int>(running), kind, tensor, offset, format, arguments);
            va_end(arguments);
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
            fail_deadlock(*this);
        }
        return {&from->context, &fiber->context};
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
        fiber->apart = Site{};
        if (barrier.arrived == 0) barrier.site = site;
        if (barrier.site.line != site.line || barrier.site.number != site.number) {
            // Wrong already. Who is missing is known once nobody can go on.
            fiber->other_barrier = site;
            barrier.elsewhere[running / 32] |= 1u << lane();
            return leave();
        }
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
        std::uint32_t engine = 0;  // the latest copy that any warp has waited for
        for (int w = 0; w < warp_count; ++w)
            engine = std::max(engine, warps[w].clock.seen[warp_count % MAX_WARPS]);
        for (int w = 0; w < warp_count; ++w) {
            for (int v = 0; v < warp_count; ++v) warps[w].clock.seen[v] = now - 1;
            if (clock_warps > warp_count) warps[w].clock.seen[warp_count] = engine;
            warps[w].clock.advance(now, clock_warps);
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
            if (w.exited && kind != Wait::WARP_SYNC) fail_partial(kind, site);
            w.kind = kind;
            w.site = site;
        } else if (w.kind != kind || w.site.line != site.line) {
            fail("divergence", -1, 0,
                 "%s at %s:%d while other lanes (mask %08x) of the warp wait in %s at %s:%d",
                 wait_name(kind), site.file, site.line, w.arrived, wait_name(w.kind), w.site.file,
                 w.site.line);
        }
        come_together(kind, site);
        w.arrived |= 1u << lane();
        return w.arrived == 0xffffffffu;
    }

    // One thread of a warp issues bulk stores and waits for them. What is `.aligned` in PTX wants the
    // whole warp at once; only a warp_sync, a shuffle or a barrier of the block brings it together.
    void come_together(Wait kind, Site site) {
        if (kind != Wait::WARP_SYNC && kind != Wait::SHUFFLE) must_be_together(wait_name(kind), site);
        fiber->apart = Site{};
    }

    void must_be_together(const char* what, Site site) {
        if (fiber->apart.file)
            fail("divergence", -1, 0,
                 "%s at %s:%d after the thread's own bulk store or wait at %s:%d: warp_sync is missing "
                 "between them",
                 what, site.file, site.line, fiber->apart.file, fiber->apart.line);
    }

    [[noreturn]] void fail_partial(Wait kind, Site site) {
        fail("divergence", -1, 0, "%s at %s:%d, but lanes (mask %08x) of the warp have exited",
             wait_name(kind), site.file, site.line, warp->exited);
    }

    void finish_collective() {
        warp->arrived = 0;
        warp->ready = ~(1u << lane());
    }

    // Exited lanes do not count at a warp_sync; every other collective needs all lanes.
    Switch warp_sync(Site site) {
        arrive(Wait::WARP_SYNC, site);
        if ((warp->arrived | warp->exited) != ~0u) return leave();
        complete_warp_sync();
        warp->ready &= ~(1u << lane());
        return {};
    }

    void complete_warp_sync() {
        Clock& c = clock();
        c.seen[running / 32] = c.time;
        c.advance(tick(), clock_warps);
        warp->ready = warp->arrived;
        warp->arrived = 0;
    }

    // ---- collectives of some lanes -------------------------------------------------------------

    Switch exchange(const MaskedWait& wait) {
        Warp& w = *warp;
        if (!(wait.mask >> lane() & 1u))
            fail("divergence", -1, 0, "%s at %s:%d in lane %u, which the mask %08x does not name",
                 word_name(wait.word), wait.site.file, wait.site.line, lane(), wait.mask);
        if (wait.mask == ~0u) fiber->apart = Site{};
        w.masked |= 1u << lane();
        w.masked_waits[lane()] = wait;
        if (!complete_exchange(lane())) return leave();
        w.ready &= ~(1u << lane());
        return {};
    }

    // Lanes that have exited are not waited for.
    bool complete_exchange(unsigned of_lane) {
        Warp& w = *warp;
        const MaskedWait& mine = w.masked_waits[of_lane];
        const std::uint32_t lanes = mine.mask & ~w.exited;
        if (lanes & ~w.masked) return false;
        Brought brought{lanes, {}};
        for (unsigned l = 0; l < 32; ++l) {
            brought.values[l] = ~0ull;
            if (!(lanes >> l & 1u)) continue;
            const MaskedWait& other = w.masked_waits[l];
            if (other.mask != mine.mask || other.word != mine.word) return false;
            brought.values[l] = other.value;
        }
        for (std::uint32_t left = lanes; left; left &= left - 1)
            *w.masked_waits[__builtin_ctz(left)].all = brought;
        w.masked &= ~lanes;
        w.ready |= lanes;
        // A warp has one clock: lanes that the mask does not name count as ordered too.
        if (mine.word == Word::SYNCWARP) {
            Clock& c = clock();
            c.seen[running / 32] = c.time;
            c.advance(tick(), clock_warps);
        }
        return true;
    }

    // ---- a block -----------------------------------------------------------------------------

    static void fiber_main() {
        Worker& w = *current_worker;
        w.launch->entry(w.launch->params);
        w.exit_thread();
    }

    [[noreturn]] void exit_thread() {
        warp->exited |= 1u << lane();
        if (warp->arrived && warp->kind != Wait::WARP_SYNC)
            fail("divergence", -1, 0,
                 "exits while lanes (mask %08x) of the warp wait in %s at %s:%d", warp->arrived,
                 wait_name(warp->kind), warp->site.file, warp->site.line);
        if (!fiber->bulk_stores.empty())
            fail("race", -1, static_cast<std::int64_t>(fiber->bulk_stores[0].base),
                 "exits before its bulk store at %s:%d has been waited for",
                 fiber->bulk_stores[0].site.file, fiber->bulk_stores[0].site.line);
        if (fiber->turn_at)
            fail("deadlock", -1, 0, "exits without passing on the turn it waited for at %s:%d",
                 fiber->turn_site.file, fiber->turn_site.line);
        if (warp->exited == ~0u && !warp->products.empty())
            fail("race", -1, 0, "the warp exits before its wgmma at %s:%d has been waited for",
                 warp->products[0].site.file, warp->products[0].site.line);
        if (warp->arrived && (warp->arrived | warp->exited) == ~0u) complete_warp_sync();
        for (unsigned l = 0; warp->masked && l < 32; ++l)
            if (warp->masked >> l & 1u) complete_exchange(l);
        --live;
        if (live == 0) {
            check_registers();
            switch_context(&fiber->context, &main);
        } else {
            // Exited threads do not count at a barrier.
            if (barrier.arrived == live) complete_barrier();
            const Switch s = leave();
            switch_context(s.from, s.to);
        }
        __builtin_unreachable();
    }

    int registers_at_start() const { return std::min(255, 65536 / launch->threads) / 8 * 8; }

    // Once one warpgroup has asked for registers, all had to: whole, and within the block's share.
    void check_registers() {
        if (std::none_of(registers, registers + warp_count, [](int n) { return n != 0; })) return;
        int total = 0;
        for (int first = 0; first < warp_count; first += 4) {
            const int* const group = registers + first;
            if (std::any_of(group, group + 4, [&](int n) { return n != group[0]; }))
                fail("divergence", -1, 0, "setmaxnreg in some warps only of the warpgroup of thread "
                     "%d", first * 32);
            total += group[0] ? group[0] : registers_at_start();
        }
        if (total > warp_count / 4 * registers_at_start())
            fail("deadlock", -1, 0,
                 "setmaxnreg: warpgroups hold %d registers a thread together, the block has %d; a "
                 "group that shrinks is missing",
                 total, warp_count / 4 * registers_at_start());
    }

    std::uint64_t* canary(int thread) {
        return reinterpret_cast<std::uint64_t*>(stacks + thread * STACK_STEP + GUARD_BYTES);
    }

    void run_block(std::int64_t linear) {
        block = linear;
        live = launch->threads;
        time = 1;
        random_state = launch->seed + static_cast<std::uint64_t>(linear) * 0x9e3779b97f4a7c15u;
        barrier = Barrier{};
        clock_warps = warp_count;
        mbarriers.clear();
        for (auto& b : named) b = NamedBarrier{};
        const Dim3 index = block_index(linear);
        for (int t = 0; t < launch->threads; ++t) {
            Fiber& f = fibers[t];
            f.info = {{static_cast<unsigned>(t), 0, 0},
                      index,
                      {static_cast<unsigned>(launch->threads), 1, 1},
                      launch->grid};
            f.group = f.fenced = f.bulk_group = f.bulk_issued = f.bulk_complete = 0;
            f.apart = Site{};
            f.turn_at = nullptr;
            f.copies.clear();
            f.bulk_stores.clear();
            // Stacks start at different cache sets: 32 lanes touch the same frame in turn.
            const std::size_t colour = static_cast<std::size_t>(t) * 1088 % 16384;
            *canary(t) = CANARY;
            start_context(&f.context, canary(t), STACK_BYTES - colour, fiber_main);
        }
        for (int w = 0; w < warp_count; ++w) {
            warps[w].exited = warps[w].arrived = warps[w].masked = 0;
            warps[w].ready = 0xffffffffu;
            warps[w].product_group = 0;
            warps[w].products.clear();
            warps[w].clock.start();
            registers[w] = 0;
        }
        std::memset(data(shared), 0xff, launch->shared_bytes);  // NaN, should anybody read it
        if (launch->checks) shadow.reset(launch->shared_bytes);
        run_lane(0, 0);
        switch_context(&main, &fiber->context);
        for (int t = 0; t < launch->threads; ++t)
            if (*canary(t) != CANARY)
                note_failure(t, "limit", -1, 0, "more than %zu bytes of local variables", STACK_BYTES);
    }
};

}  // namespace host
