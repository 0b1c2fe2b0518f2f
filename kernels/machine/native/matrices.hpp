// Matrices of 8 x 8 halves: between shared memory and registers, and transposed in registers.
#pragma once

#include "memory.hpp"

// Row r of matrix k lies at the address that thread 8 k + r gives. Without transposition thread t
// gets elements 2 (t % 4) and the next of row t / 4; with it, of column t / 4.
inline u16* matrix_row(Warp& w, const u64* at, int matrix, int row) {
    return reinterpret_cast<u16*>(shared_at(*w.block, u32(at[8 * matrix + row]), 16, 16));
}

// LDSM: mod[0] matrices (1, 2, 4), mod[1] transposed.
inline void ldsm(Warp& w, const Instruction& i) {
    u64 at[LANES];
    addresses(w, i.o[MEM], at);
    if (w.active != ALL_LANES) fail("LDSM where only some threads of the warp are here");
    Machine& m = *w.block->machine;
    for (int k = 0; k < i.mod[0]; k++) {
        u16 rows[8][8];
        for (int r = 0; r < 8; r++) memcpy(rows[r], matrix_row(w, at, k, r), 16);
        u32 out[LANES];
        for (int t = 0; t < LANES; t++) {
            int r = t / 4, c = 2 * (t % 4);
            out[t] = i.mod[1] ? rows[c][r] | u32(rows[c + 1][r]) << 16
                              : rows[r][c] | u32(rows[r][c + 1]) << 16;
        }
        put(w, i.o[DST], out, k);
        u64 places[LANES] = {};
        for (int r = 0; r < 8; r++) places[r] = at[8 * k + r];
        count_banks(m, places, 0xff, 16, false);
        m.shared_counts[0] -= k > 0;
    }
}

inline void stsm(Warp& w, const Instruction& i) {
    u64 at[LANES];
    addresses(w, i.o[MEM], at);
    if (w.active != ALL_LANES) fail("STSM where only some threads of the warp are here");
    Machine& m = *w.block->machine;
    for (int l = 0; l < 8 * i.mod[0]; l++) {
        shared_at(*w.block, u32(at[l]), 16, 16);
        mark_unfenced(w, u32(at[l]), 16);
    }
    for (int k = 0; k < i.mod[0]; k++) {
        u32 space[LANES];
        const u32* a = raw(w, i.o[A], space, k);
        for (int t = 0; t < LANES; t++) {
            int r = t / 4, c = 2 * (t % 4);
            for (int h = 0; h < 2; h++) {
                u16 half = u16(a[t] >> (16 * h));
                if (i.mod[1])
                    matrix_row(w, at, k, c + h)[r] = half;
                else
                    matrix_row(w, at, k, r)[c + h] = half;
            }
        }
        u64 places[LANES] = {};
        for (int r = 0; r < 8; r++) places[r] = at[8 * k + r];
        count_banks(m, places, 0xff, 16, true);
        m.shared_counts[3] -= k > 0;
    }
}

inline void movm(Warp& w, const Instruction& i) {
    u32 space[LANES], out[LANES];
    const u32* a = raw(w, i.o[A], space);
    for (int t = 0; t < LANES; t++) {
        int r = t / 4, c = 2 * (t % 4);
        out[t] = 0;
        for (int h = 0; h < 2; h++) {
            u32 from = a[4 * (c + h) + r / 2];
            out[t] |= (from >> (16 * (r % 2)) & 0xffff) << (16 * h);
        }
    }
    put(w, i.o[DST], out);
}
