// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11),
// a counter-based generator, and the dropout mask made of it.
//
// Whether a weight is dropped depends on (seed, batch, head, row, column) alone: not on tiles, not
// on the kernel that asks. The backward pass recomputes the mask instead of loading it.
//
// One call gives four 32-bit words. They decide the four weights (r, c), (r, c + 8), (r + 8, c),
// (r + 8, c + 8) of a 16 x 16 block with r, c < 8, because one thread owns exactly such fours both
// in the scores of the forward pass and in their transpose in the backward pass.
//   counter = (8 (column / 16) + column % 8, 8 (row / 16) + row % 8, head, batch)
//   key     = (seed, seed >> 32)
//   word    = 2 (row / 8 % 2) + column / 8 % 2
// A weight is kept when its word is >= floor(p 2^32). kernels/philox.py is the same in NumPy.
#pragma once

#include "device.cuh"

struct PhiloxWords {
    uint32 w[4];
};

__device__ __forceinline__ PhiloxWords philox_4x32_10(uint32 c0, uint32 c1, uint32 c2, uint32 c3,
                                                      uint32 k0, uint32 k1) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64 p0 = static_cast<uint64>(0xD2511F53u) * c0;
        const uint64 p1 = static_cast<uint64>(0xCD9E8D57u) * c2;
        c0 = static_cast<uint32>(p1 >> 32) ^ c1 ^ k0;
        c2 = static_cast<uint32>(p0 >> 32) ^ c3 ^ k1;
        c1 = static_cast<uint32>(p1);
        c3 = static_cast<uint32>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

struct Dropout {
    uint64 seed;
    uint32 threshold;   // floor(p 2^32)
    float keep_scale;   // 1 / (1 - p); 0 when p = 1
    uint32 batch, head;

    // The words of the four weights that share row % 8 and column % 8 in the 16 x 16 block.
    __device__ __forceinline__ PhiloxWords words(int row, int column) const {
        return philox_4x32_10((column >> 4) * 8 + (column & 7), (row >> 4) * 8 + (row & 7), head,
                              batch, static_cast<uint32>(seed), static_cast<uint32>(seed >> 32));
    }
};
