// What a launch, a block and a warp consist of, and what an instruction looks like after decoding.
//
// The layouts of Operand, Instruction, Range, Tally and LaunchArguments are shared with
// ../native.py, which fills them.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <unordered_set>
#include <vector>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int LANES = 32;
constexpr u32 ALL_LANES = 0xffffffffu;
constexpr int ZERO_REGISTER = 255;

enum Kind : u8 {
    K_NONE, K_REGISTER, K_UNIFORM, K_IMMEDIATE, K_CONSTANT, K_PREDICATE, K_UNIFORM_PREDICATE,
    K_MEMORY, K_LABEL, K_SPECIAL, K_BARRIER, K_DESCRIPTOR,
};
enum Flag : u8 { F_NEGATED = 1, F_ABSOLUTE = 2, F_INVERTED = 4, F_NOT = 8 };
// Operand::part of a register: which half or byte is meant.
enum Part : u8 { P_ALL, P_H0_H0, P_H1_H1, P_B0, P_B1, P_B2, P_B3, P_H0, P_H1, P_H0_NH1 };
// Operand::part of an address: how wide its register is.
enum Width : u8 { A_32, A_64, A_U32 };

struct Operand {
    u8 kind, reg, flags, part;
    u8 ureg, bank, scale, wide;
    i64 value;
};

// Where the operands of an instruction lie after decoding, whatever their order in its text.
enum Slot { DST, OUT0, OUT1, A, B, C, IN0, IN1, MEM, EXTRA, SLOTS };

struct Instruction {
    u16 op;
    u8 guard;        // number of the predicate, 7: none
    u8 guard_flags;  // 1: negated, 2: uniform
    u32 address;
    i32 target;  // index of the instruction behind a label, -1: none
    u32 index;
    u8 mod[8];
    Operand o[SLOTS];
};

struct Range {  // of global memory
    u64 begin, end;
    u8* host;
    i32 argument;
    i32 slot;  // of the tallies; -1: in none
    i32 writable;
};

enum Direction { READ, WRITE, ATOMIC, DIRECTIONS };

struct Tally {  // per array among the arguments and direction
    u64 requests, sectors, bytes, misses;
};

struct LaunchArguments {
    const Instruction* code;
    i64 code_count;
    u8* banks[8];
    i64 bank_bytes[8];
    const Range* ranges;
    i64 range_count;
    Tally* tallies;  // [slots][DIRECTIONS]; the last is local memory
    i64 slot_count;
    u64* executed;  // [code_count] warps
    u64* lanes;     // [code_count] threads
    u64* shared;    // loads, wavefronts, ideal; stores, wavefronts, ideal
    u32 grid[3], block[3];
    i64 first_block, block_count;  // in launch order
    i64 shared_bytes;  // static and dynamic
    u32 shared_base, architecture;
    i64 local_bytes;
    i32 workers, resident;
    i32 exact_products, mufu, adversarial;
    u64 seed;
    u64 step_limit;  // of a warp
    std::atomic<int>* stop;
    const i64* chosen;  // block numbers, or null: all from first_block on
    i64 dynamic_shared;
    u64 map_base;  // generic address of the constant bank's arguments
};

struct Failure {
    char text[512];
    i64 block, warp, address;
};

struct Fault {
    std::string text;
};

[[noreturn]] inline void fail(const char* format, unsigned long long a = 0,
                              unsigned long long b = 0, unsigned long long c = 0) {
    char text[256];
    snprintf(text, sizeof text, format, a, b, c);
    throw Fault{text};
}

enum class Wait : u8 { RUNS, CONVERGENCE, WARP_MASK, BLOCK_BARRIER, RETRY };

struct Group {  // threads of a warp that are at the same instruction
    u32 mask;
    u32 pc;
    Wait wait;
    u8 barrier;
    u32 collected;  // mask of a WARPSYNC, or what a BAR asks for
    u64 generation;
};

struct Factor {  // value = significand * 2^(exponent - 10), the significand as an integer
    i32 significand, exponent;
};

struct Values {  // a row or column of a product's operand
    Factor factors[32];
    float plain[32];
    bool special;
};

struct Block;

struct BulkStore {  // from shared to global memory, by TMA
    u8 kind;        // BOX_OUT, BOX_ADD with a map; 3 copy, 4 add of a row of bytes
    u32 shared, bytes;
    u64 to;
    i32 at[5];
};

struct Product {  // a wgmma on its way, of one warp
    const Instruction* i;
    u32 u[4];  // the descriptors
    bool scaled;
    bool ends_group;
};

struct AsyncCopy {  // a cp.async that has not arrived yet
    u32 to, bytes, valid;
    u64 from;
};

struct Warp {
    u32 r[256][LANES];
    u32 u[64];
    u32 p[8];
    u8 up[8];
    u32 b[16][LANES];  // convergence barriers, as each thread knows them
    u32 exists, live;
    std::vector<Group> groups;
    int current = 0;
    int number = 0;
    u64 steps = 0;
    bool done = false;
    bool progressed = false;
    bool postponed = false;
    i64 tried = -1;  // the wait that failed last, an instruction's index
    u32 active = 0;  // threads of the instruction at hand
    u32 group_mask = 0;
    std::vector<u8> local;
    std::vector<AsyncCopy> open_copies;
    std::deque<std::vector<AsyncCopy>> copy_groups;
    std::vector<BulkStore> open_stores;
    std::deque<std::vector<BulkStore>> store_groups;
    std::deque<Product> products;
    std::map<int, std::vector<u32>> accumulators;  // what the registers of products would hold
    int product_groups = 0;
    Block* block = nullptr;
    u32 barrier_result = 0;
};

struct NamedBarrier {
    u32 arrived = 0;
    u32 expected = 0;
    u64 generation = 0;
    u32 votes_all = 1, votes_any = 0, votes_count = 0;
    u32 result_all = 0, result_any = 0, result_count = 0;
};

struct Mbarrier {
    u32 count = 0;
    i64 pending = 0, bytes = 0;
    u32 phase = 0;  // completed phases
};

struct Machine;

struct TensorCopy;

struct Block {
    Machine* machine = nullptr;
    u64 number = 0;
    u32 id[3];
    std::vector<u8> shared;
    // In adversarial time, for each 16 bytes: the warp, plus one, that has written there by ordinary
    // stores and has had no proxy fence since; 0: none.
    std::vector<u8> unfenced;
    std::vector<Warp*> warps;
    NamedBarrier named[16];
    std::map<u32, Mbarrier> mbarriers;
    std::unordered_set<u64> cached;  // sectors that an L1 without an end would hold
    std::deque<TensorCopy> copies;
    u32 live_threads = 0;
    bool finished = false;
};

struct TensorCopy {  // of TMA, on its way
    u8 kind;         // 0: tile load, 1: bulk load
    u32 shared, mbarrier, bytes;
    u64 from;
    i32 at[5];
};

struct Machine {  // one per worker
    LaunchArguments* launch;
    std::vector<Tally> tallies;
    std::vector<u64> executed, lanes;
    u64 shared_counts[6] = {};
    const Range* last_range = nullptr;
    u64 random;
    std::vector<Values> a = std::vector<Values>(16), b = std::vector<Values>(256);  // of a product

    u64 draw() {  // xorshift64*
        random ^= random >> 12;
        random ^= random << 25;
        random ^= random >> 27;
        return random * 2685821657736338717ull;
    }
};
