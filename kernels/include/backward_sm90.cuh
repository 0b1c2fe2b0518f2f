// What the kernels of the Hopper backward agree on: how dQ lies in memory while it is added up.
//
// Tile after tile in fp32, and in a tile the two consumer warpgroups' parts, each in the order of
// its accumulator: register 4 c + e of thread t at float (c * 128 + t) * 4 + e. A part is 64 x 64 of
// dQ (the left or right half of 64 rows of 128, the upper or lower half of 128 rows of 64) or, with
// 80 rows of 128, 64 x 80 of dQ^T.
#pragma once

#include "device_sm90.cuh"

static_assert((HEAD_DIM == 64 && BLOCK_M == 128) ||
              (HEAD_DIM == 128 && (BLOCK_M == 64 || BLOCK_M == 80)), "tile");
constexpr int CONSUMERS = 2;
constexpr int WARPGROUP = 128;
constexpr bool DQ_TRANSPOSED = BLOCK_M == 80;
constexpr int DQ_COLUMNS = DQ_TRANSPOSED ? BLOCK_M : 64;
constexpr int DQ_FLOATS = 64 * DQ_COLUMNS;    // a warpgroup's part
constexpr int DQ_REGISTERS = DQ_COLUMNS / 2;  // a thread
constexpr int TILE_FLOATS = CONSUMERS * DQ_FLOATS;
