// Reading and writing operands for the 32 threads of a warp at once.
#pragma once

#include <cmath>

#include "state.hpp"

inline bool lane_on(u32 mask, int lane) { return mask >> lane & 1; }

inline int first_lane(u32 mask) { return __builtin_ctz(mask); }

// The bits of the source before its signs, the same for every thread unless it is a register.
inline const u32* raw(const Warp& w, const Operand& o, u32* space, int next = 0) {
    u32 value = 0;
    switch (o.kind) {
        case K_REGISTER:
            return w.r[o.reg == ZERO_REGISTER ? ZERO_REGISTER : o.reg + next];
        case K_UNIFORM:
            value = o.reg == 63 ? 0 : w.u[o.reg + next];
            break;
        case K_IMMEDIATE:
            value = u32(u64(o.value) >> (32 * next));
            break;
        case K_CONSTANT: {
            const LaunchArguments& l = *w.block->machine->launch;
            i64 at = o.value + 4 * next;
            if (o.reg != ZERO_REGISTER) fail("a constant whose place depends on a register");
            if (at + 4 > l.bank_bytes[o.bank]) fail("c[0x%llx][0x%llx] is outside of the bank", o.bank, at);
            memcpy(&value, l.banks[o.bank] + at, 4);
            break;
        }
        case K_NONE:
            break;
        default:
            fail("an operand of kind %llu is no number", o.kind);
    }
    for (int l = 0; l < LANES; l++) space[l] = value;
    return space;
}

inline const u32* integers(const Warp& w, const Operand& o, u32* space) {
    const u32* from = raw(w, o, space);
    if (!o.flags) return from;
    for (int l = 0; l < LANES; l++) {
        u32 x = from[l];
        if (o.flags & F_ABSOLUTE) x = i32(x) < 0 ? 0 - x : x;
        if (o.flags & F_INVERTED) x = ~x;
        if (o.flags & F_NEGATED) x = 0 - x;
        space[l] = x;
    }
    return space;
}

// Bits of fp32 with sign and absolute value applied.
inline const u32* floats(const Warp& w, const Operand& o, u32* space) {
    const u32* from = raw(w, o, space);
    if (!o.flags) return from;
    u32 keep = o.flags & F_ABSOLUTE ? 0x7fffffffu : ~0u, flip = o.flags & F_NEGATED ? 1u << 31 : 0;
    for (int l = 0; l < LANES; l++) space[l] = (from[l] & keep) ^ flip;
    return space;
}

// 64 bits: a register and the next. An immediate is of 64 bits; a short one is extended.
inline void wide(const Warp& w, const Operand& o, u64* out) {
    u32 low[LANES], high[LANES];
    if (o.kind == K_NONE) {
        memset(out, 0, 8 * LANES);
        return;
    }
    const u32 *a = raw(w, o, low), *b = raw(w, o, high, 1);
    for (int l = 0; l < LANES; l++) out[l] = u64(b[l]) << 32 | a[l];
    if (o.flags & F_INVERTED)
        for (int l = 0; l < LANES; l++) out[l] = ~out[l];
    if (o.flags & F_NEGATED)
        for (int l = 0; l < LANES; l++) out[l] = 0 - out[l];
}

inline void doubles(const Warp& w, const Operand& o, double* out) {
    u64 bits[LANES];
    Operand plain = o;
    plain.flags = 0;
    wide(w, plain, bits);
    for (int l = 0; l < LANES; l++) {
        if (o.flags & F_ABSOLUTE) bits[l] &= ~0ull >> 1;
        if (o.flags & F_NEGATED) bits[l] ^= 1ull << 63;
    }
    memcpy(out, bits, sizeof bits);
}

inline u32 predicate(const Warp& w, const Operand& o) {
    u32 value;
    if (o.kind == K_NONE) return ALL_LANES;
    if (o.kind == K_PREDICATE)
        value = w.p[o.reg];
    else if (o.kind == K_UNIFORM_PREDICATE)
        value = w.up[o.reg] ? ALL_LANES : 0;
    else
        fail("an operand that should be a predicate");
    return o.flags & F_NOT ? ~value : value;
}

inline void put_row(Warp& w, int reg, const u32* values) {
    if (reg == ZERO_REGISTER) return;
    u32* row = w.r[reg];
    u32 m = w.active;
    if (m == ALL_LANES) {
        memcpy(row, values, sizeof(u32) * LANES);
        return;
    }
    for (int l = 0; l < LANES; l++) row[l] = lane_on(m, l) ? values[l] : row[l];
}

inline void put(Warp& w, const Operand& o, const u32* values, int next = 0) {
    if (o.kind == K_REGISTER) {
        if (o.reg != ZERO_REGISTER) put_row(w, o.reg + next, values);
    } else if (o.kind == K_UNIFORM) {
        if (o.reg != 63) w.u[o.reg + next] = values[first_lane(w.active)];
    } else if (o.kind != K_NONE) {
        fail("a target that is no register");
    }
}

inline void put_wide(Warp& w, const Operand& o, const u64* values) {
    u32 low[LANES], high[LANES];
    for (int l = 0; l < LANES; l++) low[l] = u32(values[l]), high[l] = u32(values[l] >> 32);
    put(w, o, low);
    put(w, o, high, 1);
}

inline void put_doubles(Warp& w, const Operand& o, const double* values) {
    u64 bits[LANES];
    memcpy(bits, values, sizeof bits);
    for (int l = 0; l < LANES; l++)
        if (std::isnan(values[l])) bits[l] = 0xfff8000000000000ull;
    put_wide(w, o, bits);
}

inline void put_predicate(Warp& w, const Operand& o, u32 values) {
    if (o.kind == K_NONE || o.reg == 7) return;
    if (o.kind == K_PREDICATE)
        w.p[o.reg] = (w.p[o.reg] & ~w.active) | (values & w.active);
    else if (o.kind == K_UNIFORM_PREDICATE)
        w.up[o.reg] = values >> first_lane(w.active) & 1;
    else
        fail("a target that is no predicate");
}

inline float as_float(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline u32 as_bits(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}

// One predicate bit a thread from a comparison of each.
template <typename F>
inline u32 lanes_where(F f) {
    u32 found = 0;
    for (int l = 0; l < LANES; l++) found |= u32(bool(f(l))) << l;
    return found;
}
