// What a kernel may do to the process that runs it, turned into an error that names the thread:
// signals of the processor, stacks that overflow, loops without end, and Ctrl-C.
//
// While a launch runs, signals that a thread of a block raises are taken over; all others go where
// they went before. A timer looks in ten times a second: at a thread that has not come to a barrier
// for too long, at an interrupt, and at blocks that go on after an earlier one has failed. It leaves a
// block where the kernel's own code runs, which holds no lock and owns nothing; elsewhere (in a call
// of the system's that never returns) only after much longer, when the process would hang for good.
#pragma once

#include <csignal>
#include <cstdlib>

#include "scheduler.hpp"
#include "user_memory.hpp"

#if defined(HOST_FAULTS)
#include <dlfcn.h>
#include <link.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#endif

namespace host {

#if !defined(HOST_FAULTS)

// Elsewhere a fault ends the process, as it does in any program.
struct Running {
    Running(Worker&, bool) {}
};
struct Guard {
    Guard(Launch&, const std::unique_ptr<Worker>*, int, double) {}
};

#else

constexpr std::size_t FAULT_STACK_BYTES = 64 * 1024;
constexpr int TICKS_A_SECOND = 10;
constexpr int WAIT_FOR_EARLIER_S = 5;  // after a failure, for blocks that started before that block
constexpr int LOOK_IN = SIGURG;  // ignored by who has no use for it, so a late one does no harm

inline int os_thread_id() { return static_cast<int>(syscall(SYS_gettid)); }

// What an OS thread keeps from its first launch to its end: a stack for the handlers, since that of
// the kernel's thread may be what has overflowed; above it one for what leaves the block; a timer.
class OsThread {
   public:
    OsThread() {
        void* p = mmap(nullptr, 2 * FAULT_STACK_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return;
        stack_t mine{};
        mine.ss_sp = p;
        mine.ss_size = FAULT_STACK_BYTES;
        if (sigaltstack(&mine, nullptr) == 0) stack_ = static_cast<unsigned char*>(p);
    }
    OsThread(const OsThread&) = delete;
    OsThread& operator=(const OsThread&) = delete;
    ~OsThread() {
        if (timed_) syscall(SYS_timer_delete, timer_);
        stack_t none{};
        none.ss_flags = SS_DISABLE;
        sigaltstack(&none, nullptr);
        if (stack_) munmap(stack_, 2 * FAULT_STACK_BYTES);
    }

    static OsThread& mine() {
        static thread_local OsThread here;
        return here;
    }
    unsigned char* stack_top() const { return stack_ ? stack_ + 2 * FAULT_STACK_BYTES : nullptr; }

    void tick(bool on) {
        const timespec period{0, on ? 1000000000 / TICKS_A_SECOND : 0};
        const itimerspec every{period, period};
        // A forked process has the number, but not the timer.
        if (timed_ && syscall(SYS_timer_settime, timer_, 0, &every, nullptr) == 0) return;
        if (!on) return;
        sigevent event{};
        event.sigev_notify = SIGEV_THREAD_ID;
        event.sigev_signo = LOOK_IN;
        event._sigev_un._tid = os_thread_id();
        timed_ = syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &timer_) == 0;
        if (timed_) syscall(SYS_timer_settime, timer_, 0, &every, nullptr);
    }

   private:
    unsigned char* stack_ = nullptr;
    bool timed_ = false;
    int timer_ = 0;
};

// A worker while it runs blocks. `launching`: in the thread that the timer looks in at anyway.
class Running {
   public:
    Running(Worker& w, bool launching) : worker_(w) {
        w.fault_stack = OsThread::mine().stack_top();
        w.os_thread.store(launching ? 1 : os_thread_id());
    }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;
    ~Running() { worker_.os_thread.store(0); }

   private:
    Worker& worker_;
};

// Where the interrupted code is, and how it goes on.
struct Interrupted {
    explicit Interrupted(void* context) : place(*static_cast<ucontext_t*>(context)) {}
    ucontext_t& place;

#if defined(__x86_64__)
    std::uintptr_t code() const { return place.uc_mcontext.gregs[REG_RIP]; }
    std::uintptr_t stack() const { return place.uc_mcontext.gregs[REG_RSP]; }
    const char* access() const { return place.uc_mcontext.gregs[REG_ERR] & 2 ? "write" : "read"; }
    void go_on_at(void (*function)(), unsigned char* stack_top) {
        place.uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(function);
        // As after a call: 8 bytes off a multiple of 16.
        place.uc_mcontext.gregs[REG_RSP] = reinterpret_cast<greg_t>(stack_top) - 8;
        place.uc_mcontext.gregs[REG_EFL] &= ~0x400;  // strings go upwards
    }
#else
    std::uintptr_t code() const { return place.uc_mcontext.pc; }
    std::uintptr_t stack() const { return place.uc_mcontext.sp; }
    const char* access() const { return "access"; }
    void go_on_at(void (*function)(), unsigned char* stack_top) {
        place.uc_mcontext.pc = reinterpret_cast<std::uintptr_t>(function);
        place.uc_mcontext.sp = reinterpret_cast<std::uintptr_t>(stack_top);
    }
#endif
};

// Is the interrupted code a thread of a block? Its stack pointer may be in the guard below.
inline bool runs_a_block(const Worker* w, const Interrupted& at) {
    const auto first = reinterpret_cast<std::uintptr_t>(w ? w->stacks : nullptr);
    return w && w->fault_stack && at.stack() >= first && at.stack() - first <= STACKS_BYTES;
}

// Runs on the fault stack, in place of what the thread of the block was at.
inline void leave_block() {
    Worker& w = *current_worker;
    w.fail(w.fault.kind, w.fault.tensor, w.fault.offset, "%s", w.fault.text);
}

inline void leave_block_after(Worker& w, Interrupted& at, const char* kind, int tensor,
                              std::int64_t offset) {
    std::snprintf(w.fault.kind, sizeof w.fault.kind, "%s", kind);
    w.fault.tensor = tensor;
    w.fault.offset = offset;
    at.go_on_at(leave_block, w.fault_stack);
}

// A launch in progress: its signals, its timer, its interrupt.
class Guard {
   public:
    Guard(Launch& launch, const std::unique_ptr<Worker>* workers, int count, double limit_s)
        : launch_(launch), workers_(workers), count_(count), limit_s_(limit_s), watched_(count) {
        find_code(reinterpret_cast<std::uintptr_t>(launch.entry));
        active = this;
        for (auto& [number, before] : before_) {
            struct sigaction mine {};
            mine.sa_sigaction = handle;
            mine.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
            sigemptyset(&mine.sa_mask);
            sigaddset(&mine.sa_mask, LOOK_IN);
            sigaddset(&mine.sa_mask, SIGINT);
            sigaction(number, &mine, &before);
            // Who lets Ctrl-C end the process, or ignores it, goes on doing so.
            if (number == SIGINT && !(before.sa_flags & SA_SIGINFO) &&
                (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN))
                sigaction(number, &before, nullptr);
        }
        OsThread::mine().tick(true);
    }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;
    ~Guard() {
        OsThread::mine().tick(false);
        active = nullptr;
        for (auto& [number, before] : before_) sigaction(number, &before, nullptr);
    }

   private:
    struct Watched {
        std::uint64_t state = 0;
        int ticks = 0;
    };
    struct Code {
        std::uintptr_t inside, first, end;
    };

    inline static Guard* active = nullptr;

    // The part of the kernel's shared object that holds code. Of other objects, whose files may
    // have been emptied under them, nothing is read.
    void find_code(std::uintptr_t entry) {
        static Code known{};
        Dl_info object{};
        if (known.inside != entry && dladdr(reinterpret_cast<void*>(entry), &object)) {
            known = {entry, 0, 0};
            const char* const start = static_cast<const char*>(object.dli_fbase);
            const auto& header = *reinterpret_cast<const ElfW(Ehdr)*>(start);
            const auto* const parts = reinterpret_cast<const ElfW(Phdr)*>(start + header.e_phoff);
            std::uintptr_t base = 0;  // what is added to the object's own addresses
            for (int i = 0; i < header.e_phnum; ++i) {
                const auto& part = parts[i];
                if (part.p_type != PT_LOAD) continue;
                if (part.p_offset == 0) base = reinterpret_cast<std::uintptr_t>(start) - part.p_vaddr;
                const std::uintptr_t first = base + part.p_vaddr;
                if ((part.p_flags & PF_X) && entry - first < part.p_memsz)
                    known = {entry, first, first + part.p_memsz};
            }
        }
        code_ = known;
    }

    static void handle(int number, siginfo_t* info, void* context) {
        Guard* const guard = active;
        Worker* const w = current_worker;
        Interrupted at(context);
        const int error = errno;
        if (guard && number == LOOK_IN) {
            if (info->si_code == SI_TIMER) guard->look();
            guard->stop_here(w, at);
        } else if (guard && number == SIGINT) {
            guard->interrupted_ = true;
            pass_on(guard->before_, number, info, context);
        } else if (guard && runs_a_block(w, at)) {
            guard->blame(*w, number, *info, at);
        } else if (guard) {
            pass_on(guard->before_, number, info, context);
        }
        errno = error;
    }

    // A fault of the processor in a thread of a block.
    void blame(Worker& w, int number, const siginfo_t& info, Interrupted& at) {
        Failure& f = w.fault;
        const auto address = reinterpret_cast<std::uintptr_t>(info.si_addr);
        const auto stacks = reinterpret_cast<std::uintptr_t>(w.stacks);
        const std::uintptr_t slot = (address - launch_.region) >> SLOT_BITS;
        if (number == SIGFPE) {
            std::snprintf(f.text, sizeof f.text, "an integer is divided by zero");
            return leave_block_after(w, at, "division", -1, 0);
        }
        if (number == SIGABRT) {
            std::snprintf(f.text, sizeof f.text,
                          "abort: a failed assertion, or an exception that nobody catches");
            return leave_block_after(w, at, "trap", -1, 0);
        }
        if (number == TRAP) {
            std::snprintf(f.text, sizeof f.text, "__trap, or code that must not be reached");
            return leave_block_after(w, at, "trap", -1, 0);
        }
        if (number == SIGBUS && info.si_code != BUS_ADRALN) {
            std::snprintf(f.text, sizeof f.text,
                          "%s of address %p, behind which there is no memory: a mapped file that was "
                          "cut short?", at.access(), info.si_addr);
            return leave_block_after(w, at, "gone", -1, 0);
        }
        if (number == SIGSEGV && info.si_code == SI_KERNEL) {  // the processor does not say which
            std::snprintf(f.text, sizeof f.text, "access of an address that no memory can have");
            return leave_block_after(w, at, "out of bounds", -1, 0);
        }
        if (address - stacks < STACKS_BYTES) {
            std::snprintf(f.text, sizeof f.text,
                          "more than %zu bytes of local variables: deep recursion, or large arrays",
                          STACK_BYTES);
            return leave_block_after(w, at, "limit", -1, 0);
        }
        if (slot < launch_.tensors.size()) {
            std::snprintf(f.text, sizeof f.text,
                          "%s through a plain pointer, which would not be counted: use ld_global, "
                          "st_global or Global<T> (counted.cuh)", at.access());
            const char* base = launch_.tensors[slot].base;
            return leave_block_after(w, at, "uncounted", static_cast<int>(slot),
                                     static_cast<std::int64_t>(address) -
                                         reinterpret_cast<std::intptr_t>(base));
        }
        if (slot == SLOTS) {
            std::snprintf(f.text, sizeof f.text,
                          "%s of shared memory through a plain pointer, which would not be checked: "
                          "use ld_shared, st_shared or Shared<T> (counted.cuh)", at.access());
            return leave_block_after(w, at, "uncounted", -1,
                                     static_cast<std::int64_t>(address) -
                                         reinterpret_cast<std::intptr_t>(w.shared));
        }
        std::snprintf(f.text, sizeof f.text, "%s of address %p, which is in no tensor", at.access(),
                      info.si_addr);
        leave_block_after(w, at, "out of bounds", -1, 0);
    }

    // Every tick, in the thread that launches: who has to stop?
    void look() {
        if (interrupted_) ++ticks_since_interrupt_;
        if (launch_.has_failed()) ++ticks_since_failure_;
        for (int i = 0; i < count_; ++i) {
            Worker& w = *workers_[i];
            const int thread = w.os_thread.load(std::memory_order_relaxed);
            const std::uint64_t state = static_cast<std::uint64_t>(w.block) << 42 ^
                                        static_cast<std::uint64_t>(w.time) << 21 ^ w.running ^
                                        static_cast<std::uint64_t>(w.beat.load()) << 32;
            Watched& watched = watched_[i];
            watched.ticks = thread && watched.state == state ? watched.ticks + 1 : 0;
            watched.state = state;
            const bool stuck = limit_s_ > 0 && watched.ticks > limit_s_ * TICKS_A_SECOND;
            if (thread && i > 0 && (stuck || interrupted_ || must_stop(w)))
                syscall(SYS_tgkill, getpid(), thread, LOOK_IN);
        }
    }

    // A block after the one that failed; one before it only where it may be waiting for that one.
    bool must_stop(const Worker& w) const {
        return launch_.failed_before(w.block) ||
               ticks_since_failure_ > WAIT_FOR_EARLIER_S * TICKS_A_SECOND;
    }

    // Leaves the block of this thread if it has to, and can here.
    void stop_here(Worker* w, Interrupted& at) {
        if (!runs_a_block(w, at)) return;
        int mine = 0;
        while (mine < count_ && workers_[mine].get() != w) ++mine;
        if (mine == count_) return;
        const bool hangs = limit_s_ > 0 && watched_[mine].ticks > 4 * limit_s_ * TICKS_A_SECOND;
        const bool in_own_code = at.code() - code_.first < code_.end - code_.first;
        if (!in_own_code && !hangs && ticks_since_interrupt_ <= 2 * TICKS_A_SECOND) return;
        if (limit_s_ > 0 && watched_[mine].ticks > limit_s_ * TICKS_A_SECOND) {
            std::snprintf(w->fault.text, sizeof w->fault.text,
                          "has run for %g s without coming to a barrier: a loop without an end? "
                          "(REPRO_HOST_LIMIT_S sets the limit, 0 takes it away)", limit_s_);
            leave_block_after(*w, at, "endless", -1, 0);
        } else if (interrupted_) {
            std::snprintf(w->fault.text, sizeof w->fault.text, "stopped by an interrupt");
            leave_block_after(*w, at, "interrupted", -1, 0);
        } else if (must_stop(*w)) {
            leave_block_after(*w, at, "", -1, 0);  // another block has told why
        }
    }

    Launch& launch_;
    const std::unique_ptr<Worker>* workers_;
    int count_;
    double limit_s_;
    std::vector<Watched> watched_;
    Code code_{};
    volatile bool interrupted_ = false;
    int ticks_since_interrupt_ = 0;
    int ticks_since_failure_ = 0;
    // What __builtin_trap raises differs from one processor to the other.
#if defined(__x86_64__)
    static constexpr int TRAP = SIGILL;
#else
    static constexpr int TRAP = SIGTRAP;
#endif
    Taken before_[7] = {{SIGSEGV, {}}, {SIGBUS, {}}, {SIGFPE, {}}, {SIGABRT, {}},
                        {TRAP, {}},    {SIGINT, {}}, {LOOK_IN, {}}};
};

#endif

}  // namespace host
