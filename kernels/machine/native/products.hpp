// Tensor cores to the bit: aligned truncation of exact products, see the page on machine code.
//
// Of a block of terms, each product is exact and the sum of its factors' exponents is its exponent.
// All terms and C are cut toward zero to F bits behind the point of the largest exponent, added
// exactly, and the sum is rounded once, toward zero for fp32.
#pragma once

#include "memory.hpp"

enum Element { E_F16, E_BF16, E_TF32, E_E4M3, E_E5M2 };

struct Arithmetic {
    int bits;       // F
    int terms;      // of a block
    int kept_bits;  // of the result behind the point, 23 or 13
    bool half;      // the result is rounded to fp16, nearest even, once a block
};

// The formats differ in what a row of bits means; a factor has at most 11 significant bits.
inline Factor factor_of(u32 x, int element, bool* special, float* value) {
    float f;
    int least;
    switch (element) {
        case E_F16: f = from_half(x), least = -14; break;
        case E_BF16: f = from_bf16(x), least = -126; break;
        case E_TF32: f = as_float(x & 0xffffe000), least = -126; break;
        case E_E4M3: f = from_e4m3(x), least = -6; break;
        default: f = from_e5m2(x), least = -14; break;
    }
    *value = f;
    u32 bits = as_bits(f);
    int e = i32(bits >> 23 & 255);
    if (e == 255) *special = true;
    if (f == 0) return {0, -4096};
    i32 m = i32(bits & 0x7fffff);
    if (e)
        m |= 1 << 23, e -= 127;
    else
        e = -126;
    if (e < least) m >>= least - e, e = least;  // exact: a subnormal of a small format
    return {(bits >> 31 ? -m : m) / (1 << 13), e};  // the lower 13 bits are zero
}

// One block: c plus the sum of n products.
inline u32 block_sum(u32 c, const Factor* a, const Factor* b, int n, const Arithmetic& how) {
    int e = i32(c >> 23 & 255);
    i64 m = i64(c & 0x7fffff);
    if (e)
        m |= 1 << 23, e -= 127;
    else
        e = -126;
    bool zero_c = (c & 0x7fffffff) == 0;
    int most = zero_c ? -4096 : e;
    for (int k = 0; k < n; k++) {
        int x = a[k].exponent + b[k].exponent;
        most = x > most ? x : most;
    }
    if (most < -2048) return 0;  // all terms are zero
    if (most < -133) most = -133;
    i64 total = 0;
    if (!zero_c) {
        int by = most - e + 23 - how.bits;
        i64 term = by <= 0 ? m << -by : by > 40 ? 0 : m >> by;
        total = c >> 31 ? -term : term;
    }
    for (int k = 0; k < n; k++) {
        i64 p = i64(a[k].significand) * b[k].significand;  // 20 bits behind the point
        if (!p) continue;
        int by = most - (a[k].exponent + b[k].exponent) + 20 - how.bits;
        if (by <= 0)
            total += p << -by;
        else if (by < 40)
            total += p >= 0 ? p >> by : -(-p >> by);
    }
    if (!total) return 0;
    if (how.half) return as_bits(from_half(to_half(ldexp(double(total), most - how.bits))));
    u32 sign = total < 0 ? 1u << 31 : 0;
    u64 t = u64(total < 0 ? -total : total);
    int top = 63 - __builtin_clzll(t), exponent = top - how.bits + most;
    if (exponent > 127) return sign | 0x7f800000;
    // Cut to the bits that are kept, fewer if the result is subnormal.
    int place = exponent < -126 ? how.bits - most - 126 : top;  // of the bit with weight 2^max(e,-126)
    int drop = place - how.kept_bits;
    if (drop > 0) t = drop > 63 ? 0 : t >> drop << drop;
    i64 mantissa = place >= 23 ? i64(t >> (place - 23)) : i64(t << (23 - place));
    if (exponent < -126) return sign | u32(mantissa);
    return sign | u32(exponent + 127) << 23 | (u32(mantissa) & 0x7fffff);
}

// NaN and infinities follow IEEE's rules; every NaN is the same.
inline u32 special_sum(u32 c, const Values& a, const Values& b, int from, int n,
                       const Arithmetic& how) {
    double total = as_float(c);
    for (int k = from; k < from + n; k++) total += double(a.plain[k]) * b.plain[k];
    float x = how.half ? from_half(to_half(total)) : float(total);
    return x != x ? NAN32 : as_bits(x);
}

// c plus the dot product of n terms, in blocks.
inline u32 dot(u32 c, const Values& a, const Values& b, int n, const Arithmetic& how, bool exact) {
    if (!exact && !how.half) {
        float total = as_float(c), sum = 0;
        for (int k = 0; k < n; k++) sum += a.plain[k] * b.plain[k];
        total += sum;
        return total != total ? NAN32 : as_bits(total);
    }
    for (int from = 0; from < n; from += how.terms) {
        int count = how.terms < n - from ? how.terms : n - from;
        if (a.special || b.special || (c & 0x7f800000) == 0x7f800000)
            c = special_sum(c, a, b, from, count, how);
        else
            c = block_sum(c, a.factors + from, b.factors + from, count, how);
    }
    return c;
}

inline void add_value(Values& v, int place, u32 bits, int element) {
    v.factors[place] = factor_of(bits, element, &v.special, &v.plain[place]);
}

inline Arithmetic arithmetic(int element, int architecture) {
    if (element == E_E4M3 || element == E_E5M2) return {13, 32, 13, false};
    bool tf32 = element == E_TF32;
    if (architecture == 80) return {24, tf32 ? 4 : 8, 23, false};
    return {25, tf32 ? 8 : 16, 23, false};
}

// HMMA m16n8: mod[0] depth (8, 16; 4, 8 of tf32), mod[1] element, mod[2] result fp16.
inline void hmma(Warp& w, const Instruction& i) {
    if (w.active != ALL_LANES) fail("HMMA where only some threads of the warp are here");
    const LaunchArguments& launch = *w.block->machine->launch;
    int depth = i.mod[0], element = i.mod[1], each = element == E_TF32 ? 1 : 2;
    int columns = 4 * each, chunks = depth / columns;  // a register holds `each` of a row's chunk
    std::vector<Values>&a = w.block->machine->a, &b = w.block->machine->b;
    for (Values& v : a) v.special = false;
    for (int k = 0; k < 8; k++) b[k].special = false;
    u32 space[LANES];
    for (int chunk = 0; chunk < chunks; chunk++) {
        for (int half = 0; half < 2; half++) {
            const u32* x = raw(w, i.o[A], space, 2 * chunk + half);
            for (int t = 0; t < LANES; t++)
                for (int h = 0; h < each; h++)
                    add_value(a[t / 4 + 8 * half], columns * chunk + each * (t % 4) + h,
                              each == 1 ? x[t] : x[t] >> (16 * h) & 0xffff, element);
        }
        const u32* y = raw(w, i.o[B], space, chunk);
        for (int t = 0; t < LANES; t++)
            for (int h = 0; h < each; h++)
                add_value(b[t / 4], columns * chunk + each * (t % 4) + h,
                          each == 1 ? y[t] : y[t] >> (16 * h) & 0xffff, element);
    }
    Arithmetic how = arithmetic(element, launch.architecture);
    how.half = i.mod[2];
    u32 out[4][LANES];
    for (int k = 0; k < 4; k++) {
        // Two fp16 results share a register, the left one below.
        const u32* c = raw(w, i.o[C], space, how.half ? k / 2 : k);
        for (int t = 0; t < LANES; t++)
            out[k][t] = dot(how.half ? as_bits(from_half(c[t] >> (16 * (k % 2)) & 0xffff)) : c[t], a[t / 4 + 8 * (k / 2)], b[2 * (t % 4) + k % 2], depth, how,
                            launch.exact_products);
    }
    if (how.half) {
        for (int k = 0; k < 2; k++) {
            u32 packed[LANES];
            for (int t = 0; t < LANES; t++)
                packed[t] = half_of(as_float(out[2 * k][t])) | half_of(as_float(out[2 * k + 1][t])) << 16;
            put(w, i.o[DST], packed, k);
        }
        return;
    }
    for (int k = 0; k < 4; k++) put(w, i.o[DST], out[k], k);
}
