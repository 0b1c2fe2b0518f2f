// Tiles in shared memory: rows of 16-byte chunks, swizzled so that eight rows of one chunk column,
// which is what ldmatrix and the fragment stores touch together, never meet in a bank.
#pragma once

#include "device.cuh"

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

__device__ __forceinline__ int min_int(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int max_int(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }

// ROWS x COLS values of type T in shared memory; COLS is a multiple of 16.
template <class T, int ROWS_, int COLS_>
struct Tile {
    using value_type = T;
    static constexpr int ROWS = ROWS_;
    static constexpr int COLS = COLS_;
    static constexpr int VEC = 16 / int(sizeof(T));  // values of one chunk
    static constexpr int CHUNKS = COLS / VEC;
    static constexpr int BYTES = ROWS * COLS * int(sizeof(T));
    static_assert(COLS % 16 == 0 && ROWS % 16 == 0, "tiles are made of 16 x 16 blocks");

    T* data;

    // The eight 16-byte bank groups hold 8 / CHUNKS rows of a narrow tile at once: the swizzle
    // changes when those are used up, and stays inside the row.
    static __device__ __forceinline__ int swizzle(int row) {
        if constexpr (CHUNKS % 8 == 0) return row & 7;
        if constexpr (CHUNKS % 8 == 4) return (row >> 1) & 3;
        return (row >> 2) & 1;
    }
    __device__ __forceinline__ T* chunk(int row, int c) const {
        return data + row * COLS + (c ^ swizzle(row)) * VEC;
    }
    // The tile from a multiple of 8 rows further down.
    __device__ __forceinline__ Tile from_row(int row) const { return Tile{data + row * COLS}; }
    // Chunk `fixed` + `own` of row `down` + `row`, with what differs between threads kept apart:
    // `own` is 0 or 1 (and `fixed` even, where it is not 0), `down` a multiple of 8. In unrolled
    // loops over `down` and `fixed` all addresses are then one of a few plus a constant.
    __device__ __forceinline__ T* chunk(int down, int row, int fixed, int own) const {
        constexpr int SPAN = CHUNKS % 8 == 0 ? 7 : CHUNKS % 8 == 4 ? 3 : 1;
        T* const there = data + (row * COLS + ((own ^ swizzle(row)) ^ (fixed & SPAN)) * VEC);
        return there + (down * COLS + (fixed & ~SPAN) * VEC);
    }
};

template <class TileT>
__device__ __forceinline__ TileT tile_at(unsigned char* shared) {
    return TileT{reinterpret_cast<typename TileT::value_type*>(shared)};
}

// Calls body(row, chunk, shared address, address in `global`) for every chunk of the tile, shared
// out over the threads of the block so that neighbours touch neighbouring addresses. Where the
// widths allow, a thread stays in its chunk column and steps down whole swizzle periods, so that
// all its addresses follow from the first.
template <int THREADS, class TileT, class T, class Body>
__device__ __forceinline__ void for_each_chunk(TileT tile, T* global, int64 stride_n, Body body) {
    constexpr int TOTAL = TileT::ROWS * TileT::CHUNKS, VEC = TileT::VEC;
    const int thread = threadIdx.x;
    if constexpr (THREADS % (8 * TileT::CHUNKS) == 0) {
        constexpr int STEP = THREADS / TileT::CHUNKS;
        const int row0 = thread / TileT::CHUNKS, c = thread % TileT::CHUNKS;
        auto* const shared = tile.chunk(row0, c);
        T* there = global + row0 * stride_n + c * VEC;
#pragma unroll
        for (int down = 0; down < TileT::ROWS; down += STEP, there += STEP * stride_n)
            if (TileT::ROWS % STEP == 0 || row0 + down < TileT::ROWS)
                body(row0 + down, c, shared + down * TileT::COLS, there);
    } else {
#pragma unroll 2
        for (int start = 0; start < TOTAL; start += THREADS) {
            const int row = (start + thread) / TileT::CHUNKS, c = (start + thread) % TileT::CHUNKS;
            if (TOTAL % THREADS == 0 || row < TileT::ROWS)
                body(row, c, tile.chunk(row, c), global + row * stride_n + c * VEC);
        }
    }
}

// Starts copying `rows` real rows of `head_dim` values into the tile. The rest of the tile is
// zeroed: a zero row of K gives a finite score to mask, a zero row of V keeps 0 * V at 0.
// WHOLE: a tile that is real as a whole has code of its own, which asks no chunk.
template <int THREADS, bool WHOLE = false, class TileT, class T>
__device__ __forceinline__ void load_tile_async(TileT tile, const T* source, int64 stride_n,
                                                int rows, int head_dim) {
    if (WHOLE && rows >= TileT::ROWS && head_dim >= TileT::COLS) {
        for_each_chunk<THREADS>(tile, source, stride_n, [](int, int, T* shared, const T* from) {
            cp_async_16(shared, from, true);
        });
        return;
    }
    for_each_chunk<THREADS>(tile, source, stride_n, [&](int row, int c, T* shared, const T* from) {
        const bool valid = row < rows && c * TileT::VEC < head_dim;
        cp_async_16(shared, valid ? from : source, valid);
    });
}

// Copies the real rows of a tile to global memory, 16 bytes at a time.
template <int THREADS, class TileT, class T>
__device__ __forceinline__ void store_tile(TileT tile, T* target, int64 stride_n, int rows,
                                           int head_dim) {
    for_each_chunk<THREADS>(tile, target, stride_n, [&](int row, int c, T* shared, T* to) {
        if (row < rows && c * TileT::VEC < head_dim)
            st_global(reinterpret_cast<Vec16*>(to),
                      ld_shared(reinterpret_cast<const Vec16*>(shared)));
    });
}

// Writes zeros where store_tile would write the tile.
template <int THREADS, class TileT, class T>
__device__ __forceinline__ void store_zeros(TileT tile, T* target, int64 stride_n, int rows,
                                            int head_dim) {
    for_each_chunk<THREADS>(tile, target, stride_n, [&](int row, int c, T*, T* to) {
        if (row < rows && c * TileT::VEC < head_dim)
            st_global(reinterpret_cast<Vec16*>(to), Vec16{});
    });
}

// Zeroes the rows whose word in `keep` is 0: a masked key may hold anything, and 0 * NaN is NaN.
template <int THREADS, class TileT>
__device__ __forceinline__ void clear_rows(TileT tile, const uint32* keep) {
    auto* const nowhere = tile.data;
    for_each_chunk<THREADS>(tile, nowhere, 0, [&](int row, int, auto* shared, auto*) {
        if (ld_shared(keep + row) == 0) st_shared(reinterpret_cast<Vec16*>(shared), Vec16{});
    });
}

// Two neighbouring values, rounded to T.
template <class T>
__device__ __forceinline__ void store_pair(T* shared, float lo, float hi) {
    if constexpr (sizeof(T) == 4)
        st_shared(reinterpret_cast<Vec<float, 2>*>(shared), Vec<float, 2>{{lo, hi}});
    else
        st_shared(reinterpret_cast<uint32*>(shared), pack2<T>(lo, hi));
}
