// Switching between stacks. A switch saves the registers that the calling convention says a
// function preserves, exchanges the stack pointer and returns on the other stack.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#define HOST_UCONTEXT 1
#endif

namespace host {

#if defined(HOST_UCONTEXT)

struct Context {
    ucontext_t place;
};
inline void switch_context(Context& from, Context& to) { swapcontext(&from.place, &to.place); }
inline void start_context(Context& c, void* stack, std::size_t bytes, void (*function)()) {
    getcontext(&c.place);
    c.place.uc_stack.ss_sp = stack;
    c.place.uc_stack.ss_size = bytes;
    c.place.uc_link = nullptr;
    makecontext(&c.place, function, 0);
}

#else

struct Context {
    void* stack_pointer;
};

extern "C" void host_switch(void** from, void* to) __attribute__((visibility("hidden")));

#if defined(__APPLE__)
#define HOST_SYMBOL "_host_switch"
#define HOST_BEGIN ".text\n.p2align 4\n.private_extern _host_switch\n_host_switch:\n"
#define HOST_END ""
#else
#define HOST_BEGIN                                                        \
    ".pushsection .text\n.p2align 4\n.globl host_switch\n.hidden host_switch\n" \
    ".type host_switch, %function\nhost_switch:\n"
#define HOST_END ".size host_switch, .-host_switch\n.popsection\n"
#endif

#if defined(__x86_64__)

__asm__(HOST_BEGIN
        "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n"
        "movq %rsi, %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
        "ret\n" HOST_END);

inline void start_context(Context& c, void* stack, std::size_t bytes, void (*function)()) {
    auto top = (reinterpret_cast<std::uintptr_t>(stack) + bytes) & ~std::uintptr_t{15};
    auto* frame = reinterpret_cast<void**>(top) - 8;  // 6 registers, return address, alignment
    for (int i = 0; i < 6; ++i) frame[i] = nullptr;
    frame[6] = reinterpret_cast<void*>(function);
    frame[7] = nullptr;  // where a caller's return address would be
    c.stack_pointer = frame;
}

#else  // aarch64

__asm__(HOST_BEGIN
        "sub sp, sp, #160\n"
        "stp x19, x20, [sp, #0]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n"
        "stp x25, x26, [sp, #48]\n stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
        "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n"
        "stp d14, d15, [sp, #144]\n"
        "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
        "ldp x19, x20, [sp, #0]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n"
        "ldp x25, x26, [sp, #48]\n ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
        "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n"
        "ldp d14, d15, [sp, #144]\n"
        "add sp, sp, #160\n"
        "ret\n" HOST_END);

inline void start_context(Context& c, void* stack, std::size_t bytes, void (*function)()) {
    auto top = (reinterpret_cast<std::uintptr_t>(stack) + bytes) & ~std::uintptr_t{15};
    auto* frame = reinterpret_cast<void**>(top) - 20;
    for (int i = 0; i < 20; ++i) frame[i] = nullptr;
    frame[11] = reinterpret_cast<void*>(function);  // x30, the return address
    c.stack_pointer = frame;
}

#endif

inline void switch_context(Context& from, Context& to) {
    host_switch(&from.stack_pointer, to.stack_pointer);
}

#endif

}  // namespace host
