"""Tiles, shared memory and random words of the flash kernels, without running one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from analysis.shapes import Tile
from kernels.flash_config import (
    HEAD_DIMS,
    PASSES,
    SHARED_LIMIT_BYTES,
    FlashConfig,
    configure,
    default_tile,
    shared_bytes,
)
from kernels.philox import keep_scale, kept_weights, philox_4x32_10


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]) -> None:
    """The test vectors published with the generator (Random123)."""
    assert tuple(int(w) for w in philox_4x32_10(counter, key)) == words


def test_kept_share() -> None:
    kept = kept_weights(3, 0.1, 1, 8, 256, 256)
    assert abs(kept.mean() - 0.9) <= 0.00125
    assert kept_weights(3, 0.0, 1, 1, 33, 17).all()
    assert not kept_weights(3, 1.0, 1, 1, 33, 17).any()
    assert (keep_scale(0.5), keep_scale(1.0)) == (2.0, 0.0)


def test_mask_of_a_part_is_the_part_of_the_mask() -> None:
    whole = kept_weights(11, 0.4, 2, 3, 70, 90)
    assert np.array_equal(whole[:1, :2, :35, :50], kept_weights(11, 0.4, 1, 2, 35, 50))
    assert not np.array_equal(whole, kept_weights(12, 0.4, 2, 3, 70, 90))


def test_dropout_outside_0_to_1() -> None:
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="dropout_p"):
            kept_weights(0, p, 1, 1, 1, 1)


@pytest.mark.parametrize("limit", [99 * 1024, 163 * 1024, SHARED_LIMIT_BYTES])
def test_default_tiles_fit_every_device(limit: int) -> None:
    """RTX 3090 (99 KiB a block), A100 (163) and H100 (227), masks included."""
    for pass_, dtype, head_dim in product(PASSES, ("fp16", "bf16", "fp32"), HEAD_DIMS):
        tile = default_tile(head_dim, dtype, pass_, limit)
        blocks = (tile.block_m, tile.block_n)
        config = configure(pass_, dtype, head_dim, limit=limit, causal=True, key_mask=True, block_size=blocks)
        assert config.tile == tile
        assert config.shared_bytes <= limit


def test_shared_memory_scales_with_the_item_size() -> None:
    """Three 64 x 128 tiles: 49,152 bytes in fp16. fp32 doubles them and stages P (64 x 64)."""
    half = FlashConfig("forward", "fp16", 128, Tile(64, 64), stages=1)
    single = FlashConfig("forward", "fp32", 128, Tile(64, 64), stages=1)
    assert half.shared_bytes == 49152
    assert single.shared_bytes == 98304 + 64 * 64 * 4
    with pytest.raises(ValueError, match=r"needs 114688 bytes of shared memory, the limit is 65536"):
        shared_bytes(single, 65536)


def test_two_stages_where_they_fit() -> None:
    tile = Tile(64, 64)
    assert configure("forward", "fp16", 128, tile=tile).stages == 2
    assert configure("forward", "fp16", 128, tile=tile, limit=60000).stages == 1
    with pytest.raises(ValueError, match=r"needs 49152 bytes .* limit is 40000"):
        configure("forward", "fp16", 128, tile=tile, limit=40000)


def test_no_tile_for_a_tiny_device() -> None:
    with pytest.raises(ValueError, match="limit is 4096"):
        default_tile(128, "fp16", "forward", 4096)
