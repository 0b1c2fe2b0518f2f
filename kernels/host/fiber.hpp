// Switching between stacks.
//
// The switch is part of the code that waits, not a function of the runtime: returns then pair with
// their calls on every stack, and the processor predicts where a switch goes. Everything but the
// stack pointer, the frame pointer and the place to go on is left to the compiler, which knows
// which registers are in use.
#pragma once

#if !defined(__x86_64__) && !defined(__aarch64__)
#define HOST_UCONTEXT 1
#include <ucontext.h>
#endif

namespace host {

#if defined(HOST_UCONTEXT)

struct Context {
    ucontext_t place;
};
inline void switch_context(Context* from, Context* to) { swapcontext(&from->place, &to->place); }
inline void start_context(Context* c, void* stack, unsigned long bytes, void (*function)()) {
    getcontext(&c->place);
    c->place.uc_stack.ss_sp = stack;
    c->place.uc_stack.ss_size = bytes;
    c->place.uc_link = nullptr;
    makecontext(&c->place, function, 0);
}

#else

struct Context {
    void* stack_pointer;  // at the top: where to go on
};

// Suspends the running code into `from` and goes on where `to` was suspended.
__attribute__((always_inline)) inline void switch_context(Context* from, Context* to) {
#if defined(__x86_64__)
    // Compiled with -mno-red-zone: pushing must not overwrite locals.
    __asm__ volatile(
        "pushq %%rbp\n\t"
        "leaq 1f(%%rip), %%rdx\n\t"
        "pushq %%rdx\n\t"
        "movq %%rsp, (%0)\n\t"
        "movq (%1), %%rsp\n\t"
        "popq %%rdx\n\t"
        "jmpq *%%rdx\n\t"
        "1:\n\t"
        "popq %%rbp\n\t"
        : "+a"(from), "+c"(to)
        :
        : "rbx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0",
          "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
          "xmm12", "xmm13", "xmm14", "xmm15",
#if defined(__AVX512F__)
          "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25",
          "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6",
          "k7",
#endif
          "cc", "memory");
#else
    register Context* x0 __asm__("x0") = from;
    register Context* x1 __asm__("x1") = to;
    __asm__ volatile(
        "adr x2, 1f\n\t"
        "sub sp, sp, #32\n\t"
        "str x2, [sp]\n\t"
        "stp x19, x29, [sp, #16]\n\t"
        "mov x2, sp\n\t"
        "str x2, [x0]\n\t"
        "ldr x2, [x1]\n\t"
        "mov sp, x2\n\t"
        "ldr x2, [sp]\n\t"
        "br x2\n\t"
        "1:\n\t"
        "ldp x19, x29, [sp, #16]\n\t"
        "add sp, sp, #32\n\t"
        : "+r"(x0), "+r"(x1)
        :
        : "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15",
          "x16", "x17",
#if !defined(__APPLE__)
          "x18",  // belongs to the system there
#endif
          "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x30", "v0", "v1", "v2",
          "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16",
          "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29",
          "v30", "v31", "cc", "memory");
#endif
}

// Makes the first switch to `c` call `function` on the given stack. It must never return.
inline void start_context(Context* c, void* stack, unsigned long bytes, void (*function)()) {
    const auto top = (reinterpret_cast<unsigned long>(stack) + bytes) & ~15ul;
    // x86 functions start with the stack 8 bytes off a multiple of 16: the return address of their
    // caller, here absent, lies there.
    auto* frame = reinterpret_cast<void**>(top) - 4;
#if defined(__x86_64__)
    frame += 2;
    frame[1] = nullptr;
#endif
    frame[0] = reinterpret_cast<void*>(function);
    c->stack_pointer = frame;
}

#endif

}  // namespace host
