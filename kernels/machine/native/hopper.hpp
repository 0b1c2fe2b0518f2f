// Hopper: transaction barriers, bulk and tensor copies, wgmma.
//
// In adversarial time a copy arrives only when no warp can go on without it, stores of TMA read
// shared memory when they are waited for, and a product's registers hold NaN until its wait.
#pragma once

#include "control.hpp"
#include "products.hpp"

// ---- mbarriers

inline Mbarrier& mbarrier_at(Block& b, u32 address) {
    auto found = b.mbarriers.find(address);
    if (found == b.mbarriers.end()) fail("no mbarrier has been made at 0x%llx", address);
    return found->second;
}

inline void settle_mbarrier(Mbarrier& m) {
    if (m.pending == 0 && m.bytes == 0) {
        m.phase++;
        m.pending = m.count;
    }
    if (m.pending < 0) fail("more arrivals at an mbarrier than its count of %llu", m.count);
}

enum { SYNCS_INIT, SYNCS_CHECK, SYNCS_ARRIVE, SYNCS_INVALIDATE };

// mod[0] what; of arrivals mod[1] how many, mod[2] whether bytes are expected. False: a wait failed.
inline bool syncs(Warp& w, const Instruction& i) {
    Block& b = *w.block;
    u64 at[LANES];
    u32 space[LANES];
    addresses(w, i.o[MEM], at);
    w.progressed = true;
    u32 done = 0;
    for (int l = 0; l < LANES; l++) {
        if (!lane_on(w.active, l)) continue;
        u32 address = u32(at[l]);
        shared_at(b, address, 8, 8);
        u32 value = i.o[A].kind == K_NONE ? 0 : raw(w, i.o[A], space)[l];
        if (i.mod[0] == SYNCS_INIT) {
            // The count lies in the lower word as 2 (2^20 - n).
            u32 count = 0x100000 - (value >> 1 & 0xfffff);
            b.mbarriers[address] = Mbarrier{count, i64(count), 0, 0};
        } else if (i.mod[0] == SYNCS_CHECK) {
            done |= u32((mbarrier_at(b, address).phase & 1) != value >> 31) << l;
        } else if (i.mod[0] == SYNCS_INVALIDATE) {
            b.mbarriers.erase(address);
        } else {
            Mbarrier& m = mbarrier_at(b, address);
            m.pending -= i.mod[1];
            if (i.mod[2]) m.bytes += i32(value);
            settle_mbarrier(m);
        }
    }
    if (i.mod[0] != SYNCS_CHECK) return true;
    put_predicate(w, i.o[OUT0], done);
    w.progressed = (done & w.active) == w.active;
    return w.progressed;
}

// ARRIVES.LDGSTSBAR: an arrival when the thread's copies so far have come.
inline void arrives(Warp& w, const Instruction& i) {
    u64 at[LANES];
    addresses(w, i.o[MEM], at);
    end_copy_group(w);
    wait_copy_groups(w, 0);
    for (int l = 0; l < LANES; l++) {
        if (!lane_on(w.active, l)) continue;
        Mbarrier& m = mbarrier_at(*w.block, u32(at[l]));
        m.pending -= 1;
        if (i.mod[0]) m.pending += 1;
        settle_mbarrier(m);
    }
}

// ---- tensor maps: our own encoding, written by ../tensor_map.py

struct TensorMap {
    u64 address, form, size[5], stride[4], box[3], magic, unused;
    int rank() const { return int(form & 255); }
    u32 itemsize() const { return u32(form >> 8 & 255); }
    int swizzle() const { return int(form >> 16 & 255); }  // 0 none, 1: 32 bytes, 2: 64, 3: 128
    u32 box_of(int d) const { return u32(box[d / 2] >> (32 * (d % 2))); }
};
constexpr u64 MAP_MAGIC = 0x70616d726f736e74ull;

inline TensorMap tensor_map_at(Block& b, u64 address) {
    const LaunchArguments& l = *b.machine->launch;
    TensorMap map;
    if (address >= l.map_base && address + sizeof map <= l.map_base + u64(l.bank_bytes[0]))
        memcpy(&map, l.banks[0] + (address - l.map_base), sizeof map);
    else
        memcpy(&map, global_at(*b.machine, address, sizeof map, READ, 64), sizeof map);
    if (map.magic != MAP_MAGIC) fail("there is no tensor map at 0x%llx", address);
    return map;
}

inline u32 swizzled(u32 address, int mode) {
    if (mode == 0) return address;
    return address ^ ((address >> 7 & ((1u << mode) - 1)) << 4);
}

inline u32 box_bytes(const TensorMap& map) {
    u32 bytes = map.itemsize();
    for (int d = 0; d < map.rank(); d++) bytes *= map.box_of(d);
    return bytes;
}

enum BoxWay { BOX_IN, BOX_OUT, BOX_ADD };

inline void count_row(Machine& m, u64 address, u32 bytes, Direction way) {
    i32 slot = range_of(m, address, bytes).slot;
    if (slot < 0) return;
    Tally& t = m.tallies[slot * DIRECTIONS + way];
    t.bytes += bytes;
    u64 sectors = ((address + bytes - 1) >> 5) - (address >> 5) + 1;
    t.sectors += sectors;
    t.misses += sectors;
}

inline void add_floats(u8* to, const u8* from, u32 bytes) {
    for (u32 k = 0; k < bytes; k += 4) {
        u32 x;
        memcpy(&x, from + k, 4);
        exchange<u32>(to + k, AT_ADD, AT_F32, x, 0);
    }
}

// Moves a box; what lies outside of the tensor reads as zero and is not written.
inline void move_box(Block& b, const TensorMap& map, u32 shared, const i32* at, BoxWay way) {
    Machine& m = *b.machine;
    u32 row_bytes = map.box_of(0) * map.itemsize();
    if (row_bytes % 16) fail("a box with rows of %llu bytes", row_bytes);
    u32 outer[4] = {1, 1, 1, 1};
    for (int d = 1; d < map.rank(); d++) outer[d - 1] = map.box_of(d);
    u32 place = shared;
    for (u32 k3 = 0; k3 < outer[3]; k3++)
    for (u32 k2 = 0; k2 < outer[2]; k2++)
    for (u32 k1 = 0; k1 < outer[1]; k1++)
    for (u32 k0 = 0; k0 < outer[0]; k0++) {
        const u32 k[4] = {k0, k1, k2, k3};
        u64 address = map.address;
        bool inside = true;
        for (int d = 1; d < map.rank(); d++) {
            i64 x = i64(at[d]) + k[d - 1];
            inside &= x >= 0 && x < i64(map.size[d]);
            address += u64(x * i64(map.stride[d - 1]));
        }
        i64 first = std::max<i64>(0, -i64(at[0])), last = std::min<i64>(map.box_of(0), i64(map.size[0]) - at[0]);
        u8 row[2048];
        if (row_bytes > sizeof row) fail("a box with rows of %llu bytes", row_bytes);
        if (way != BOX_IN)
            for (u32 c = 0; c < row_bytes; c += 16)
            {
                u32 from = swizzled(place + c, map.swizzle());
                check_fenced(b, from, 16);
                memcpy(row + c, shared_at(b, from, 16, 16), 16);
            }
        else
            memset(row, 0, row_bytes);
        if (inside && first < last) {
            u32 begin = u32(first) * map.itemsize(), bytes = u32(last - first) * map.itemsize();
            u64 from = address + u64((i64(at[0]) + first) * map.itemsize());
            u8* there = global_at(m, from, bytes, way == BOX_IN ? READ : WRITE, 0);
            count_row(m, from, bytes, way == BOX_IN ? READ : way == BOX_OUT ? WRITE : ATOMIC);
            if (way == BOX_IN)
                memcpy(row + begin, there, bytes);
            else if (way == BOX_OUT)
                memcpy(there, row + begin, bytes);
            else
                add_floats(there, row + begin, bytes);
        }
        if (way == BOX_IN)
            for (u32 c = 0; c < row_bytes; c += 16)
                memcpy(shared_at(b, swizzled(place + c, map.swizzle()), 16, 16), row + c, 16);
        place += row_bytes;
    }
}

inline void deliver_copy(Block& b, const TensorCopy& copy) {
    u32 bytes = copy.bytes;
    if (copy.kind == 0) {
        TensorMap map = tensor_map_at(b, copy.from);
        move_box(b, map, copy.shared, copy.at, BOX_IN);
        bytes = box_bytes(map);
    } else {
        memcpy(shared_at(b, copy.shared, bytes, 16), global_at(*b.machine, copy.from, bytes, READ, 16), bytes);
        count_row(*b.machine, copy.from, bytes, READ);
    }
    Mbarrier& m = mbarrier_at(b, copy.mbarrier);
    m.bytes -= bytes;
    settle_mbarrier(m);
}

inline u32 uniform(const Warp& w, int reg) { return reg >= 63 ? 0 : w.u[reg]; }

inline void start_copy(Block& b, const TensorCopy& copy, u32 bytes) {
    if (!b.machine->launch->adversarial) {
        deliver_copy(b, copy);
        return;
    }
    shared_at(b, copy.shared, bytes, 16);
    memset(b.shared.data() + copy.shared, 0xff, bytes);
    for (u32 k = copy.shared / 16; k < (copy.shared + bytes) / 16; k++) b.unfenced[k] = 0;
    mbarrier_at(b, copy.mbarrier);
    b.copies.push_back(copy);
}

// UTMALDG [shared, mbarrier, coordinates …], [map]: mod[0] dimensions.
inline void utmaldg(Warp& w, const Instruction& i) {
    int to = i.o[MEM].ureg, from = i.o[EXTRA].ureg;
    TensorCopy copy{0, w.u[to], w.u[to + 1], 0, u64(w.u[from + 1]) << 32 | w.u[from], {}};
    TensorMap map = tensor_map_at(*w.block, copy.from);
    if (map.rank() != i.mod[0]) fail("a copy of %llu dimensions by a tensor map of %llu", i.mod[0], map.rank());
    for (int d = 0; d < i.mod[0]; d++) copy.at[d] = i32(w.u[to + 2 + d]);
    if (copy.shared % 128) fail("a tensor copy to shared address 0x%llx, no multiple of 128", copy.shared);
    start_copy(*w.block, copy, box_bytes(map));
}

inline void deliver_store(Block& b, const BulkStore& s) {
    if (s.kind == BOX_OUT || s.kind == BOX_ADD) {
        move_box(b, tensor_map_at(b, s.to), s.shared, s.at, BoxWay(s.kind));
        return;
    }
    u8* to = global_at(*b.machine, s.to, s.bytes, WRITE, 16);
    const u8* from = shared_at(b, s.shared, s.bytes, 16);
    check_fenced(b, s.shared, s.bytes);
    count_row(*b.machine, s.to, s.bytes, s.kind == 3 ? WRITE : ATOMIC);
    if (s.kind == 3)
        memcpy(to, from, s.bytes);
    else
        add_floats(to, from, s.bytes);
}

inline void start_store(Warp& w, const BulkStore& s) {
    if (w.block->machine->launch->adversarial)
        w.open_stores.push_back(s);
    else
        deliver_store(*w.block, s);
}

inline void end_bulk_group(Warp& w) {
    if (!w.block->machine->launch->adversarial) return;
    w.store_groups.push_back(std::move(w.open_stores));
    w.open_stores.clear();
}

inline void wait_bulk_groups(Warp& w, size_t left) {
    if (!w.block->machine->launch->adversarial) return;
    while (w.store_groups.size() > left) {
        for (const BulkStore& s : w.store_groups.front()) deliver_store(*w.block, s);
        w.store_groups.pop_front();
    }
}

// UTMASTG, UTMAREDG [shared, coordinates …], [map]: mod[0] dimensions, mod[1] adds.
inline void utmastg(Warp& w, const Instruction& i) {
    int from = i.o[MEM].ureg, to = i.o[EXTRA].ureg;
    BulkStore s{u8(i.mod[1] ? BOX_ADD : BOX_OUT), w.u[from], 0, u64(w.u[to + 1]) << 32 | w.u[to], {}};
    TensorMap map = tensor_map_at(*w.block, s.to);
    if (map.rank() != i.mod[0]) fail("a copy of %llu dimensions by a tensor map of %llu", i.mod[0], map.rank());
    for (int d = 0; d < i.mod[0]; d++) s.at[d] = i32(w.u[from + 1 + d]);
    start_store(w, s);
}

// UBLKCP, UBLKRED: mod[0] 0 to shared, 1 to global, 2 adds to global. The size is in units of 16.
inline void ublkcp(Warp& w, const Instruction& i) {
    int to = i.o[MEM].ureg, from = i.o[EXTRA].ureg;
    u32 bytes = 16 * (uniform(w, i.o[A].reg) & 0xffff);
    if (i.mod[0] == 0) {
        TensorCopy copy{1, w.u[to], w.u[to + 1], bytes, u64(w.u[from + 1]) << 32 | w.u[from], {}};
        start_copy(*w.block, copy, bytes);
        return;
    }
    BulkStore s{u8(i.mod[0] == 1 ? 3 : 4), w.u[from], bytes, u64(w.u[to + 1]) << 32 | w.u[to], {}};
    start_store(w, s);
}

// ---- wgmma

struct Descriptor {
    u32 start, leading, stride;
    int swizzle;  // as a tensor map's
};

inline Descriptor descriptor(u32 low, u32 high) {
    static const int modes[4] = {0, 3, 2, 1};
    if (high >> 17 & 7) fail("a wgmma descriptor with base offset %llu", high >> 17 & 7);
    return {(low & 0x3fff) << 4, (low >> 16 & 0x3fff) << 4, (high & 0x3fff) << 4, modes[high >> 30]};
}

// Where element (row, k) of an operand lies: rows are of M or N. transposed: rows are contiguous.
inline u32 element_address(const Descriptor& d, bool transposed, u32 row, u32 k, u32 itemsize) {
    u32 at;
    if (!transposed) {
        u32 byte = k * itemsize;
        if (d.swizzle == 0)
            at = d.start + row / 8 * d.stride + byte / 16 * d.leading + row % 8 * 16 + byte % 16;
        else
            at = d.start + row / 8 * d.stride + row % 8 * (16u << d.swizzle) + byte;
    } else if (d.swizzle == 0) {
        at = d.start + row / 8 * d.stride + k / 8 * d.leading + k % 8 * 16 + row % 8 * itemsize;
    } else {
        u32 width = (16u << d.swizzle) / itemsize;
        at = d.start + row / width * d.leading + k / 8 * d.stride + k % 8 * (16u << d.swizzle) + row % width * itemsize;
    }
    return swizzled(at, d.swizzle);
}

inline void read_operand(Block& b, const Descriptor& d, bool transposed, u32 first, u32 rows, u32 depth,
                         int element, Values* out) {
    u32 itemsize = element == E_TF32 ? 4 : element >= E_E4M3 ? 1 : 2;
    for (u32 r = 0; r < rows; r++) {
        out[r].special = false;
        for (u32 k = 0; k < depth; k++) {
            u32 bits = 0, at = element_address(d, transposed, first + r, k, itemsize);
            memcpy(&bits, shared_at(b, at, itemsize, itemsize), itemsize);
            check_fenced(b, at, itemsize);
            add_value(out[r], int(k), bits, element);
        }
    }
}

// mod[0] columns / 8, mod[1] element of A, mod[2] A transposed, mod[3] B transposed, mod[4] last of
// a group, mod[5] result fp16, mod[6] A in registers, mod[7] element of B.
inline void multiply(Warp& w, const Product& p) {
    const Instruction& i = *p.i;
    Block& b = *w.block;
    u32 columns = 8u * i.mod[0], depth = i.mod[1] == E_TF32 ? 8 : i.mod[1] >= E_E4M3 ? 32 : 16;
    Values *a = b.machine->a.data(), *bs = b.machine->b.data();
    const u32* db = p.u + 2;
    if (!i.mod[6]) {
        read_operand(b, descriptor(p.u[0], p.u[1]), i.mod[2], 16 * (w.number % 4), 16, depth, i.mod[1], a);
    } else {
        int each = i.mod[1] == E_TF32 ? 1 : i.mod[1] >= E_E4M3 ? 4 : 2;
        for (int k = 0; k < 16; k++) a[k].special = false;
        for (int reg = 0; reg < 4; reg++)
            for (int t = 0; t < LANES; t++)
                for (int h = 0; h < each; h++) {
                    u32 x = w.r[i.o[A].reg + reg][t] >> (h * (32 / each));
                    add_value(a[t / 4 + 8 * (reg % 2)], 4 * each * (reg / 2) + each * (t % 4) + h,
                              each == 1 ? x : each == 2 ? x & 0xffff : x & 0xff, i.mod[1]);
                }
    }
    read_operand(b, descriptor(db[0], db[1]), i.mod[3], 0, columns, depth, i.mod[7], bs);
    Arithmetic how = arithmetic(i.mod[1], 90);
    how.half = i.mod[5];
    bool exact = b.machine->launch->exact_products;
    if (how.half) {  // two results of a row share a register
        for (u32 k = 0; k < columns / 4; k++)
            for (int t = 0; t < LANES; t++) {
                u32* place = &w.r[i.o[DST].reg + k][t];
                u32 packed = 0;
                for (int h = 0; h < 2; h++) {
                    u32 c = p.scaled ? as_bits(from_half(*place >> (16 * h) & 0xffff)) : 0;
                    u32 d = dot(c, a[t / 4 + 8 * (k % 2)], bs[8 * (k / 2) + 2 * (t % 4) + h], int(depth), how, exact);
                    packed |= half_of(as_float(d)) << (16 * h);
                }
                *place = packed;
            }
        return;
    }
    for (u32 k = 0; k < columns / 2; k++) {
        u32* row = w.r[i.o[DST].reg + k];
        for (int t = 0; t < LANES; t++)
            row[t] = dot(p.scaled ? row[t] : 0, a[t / 4 + 8 * (k / 2 % 2)],
                         bs[8 * (k / 4) + 2 * (t % 4) + k % 2], int(depth), how, exact);
    }
}

inline void poison(Warp& w, int reg, int count) {
    for (int k = 0; k < count; k++)
        for (u32& x : w.r[reg + k]) x = NAN32;
}

inline int accumulator_registers(const Instruction& i) { return (i.mod[5] ? 2 : 4) * i.mod[0]; }

inline void hgmma(Warp& w, const Instruction& i) {
    if (w.active != ALL_LANES) fail("HGMMA where only some threads of the warp are here");
    const Operand& desc = i.o[MEM];
    Product p{&i, {}, predicate(w, i.o[IN0]) != 0 && !(i.o[C].kind == K_REGISTER && i.o[C].reg == ZERO_REGISTER), i.mod[4] != 0};
    for (int k = 0; k < 4; k++) p.u[k] = uniform(w, desc.ureg + k);  // of A, then of B
    if (!w.block->machine->launch->adversarial) {
        multiply(w, p);
        return;
    }
    int reg = i.o[DST].reg, count = accumulator_registers(i);
    if (!w.accumulators.count(reg)) {
        std::vector<u32>& kept = w.accumulators[reg];
        kept.resize(size_t(count) * LANES);
        memcpy(kept.data(), w.r[reg], kept.size() * 4);
    }
    poison(w, reg, count);
    w.products.push_back(p);
    w.product_groups += p.ends_group;
}

inline void finish_products(Warp& w, int left) {
    while (w.product_groups > left && !w.products.empty()) {
        Product p = w.products.front();
        w.products.pop_front();
        int reg = p.i->o[DST].reg, count = accumulator_registers(*p.i);
        std::vector<u32>& kept = w.accumulators[reg];
        memcpy(w.r[reg], kept.data(), kept.size() * 4);
        multiply(w, p);
        bool later = false;
        for (const Product& other : w.products) later |= other.i->o[DST].reg == reg;
        if (later) {
            memcpy(kept.data(), w.r[reg], kept.size() * 4);
            poison(w, reg, count);
        } else {
            w.accumulators.erase(reg);
        }
        w.product_groups -= p.ends_group;
    }
}

// WARPGROUP: mod[0] 0 arrive, 1 wait for all but mod[1] groups.
inline void warpgroup(Warp& w, const Instruction& i) {
    if (i.mod[0] == 1 && w.block->machine->launch->adversarial) finish_products(w, i.mod[1]);
}
