// Which tiles a block visits, and in which order: 0, 1, 2, … with the causal mask cutting off the
// end (forward) or the beginning (backward), and a block mask leaving some out.
#pragma once

#include "tile.cuh"

// Key tiles that query tile i meets. Causal is aligned bottom-right: query r sees key c when
// c <= r + seqlen_k - seqlen_q, so the last real row of the tile sees the most keys.
template <int BLOCK_M_, int BLOCK_N_, bool CAUSAL_>
__device__ __forceinline__ int key_tiles_of(int i, int seqlen_q, int seqlen_k) {
    int keys = seqlen_k;
    if constexpr (CAUSAL_) {
        const int last_row = min_int((i + 1) * BLOCK_M_, seqlen_q) - 1;
        keys = min_int(max_int(last_row + seqlen_k - seqlen_q + 1, 0), seqlen_k);
    }
    return ceil_div(keys, BLOCK_N_);
}

// First query tile that meets key tile j; the tiles from there on meet it too. At least
// ceil(seqlen_q / BLOCK_M) when none does.
template <int BLOCK_M_, int BLOCK_N_, bool CAUSAL_>
__device__ __forceinline__ int first_query_tile_of(int j, int seqlen_q, int seqlen_k) {
    if constexpr (!CAUSAL_) return 0;
    const int first_row = max_int(j * BLOCK_N_ - (seqlen_k - seqlen_q), 0);
    return first_row < seqlen_q ? first_row / BLOCK_M_ : ceil_div(seqlen_q, BLOCK_M_);
}

// Walks the candidates 0 … count - 1, all of them.
struct DenseWalk {
    int count;
    __device__ __forceinline__ int next(int t) { return t; }
};

// Walks the candidates whose byte in the block mask is not 0. The block reads every candidate's
// byte once, THREADS at a time, into `flags` (THREADS words of shared memory). All threads of the
// block must call next() together, with growing t.
template <int THREADS, class Address>
struct SparseWalk {
    int count;
    uint32* flags;
    Address address;  // of the byte of candidate t
    int loaded = 0;   // candidates read so far, the last THREADS of them at hand

    __device__ __forceinline__ int next(int t) {
        for (; t < count; ++t) {
            if (t >= loaded) {
                block_sync();
                const int mine = loaded + threadIdx.x;
                if (mine < count) st_shared(flags + threadIdx.x, ld_global(address(mine)));
                loaded += THREADS;
                block_sync();
            }
            if (ld_shared(flags + t % THREADS) != 0) break;
        }
        return t;
    }
};
