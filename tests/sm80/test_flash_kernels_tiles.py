"""Swizzled tiles in shared memory: a permutation, no bank conflicts, addresses by constants."""

from __future__ import annotations

import numpy as np
import pytest
from flash_support import view

from kernels.host import HostBackend
from kernels.launch import Kernel

# Writes, for every row and chunk of a 32-row tile, where the chunk lies, in units of 16 bytes:
# once asked for directly, once as multiple of 8 rows + own row, even chunk + 0 or 1.
SOURCE = """
#include "tile.cuh"
extern "C" __global__ void __launch_bounds__(32) places(Tensor1<int> direct, Tensor1<int> split) {
    using TileT = Tile<io_t, 32, WIDTH>;
    const TileT tile = tile_at<TileT>(shared_memory());
    const auto base = reinterpret_cast<unsigned char*>(tile.data);
    const int row = threadIdx.x;
    for (int c = 0; c < TileT::CHUNKS; ++c) {
        const int at = row * TileT::CHUNKS + c;
        const auto one = reinterpret_cast<unsigned char*>(tile.chunk(row, c));
        const auto two = reinterpret_cast<unsigned char*>(
            tile.from_row(row & 16).chunk(row & 8, row & 7, c & ~1, c & 1));
        st_global(direct.data + at, int(one - base) / 16);
        st_global(split.data + at, int(two - base) / 16);
    }
}
"""


@pytest.mark.parametrize(("dtype", "cols"), [(0, 16), (0, 48), (0, 64), (0, 80), (0, 256), (2, 16), (2, 48), (2, 256)])
def test_swizzle(dtype: int, cols: int) -> None:
    itemsize = 4 if dtype == 2 else 2
    chunks = cols * itemsize // 16
    direct, split = (np.full((32, chunks), -1, np.int32) for _ in range(2))
    HostBackend().launch(
        Kernel(SOURCE, "places", (("DTYPE", dtype), ("WIDTH", cols)), 32),
        (1, 1, 1),
        32 * cols * itemsize,
        [view("direct", direct, "int32"), view("split", split, "int32")],
    )
    assert sorted(direct.ravel()) == list(range(32 * chunks))  # no two chunks share a place
    assert (direct // chunks == np.arange(32)[:, None]).all()  # and each stays in its row
    assert np.array_equal(direct, split)
    # ldmatrix reads one chunk column of eight rows at once: eight different 16-byte bank groups.
    for rows in direct.reshape(4, 8, chunks):
        for column in rows.T:
            assert len(set(column % 8)) == 8
