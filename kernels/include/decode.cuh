// Decoding: which keys of a sequence a split works on; for the kernel that does and the one that
// adds the splits up.
#pragma once

#include "device.cuh"

// The key tiles of a split: whole tiles, as even as they come.
template <int BLOCK_N_>
struct Span {
    int first, end;
    __device__ __forceinline__ Span(int keys, int split, int splits) {
        const int64 tiles = ceil_div(keys, BLOCK_N_);
        first = int(tiles * split / splits);
        end = int(tiles * (split + 1) / splits);
    }
};
