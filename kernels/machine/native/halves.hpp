// Two fp16 or bf16 numbers in a register, and packing into them and into fp8.
#pragma once

#include "floating.hpp"

enum { HALF, BF16 };

// The two numbers of an operand; an immediate has both.
inline void pairs(const Warp& w, const Operand& o, int type, bool flush, float out[2][LANES]) {
    u32 s[LANES];
    const u32* a = raw(w, o, s);
    for (int l = 0; l < LANES; l++) {
        u32 low = a[l] & 0xffff, high = a[l] >> 16;
        if (o.part == P_H0_H0) high = low;
        if (o.part == P_H1_H1) low = high;
        for (int k = 0; k < 2; k++) {
            u32 half = k ? high : low;
            float x = type == HALF ? from_half(half) : from_bf16(half);
            if (flush && type == HALF && std::fabs(x) < 6.103515625e-05f) x = std::copysign(0.0f, x);
            if (o.flags & F_ABSOLUTE) x = std::fabs(x);
            if (o.flags & F_NEGATED) x = -x;
            out[k][l] = x;
        }
    }
}

// HADD2, HMUL2, HFMA2: mod[0] bf16, mod[1] .FTZ, mod[2] .SAT, mod[3] .RELU, mod[4] .F32.
inline void half_operation(Warp& w, const Instruction& i, int which) {
    float a[2][LANES], b[2][LANES], c[2][LANES];
    pairs(w, i.o[A], i.mod[0], i.mod[1], a);
    pairs(w, i.o[B], i.mod[0], i.mod[1], b);
    pairs(w, i.o[C], i.mod[0], i.mod[1], c);
    u32 out[LANES];
    for (int l = 0; l < LANES; l++) {
        u32 halves[2];
        for (int k = 0; k < 2; k++) {
            double p = which == 0 ? a[k][l] : double(a[k][l]) * b[k][l];
            double q = which == 0 ? b[k][l] : which == 1 ? -0.0 : c[k][l];
            double x = which == 1 ? p : p + q, err = which == 1 ? 0 : sum_error(p, q, x);
            if (i.mod[4] && k == 0) {
                float y = narrow(x, err, NEAREST);
                out[l] = y != y ? NAN32 : as_bits(y);
            }
            if (i.mod[2] && x == x) x = x > 0 ? (x < 1 ? x : 1) : 0;
            if (i.mod[2] && x != x) x = 0;
            if (i.mod[3] && !(x != x) && x < 0) x = 0;
            halves[k] = i.mod[0] ? to_bf16(x, err) : to_half(x, err);
            if (i.mod[1] && !i.mod[0] && (halves[k] & 0x7c00) == 0) halves[k] &= 0x8000;
        }
        if (!i.mod[4]) out[l] = halves[0] | halves[1] << 16;
    }
    put(w, i.o[DST], out);
}

// HMNMX2: mod[0] bf16, mod[1] .FTZ, mod[2] .NAN.
inline void half_extreme(Warp& w, const Instruction& i) {
    float a[2][LANES], b[2][LANES];
    pairs(w, i.o[A], i.mod[0], i.mod[1], a);
    pairs(w, i.o[B], i.mod[0], i.mod[1], b);
    u32 p = predicate(w, i.o[IN0]), out[LANES];
    for (int l = 0; l < LANES; l++) {
        out[l] = 0;
        for (int k = 0; k < 2; k++) {
            float x = least_or_most(a[k][l], b[k][l], lane_on(p, l), i.mod[2]);
            out[l] |= (i.mod[0] ? bf16_of(x) : half_of(x)) << (16 * k);
        }
    }
    put(w, i.o[DST], out);
}

// HSETP2: a predicate for each half. HSET2: a half of ones or of 1.0 (mod[4] .BF).
// mod[0] bf16, mod[1] .FTZ, mod[2] comparison, mod[3] combination, mod[5] .H_AND.
inline void half_compare(Warp& w, const Instruction& i, bool to_register) {
    float a[2][LANES], b[2][LANES];
    pairs(w, i.o[A], i.mod[0], i.mod[1], a);
    pairs(w, i.o[B], i.mod[0], i.mod[1], b);
    u32 in = predicate(w, i.o[IN0]), found[2];
    for (int k = 0; k < 2; k++) {
        u32 x = lanes_where([&](int l) { return compares(i.mod[2], a[k][l], b[k][l]); });
        found[k] = i.mod[3] == 0 ? x & in : i.mod[3] == 1 ? x | in : x ^ in;
    }
    if (to_register) {
        u32 out[LANES], one = i.mod[4] ? (i.mod[0] ? 0x3f80 : 0x3c00) : 0xffff;
        for (int l = 0; l < LANES; l++)
            out[l] = (lane_on(found[0], l) ? one : 0) | (lane_on(found[1], l) ? one << 16 : 0);
        put(w, i.o[DST], out);
        return;
    }
    if (i.mod[5]) {
        put_predicate(w, i.o[OUT0], found[0] & found[1]);
        put_predicate(w, i.o[OUT1], ~(found[0] & found[1]));
        return;
    }
    put_predicate(w, i.o[OUT0], found[0]);
    put_predicate(w, i.o[OUT1], found[1]);
}

enum { PACK_F16, PACK_BF16, PACK_E4M3, PACK_E5M2, UNPACK_E4M3, UNPACK_E5M2, PACK_TF32, UNPACK_BF16 };

// F2FP: a into the upper half, b into the lower. mod[0] what, mod[1] rounding, mod[2] .RELU;
// fp8 goes into the lower half and c's lower half above it (mod[3]: .MERGE_C).
inline void f2fp(Warp& w, const Instruction& i) {
    u32 out[LANES], sc[LANES];
    if (i.mod[0] == UNPACK_E4M3 || i.mod[0] == UNPACK_E5M2) {
        u32 s[LANES];
        const u32* a = raw(w, i.o[A], s);
        int by = i.o[A].part == P_H1 || i.o[A].part == P_H1_H1 ? 16 : 0;
        for (int l = 0; l < LANES; l++) {
            out[l] = 0;
            for (int k = 0; k < 2; k++) {
                u32 byte = a[l] >> (by + 8 * k) & 255;
                out[l] |= half_of(i.mod[0] == UNPACK_E4M3 ? from_e4m3(byte) : from_e5m2(byte)) << (16 * k);
            }
        }
        put(w, i.o[DST], out);
        return;
    }
    float a[LANES], b[LANES];
    floats_in(w, i.o[A], a, false);
    floats_in(w, i.o[B], b, false);
    const u32* c = raw(w, i.o[C], sc);
    auto packed = [&](float x) -> u32 {
        if (i.mod[2] && !(x != x) && x < 0) x = 0;
        switch (i.mod[0]) {
            case PACK_F16: return i.mod[1] == NEAREST ? half_of(x) : to_half(x, 0, i.mod[1]);
            case PACK_BF16: return i.mod[1] == NEAREST ? bf16_of(x) : to_bf16(x, 0, i.mod[1]);
            case PACK_E4M3: return pack_small(x, 0, 3, 4, true, false);
            default: return pack_small(x, 0, 2, 5, true, true);
        }
    };
    bool bytes = i.mod[0] == PACK_E4M3 || i.mod[0] == PACK_E5M2;
    for (int l = 0; l < LANES; l++) {
        if (bytes)
            out[l] = packed(b[l]) | packed(a[l]) << 8 | (i.mod[3] ? c[l] << 16 : 0);
        else
            out[l] = packed(b[l]) | packed(a[l]) << 16;
    }
    put(w, i.o[DST], out);
}
