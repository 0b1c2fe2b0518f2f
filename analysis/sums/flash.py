"""The fast form: queries outside forward, keys outside backward (FlashAttention-2, Alg. 1 and 2).

Forward, one thread block per (batch, head, query tile): Q once, K and V once per visited tile,
O and the log-sum-exp once. Backward, one thread block per (batch, key/value head, key tile):
K, V, dK, dV once; Q, dO, lse and delta once per visit; dQ leaves as fp32, either by atomic
addition or, deterministically, as one partial tile per visit. Rows are the real ones: a ragged
last tile moves what it has.
"""

from analysis.shapes import STAT_BYTES, AttentionShape, Tile
from analysis.sums import KernelBytes
from analysis.tile_loop import tile_loop


def flash_forward(shape: AttentionShape, tile: Tile) -> KernelBytes:
    """O = softmax(QKᵀ)V without S or P in memory. A query tile that meets no key reads nothing."""
    loop = tile_loop(shape, tile)
    heads = shape.batch * shape.heads
    row = shape.head_dim * shape.itemsize
    return {
        "flash_forward": {
            ("q", "read"): heads * loop.query_rows_with_a_visit * row,
            ("k", "read"): heads * loop.key_rows_visited * row,
            ("v", "read"): heads * loop.key_rows_visited * row,
            ("out", "write"): shape.query_bytes,
            ("lse", "write"): shape.row_bytes,
        }
    }


def flash_backward(shape: AttentionShape, tile: Tile, *, deterministic: bool) -> KernelBytes:
    """dQ, dK, dV with P recomputed from lse, and delta = rowsum(dO∘O) computed beforehand.

    dK and dV are summed over the heads of a group inside one thread block, so K and V are read
    once per key/value head. A key tile that meets no query writes zeros and reads nothing.
    """
    loop = tile_loop(shape, tile)
    heads = shape.batch * shape.heads
    kv_heads = shape.batch * shape.kv_heads
    row = shape.head_dim * shape.itemsize
    accumulator_row = shape.head_dim * STAT_BYTES

    key_once = kv_heads * loop.key_rows_with_a_visit * row
    query_per_visit = heads * loop.query_rows_visited * row
    stat_per_visit = heads * loop.query_rows_visited * STAT_BYTES
    partial_dq = heads * loop.query_rows_visited * accumulator_row
    whole_dq = heads * shape.seqlen_q * accumulator_row

    preprocess = {
        ("out", "read"): shape.query_bytes,
        ("dout", "read"): shape.query_bytes,
        ("delta", "write"): shape.row_bytes,
    }
    main = {
        ("k", "read"): key_once,
        ("v", "read"): key_once,
        ("q", "read"): query_per_visit,
        ("dout", "read"): query_per_visit,
        ("lse", "read"): stat_per_visit,
        ("delta", "read"): stat_per_visit,
        ("dk", "write"): shape.key_bytes,
        ("dv", "write"): shape.key_bytes,
    }
    postprocess = {("dq", "write"): shape.query_bytes}
    if deterministic:
        main["dq_accum", "write"] = partial_dq
        postprocess["dq_accum", "read"] = partial_dq
    else:
        preprocess["dq_accum", "write"] = whole_dq
        main["dq_accum", "atomic"] = partial_dq
        postprocess["dq_accum", "read"] = whole_dq
    return {
        "flash_backward_preprocess": preprocess,
        "flash_backward": main,
        "flash_backward_postprocess": postprocess,
    }
