// The runtime behind vocabulary.hpp: its table of functions, and the launch.
//
// Compiled once; loaded by backend.py through ctypes. The rules that the checks hold a kernel to
// are listed in __init__.py.
#include <cinttypes>
#include <thread>

#include "collectives.hpp"
#include "deadlock.hpp"
#include "faults.hpp"
#include "global_memory.hpp"
#include "hopper_runtime.hpp"
#include "scheduler.hpp"
#include "shared_memory.hpp"
#include "user_memory.hpp"

namespace host {
namespace {

// ---- collectives -------------------------------------------------------------------------------

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
    for (int l = 0; l < 32; ++l) *static_cast<std::uint32_t*>(warp.out[l]) = values[warp.number[l]];
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

Switch exchange(Word word, unsigned mask, unsigned long long value, Brought* all, Site site) {
    return current_worker->exchange({word, mask, value, all, site});
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
                             mma_16816,
                             exchange,
                             &HOPPER<CHECKS>};

// ---- launch ------------------------------------------------------------------------------------

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

// From the callers' tensors, or back to those that the launch writes.
bool copy_all(Launch& launch, bool back, const char* complaint) {
    volatile std::size_t at = 0;
    const void* const fault = faulted([&] {
        for (; at < launch.tensors.size(); at = at + 1) {
            const Tensor& t = launch.tensors[at];
            auto* user = reinterpret_cast<char*>(t.argument->pointer);
            if (t.access == (back ? ACCESS_R : ACCESS_W)) continue;
            t.each_row([&](std::int64_t row) {
                char* const ours = data(t.base) + row;
                std::memcpy(back ? user + row : ours, back ? ours : user + row, t.row_bytes);
            });
        }
    });
    if (!fault) return true;
    const auto from = reinterpret_cast<std::intptr_t>(fault);
    refuse(*launch.failure, "gone", static_cast<int>(at),
           from - static_cast<std::int64_t>(launch.tensors[at].argument->pointer), complaint);
    return false;
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
        if (t.access == ACCESS_W)
            t.each_row([&](std::int64_t at) { std::memset(data(t.base) + at, 0xff, t.row_bytes); });
        *static_cast<void**>(launch.params[a.parameter]) = t.base;
    }
    return copy_all(launch, false,
                    "its memory cannot be read: a mapped file that was cut short? No block has run");
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

void run(Launch& launch, Worker& worker, bool launching) {
    const Running running(worker, launching);
    current_worker = &worker;
    while (!launch.has_failed()) {
        const std::int64_t block = launch.next_block.fetch_add(1);
        if (block >= launch.blocks) break;
        worker.run_block(block);
        launch.finished[block].store(true, std::memory_order_release);
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
    double limit_s;                 // of a thread without a barrier; 0: none
};

// 0: done and written back. 1: `failure` says why; no tensor was touched, unless it says so.
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
    const bool checks = launch.checks = a->checks != 0;
    *a->runtime_of_kernel = checks ? &RUNTIME<true> : &RUNTIME<false>;

    const int os_threads =
        static_cast<int>(std::min<std::int64_t>(std::max(1, a->os_threads), launch.blocks));
    launch.parallel = os_threads > 1;
    if (a->tensor_count > SLOTS || launch.blocks >= static_cast<std::int64_t>(MANY_BLOCKS) - 1) {
        refuse(*failure, "limit", -1, 0, "too many tensors or blocks");
        return 1;
    }
    if (!slots.reserve()) {
        refuse(*failure, "limit", -1, 0, "no address space (8 TiB are reserved, not used)");
        return 1;
    }
    launch.finished = std::make_unique<std::atomic<bool>[]>(static_cast<std::size_t>(launch.blocks));
    ZeroedMemory zeroed;
    if (!place_tensors(launch, a->tensors, a->tensor_count, checks, zeroed)) return 1;
    while (static_cast<int>(workers.size()) < os_threads)
        workers.push_back(std::make_unique<Worker>());
    for (int i = 0; i < os_threads; ++i)
        if (!workers[i]->prepare(launch, slots, i)) {
            refuse(*failure, "limit", -1, 0, "no memory for stacks");
            return 1;
        }

    {
        const Guard guard(launch, workers.data(), os_threads, a->limit_s);
        std::vector<std::thread> threads;
        for (int i = 1; i < os_threads; ++i)
            threads.emplace_back([&, i] { run(launch, *workers[i], false); });
        run(launch, *workers[0], true);
        for (auto& t : threads) t.join();
    }

    if (launch.has_failed() || (checks && find_unwritten(launch))) return 1;
    if (!copy_all(launch, true,
                  "its memory cannot be written: a mapped file that was cut short? What the kernel "
                  "wrote is lost; tensors before this one have it"))
        return 1;
    for (std::size_t i = 0; i < launch.tensors.size(); ++i) {
        const Tensor& t = launch.tensors[i];
        mark_initialised(t);
        for (int d = 0; d < 3; ++d) {
            t.argument->bytes[d] = 0;
            for (int k = 0; k < os_threads; ++k)
                t.argument->bytes[d] += workers[k]->windows[i].bytes[d];
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
