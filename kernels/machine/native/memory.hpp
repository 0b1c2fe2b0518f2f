// Global, shared, local and constant memory: addresses, loads, stores, atomics, counts.
#pragma once

#include <algorithm>

#include "halves.hpp"

constexpr int ROOT_SHIFT = 36;  // an array's addresses begin at (number + 1) << ROOT_SHIFT
constexpr u64 SHARED_WINDOW = 0x7ffe00000000ull, LOCAL_WINDOW = 0x7ffd00000000ull;

inline const Range& range_of(Machine& m, u64 address, u32 bytes) {
    const Range* last = m.last_range;
    if (last && address >= last->begin && address + bytes <= last->end) return *last;
    for (i64 k = 0; k < m.launch->range_count; k++) {
        const Range& r = m.launch->ranges[k];
        if (address >= r.begin && address + bytes <= r.end) {
            m.last_range = &r;
            return r;
        }
    }
    fail("address 0x%llx (%llu bytes) is outside of every argument", address, bytes);
}

inline u8* global_at(Machine& m, u64 address, u32 bytes, Direction way, u32 alignment) {
    if (alignment && address % alignment)
        fail("misaligned address 0x%llx of %llu bytes", address, bytes);
    const Range& r = range_of(m, address, bytes);
    if (way != READ && !r.writable) fail("a store to argument %llu, which is read-only", r.argument);
    return r.host + (address - r.begin);
}

inline u8* shared_at(Block& b, u32 address, u32 bytes, u32 alignment) {
    u32 base = b.machine->launch->shared_base;
    if (alignment && address % alignment)
        fail("misaligned shared address 0x%llx of %llu bytes", address, bytes);
    if (address < base || u64(address) + bytes > b.shared.size())
        fail("shared address 0x%llx (%llu bytes) is outside of the block's 0x%llx", address, bytes,
             b.shared.size());
    return b.shared.data() + address;
}

inline void mark_unfenced(Warp& w, u32 address, u32 bytes) {
    Block& b = *w.block;
    if (b.unfenced.empty()) return;
    for (u32 k = address / 16; k <= (address + bytes - 1) / 16; k++) b.unfenced[k] = u8(w.number + 1);
}

inline void check_fenced(Block& b, u32 address, u32 bytes) {
    if (b.unfenced.empty()) return;
    for (u32 k = address / 16; k <= (address + bytes - 1) / 16; k++)
        if (b.unfenced[k])
            fail("the asynchronous proxy reads shared address 0x%llx, which warp %llu has written "
                 "without a proxy fence since", 16 * k, b.unfenced[k] - 1);
}

// FENCE.VIEW.ASYNC: what this warp has written is seen by TMA and wgmma.
inline void fence_async(Warp& w) {
    for (u8& x : w.block->unfenced)
        if (x == w.number + 1) x = 0;
}

inline u8* local_at(Warp& w, int lane, u32 address, u32 bytes) {
    i64 size = w.block->machine->launch->local_bytes;
    if (u64(address) + bytes > u64(size))
        fail("local address 0x%llx (%llu bytes) is outside of the thread's %llu", address, bytes, size);
    return w.local.data() + size * lane + address;
}

// One access of the warp to global memory, for the tallies: distinct sectors of 32 bytes, and those
// of them that cross to L2. L1 keeps all that its block reads by it, and the block's local memory;
// what is stored goes on to L2 too.
struct Touched {
    Block& b;
    Machine& m;
    Direction way;
    bool by_l1;
    u64 sectors[LANES * 4];
    int count = 0;
    i32 counted = -2;

    Touched(Block& block, Direction direction, bool reads_by_l1 = false)
        : b(block), m(*block.machine), way(direction), by_l1(reads_by_l1) {}

    void touch(u64 address, u32 bytes, i32 slot) {
        if (slot < 0) return;
        bool keeps = by_l1 || slot == m.launch->slot_count - 1;
        Tally& t = m.tallies[slot * DIRECTIONS + way];
        t.bytes += bytes;
        if (slot != counted) {
            t.requests++;
            counted = slot;
        }
        for (u64 s = address >> 5; s <= (address + bytes - 1) >> 5; s++) {
            bool seen = false;
            for (int k = count - 1; k >= 0 && !seen; k--) seen = sectors[k] == s;
            if (!seen) {
                sectors[count++] = s;
                t.sectors++;
                if (!keeps || b.cached.insert(s).second || way != READ) t.misses++;
            }
        }
    }

    // Local memory: a word of all threads of a warp lies side by side.
    void touch_local(const Warp& w, int lane, u32 address, u32 bytes) {
        for (u32 k = 0; k < bytes; k += 4) {
            u64 word = u64((address + k) / 4) * LANES + lane;
            touch(LOCAL_WINDOW << 8 | u64(w.number) << 32 | 4 * word, 4, i32(m.launch->slot_count - 1));
        }
    }
};

// The address of each thread: register, uniform register and offset.
inline void addresses(const Warp& w, const Operand& o, u64* out) {
    u64 rest = u64(o.value);
    if (o.ureg != 63) rest += o.wide != A_32 || o.bank ? u64(w.u[o.ureg + 1]) << 32 | w.u[o.ureg] : w.u[o.ureg];
    if (o.reg == ZERO_REGISTER) {
        for (int l = 0; l < LANES; l++) out[l] = rest;
        return;
    }
    const u32* low = w.r[o.reg];
    if (o.wide == A_64) {
        const u32* high = w.r[o.reg + 1];
        for (int l = 0; l < LANES; l++) out[l] = (u64(high[l]) << 32 | low[l]) + rest;
    } else {
        for (int l = 0; l < LANES; l++) out[l] = u64(low[l]) * o.scale + rest;
    }
}

struct Size {
    u32 bytes;
    bool extends_sign;
};
// mod[0] of loads and stores: 4 bytes, U8, S8, U16, S16, 64, 128. mod[1]: a load passes L1 by.
constexpr Size SIZES[7] = {{4, false}, {1, false}, {1, true}, {2, false}, {2, true}, {8, false}, {16, false}};

enum Space { GLOBAL, SHARED, LOCAL, GENERIC };

inline void count_banks(Machine& m, const u64* at, u32 active, u32 bytes, bool store) {
    // Wide accesses run in halves or quarters of a warp.
    int parts = bytes <= 4 ? 1 : int(bytes / 4), lanes = LANES / parts, most_all = 0, ideal = 0;
    for (int part = 0; part < parts; part++) {
        u32 words[32][LANES];
        int count[32] = {}, most = 0;
        for (int l = part * lanes; l < (part + 1) * lanes; l++) {
            if (!lane_on(active, l)) continue;
            for (u32 k = 0; k < (bytes + 3) / 4; k++) {
                u32 word = u32(at[l] / 4) + k, bank = word % 32;
                bool seen = false;
                for (int j = 0; j < count[bank] && !seen; j++) seen = words[bank][j] == word;
                if (!seen && count[bank] < LANES) words[bank][count[bank]++] = word;
                most = std::max(most, count[bank]);
            }
        }
        most_all += most;
        ideal += most > 0;
    }
    m.shared_counts[3 * store] += 1;
    m.shared_counts[3 * store + 1] += most_all;
    m.shared_counts[3 * store + 2] += ideal;
}

inline u8* generic_at(Warp& w, int lane, u64 address, u32 bytes, Direction way, Space space,
                      Touched* touched) {
    Machine& m = *w.block->machine;
    if (space == GENERIC && address >> 32 == SHARED_WINDOW >> 32) space = SHARED;
    if (space == GENERIC && address >> 32 == LOCAL_WINDOW >> 32) space = LOCAL;
    if (space == SHARED) {
        u8* place = shared_at(*w.block, u32(address), bytes, bytes);
        if (way == WRITE) mark_unfenced(w, u32(address), bytes);
        return place;
    }
    if (space == LOCAL) {
        if (touched) touched->touch_local(w, lane, u32(address), bytes);
        return local_at(w, lane, u32(address), bytes);
    }
    u8* host = global_at(m, address, bytes, way, bytes);
    if (touched) touched->touch(address, bytes, m.last_range->slot);
    return host;
}

inline void load(Warp& w, const Instruction& i, Space space) {
    u64 at[LANES];
    addresses(w, i.o[MEM], at);
    Size size = SIZES[i.mod[0]];
    u32 rows[4][LANES] = {};
    Machine& m = *w.block->machine;
    Touched touched(*w.block, READ, !i.mod[1]);
    if (space == SHARED) count_banks(m, at, w.active, size.bytes, false);
    for (int l = 0; l < LANES; l++) {
        if (!lane_on(w.active, l)) continue;
        if (space == SHARED || space == LOCAL) at[l] = u32(at[l]);
        const u8* from = generic_at(w, l, at[l], size.bytes, READ, space, &touched);
        u32 value[4] = {};
        memcpy(value, from, size.bytes);
        if (size.extends_sign)
            value[0] = size.bytes == 1 ? u32(i32(int8_t(value[0]))) : u32(i32(int16_t(value[0])));
        for (u32 k = 0; k < (size.bytes + 3) / 4; k++) rows[k][l] = value[k];
    }
    for (u32 k = 0; k < (size.bytes + 3) / 4; k++) put(w, i.o[DST], rows[k], int(k));
}

inline void store(Warp& w, const Instruction& i, Space space) {
    u64 at[LANES];
    addresses(w, i.o[MEM], at);
    Size size = SIZES[i.mod[0]];
    Machine& m = *w.block->machine;
    Touched touched(*w.block, WRITE);
    u32 words = (size.bytes + 3) / 4, spaces[4][LANES];
    const u32* rows[4];
    for (u32 k = 0; k < words; k++) rows[k] = raw(w, i.o[A], spaces[k], int(k));
    if (space == SHARED) count_banks(m, at, w.active, size.bytes, true);
    for (int l = 0; l < LANES; l++) {
        if (!lane_on(w.active, l)) continue;
        if (space == SHARED || space == LOCAL) at[l] = u32(at[l]);
        u8* to = generic_at(w, l, at[l], size.bytes, WRITE, space, &touched);
        u32 value[4];
        for (u32 k = 0; k < words; k++) value[k] = rows[k][l];
        memcpy(to, value, size.bytes);
    }
}

// LDC: a constant, at a place that may depend on a register. mod[0] as a load's.
inline void load_constant(Warp& w, const Instruction& i) {
    const LaunchArguments& l = *w.block->machine->launch;
    const Operand& o = i.o[A];
    Size size = SIZES[i.mod[0]];
    u32 rows[4][LANES] = {};
    for (int k = 0; k < LANES; k++) {
        if (!lane_on(w.active, k)) continue;
        u32 offset = o.reg == ZERO_REGISTER ? 0 : o.part == K_UNIFORM ? w.u[o.reg] : w.r[o.reg][k];
        i64 at = i64(i32(offset)) + o.value;
        if (at < 0 || at + size.bytes > l.bank_bytes[o.bank])
            fail("c[0x%llx][0x%llx] is outside of the bank", o.bank, at);
        u32 value[4] = {};
        memcpy(value, l.banks[o.bank] + at, size.bytes);
        if (size.extends_sign)
            value[0] = size.bytes == 1 ? u32(i32(int8_t(value[0]))) : u32(i32(int16_t(value[0])));
        for (u32 j = 0; j < (size.bytes + 3) / 4; j++) rows[j][k] = value[j];
    }
    for (u32 j = 0; j < (size.bytes + 3) / 4; j++) put(w, i.o[DST], rows[j], int(j));
}

// ---- copies from global to shared memory that pass by the registers (cp.async)

inline void deliver(Warp& w, const AsyncCopy& copy) {
    u8* to = shared_at(*w.block, copy.to, copy.bytes, 0);
    memset(to, 0, copy.bytes);
    mark_unfenced(w, copy.to, copy.bytes);
    if (copy.valid) memcpy(to, global_at(*w.block->machine, copy.from, copy.valid, READ, 0), copy.valid);
}

// LDGSTS: mod[0] size. Without its predicate a thread writes zeros.
inline void ldgsts(Warp& w, const Instruction& i) {
    u64 to[LANES], from[LANES];
    addresses(w, i.o[MEM], to);
    addresses(w, i.o[EXTRA], from);
    u32 bytes = SIZES[i.mod[0]].bytes, valid = predicate(w, i.o[IN0]);
    Machine& m = *w.block->machine;
    Touched touched(*w.block, READ, !i.mod[1]);
    for (int l = 0; l < LANES; l++) {
        if (!lane_on(w.active, l)) continue;
        AsyncCopy copy{u32(to[l]), bytes, lane_on(valid, l) ? bytes : 0, from[l]};
        u8* there = shared_at(*w.block, copy.to, bytes, bytes);
        if (copy.valid) {
            global_at(m, from[l], bytes, READ, bytes);
            touched.touch(from[l], bytes, m.last_range->slot);
        }
        if (m.launch->adversarial)
            memset(there, 0xff, bytes);  // nobody may read it before it has been waited for
        w.open_copies.push_back(copy);
    }
    if (!m.launch->adversarial) {
        for (const AsyncCopy& copy : w.open_copies) deliver(w, copy);
        w.open_copies.clear();
    }
}

inline void end_copy_group(Warp& w) {
    w.copy_groups.push_back(std::move(w.open_copies));
    w.open_copies.clear();
}

inline void wait_copy_groups(Warp& w, size_t left) {
    while (w.copy_groups.size() > left) {
        for (const AsyncCopy& copy : w.copy_groups.front()) deliver(w, copy);
        w.copy_groups.pop_front();
    }
}

// ---- atomics

enum Atomic { AT_ADD, AT_MIN, AT_MAX, AT_INC, AT_DEC, AT_AND, AT_OR, AT_XOR, AT_EXCH, AT_CAS, AT_POPC, AT_CAST };
enum AtomicType { AT_U32, AT_S32, AT_U64, AT_S64, AT_F32, AT_F64, AT_F16X2, AT_BF16X2 };

template <typename T, typename S>
inline T combine_integers(int op, T old, T a, T b) {
    switch (op) {
        case AT_ADD: return old + a;
        case AT_MIN: return S(a) < S(old) ? a : old;
        case AT_MAX: return S(a) > S(old) ? a : old;
        case AT_INC: return old >= a ? 0 : old + 1;
        case AT_DEC: return old == 0 || old > a ? a : old - 1;
        case AT_AND: return old & a;
        case AT_OR: return old | a;
        case AT_XOR: return old ^ a;
        case AT_EXCH: return a;
        case AT_POPC: return old + 1;
        default: return old == a ? b : old;  // compare and swap
    }
}

inline u32 add_pairs(u32 old, u32 a, int type) {
    u32 out = 0;
    for (int k = 0; k < 2; k++) {
        u32 x = old >> (16 * k) & 0xffff, y = a >> (16 * k) & 0xffff;
        float s = type == AT_F16X2 ? from_half(x) + from_half(y) : from_bf16(x) + from_bf16(y);
        out |= (type == AT_F16X2 ? half_of(s) : bf16_of(s)) << (16 * k);
    }
    return out;
}

inline u64 combine(int op, int type, u64 old, u64 a, u64 b) {
    switch (type) {
        case AT_U32: return combine_integers<u32, u32>(op, u32(old), u32(a), u32(b));
        case AT_S32: return combine_integers<u32, i32>(op, u32(old), u32(a), u32(b));
        case AT_U64: return combine_integers<u64, u64>(op, old, a, b);
        case AT_S64: return combine_integers<u64, i64>(op, old, a, b);
        case AT_F32: {
            if (op != AT_ADD) fail("an atomic of fp32 that does not add");
            float x = flushed(as_float(u32(old))) + flushed(as_float(u32(a)));
            return x != x ? NAN32 : as_bits(flushed(x));
        }
        case AT_F64: {
            if (op != AT_ADD) fail("an atomic of fp64 that does not add");
            double x, y;
            memcpy(&x, &old, 8);
            memcpy(&y, &a, 8);
            x += y;
            memcpy(&old, &x, 8);
            return old;
        }
        default:
            if (op != AT_ADD) fail("an atomic of two halves that does not add");
            return add_pairs(u32(old), u32(a), type);
    }
}

template <typename T>
inline T exchange(u8* place, int op, int type, u64 a, u64 b) {
    T old = __atomic_load_n(reinterpret_cast<T*>(place), __ATOMIC_SEQ_CST);
    for (;;) {
        T next = T(combine(op, type, old, a, b));
        if (__atomic_compare_exchange_n(reinterpret_cast<T*>(place), &old, next, false,
                                        __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return old;
    }
}

// ATOM, ATOMG, ATOMS, RED: mod[0] operation, mod[1] type, mod[2] words of a vector (1, 2, 4).
inline void atomic(Warp& w, const Instruction& i, Space space) {
    u64 at[LANES];
    addresses(w, i.o[MEM], at);
    int op = i.mod[0], type = i.mod[1], vector = i.mod[2] ? i.mod[2] : 1;
    bool eight = type == AT_U64 || type == AT_S64 || type == AT_F64;
    u32 bytes = eight ? 8 : 4;
    Touched touched(*w.block, ATOMIC);
    for (int part = 0; part < vector; part++) {
        u64 a[LANES], b[LANES], old[LANES] = {};
        u32 sa[LANES], sb[LANES];
        if (eight) {
            wide(w, i.o[A], a);
            wide(w, i.o[B], b);
        } else {
            const u32 *x = raw(w, i.o[A], sa, part), *y = raw(w, i.o[B], sb);
            for (int l = 0; l < LANES; l++) a[l] = x[l], b[l] = y[l];
        }
        for (int l = 0; l < LANES; l++) {
            if (!lane_on(w.active, l)) continue;
            u64 address = (space == SHARED ? u32(at[l]) : at[l]) + 4 * part;
            u8* place = generic_at(w, l, address, bytes, ATOMIC, space, &touched);
            old[l] = eight ? exchange<u64>(place, op, type, a[l], b[l])
                           : exchange<u32>(place, op, type, a[l], b[l]);
            if (op == AT_CAST) old[l] = u32(old[l]) == u32(a[l]);
        }
        if (i.o[DST].kind == K_NONE) continue;
        if (eight) {
            put_wide(w, i.o[DST], old);
        } else {
            u32 low[LANES];
            for (int l = 0; l < LANES; l++) low[l] = u32(old[l]);
            put(w, i.o[DST], low, part);
        }
    }
}
