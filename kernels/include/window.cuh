// Which keys a query sees under a sliding window with attention sinks, and which tiles hold any.
//
// With d = query + seqlen_k - seqlen_q, its diagonal, a query sees the keys d - left ... d + right
// and those before `sinks`; with CAUSAL none beyond d. The same in Python: analysis/window.py.
//
// WINDOW 0: nothing but the causal mask, at no cost.
#pragma once

#include "tile_order.cuh"

#ifndef WINDOW
#define WINDOW 0  // 1: the arguments window_left, window_right, sinks; all three at least 0
#endif

constexpr int NO_LIMIT = 0x7fffffff;

// Query tiles first ... end - 1.
struct QueryTiles {
    int first, end;
};

#if WINDOW
// The key tiles of a query tile, numbered as they are walked: those with sinks, then the others.
struct KeyTiles {
    int sink_tiles, skipped, count;
    __device__ __forceinline__ int at(int t) const { return t < sink_tiles ? t : t + skipped; }
    // The number of a tile that is among them.
    __device__ __forceinline__ int place(int j) const { return j < sink_tiles ? j : j - skipped; }
};

struct Window {
    int left, right, sinks;

    // The keys that it leaves beside the sinks: first(diagonal) … end(diagonal) - 1.
    __device__ __forceinline__ int first(int diagonal) const { return diagonal - left; }
    __device__ __forceinline__ int end(int diagonal) const { return diagonal + right + 1; }
    // Whether the window takes the key out. What lies to the right of a causal one the causal mask
    // has taken out already.
    __device__ __forceinline__ bool hides(int diagonal, int key) const {
        return key >= sinks && (key < diagonal - left || (!CAUSAL && key > diagonal + right));
    }
    // The same from the key's side: whether it takes out the query. `diagonal` is the key's, a query.
    __device__ __forceinline__ bool hides_query(int diagonal, int query, int key) const {
        const int last = key < sinks ? NO_LIMIT : diagonal + left;
        if constexpr (CAUSAL) return query > last;
        return query > last || query < (key < sinks ? 0 : diagonal - right);
    }
    // Whether it takes out the whole tile of `keys` keys from key0, for `rows` rows that have their
    // diagonals from `first` on.
    __device__ __forceinline__ bool hides_all(int first, int rows, int key0, int keys) const {
        return key0 >= sinks && (key0 + keys <= first - left || key0 >= first + rows + right);
    }
    // Whether it may take out any of it.
    __device__ __forceinline__ bool hides_any(int first, int rows, int key0, int keys) const {
        return key0 < first + rows - 1 - left || key0 + keys - 1 > first + right;
    }
};

template <int BLOCK_M_, int BLOCK_N_, bool CAUSAL_>
__device__ __forceinline__ KeyTiles key_tiles_of(int i, int seqlen_q, int seqlen_k,
                                                 const Window& window) {
    const int offset = seqlen_k - seqlen_q, row0 = i * BLOCK_M_;
    const int last = min_int(row0 + BLOCK_M_, seqlen_q) - 1 + offset;  // diagonal of the last row
    int reach = min_int(window.sinks, seqlen_k);
    if constexpr (CAUSAL_) reach = min_int(reach, max_int(last + 1, 0));
    const int sink_tiles = ceil_div(reach, BLOCK_N_);
    const int start = max_int(row0 + offset - window.left, 0);
    const int keys = min_int(last + window.right + 1, seqlen_k);
    if (keys <= start) return {sink_tiles, 0, sink_tiles};
    const int skipped = max_int(start / BLOCK_N_ - sink_tiles, 0);
    return {sink_tiles, skipped, max_int(ceil_div(keys, BLOCK_N_) - skipped, sink_tiles)};
}

template <int BLOCK_M_, int BLOCK_N_, bool CAUSAL_>
__device__ __forceinline__ QueryTiles query_tiles_of(int j, int seqlen_q, int seqlen_k,
                                                     const Window& window) {
    const int offset = seqlen_k - seqlen_q, key0 = j * BLOCK_N_;
    const int last_key = min_int(key0 + BLOCK_N_, seqlen_k) - 1;
    const bool sink = key0 < window.sinks;
    const int start = sink && !CAUSAL_ ? 0 : max_int(key0 - offset - window.right, 0);
    const int rows = sink ? seqlen_q : min_int(last_key - offset + window.left + 1, seqlen_q);
    const int first = start / BLOCK_M_;
    return {first, rows > start ? ceil_div(rows, BLOCK_M_) : first};
}
#else
struct KeyTiles {
    int count;
    __device__ __forceinline__ int at(int t) const { return t; }
    __device__ __forceinline__ int place(int j) const { return j; }
};

struct Window {
    __device__ __forceinline__ bool hides(int, int) const { return false; }
    __device__ __forceinline__ bool hides_query(int, int, int) const { return false; }
    __device__ __forceinline__ bool hides_all(int, int, int, int) const { return false; }
    __device__ __forceinline__ bool hides_any(int, int, int, int) const { return false; }
};

template <int BLOCK_M_, int BLOCK_N_, bool CAUSAL_>
__device__ __forceinline__ KeyTiles key_tiles_of(int i, int seqlen_q, int seqlen_k,
                                                 const Window&) {
    return {key_tiles_of<BLOCK_M_, BLOCK_N_, CAUSAL_>(i, seqlen_q, seqlen_k)};
}

template <int BLOCK_M_, int BLOCK_N_, bool CAUSAL_>
__device__ __forceinline__ QueryTiles query_tiles_of(int j, int seqlen_q, int seqlen_k,
                                                     const Window&) {
    const int tiles = ceil_div(seqlen_q, BLOCK_M_);
    return {first_query_tile_of<BLOCK_M_, BLOCK_N_, CAUSAL_>(j, seqlen_q, seqlen_k), tiles};
}
#endif
