// Where a warp's threads go: branches, convergence, barriers of a block, the end.
#pragma once

#include "exchange.hpp"
#include "memory.hpp"

inline u32 partners(const Warp& w, const Group& g, int barrier) {
    return w.b[barrier][first_lane(g.mask)] & w.live;
}

inline void merge_groups(Warp& w) {  // of equal place and state
    for (size_t x = 0; x < w.groups.size(); x++)
        for (size_t y = x + 1; y < w.groups.size();) {
            Group &a = w.groups[x], &b = w.groups[y];
            if (a.wait == Wait::RUNS && b.wait == Wait::RUNS && a.pc == b.pc) {
                a.mask |= b.mask;
                w.groups.erase(w.groups.begin() + y);
            } else {
                y++;
            }
        }
}

inline u32 waiting_mask(const Warp& w, Wait how, int barrier) {
    u32 found = 0;
    for (const Group& g : w.groups)
        if (g.wait == how && (how != Wait::CONVERGENCE || g.barrier == barrier)) found |= g.mask;
    return found;
}

// Lets go on who waits for nobody any more.
inline bool settle(Warp& w) {
    bool any = false;
    for (size_t k = 0; k < w.groups.size(); k++) {
        Group g = w.groups[k];
        if (g.wait == Wait::CONVERGENCE) {
            u32 all = partners(w, g, g.barrier) | g.mask;
            if (all & ~waiting_mask(w, Wait::CONVERGENCE, g.barrier)) continue;
            for (Group& other : w.groups)
                if (other.wait == Wait::CONVERGENCE && other.barrier == g.barrier && (other.mask & all))
                    other.wait = Wait::RUNS, other.pc++;
            any = true;
        } else if (g.wait == Wait::WARP_MASK) {
            u32 all = (g.collected & w.live) | g.mask;
            if (all & ~waiting_mask(w, Wait::WARP_MASK, 0)) continue;
            for (Group& other : w.groups)
                if (other.wait == Wait::WARP_MASK && (other.mask & all)) other.wait = Wait::RUNS, other.pc++;
            any = true;
        }
    }
    if (any) merge_groups(w), w.current = 0;
    return any;
}

inline void vote_results(NamedBarrier& n) {
    n.generation++;
    n.arrived = 0;
    n.expected = 0;
    n.result_all = n.votes_all, n.result_any = n.votes_any, n.result_count = n.votes_count;
    n.votes_all = 1, n.votes_any = 0, n.votes_count = 0;
}

inline void check_barriers(Block& b) {
    for (NamedBarrier& n : b.named) {
        if (!n.arrived) continue;
        u32 all = n.expected ? n.expected : b.live_threads;
        if (n.arrived >= all) {
            if (n.arrived > all && n.expected) fail("%llu threads at a barrier of %llu", n.arrived, all);
            vote_results(n);
        }
    }
}

inline bool release_from_barriers(Warp& w) {
    bool any = false;
    for (Group& g : w.groups)
        if (g.wait == Wait::BLOCK_BARRIER && w.block->named[g.barrier].generation != g.generation) {
            g.wait = Wait::RUNS;
            g.pc++;
            const NamedBarrier& n = w.block->named[g.barrier];
            w.barrier_result = g.collected == 2 ? n.result_count : g.collected == 3 ? n.result_all : n.result_any;
            any = true;
        }
    if (any) merge_groups(w), w.current = 0;
    return any;
}

// Splits the threads in `mask` off the group at hand; they go to `pc`.
inline void leave_group(Warp& w, u32 mask, u32 pc) {
    Group& g = w.groups[w.current];
    if (g.mask == mask) {
        g.pc = pc;
        return;
    }
    g.mask &= ~mask;
    Group other = g;
    other.mask = mask;
    other.pc = pc;
    w.groups.push_back(other);
}

// Some threads go to `there`, the others on. Which run first is drawn in adversarial time.
inline void branch(Warp& w, u32 taken, u32 there) {
    Group& g = w.groups[w.current];
    u32 all = g.mask, falls = all & ~taken, next = g.pc + 1;
    if (!taken || !falls) {
        g.pc = taken ? there : next;
        return;
    }
    g.mask = falls;
    g.pc = next;
    Group other = g;
    other.mask = taken;
    other.pc = there;
    w.groups.push_back(other);
    const Machine& m = *w.block->machine;
    if (m.launch->adversarial && w.block->machine->draw() & 1) w.current = int(w.groups.size()) - 1;
}

inline void finish_threads(Warp& w, u32 mask) {
    Group& g = w.groups[w.current];
    w.live &= ~mask;
    w.block->live_threads -= u32(__builtin_popcount(mask));
    g.mask &= ~mask;
    if (g.mask)
        g.pc++;
    else
        w.groups.erase(w.groups.begin() + w.current);
    w.current = 0;
    if (!w.live) {
        w.done = true;
        while (!w.open_copies.empty() || !w.copy_groups.empty()) {
            if (!w.open_copies.empty()) end_copy_group(w);
            wait_copy_groups(w, 0);
        }
    }
    settle(w);
    check_barriers(*w.block);
}

// Waits at a convergence barrier; threads that know different partners wait apart.
inline void converge(Warp& w, int barrier) {
    Group& here = w.groups[w.current];
    u32 left = here.mask;
    Group base = here;
    bool first = true;
    while (left) {
        u32 value = w.b[barrier][first_lane(left)];
        u32 same = lanes_where([&](int l) { return lane_on(left, l) && w.b[barrier][l] == value; });
        Group g = base;
        g.mask = same;
        g.wait = Wait::CONVERGENCE;
        g.barrier = u8(barrier);
        if (first)
            w.groups[w.current] = g;
        else
            w.groups.push_back(g);
        first = false;
        left &= ~same;
    }
    settle(w);
}

inline void bssy(Warp& w, int barrier) {
    for (int l = 0; l < LANES; l++)
        if (lane_on(w.active, l)) w.b[barrier][l] = w.active;
}

inline void break_(Warp& w, int barrier) {
    for (int l = 0; l < LANES; l++) w.b[barrier][l] &= ~w.active;
}

inline void warp_sync(Warp& w, u32 mask) {
    Group& g = w.groups[w.current];
    g.wait = Wait::WARP_MASK;
    g.collected = mask;
    settle(w);
}

// BAR: mod[0] 0 sync, 1 arrive, 2 count, 3 and, 4 or.
inline void bar(Warp& w, const Instruction& i) {
    u32 s[LANES];
    u32 number = i.o[A].kind == K_NONE ? 0 : raw(w, i.o[A], s)[first_lane(w.active)];
    if (number > 15) fail("barrier %llu: there are 16", number);
    NamedBarrier& n = w.block->named[number];
    u32 threads = i.o[B].kind == K_NONE ? 0 : raw(w, i.o[B], s)[first_lane(w.active)];
    if (n.arrived && n.expected != threads)
        fail("barrier %llu: %llu threads are expected, before it were %llu", number, threads, n.expected);
    n.expected = threads;
    u32 whole = w.active == (w.live & w.exists) && threads;
    n.arrived += whole ? LANES : u32(__builtin_popcount(w.active));
    if (i.mod[0] >= 2) {
        u32 p = predicate(w, i.o[IN0]) & w.active;
        n.votes_count += u32(__builtin_popcount(p));
        n.votes_all &= p == w.active;
        n.votes_any |= p != 0;
    }
    Group& g = w.groups[w.current];
    if (i.mod[0] == 1) {
        g.pc++;
        check_barriers(*w.block);
        return;
    }
    g.wait = Wait::BLOCK_BARRIER;
    g.barrier = u8(number);
    g.generation = n.generation;
    g.collected = i.mod[0];
    check_barriers(*w.block);
}

enum Special {
    SR_TID_X, SR_TID_Y, SR_TID_Z, SR_CTAID_X, SR_CTAID_Y, SR_CTAID_Z, SR_LANEID, SR_WARPID,
    SR_CLOCKLO, SR_CLOCKHI, SR_EQMASK, SR_LTMASK, SR_LEMASK, SR_GTMASK, SR_GEMASK, SR_ZERO,
    SR_CGA_CTAID, SR_SWINHI, SR_NCTAID_X, SR_NCTAID_Y, SR_NCTAID_Z, SR_NTID_X, SR_NTID_Y, SR_NTID_Z,
    SR_TIMERLO, SR_TIMERHI, SR_SMID, SR_TID, SR_CGASIZE,
};

inline u32 special_register(const Warp& w, int which, int lane) {
    const LaunchArguments& l = *w.block->machine->launch;
    u32 t = u32(w.number * LANES + lane);
    u32 x = t % l.block[0], y = t / l.block[0] % l.block[1], z = t / (l.block[0] * l.block[1]);
    switch (which) {
        case SR_TID_X: return x;
        case SR_TID_Y: return y;
        case SR_TID_Z: return z;
        case SR_CTAID_X: case SR_CTAID_Y: case SR_CTAID_Z: return w.block->id[which - SR_CTAID_X];
        case SR_LANEID: return u32(lane);
        case SR_WARPID: return u32(w.number);
        case SR_CLOCKLO: case SR_TIMERLO: return u32(w.steps);
        case SR_CLOCKHI: case SR_TIMERHI: return u32(w.steps >> 32);
        case SR_EQMASK: return 1u << lane;
        case SR_LTMASK: return (1u << lane) - 1;
        case SR_LEMASK: return ((1u << lane) - 1) | 1u << lane;
        case SR_GTMASK: return ~(((1u << lane) - 1) | 1u << lane);
        case SR_GEMASK: return ~((1u << lane) - 1);
        case SR_NCTAID_X: case SR_NCTAID_Y: case SR_NCTAID_Z: return l.grid[which - SR_NCTAID_X];
        case SR_NTID_X: case SR_NTID_Y: case SR_NTID_Z: return l.block[which - SR_NTID_X];
        case SR_SWINHI: return u32(SHARED_WINDOW >> 32);
        case SR_SMID: return u32(w.block->number % 132);
        case SR_TID: return x | y << 16 | z << 26;
        default: return 0;
    }
}

// S2R, S2UR, CS2R: mod[0] 64 bits.
inline void read_special(Warp& w, const Instruction& i) {
    u32 out[LANES], high[LANES];
    int which = int(i.o[A].value);
    bool timer = which == SR_CLOCKLO || which == SR_TIMERLO;
    for (int l = 0; l < LANES; l++) {
        out[l] = special_register(w, which, l);
        high[l] = timer ? u32(w.steps >> 32) : 0;
    }
    put(w, i.o[DST], out);
    if (i.mod[0]) put(w, i.o[DST], high, 1);
}
