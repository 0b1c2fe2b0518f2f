// Integers, bits and predicates. The uniform forms (UIADD3 …) run through the same functions.
#pragma once

#include "operands.hpp"

using u128 = unsigned __int128;
using i128 = __int128;

// VIADD.16x2, VIMNMX.S16x2: each half of a word apart.
template <typename F>
inline u32 by_halves(u32 a, u32 b, F f) {
    return (f(a & 0xffff, b & 0xffff) & 0xffff) | f(a >> 16, b >> 16) << 16;
}

// IADD3, VIADD: mod[0] .X (carries in), mod[1] .64, mod[2] .16x2.
inline void iadd3(Warp& w, const Instruction& i) {
    const Operand* sources[3] = {&i.o[A], &i.o[B], &i.o[C]};
    if (i.mod[1]) {
        u64 total[LANES] = {}, x[LANES];
        for (const Operand* o : sources) {
            wide(w, *o, x);
            for (int l = 0; l < LANES; l++) total[l] += x[l];
        }
        put_wide(w, i.o[DST], total);
        return;
    }
    if (i.mod[2]) {
        u32 sa[LANES], sb[LANES], out[LANES];
        const u32 *a = integers(w, i.o[A], sa), *b = integers(w, i.o[B], sb);
        if (i.o[A].flags || i.o[B].flags) fail("a sign in front of two halves");
        for (int l = 0; l < LANES; l++)
            out[l] = by_halves(a[l], b[l], [](u32 x, u32 y) { return x + y; });
        put(w, i.o[DST], out);
        return;
    }
    u64 total[LANES] = {};
    for (const Operand* o : sources) {
        u32 space[LANES];
        const u32* x = raw(w, *o, space);
        // A negated term is its complement plus one, and the one counts for the carry.
        u32 flip = o->flags & (F_NEGATED | F_INVERTED) ? ~0u : 0;
        u32 one = o->flags & F_NEGATED ? 1 : 0;
        if (o->kind == K_NONE) continue;
        for (int l = 0; l < LANES; l++) total[l] += u64(x[l] ^ flip) + one;
    }
    if (i.mod[0]) {
        u32 first = predicate(w, i.o[IN0]);
        u32 second = i.o[IN1].kind == K_NONE ? 0 : predicate(w, i.o[IN1]);
        if (i.o[IN0].kind == K_NONE) first = 0;
        for (int l = 0; l < LANES; l++) total[l] += (first >> l & 1) + (second >> l & 1);
    }
    u32 out[LANES];
    for (int l = 0; l < LANES; l++) out[l] = u32(total[l]);
    put(w, i.o[DST], out);
    put_predicate(w, i.o[OUT0], lanes_where([&](int l) { return total[l] >> 32 >= 1; }));
    put_predicate(w, i.o[OUT1], lanes_where([&](int l) { return total[l] >> 32 >= 2; }));
}

// IMAD: mod[0] 0 low, 1 wide, 2 high; mod[1] unsigned; mod[2] .X.
inline void imad(Warp& w, const Instruction& i) {
    u32 sa[LANES], sb[LANES], sc[LANES];
    const u32 *a = integers(w, i.o[A], sa), *b = integers(w, i.o[B], sb);
    u32 carry = i.mod[2] ? predicate(w, i.o[IN0]) : 0;
    if (i.mod[0] == 0) {
        const u32* c = integers(w, i.o[C], sc);
        u32 out[LANES];
        u64 total[LANES];
        for (int l = 0; l < LANES; l++) {
            total[l] = u64(u32(a[l] * b[l])) + c[l] + (carry >> l & 1);
            out[l] = u32(total[l]);
        }
        put(w, i.o[DST], out);
        put_predicate(w, i.o[OUT0], lanes_where([&](int l) { return total[l] >> 32; }));
        return;
    }
    u64 c[LANES], out[LANES];
    u32 over = 0;
    wide(w, i.o[C], c);
    for (int l = 0; l < LANES; l++) {
        u64 product = i.mod[1] ? u64(a[l]) * b[l] : u64(i64(i32(a[l])) * i32(b[l]));
        u128 total = u128(product) + c[l] + (carry >> l & 1);
        out[l] = u64(total);
        over |= u32(total >> 64 ? 1 : 0) << l;
    }
    put_predicate(w, i.o[OUT0], over);
    if (i.mod[0] == 1) {
        put_wide(w, i.o[DST], out);
        return;
    }
    u32 high[LANES];
    for (int l = 0; l < LANES; l++) high[l] = u32(out[l] >> 32);
    put(w, i.o[DST], high);
}

// LEA: b plus a shifted left; mod[0] .HI (the upper half of c:a shifted), mod[1] .X, mod[2] .SX32.
inline void lea(Warp& w, const Instruction& i) {
    u32 sa[LANES], sb[LANES], sc[LANES], ss[LANES];
    const u32 *a = integers(w, i.o[A], sa), *b = raw(w, i.o[B], sb), *c = raw(w, i.o[C], sc);
    const u32* by = raw(w, i.o[EXTRA], ss);
    u32 flip = i.o[B].flags & (F_NEGATED | F_INVERTED) ? ~0u : 0, one = i.o[B].flags & F_NEGATED;
    u32 carry = i.mod[1] ? predicate(w, i.o[IN0]) : 0;
    u64 total[LANES];
    u32 out[LANES];
    for (int l = 0; l < LANES; l++) {
        u32 upper = i.mod[2] ? u32(i32(a[l]) >> 31) : c[l];
        u64 both = (i.mod[0] ? u64(upper) << 32 : 0) | a[l];
        u64 shifted = both << (by[l] & 31);
        u32 term = i.mod[0] ? u32(shifted >> 32) : u32(shifted);
        total[l] = u64(term) + (b[l] ^ flip) + one + (carry >> l & 1);
        out[l] = u32(total[l]);
    }
    put(w, i.o[DST], out);
    put_predicate(w, i.o[OUT0], lanes_where([&](int l) { return total[l] >> 32; }));
}

// SHF: mod[0] right, mod[1] .HI, mod[2] signed, mod[3] of 64 bits, mod[4] .W (the amount wraps).
inline void shf(Warp& w, const Instruction& i) {
    u32 sa[LANES], sb[LANES], sc[LANES], out[LANES];
    const u32 *low = integers(w, i.o[A], sa), *by = integers(w, i.o[B], sb);
    const u32* high = integers(w, i.o[C], sc);
    u32 bits = i.mod[3] ? 64 : 32;
    for (int l = 0; l < LANES; l++) {
        u32 n = i.mod[4] ? by[l] & (bits - 1) : (by[l] < bits ? by[l] : bits);
        u64 x = u64(high[l]) << 32 | low[l];
        u64 y;
        if (!i.mod[0])
            y = n >= 64 ? 0 : x << n;
        else if (i.mod[2])
            y = u64(i64(x) >> (n >= 64 ? 63 : n));
        else
            y = n >= 64 ? 0 : x >> n;
        out[l] = u32(i.mod[1] ? y >> 32 : y);
    }
    put(w, i.o[DST], out);
}

inline u32 look_up(u32 table, u32 a, u32 b, u32 c) {
    u32 out = 0;
    for (int k = 0; k < 8; k++)
        if (table >> k & 1) out |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    return out;
}

// LOP3: any function of three bits; a predicate says whether the result is not zero.
// mod[0] .PAND: and the predicate that comes in, otherwise or.
inline void lop3(Warp& w, const Instruction& i) {
    u32 sa[LANES], sb[LANES], sc[LANES], out[LANES];
    const u32 *a = integers(w, i.o[A], sa), *b = integers(w, i.o[B], sb);
    const u32* c = integers(w, i.o[C], sc);
    u32 table = u32(i.o[EXTRA].value);
    switch (table) {
        case 0xc0: for (int l = 0; l < LANES; l++) out[l] = a[l] & b[l]; break;
        case 0xfc: for (int l = 0; l < LANES; l++) out[l] = a[l] | b[l]; break;
        case 0x3c: for (int l = 0; l < LANES; l++) out[l] = a[l] ^ b[l]; break;
        default: for (int l = 0; l < LANES; l++) out[l] = look_up(table, a[l], b[l], c[l]);
    }
    put(w, i.o[DST], out);
    if (i.o[OUT0].kind != K_NONE) {
        u32 found = lanes_where([&](int l) { return out[l]; });
        u32 in = i.o[IN0].kind == K_NONE ? 0 : predicate(w, i.o[IN0]);
        put_predicate(w, i.o[OUT0], i.mod[0] ? found & in : found | in);
    }
}

// PLOP3: the same of predicates, two tables: MEM for the first result, EXTRA for the second.
inline void plop3(Warp& w, const Instruction& i) {
    u32 a = predicate(w, i.o[A]), b = predicate(w, i.o[B]), c = predicate(w, i.o[C]);
    u32 first = look_up(u32(i.o[MEM].value), a, b, c), second = look_up(u32(i.o[EXTRA].value), a, b, c);
    put_predicate(w, i.o[OUT0], first);
    put_predicate(w, i.o[OUT1], second);
}

// PRMT: mod[0] 0 by the selector's nibbles, 1 F4E, 2 B4E, 3 RC8, 4 ECL, 5 ECR, 6 RC16.
inline void prmt(Warp& w, const Instruction& i) {
    u32 sa[LANES], sb[LANES], sc[LANES], out[LANES];
    const u32 *a = integers(w, i.o[A], sa), *sel = integers(w, i.o[B], sb);
    const u32* b = integers(w, i.o[C], sc);
    for (int l = 0; l < LANES; l++) {
        u64 both = u64(b[l]) << 32 | a[l];
        u32 s = sel[l] & 3, found = 0;
        for (int k = 0; k < 4; k++) {
            u32 nibble;
            switch (i.mod[0]) {
                case 0: nibble = sel[l] >> (4 * k) & 15; break;
                case 1: nibble = s + k; break;
                case 2: nibble = (s - k) & 7; break;
                case 3: nibble = s; break;
                case 4: nibble = u32(k) > s ? k : s; break;
                case 5: nibble = u32(k) < s ? k : s; break;
                default: nibble = (s & 1) * 2 + (k & 1); break;
            }
            u32 byte = u32(both >> (8 * (nibble & 7))) & 0xff;
            if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
            found |= byte << (8 * k);
        }
        out[l] = found;
    }
    put(w, i.o[DST], out);
}

inline void select(Warp& w, const Instruction& i) {  // SEL, and FSEL with its signs: mod[0] float
    u32 sa[LANES], sb[LANES], out[LANES];
    const u32* a = i.mod[0] ? floats(w, i.o[A], sa) : integers(w, i.o[A], sa);
    const u32* b = i.mod[0] ? floats(w, i.o[B], sb) : integers(w, i.o[B], sb);
    u32 p = predicate(w, i.o[IN0]);
    for (int l = 0; l < LANES; l++) out[l] = lane_on(p, l) ? a[l] : b[l];
    put(w, i.o[DST], out);
}

inline void mov(Warp& w, const Instruction& i) {  // mod[0]: 64 bits
    if (i.mod[0]) {
        u64 x[LANES];
        wide(w, i.o[A], x);
        put_wide(w, i.o[DST], x);
        return;
    }
    u32 s[LANES], copy[LANES];
    memcpy(copy, integers(w, i.o[A], s), sizeof copy);
    put(w, i.o[DST], copy);
}

// IMNMX, VIMNMX, VIADDMNMX, VIMNMX3: mod[0] unsigned, mod[1] 1: a + b first, 2: of three,
// mod[2] .RELU, mod[3] of halves. A predicate that holds asks for the minimum.
inline void imnmx(Warp& w, const Instruction& i) {
    u32 sa[LANES], sb[LANES], sc[LANES], out[LANES];
    const u32 *a = integers(w, i.o[A], sa), *b = integers(w, i.o[B], sb);
    const u32* c = i.mod[1] ? integers(w, i.o[C], sc) : b;
    u32 p = predicate(w, i.o[IN0]);
    u32 p2 = i.o[IN1].kind == K_NONE ? p : predicate(w, i.o[IN1]);
    auto smaller = [&](u32 x, u32 y) { return i.mod[0] ? x < y : i32(x) < i32(y); };
    auto choose = [&](u32 x, u32 y, bool least) { return smaller(x, y) == least ? x : y; };
    for (int l = 0; l < LANES; l++) {
        u32 x = i.mod[1] == 1 ? a[l] + b[l] : a[l];
        u32 y = i.mod[1] == 1 ? c[l] : b[l];
        u32 z = choose(x, y, lane_on(p, l));
        if (i.mod[3])
            z = by_halves(x, y, [&](u32 g, u32 h) {
                bool less = i.mod[0] ? g < h : int16_t(g) < int16_t(h);
                return less == lane_on(p, l) ? g : h;
            });
        if (i.mod[1] == 2) z = choose(z, c[l], lane_on(p2, l));
        if (i.mod[2] && i32(z) < 0) z = 0;
        out[l] = z;
    }
    put(w, i.o[DST], out);
}

inline void iabs(Warp& w, const Instruction& i) {
    u32 s[LANES], out[LANES];
    const u32* a = integers(w, i.o[A], s);
    for (int l = 0; l < LANES; l++) out[l] = i32(a[l]) < 0 ? 0 - a[l] : a[l];
    put(w, i.o[DST], out);
}

// VABSDIFF: c plus the distance of a and b; mod[0] unsigned.
inline void vabsdiff(Warp& w, const Instruction& i) {
    u32 sa[LANES], sb[LANES], sc[LANES], out[LANES];
    const u32 *a = integers(w, i.o[A], sa), *b = integers(w, i.o[B], sb);
    const u32* c = integers(w, i.o[C], sc);
    for (int l = 0; l < LANES; l++) {
        bool less = i.mod[0] ? a[l] < b[l] : i32(a[l]) < i32(b[l]);
        out[l] = (less ? b[l] - a[l] : a[l] - b[l]) + c[l];
    }
    put(w, i.o[DST], out);
}

enum Compare { NEVER, LT, EQ, LE, GT, NE, GE, NUM, NOT_NUM, LTU, EQU, LEU, GTU, NEU, GEU, ALWAYS };

template <typename T>
inline bool compares(int how, T a, T b) {
    bool less = a < b, same = a == b, more = a > b;
    bool unordered = !less && !same && !more;
    bool found = ((how & 1) && less) || ((how & 2) && same) || ((how & 4) && more);
    return found || ((how & 8) && unordered);
}

// Combines a comparison with a predicate: mod 0 and, 1 or, 2 xor. The second result is of the
// opposite comparison.
inline void put_comparison(Warp& w, const Instruction& i, u32 found, int combine, u32 in) {
    auto both = [&](u32 x) { return combine == 0 ? x & in : combine == 1 ? x | in : x ^ in; };
    put_predicate(w, i.o[OUT0], both(found));
    put_predicate(w, i.o[OUT1], both(~found));
}

// ISETP: mod[0] comparison, mod[1] combination, mod[2] unsigned, mod[3] .EX (upper words).
inline void isetp(Warp& w, const Instruction& i) {
    u32 sa[LANES], sb[LANES];
    const u32 *a = integers(w, i.o[A], sa), *b = integers(w, i.o[B], sb);
    u32 below = i.mod[3] ? predicate(w, i.o[IN1]) : 0;
    u32 found = lanes_where([&](int l) {
        if (i.mod[3] && a[l] == b[l]) return lane_on(below, l);
        return i.mod[2] ? compares(i.mod[0] & 7, a[l], b[l])
                        : compares(i.mod[0] & 7, i32(a[l]), i32(b[l]));
    });
    put_comparison(w, i, found, i.mod[1], predicate(w, i.o[IN0]));
}

inline void popc(Warp& w, const Instruction& i) {
    u32 s[LANES], out[LANES];
    const u32* a = integers(w, i.o[A], s);
    for (int l = 0; l < LANES; l++) out[l] = u32(__builtin_popcount(a[l]));
    put(w, i.o[DST], out);
}

// FLO: place of the highest bit that differs from the sign; mod[0] unsigned, mod[1] .SH (from above).
inline void flo(Warp& w, const Instruction& i) {
    u32 s[LANES], out[LANES];
    const u32* a = integers(w, i.o[A], s);
    for (int l = 0; l < LANES; l++) {
        u32 x = !i.mod[0] && i32(a[l]) < 0 ? ~a[l] : a[l];
        u32 at = x ? 31 - u32(__builtin_clz(x)) : ~0u;
        out[l] = x && i.mod[1] ? 31 - at : at;
    }
    put(w, i.o[DST], out);
    put_predicate(w, i.o[OUT0], lanes_where([&](int l) { return out[l] != ~0u; }));
}

inline void brev(Warp& w, const Instruction& i) {
    u32 s[LANES], out[LANES];
    const u32* a = integers(w, i.o[A], s);
    for (int l = 0; l < LANES; l++) {
        u32 x = a[l];
        x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
        x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
        x = (x >> 4 & 0x0f0f0f0f) | (x & 0x0f0f0f0f) << 4;
        out[l] = __builtin_bswap32(x);
    }
    put(w, i.o[DST], out);
}

// BMSK: b ones from place a on; mod[0] .W (both wrap), otherwise they stop at 32.
inline void bmsk(Warp& w, const Instruction& i) {
    u32 sa[LANES], sb[LANES], out[LANES];
    const u32 *a = integers(w, i.o[A], sa), *b = integers(w, i.o[B], sb);
    for (int l = 0; l < LANES; l++) {
        u64 from = i.mod[0] ? a[l] & 31 : (a[l] < 32 ? a[l] : 32);
        u64 count = i.mod[0] ? b[l] & 31 : (b[l] < 32 ? b[l] : 32);
        out[l] = u32(((1ull << count) - 1) << from);
    }
    put(w, i.o[DST], out);
}

// SGXT: a from b bits to 32; mod[0] unsigned, mod[1] .W.
inline void sgxt(Warp& w, const Instruction& i) {
    u32 sa[LANES], sb[LANES], out[LANES];
    const u32 *a = integers(w, i.o[A], sa), *b = integers(w, i.o[B], sb);
    for (int l = 0; l < LANES; l++) {
        u32 bits = i.mod[1] ? b[l] & 31 : (b[l] < 32 ? b[l] : 32);
        if (bits == 0)
            out[l] = 0;
        else if (i.mod[0])
            out[l] = a[l] << (32 - bits) >> (32 - bits);
        else
            out[l] = u32(i32(a[l] << (32 - bits)) >> (32 - bits));
    }
    put(w, i.o[DST], out);
}

// P2R: predicates into byte mod[0] of a register, where the mask b has ones; a elsewhere.
inline void p2r(Warp& w, const Instruction& i) {
    u32 sa[LANES], sb[LANES], out[LANES];
    const u32 *a = integers(w, i.o[A], sa), *mask = integers(w, i.o[B], sb);
    for (int l = 0; l < LANES; l++) {
        u32 bits = 0;
        for (int k = 0; k < 7; k++) bits |= (w.p[k] >> l & 1) << k;
        int by = 8 * i.mod[0];
        out[l] = (a[l] & ~(mask[l] << by)) | (bits & mask[l]) << by;
    }
    put(w, i.o[DST], out);
}

inline void r2p(Warp& w, const Instruction& i) {
    u32 sa[LANES], sb[LANES];
    const u32 *a = integers(w, i.o[A], sa), *mask = integers(w, i.o[B], sb);
    int by = i.o[A].part >= P_B0 && i.o[A].part <= P_B3 ? 8 * (i.o[A].part - P_B0) : 0;
    for (int k = 0; k < 7; k++) {
        if (!(mask[0] >> k & 1)) continue;
        u32 found = lanes_where([&](int l) { return a[l] >> (by + k) & 1; });
        w.p[k] = (w.p[k] & ~w.active) | (found & w.active);
    }
}

// IDP: a dot product of bytes (mod[0] 4) or of halves with bytes, into 32 bits;
// mod[1], mod[2]: a, b unsigned.
inline void idp(Warp& w, const Instruction& i) {
    u32 sa[LANES], sb[LANES], sc[LANES], out[LANES];
    const u32 *a = integers(w, i.o[A], sa), *b = integers(w, i.o[B], sb);
    const u32* c = integers(w, i.o[C], sc);
    for (int l = 0; l < LANES; l++) {
        u32 total = c[l];
        for (int k = 0; k < 4; k++) {
            i32 x = i.mod[1] ? i32(a[l] >> 8 * k & 255) : i32(int8_t(a[l] >> 8 * k));
            i32 y = i.mod[2] ? i32(b[l] >> 8 * k & 255) : i32(int8_t(b[l] >> 8 * k));
            total += u32(x * y);
        }
        out[l] = total;
    }
    put(w, i.o[DST], out);
}
