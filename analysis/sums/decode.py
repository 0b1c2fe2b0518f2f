"""Decoding with the keys of a sequence split over thread blocks (``kernels/flash_decode.cu``).

One thread block per (batch, key/value head, split, row tile), key tiles inside. Split s of S takes
the key tiles ⌊T·s/S⌋ … ⌊T·(s + 1)/S⌋ - 1 of a sequence's T = ⌈Nk/Bc⌉, so min(S, T) splits have
keys. Together they read each key once per row tile, whatever S is; what a split costs is q once
more and fp32 partial results, written once and read once. The scale of a head is read by every
block of it, the scales of blocks of keys once for 16 keys of every visit.
"""

from analysis.decode import DecodeShape
from analysis.shapes import ITEMSIZE, SCALE_BYTES, SCALE_UNIT, STAT_BYTES, Tile
from analysis.sums import KernelBytes

INDEX_BYTES = 4
"""Bytes of a length, and of an entry of the block table."""
PAGE_UNIT = 16
"""Keys that are looked up in the block table at a time; page sizes are multiples of it."""


def flash_decode(shape: DecodeShape, tile: Tile, splits: int) -> KernelBytes:
    """Bytes of ``flash_decode`` and, with more than one split, of ``flash_decode_merge``."""
    if splits < 1:
        raise ValueError(f"splits={splits} is below 1")
    row_tiles = -(-shape.rows // tile.block_m)
    all_rows = shape.heads * shape.seqlen_q  # of a sequence
    parts = [min(splits, -(-keys // tile.block_n)) for keys in shape.seqlens]
    readers = shape.kv_heads * row_tiles  # of every key
    key_bytes = sum(shape.seqlens) * readers * shape.head_dim * shape.cache_itemsize
    query_row = shape.head_dim * ITEMSIZE[shape.dtype]
    blocks = shape.batch * readers * splits

    main = {("q", "read"): sum(parts) * all_rows * query_row, ("k", "read"): key_bytes}
    if not shape.latent:
        main["v", "read"] = key_bytes
    if shape.ragged:
        main["seqlens", "read"] = blocks * INDEX_BYTES
    if shape.page_size is not None:
        chunks = sum(-(-keys // PAGE_UNIT) for keys in shape.seqlens)
        main["block_table", "read"] = chunks * readers * INDEX_BYTES
    if shape.fp8:
        scales = blocks
        if shape.scale_block is not None:
            scales = sum(-(-keys // SCALE_UNIT) for keys in shape.seqlens) * readers
        main["k_scale", "read"] = scales * SCALE_BYTES
        if not shape.latent:
            main["v_scale", "read"] = scales * SCALE_BYTES
    results = {("out", "write"): shape.out_bytes, ("lse", "write"): shape.batch * all_rows * STAT_BYTES}
    if splits == 1:
        return {"flash_decode": main | results}
    partial_out = sum(parts) * all_rows * shape.values * STAT_BYTES
    partial_lse = sum(parts) * all_rows * STAT_BYTES
    main |= {("part_out", "write"): partial_out, ("part_lse", "write"): partial_lse}
    merge = results | {("part_out", "read"): partial_out, ("part_lse", "read"): partial_lse}
    if shape.ragged:
        merge["seqlens", "read"] = shape.batch * all_rows * INDEX_BYTES
    return {"flash_decode": main, "flash_decode_merge": merge}
