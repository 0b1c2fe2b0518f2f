// Packed sequences: all tokens one after another, and two tables that say where each sequence
// starts.
//
// Sequence s has the queries cu_seqlens_q[s] … cu_seqlens_q[s + 1] - 1 and the keys between the same
// entries of cu_seqlens_k. A block works on a tile of one sequence: it adds the sequence's first row
// where it addresses memory and takes its lengths for seqlen_q and seqlen_k, and all else is as if the
// sequence were alone (the views have stride_b 0, so that `batch` can number the sequences). To move
// the views instead would take them out of constant memory, two registers each.
//
// The grid is that of as many sequences of the longest length; blocks of shorter ones that have no
// rows read two entries and leave. A list of the tiles that exist would save their start, but it
// would be made on the host and copied to the device for each pass and each set of lengths, and its
// entry be read by every block that has work.
#pragma once

#include "device.cuh"

#ifndef PACKED
#define PACKED 0  // 1: the arguments cu_seqlens_q, cu_seqlens_k; seqlen_q, seqlen_k are the longest
#endif

constexpr int PACKED_BYTES = PACKED ? 16 : 0;  // of shared memory

#if PACKED
// First row and rows of a sequence, on the side that the block has a tile of and on the other.
struct Sequence {
    int own0, own, other0, other;
};

// One thread reads for all: two entries of `own_table` and, if the tile at `row0` has rows, two of
// `other_table`; else the other side is left out. All threads of the block call it together; `words`
// is shared memory that holds nothing else.
__device__ __forceinline__ Sequence sequence_of(const int* own_table, const int* other_table,
                                                int sequence, int row0, uint32* words) {
    if (threadIdx.x == 0) {
        const int own0 = ld_global(own_table + sequence);
        const int own = ld_global(own_table + sequence + 1) - own0;
        st_shared(words, uint32(own0));
        st_shared(words + 1, uint32(own));
        if (row0 < own) {
            const int other0 = ld_global(other_table + sequence);
            st_shared(words + 2, uint32(other0));
            st_shared(words + 3, uint32(ld_global(other_table + sequence + 1) - other0));
        }
    }
    block_sync();
    Sequence found{int(ld_shared(words)), int(ld_shared(words + 1)), 0, 0};
    if (row0 < found.own) {
        found.other0 = int(ld_shared(words + 2));
        found.other = int(ld_shared(words + 3));
    }
    return found;
}
#endif
