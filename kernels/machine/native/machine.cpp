// Runs machine code: every warp of every block, instruction by instruction.
//
// Decoding happens in Python (../decode.py); here is what each decoded instruction does.
#include <thread>

#include "control.hpp"
#include "hopper.hpp"
#include "matrices.hpp"
#include "products.hpp"

#define OPERATIONS(X)                                                                             \
    X(NOP) X(IADD3) X(IMAD) X(LEA) X(SHF) X(LOP3) X(PLOP3) X(PRMT) X(SEL) X(MOV) X(IMNMX) X(IABS) \
    X(ISETP) X(POPC) X(FLO) X(BREV) X(BMSK) X(SGXT) X(P2R) X(R2P) X(IDP) X(VOTE) X(SHFL) X(MATCH) \
    X(REDUX) X(R2UR) X(ELECT) X(FADD) X(FMUL) X(FFMA) X(FMNMX) X(FSETP) X(FSET) X(FCHK) X(DADD)   \
    X(DMUL) X(DFMA) X(DSETP) X(MUFU) X(F2F) X(FRND) X(F2I) X(I2F) X(HADD2) X(HMUL2) X(HFMA2)      \
    X(HMNMX2) X(HSETP2) X(HSET2) X(F2FP) X(LDG) X(STG) X(LDS) X(STS) X(LDL) X(STL) X(LD) X(ST)    \
    X(LDC) X(LDGSTS) X(LDGDEPBAR) X(DEPBAR) X(ATOMG) X(ATOM) X(ATOMS) X(LDSM) X(STSM) X(MOVM)     \
    X(HMMA) X(BRA) X(BRX) X(CALL) X(RET) X(EXIT) X(BSSY) X(BSYNC) X(BREAK) X(WARPSYNC) X(BAR)     \
    X(B2R) X(S2R) X(BRA_DIV) X(BRA_ANY) X(KILL) X(BMOV_TO) X(BMOV_FROM) X(LEPC) X(YIELD) X(VABSDIFF) \
    X(SYNCS) X(UTMALDG) X(UTMASTG) X(UBLKCP) X(UTMACMDFLUSH) X(HGMMA) X(WARPGROUP) X(FENCE_ASYNC) \
    X(SETMAXREG) X(PREEXIT) X(ARRIVES)

enum Operation {
#define AS_ENUM(name) OP_##name,
    OPERATIONS(AS_ENUM) OP_COUNT
};

static const char* const NAMES[] = {
#define AS_TEXT(name) #name,
    OPERATIONS(AS_TEXT)
};

enum class After { NEXT, MOVED, ENDS_SLICE, LATER };

static u32 index_of_address(const LaunchArguments& l, u64 address) {
    u64 index = address / 16;
    if (address % 16 || index >= u64(l.code_count)) fail("a jump to 0x%llx, outside of the code", address);
    return u32(index);
}

// A jump to an address in a register pair, each thread its own.
static After jump_by_register(Warp& w, const Instruction& i) {
    u64 at[LANES];
    const Operand& o = i.o[A];
    for (int l = 0; l < LANES; l++) {
        i64 offset = o.kind == K_REGISTER ? i64(i32(w.r[o.reg][l])) : o.kind == K_UNIFORM ? i64(i32(w.u[o.reg])) : 0;
        at[l] = i.mod[0] ? u64(offset + i.o[B].value) + i.address + 16 : u64(u32(offset)) + u64(i.o[B].value);
    }
    if (w.active != w.group_mask)
        leave_group(w, w.group_mask & ~w.active, w.groups[w.current].pc + 1);
    u32 left = w.active;
    const LaunchArguments& launch = *w.block->machine->launch;
    while (left) {
        u64 there = at[first_lane(left)];
        u32 same = lanes_where([&](int l) { return lane_on(left, l) && at[l] == there; });
        leave_group(w, same, index_of_address(launch, there));
        left &= ~same;  // the rest is still at the jump
    }
    return After::MOVED;
}

// Whether a wait lets all others go first: what it waits for shall arrive as late as it may.
static bool postponed(Warp& w) {
    Machine& m = *w.block->machine;
    if (!m.launch->adversarial || w.postponed) {
        w.postponed = false;
        return false;
    }
    w.postponed = m.draw() % 4 != 0;
    return w.postponed;
}

static After step(Warp& w, const Instruction& i) {
    switch (Operation(i.op)) {
        case OP_NOP: case OP_PREEXIT: return After::NEXT;
        case OP_FENCE_ASYNC: fence_async(w); break;
        case OP_SETMAXREG: put_predicate(w, i.o[OUT0], ALL_LANES); break;
        case OP_YIELD: return After::NEXT;
        case OP_IADD3: iadd3(w, i); break;
        case OP_IMAD: imad(w, i); break;
        case OP_LEA: lea(w, i); break;
        case OP_SHF: shf(w, i); break;
        case OP_LOP3: lop3(w, i); break;
        case OP_PLOP3: plop3(w, i); break;
        case OP_PRMT: prmt(w, i); break;
        case OP_SEL: select(w, i); break;
        case OP_MOV: mov(w, i); break;
        case OP_IMNMX: imnmx(w, i); break;
        case OP_IABS: iabs(w, i); break;
        case OP_VABSDIFF: vabsdiff(w, i); break;
        case OP_ISETP: isetp(w, i); break;
        case OP_POPC: popc(w, i); break;
        case OP_FLO: flo(w, i); break;
        case OP_BREV: brev(w, i); break;
        case OP_BMSK: bmsk(w, i); break;
        case OP_SGXT: sgxt(w, i); break;
        case OP_P2R: p2r(w, i); break;
        case OP_R2P: r2p(w, i); break;
        case OP_IDP: idp(w, i); break;
        case OP_VOTE: vote(w, i); break;
        case OP_SHFL: shfl(w, i); break;
        case OP_MATCH: match(w, i); break;
        case OP_REDUX: redux(w, i); break;
        case OP_R2UR: r2ur(w, i); break;
        case OP_ELECT: elect(w, i); break;
        case OP_FADD: fadd(w, i); break;
        case OP_FMUL: fmul(w, i); break;
        case OP_FFMA: ffma(w, i); break;
        case OP_FMNMX: fmnmx(w, i); break;
        case OP_FSETP: fsetp(w, i, false); break;
        case OP_FSET: fsetp(w, i, true); break;
        case OP_FCHK: fchk(w, i); break;
        case OP_DADD: double_operation(w, i, 0); break;
        case OP_DMUL: double_operation(w, i, 1); break;
        case OP_DFMA: double_operation(w, i, 2); break;
        case OP_DSETP: dsetp(w, i); break;
        case OP_MUFU: mufu(w, i); break;
        case OP_F2F: f2f(w, i, false); break;
        case OP_FRND: f2f(w, i, true); break;
        case OP_F2I: f2i(w, i); break;
        case OP_I2F: i2f(w, i); break;
        case OP_HADD2: half_operation(w, i, 0); break;
        case OP_HMUL2: half_operation(w, i, 1); break;
        case OP_HFMA2: half_operation(w, i, 2); break;
        case OP_HMNMX2: half_extreme(w, i); break;
        case OP_HSETP2: half_compare(w, i, false); break;
        case OP_HSET2: half_compare(w, i, true); break;
        case OP_F2FP: f2fp(w, i); break;
        case OP_LDG: load(w, i, GLOBAL); break;
        case OP_STG: store(w, i, GLOBAL); break;
        case OP_LDS: load(w, i, SHARED); break;
        case OP_STS: store(w, i, SHARED); break;
        case OP_LDL: load(w, i, LOCAL); break;
        case OP_STL: store(w, i, LOCAL); break;
        case OP_LD: load(w, i, GENERIC); break;
        case OP_ST: store(w, i, GENERIC); break;
        case OP_LDC: load_constant(w, i); break;
        case OP_LDGSTS: ldgsts(w, i); break;
        case OP_LDGDEPBAR: end_copy_group(w); break;
        case OP_DEPBAR:
            if (postponed(w)) return After::LATER;
            wait_copy_groups(w, size_t(i.mod[0]));
            wait_bulk_groups(w, size_t(i.mod[0]));
            break;
        case OP_ATOMG: atomic(w, i, GLOBAL); break;
        case OP_ATOM: atomic(w, i, GENERIC); break;
        case OP_ATOMS: atomic(w, i, SHARED); break;
        case OP_LDSM: ldsm(w, i); break;
        case OP_STSM: stsm(w, i); break;
        case OP_MOVM: movm(w, i); break;
        case OP_HMMA: hmma(w, i); break;
        case OP_S2R: read_special(w, i); break;
        case OP_BSSY: bssy(w, i.o[A].reg); break;
        case OP_BREAK:
            break_(w, i.o[A].reg);
            w.groups[w.current].pc++;
            settle(w);
            return After::MOVED;
        case OP_BMOV_TO: {  // a register into a convergence barrier
            u32 s[LANES];
            const u32* a = raw(w, i.o[A], s);
            for (int l = 0; l < LANES; l++)
                if (lane_on(w.active, l)) w.b[i.o[B].reg][l] = a[l];
            break;
        }
        case OP_BMOV_FROM: {
            put(w, i.o[DST], w.b[i.o[B].reg]);
            if (i.mod[0])
                for (int l = 0; l < LANES; l++)
                    if (lane_on(w.active, l)) w.b[i.o[B].reg][l] = 0;
            break;
        }
        case OP_B2R: {
            u32 out[LANES];
            for (u32& x : out) x = w.barrier_result;
            put(w, i.o[DST], out);
            put_predicate(w, i.o[OUT0], w.barrier_result ? ALL_LANES : 0);
            break;
        }
        case OP_LEPC: {
            u64 out[LANES];
            for (u64& x : out) x = i.address + 16;
            put_wide(w, i.o[DST], out);
            break;
        }
        case OP_BRA: {
            u32 taken = w.active;
            if (i.o[IN0].kind != K_NONE) taken &= predicate(w, i.o[IN0]);
            branch(w, taken, u32(i.target));
            return After::MOVED;
        }
        case OP_BRA_DIV: {  // mod[0] 0: if the warp has diverged, 1: if it has not
            bool diverged = (w.groups[w.current].mask != w.live);
            branch(w, diverged != bool(i.mod[0]) ? w.active : 0, u32(i.target));
            return After::MOVED;
        }
        case OP_BRA_ANY: {  // mod[0] 0 any, 1 all, 2: a uniform branch
            u32 p = w.active;
            bool taken = i.mod[0] == 0 ? p != 0 : p == w.group_mask;
            branch(w, taken ? w.group_mask : 0, u32(i.target));
            return After::MOVED;
        }
        case OP_BRX: return jump_by_register(w, i);
        case OP_RET: return jump_by_register(w, i);
        case OP_CALL: {
            branch(w, w.active, u32(i.target));
            return After::MOVED;
        }
        case OP_EXIT: finish_threads(w, w.active); return After::MOVED;
        case OP_KILL: fail("the kernel stopped itself (a trap or a failed assertion)");
        case OP_BSYNC: {
            if (w.active != w.group_mask) leave_group(w, w.group_mask & ~w.active, w.groups[w.current].pc + 1);
            converge(w, i.o[A].reg);
            return After::MOVED;
        }
        case OP_WARPSYNC: {
            u32 s[LANES];
            u32 mask = i.mod[0] ? ALL_LANES : raw(w, i.o[A], s)[first_lane(w.active)];
            if (w.active != w.group_mask) leave_group(w, w.group_mask & ~w.active, w.groups[w.current].pc + 1);
            warp_sync(w, mask);
            return After::MOVED;
        }
        case OP_BAR: {
            if (w.active != w.group_mask) leave_group(w, w.group_mask & ~w.active, w.groups[w.current].pc + 1);
            bar(w, i);
            return After::ENDS_SLICE;
        }
        case OP_SYNCS: return syncs(w, i) ? After::NEXT : After::ENDS_SLICE;
        case OP_UTMALDG: utmaldg(w, i); break;
        case OP_UTMASTG: utmastg(w, i); break;
        case OP_UBLKCP: ublkcp(w, i); break;
        case OP_UTMACMDFLUSH: end_bulk_group(w); break;
        case OP_ARRIVES: arrives(w, i); break;
        case OP_HGMMA: hgmma(w, i); break;
        case OP_WARPGROUP:
            if (i.mod[0] == 1 && postponed(w)) return After::LATER;
            warpgroup(w, i);
            break;
        default: fail("an operation without a meaning");
    }
    return After::NEXT;
}

#include "schedule.hpp"

extern "C" {

__attribute__((visibility("default"))) int machine_operation_count() { return OP_COUNT; }

__attribute__((visibility("default"))) const char* machine_operation(int k) { return NAMES[k]; }

__attribute__((visibility("default"))) int machine_sizes(int k) {
    const int sizes[] = {int(sizeof(Instruction)), int(sizeof(Range)), int(sizeof(LaunchArguments)), int(sizeof(Failure))};
    return sizes[k];
}

// 0: all blocks ran; 1: a fault, described in failure; 2: stopped from outside.
__attribute__((visibility("default"))) int machine_launch(LaunchArguments* l, Failure* failure) {
    std::atomic<i64> next{0};
    std::atomic<int> failed{0};
    int workers = l->workers < 1 ? 1 : l->workers;
    std::vector<Machine> machines(static_cast<size_t>(workers));
    std::vector<std::thread> threads;
    for (int k = 1; k < workers; k++)
        threads.emplace_back(run_worker, l, &next, &failed, failure, k, std::ref(machines[size_t(k)]));
    run_worker(l, &next, &failed, failure, 0, machines[0]);
    for (std::thread& t : threads) t.join();
    for (const Machine& m : machines) {
        for (size_t k = 0; k < m.tallies.size(); k++) {
            l->tallies[k].requests += m.tallies[k].requests;
            l->tallies[k].sectors += m.tallies[k].sectors;
            l->tallies[k].misses += m.tallies[k].misses;
            l->tallies[k].bytes += m.tallies[k].bytes;
        }
        for (size_t k = 0; k < m.executed.size(); k++) l->executed[k] += m.executed[k], l->lanes[k] += m.lanes[k];
        for (int k = 0; k < 6; k++) l->shared[k] += m.shared_counts[k];
    }
    return failed.load() ? 1 : l->stop->load() ? 2 : 0;
}
}
