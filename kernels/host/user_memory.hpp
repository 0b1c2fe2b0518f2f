// Copies to and from a caller's tensors, whose memory may be gone: a mapped file that was cut short.
#pragma once

#include <csignal>

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#define HOST_FAULTS 1
#include <csetjmp>
#endif

namespace host {

#if !defined(HOST_FAULTS)

template <typename Copy>
const void* faulted(Copy&& copy) {
    copy();
    return nullptr;
}

#else

// A signal, and who had it before.
struct Taken {
    int number;
    struct sigaction before;
};

// To whoever had the signal before this launch.
template <std::size_t N>
void pass_on(Taken (&all)[N], int number, siginfo_t* info, void* context) {
    for (auto& [taken, before] : all) {
        if (taken != number) continue;
        if (before.sa_flags & SA_SIGINFO) {
            before.sa_sigaction(number, info, context);
        } else if (before.sa_handler == SIG_DFL) {
            sigaction(number, &before, nullptr);  // it happens again, to the default
            if (info->si_code <= 0) raise(number);
        } else if (before.sa_handler != SIG_IGN) {
            before.sa_handler(number);
        }
    }
}

// While it lives, a fault of this thread's copies ends them instead of the process.
class Copying {
   public:
    Copying() {
        for (auto& [number, before] : taken) {
            struct sigaction mine {};
            mine.sa_sigaction = handle;
            mine.sa_flags = SA_SIGINFO | SA_ONSTACK;
            sigemptyset(&mine.sa_mask);
            sigaction(number, &mine, &before);
        }
    }
    Copying(const Copying&) = delete;
    Copying& operator=(const Copying&) = delete;
    ~Copying() {
        here = nullptr;
        for (auto& [number, before] : taken) sigaction(number, &before, nullptr);
    }

    inline static thread_local sigjmp_buf* here = nullptr;
    inline static thread_local const void* address = nullptr;

   private:
    // One launch runs at a time (backend.py).
    inline static Taken taken[] = {{SIGBUS, {}}, {SIGSEGV, {}}};

    static void handle(int number, siginfo_t* info, void* context) {
        if (here && info->si_code > 0) {
            address = info->si_addr;
            siglongjmp(*here, 1);
        }
        pass_on(taken, number, info, context);
    }
};

// Where the copy found no memory, or null: it came to its end. It must own nothing: its frames are
// left without a word.
template <typename Copy>
const void* faulted(Copy&& copy) {
    Copying taken;
    sigjmp_buf back;
    if (sigsetjmp(back, 1)) return taken.address;
    taken.here = &back;
    copy();
    return nullptr;
}

#endif

}  // namespace host
