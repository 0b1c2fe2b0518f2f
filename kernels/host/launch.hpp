// One launch as its workers share it: what to run, which blocks are done, the first error.
#pragma once

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <vector>

#include "interface.hpp"
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

constexpr std::int64_t NONE_FAILED = INT64_MAX;

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
    std::unique_ptr<std::atomic<bool>[]> finished;  // blocks that have come to their end
    // The first block that has failed. Blocks start in their order, and those before it go on to
    // their ends: so it is always the same one that tells why.
    std::atomic<std::int64_t> failed{NONE_FAILED};
    std::mutex mutex;
    Failure* failure;

    bool has_failed() const { return failed.load(std::memory_order_relaxed) != NONE_FAILED; }
    bool failed_before(std::int64_t block) const {
        return failed.load(std::memory_order_relaxed) < block;
    }

    __attribute__((format(printf, 7, 0))) void note_failure(
        std::int64_t block, int thread, const char* kind, int tensor, std::int64_t offset,
        const char* format, va_list arguments) {
        std::lock_guard<std::mutex> lock(mutex);
        if (block >= failed) return;
        failed = block;
        Failure& f = *failure;
        std::snprintf(f.kind, sizeof f.kind, "%s", kind);
        std::vsnprintf(f.text, sizeof f.text, format, arguments);
        f.tensor = tensor;
        f.offset = offset;
        f.block = block;
        f.thread = thread;
    }
};

}  // namespace host
