// Packed sequences on Hopper: all tokens one after another, and two tables that say where each
// sequence starts (packed.cuh, the sm_80 form).
//
// Tiles of all sequences are numbered: those of sequence s from cu_seqlens[s] / BLOCK + s up to where
// the next one's begin, at least as many as it has tiles of BLOCK rows and at most one more. So a grid
// follows from the total alone, and whoever has a number searches the table for its sequence. In the
// sm_80 form's grid, that of as many sequences of the longest, most numbers may have no rows.
//
// Boxes of TMA must end with the sequence: rows of the next one must not be overwritten, and must not
// be read, as 0 times what they hold need not be 0. A tensor map clips at the end of a dimension and
// nowhere else. So the map has L rows, L those of the longest sequence, and row i of a sequence of n
// is its row L - n + i: a box ends where the rows do. Two things make good that this row is row
// end - n + i of the tensor, `end` where the sequence ends there: the map begins L rows before the
// tensor, and along its items, of which there is one, it takes a step of a row, so that item `end`
// lies `end` rows further (kernels.launch.TensorMap).
#pragma once

#include "tile.cuh"

#ifndef PACKED
#define PACKED 0  // 1: the arguments cu_seqlens_q, cu_seqlens_k; seqlen_q, seqlen_k are the longest
#endif

constexpr int SEQUENCE_BYTES = 32;  // of shared memory, by which a block's threads share a tile

#if PACKED
// A tile of a sequence: which one of it; first row and rows of the sequence, on the side that has the
// tile and on the other.
struct SequenceTile {
    int tile, own0, own, other0, other;
};

// The tile with a number, by one thread; it has no rows where the sequence ends before it. A step of
// the search takes the quarter that it is in: three reads that do not wait for each other.
template <int BLOCK>
__device__ __forceinline__ SequenceTile sequence_tile(const int* own_table, const int* other_table,
                                                      int sequences, int number) {
    int at = 0, end = sequences;
    while (end - at > 1) {
        const int quarter = ceil_div(end - at, 4), first = at;
#pragma unroll
        for (int i = 1; i < 4; ++i) {
            const int from = first + i * quarter;
            if (from < end && ld_global(own_table + from) / BLOCK + from <= number) at = from;
        }
        end = min_int(at + quarter, end);
    }
    const int own0 = ld_global(own_table + at), other0 = ld_global(other_table + at);
    return {number - own0 / BLOCK - at, own0, ld_global(own_table + at + 1) - own0, other0,
            ld_global(other_table + at + 1) - other0};
}

// What block_sequence_tile found, once more.
__device__ __forceinline__ SequenceTile sequence_tile_again(const unsigned char* memory) {
    const int* const words = reinterpret_cast<const int*>(memory);
    return {ld_shared(words), ld_shared(words + 1), ld_shared(words + 2), ld_shared(words + 3),
            ld_shared(words + 4)};
}

// The same for all threads of a block, who call it together; `memory` is shared memory that holds
// nothing else.
template <int BLOCK>
__device__ __forceinline__ SequenceTile block_sequence_tile(const int* own_table,
                                                            const int* other_table, int sequences,
                                                            int number, unsigned char* memory) {
    int* const words = reinterpret_cast<int*>(memory);
    if (threadIdx.x == 0) {
        const SequenceTile found = sequence_tile<BLOCK>(own_table, other_table, sequences, number);
        st_shared(words, found.tile);
        st_shared(words + 1, found.own0);
        st_shared(words + 2, found.own);
        st_shared(words + 3, found.other0);
        st_shared(words + 4, found.other);
    }
    block_sync();
    return sequence_tile_again(memory);
}
#endif
