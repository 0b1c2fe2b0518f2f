// Between the threads of a warp: votes, shuffles, matches, reductions.
#pragma once

#include "integer.hpp"

// VOTE: mod[0] 0 any, 1 all, 2 equal. The register gets the ballot.
inline void vote(Warp& w, const Instruction& i) {
    u32 p = predicate(w, i.o[IN0]) & w.active;
    u32 out[LANES];
    for (u32& x : out) x = p;
    put(w, i.o[DST], out);
    bool found = i.mod[0] == 0 ? p != 0 : i.mod[0] == 1 ? p == w.active : p == 0 || p == w.active;
    put_predicate(w, i.o[OUT0], found ? ALL_LANES : 0);
}

// SHFL: mod[0] 0 index, 1 up, 2 down, 3 butterfly.
inline void shfl(Warp& w, const Instruction& i) {
    u32 sa[LANES], sb[LANES], sc[LANES], out[LANES], inside = 0;
    const u32 *a = integers(w, i.o[A], sa), *b = integers(w, i.o[B], sb);
    const u32* c = integers(w, i.o[C], sc);
    for (int l = 0; l < LANES; l++) {
        int segment = c[l] >> 8 & 31, clamp = c[l] & 31, by = b[l] & 31;
        int most = (l & segment) | (clamp & ~segment), least = l & segment, from;
        bool in;
        switch (i.mod[0]) {
            case 0: from = least | (by & ~segment); in = from <= most; break;
            case 1: from = l - by; in = from >= most; break;
            case 2: from = l + by; in = from <= most; break;
            default: from = l ^ by; in = from <= most; break;
        }
        if (!in) from = l;
        // What a thread gives that takes no part is not defined: a value that shows.
        out[l] = lane_on(w.active, from) ? a[from] : 0xffffffffu;
        inside |= u32(in) << l;
    }
    put(w, i.o[DST], out);
    put_predicate(w, i.o[OUT0], inside);
}

// MATCH: the threads with the same value; mod[0] .ALL, mod[1] 64 bits.
inline void match(Warp& w, const Instruction& i) {
    u64 a[LANES];
    u32 out[LANES], s[LANES];
    if (i.mod[1])
        wide(w, i.o[A], a);
    else
        for (int l = 0; l < LANES; l++) a[l] = integers(w, i.o[A], s)[l];
    bool all = true;
    for (int l = 0; l < LANES; l++) {
        out[l] = lanes_where([&](int k) { return lane_on(w.active, k) && a[k] == a[l]; });
        if (lane_on(w.active, l)) all &= out[l] == w.active;
    }
    if (i.mod[0])
        for (u32& x : out) x = all ? w.active : 0;
    put(w, i.o[DST], out);
    put_predicate(w, i.o[OUT0], all ? ALL_LANES : 0);
}

// REDUX: mod[0] 0 and, 1 or, 2 xor, 3 sum, 4 min, 5 max; mod[1] signed.
inline void redux(Warp& w, const Instruction& i) {
    u32 s[LANES];
    const u32* a = integers(w, i.o[A], s);
    u32 total = a[first_lane(w.active)];
    for (int l = first_lane(w.active) + 1; l < LANES; l++) {
        if (!lane_on(w.active, l)) continue;
        u32 x = a[l];
        bool less = i.mod[1] ? i32(x) < i32(total) : x < total;
        switch (i.mod[0]) {
            case 0: total &= x; break;
            case 1: total |= x; break;
            case 2: total ^= x; break;
            case 3: total += x; break;
            case 4: total = less ? x : total; break;
            default: total = less ? total : x;
        }
    }
    u32 out[LANES];
    for (u32& x : out) x = total;
    put(w, i.o[DST], out);
}

// R2UR takes the first thread's value.
inline void r2ur(Warp& w, const Instruction& i) {
    u32 s[LANES], copy[LANES];
    memcpy(copy, integers(w, i.o[A], s), sizeof copy);
    put(w, i.o[DST], copy);
}

// ELECT: one thread of those that are here.
inline void elect(Warp& w, const Instruction& i) {
    u32 chosen = first_lane(w.active), out[LANES];
    for (u32& x : out) x = chosen;
    put(w, i.o[DST], out);
    put_predicate(w, i.o[OUT0], 1u << chosen);
}
