// Which warp of which block runs next: slices in turn, or drawn in adversarial time. Included by
// machine.cpp behind step().
#pragma once

static bool choose_group(Warp& w) {
    if (w.current < int(w.groups.size()) && w.groups[w.current].wait == Wait::RUNS) return true;
    for (size_t k = 0; k < w.groups.size(); k++)
        if (w.groups[k].wait == Wait::RUNS) {
            w.current = int(k);
            return true;
        }
    return false;
}

// Runs a warp until it must wait or its slice is over. Whether it did anything.
static bool run_warp(Warp& w, u64 slice) {
    Machine& m = *w.block->machine;
    const LaunchArguments& l = *m.launch;
    release_from_barriers(w);
    bool any = false;
    u64 first = w.steps;
    i64 tried = w.tried;
    w.tried = -1;
    for (u64 k = 0; k < slice && !w.done; k++) {
        if (!choose_group(w)) break;
        Group& g = w.groups[w.current];
        if (g.pc >= u64(l.code_count)) fail("the end of the code without an EXIT");
        const Instruction& i = l.code[g.pc];
        w.group_mask = g.mask;
        u32 guard = ALL_LANES;
        if (i.guard != 7 || i.guard_flags) {
            guard = i.guard_flags & 2 ? (w.up[i.guard] ? ALL_LANES : 0) : w.p[i.guard];
            if (i.guard_flags & 1) guard = ~guard;
        }
        w.active = g.mask & guard;
        w.steps++;
        if (!w.active) {
            g.pc++;
            any = true;
            continue;
        }
        m.executed[i.index]++;
        m.lanes[i.index] += u32(__builtin_popcount(w.active));
        u32 before = g.pc;
        After after = step(w, i);
        if (after == After::LATER) {
            any = true;
            break;
        }
        if (after == After::NEXT) w.groups[w.current].pc = before + 1;
        if (after == After::ENDS_SLICE) {
            if (i.op == OP_SYNCS) {
                w.groups[w.current].pc = before + 1;
                // Once around the same wait and nothing else is no progress.
                if (tried == i64(before) && w.steps - first < 16) any = false;
                w.tried = before;
            } else {
                any = true;
            }
            release_from_barriers(w);
            // Another arm of a diverged warp may go on.
            if (w.groups.size() > 1) w.current = (w.current + 1) % int(w.groups.size());
            if (i.op == OP_SYNCS) break;
            continue;
        }
        any = true;
    }
    if (w.groups.size() > 1) w.current = (w.current + 1) % int(w.groups.size());
    if (w.steps > l.step_limit) fail("more than %llu instructions of a warp: no end in sight", l.step_limit);
    return any;
}

static Block* start_block(Machine& m, u64 number) {
    const LaunchArguments& l = *m.launch;
    Block* b = new Block;
    b->machine = &m;
    b->number = number;
    b->id[0] = u32(number % l.grid[0]);
    b->id[1] = u32(number / l.grid[0] % l.grid[1]);
    b->id[2] = u32(number / l.grid[0] / l.grid[1]);
    b->shared.assign(size_t(l.shared_base + l.shared_bytes), l.adversarial ? 0xff : 0);
    if (l.adversarial) b->unfenced.assign(b->shared.size() / 16 + 1, 0);
    u32 threads = l.block[0] * l.block[1] * l.block[2];
    b->live_threads = threads;
    for (u32 first = 0; first < threads; first += LANES) {
        Warp* w = new Warp;
        u32 here = threads - first < LANES ? threads - first : LANES;
        u32 fresh = l.adversarial ? 0xffffffffu : 0;
        for (auto& row : w->r)
            for (u32& x : row) x = fresh;
        memset(w->r[ZERO_REGISTER], 0, sizeof w->r[0]);
        for (u32& x : w->u) x = fresh;
        memset(w->p, 0, sizeof w->p);
        w->p[7] = ALL_LANES;
        memset(w->up, 0, sizeof w->up);
        w->up[7] = 1;
        memset(w->b, 0, sizeof w->b);
        w->exists = w->live = here == LANES ? ALL_LANES : (1u << here) - 1;
        w->groups.push_back(Group{w->live, 0, Wait::RUNS, 0, 0, 0});
        w->number = int(first / LANES);
        w->block = b;
        w->local.assign(size_t(l.local_bytes) * LANES, 0);
        b->warps.push_back(w);
    }
    return b;
}

static void end_block(Block* b) {
    for (Warp* w : b->warps) delete w;
    delete b;
}

struct Where {
    i64 block = -1, warp = -1, address = -1;
};

// Runs a block until it ends, cannot go on, or has used its turn. Whether it did anything.
static bool run_block(Block& b, u64 turn, Where& where) {
    Machine& m = *b.machine;
    const LaunchArguments& l = *m.launch;
    bool any_at_all = false;
    size_t count = b.warps.size();
    std::vector<size_t> order(count);
    for (size_t k = 0; k < count; k++) order[k] = k;
    for (u64 used = 0; used < turn;) {
        bool any = false, left = false;
        if (l.adversarial)
            for (size_t k = count; k > 1; k--) std::swap(order[k - 1], order[m.draw() % k]);
        for (size_t k : order) {
            Warp& w = *b.warps[k];
            if (w.done) continue;
            left = true;
            where.warp = w.number;
            u64 slice = l.adversarial ? 1 + m.draw() % 400 : 4000, before = w.steps;
            auto place = [&] {
                int g = w.current < int(w.groups.size()) ? w.current : 0;
                bool inside = !w.groups.empty() && w.groups[g].pc < u64(l.code_count);
                where.address = inside ? i64(l.code[w.groups[g].pc].address) : -1;
            };
            try {
                any |= run_warp(w, slice);
            } catch (Fault&) {
                place();
                throw;
            }
            place();
            used += w.steps - before;
        }
        if (l.stop->load()) return any_at_all;
        if (!left) {
            for (Warp* w : b.warps) {  // stores that nobody has waited for
                where.warp = w->number;
                end_bulk_group(*w);
                wait_bulk_groups(*w, 0);
            }
            b.finished = true;
            return true;
        }
        any_at_all |= any;
        if (!any) {
            if (b.copies.empty()) return any_at_all;
            size_t which = m.draw() % b.copies.size();
            TensorCopy copy = b.copies[which];
            b.copies.erase(b.copies.begin() + i64(which));
            deliver_copy(b, copy);
            any_at_all = true;
        }
    }
    return any_at_all;
}

static void run_worker(LaunchArguments* l, std::atomic<i64>* next, std::atomic<int>* failed,
                       Failure* failure, int worker, Machine& m) {
    m.launch = l;
    m.tallies.assign(size_t(l->slot_count) * DIRECTIONS, Tally{});
    m.executed.assign(size_t(l->code_count), 0);
    m.lanes.assign(size_t(l->code_count), 0);
    m.random = l->seed * 0x9e3779b97f4a7c15ull + u64(worker) + 1;
    std::vector<Block*> active;
    Where where;
    bool more = true;
    size_t turn = 0;
    constexpr u64 TURN = 1 << 20;
    bool want_new = true;
    u64 idle = 0;
    try {
        while ((more || !active.empty()) && !failed->load() && !l->stop->load()) {
            if (more && want_new && active.size() < size_t(l->resident)) {
                i64 k = next->fetch_add(1);
                if (k >= l->block_count) {
                    more = false;
                } else {
                    active.push_back(start_block(m, u64(l->chosen ? l->chosen[k] : l->first_block + k)));
                    turn = active.size() - 1;
                }
                want_new = false;
                if (active.empty()) continue;
            }
            if (active.empty()) {
                want_new = true;
                continue;
            }
            turn %= active.size();
            Block* b = active[turn];
            where.block = i64(b->number);
            bool did = run_block(*b, TURN, where);
            if (b->finished) {
                end_block(b);
                active.erase(active.begin() + i64(turn));
                want_new = active.empty();
                idle = 0;
                continue;
            }
            idle = did ? 0 : idle + 1;
            if (idle > active.size() && (!more || active.size() >= size_t(l->resident))) {
                std::string text = "waits for ever: nobody of the block can go on";
                throw Fault{text};
            }
            want_new = true;
            turn++;
        }
    } catch (Fault& fault) {
        if (!failed->exchange(1)) {
            snprintf(failure->text, sizeof failure->text, "%s", fault.text.c_str());
            failure->block = where.block;
            failure->warp = where.warp;
            failure->address = where.address;
        }
    }
    for (Block* b : active) end_block(b);
}
