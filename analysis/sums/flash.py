"""The fast form: queries outside forward, keys outside backward (FlashAttention-2, Alg. 1 and 2).

Forward, one thread block per (batch, head, query tile): Q once, K and V once per visited tile,
O and the log-sum-exp once. Backward, one thread block per (batch, key/value head, key tile):
K, V, dK, dV once; Q, dO, lse and delta once per visit; dQ leaves as fp32, either by atomic
addition or, deterministically, as one partial tile per visit. Rows are the real ones: a ragged
last tile moves what it has. The split backward takes dQ out of that loop and gives it one of its
own with queries outside, as in the forward pass: K and V are read once more per visit, and no sum
of dQ ever leaves the chip.

Options cost what they read (``analysis.options``). A key mask is one byte per key and visit. A
block mask is one byte per tile pair that the causal mask leaves, and saves the tiles it switches
off. Dropout moves nothing: its mask is drawn again from (seed, position) wherever it is needed.
Neither does a cap of the scores; ALiBi reads its head's slope, one fp32 number, where a block
starts on a head. A bias is N² again: an element for each visible pair, in every kernel that makes
scores, and its gradient as much once more. K and V of e4m3 are a byte an element, and a scale of
each is read for 16 keys of every visit, however many keys share it.
"""

from typing import Any

from analysis.feature import Walk
from analysis.features import with_options
from analysis.shapes import STAT_BYTES, AttentionShape, Tile
from analysis.sums import KernelBytes


def flash_forward(shape: AttentionShape, tile: Tile, **options: Any) -> KernelBytes:
    """O = softmax(QKᵀ)V without S or P in memory. A query tile that meets no key reads nothing.

    options: of ``analysis.traffic.predict_traffic``.
    """
    walk = Walk("flash_forward", shape, tile, options=options)
    row, key_row = shape.head_dim * shape.itemsize, shape.head_dim * shape.key_itemsize
    entries = {
        ("q", "read"): walk.loop.query_rows_with_a_visit * row,
        ("k", "read"): walk.loop.key_rows_visited * key_row,
        ("v", "read"): walk.loop.key_rows_visited * key_row,
        ("out", "write"): shape.query_bytes,
        ("lse", "write"): shape.row_bytes,
    }
    return with_options({walk.entry: entries}, walk)


def flash_backward(shape: AttentionShape, tile: Tile, *, deterministic: bool, **options: Any) -> KernelBytes:
    """dQ, dK, dV with P recomputed from lse, and delta = rowsum(dO∘O) computed beforehand.

    dK and dV are summed over the heads of a group inside one thread block, so K and V are read
    once per key/value head. A key tile that meets no query writes zeros and reads nothing.
    options: of ``analysis.traffic.predict_traffic``.
    """
    walk = Walk("flash_backward", shape, tile, True, {**options, "deterministic": deterministic})
    loop = walk.loop
    row = shape.head_dim * shape.itemsize
    accumulator_row = shape.head_dim * STAT_BYTES

    key_once = loop.key_rows_with_a_visit * row
    query_per_visit = loop.query_rows_visited * row
    stat_per_visit = loop.query_rows_visited * STAT_BYTES
    partial_dq = loop.query_rows_visited * accumulator_row
    whole_dq = shape.batch * shape.heads * shape.seqlen_q * accumulator_row

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
    passes = {
        "flash_backward_preprocess": preprocess,
        "flash_backward": main,
        "flash_backward_postprocess": postprocess,
    }
    return with_options(passes, walk)


def flash_backward_split(
    shape: AttentionShape, tile: Tile, *, dq_tile: Tile | None = None, **options: Any
) -> KernelBytes:
    """dK and dV as in :func:`flash_backward`, dQ in a second pass with queries outside.

    Deterministic without a workspace. P and dP are computed twice: seven products, not five.
    dq_tile: of the second pass; by default ``tile``.
    """
    whole = flash_backward(shape, tile, deterministic=True, **options)
    passes = {
        kernel: {key: count for key, count in entries.items() if key[0] != "dq_accum"}
        for kernel, entries in whole.items()
        if kernel != "flash_backward_postprocess"
    }
    walk = Walk("flash_backward_dq", shape, dq_tile or tile, options=options)
    row = shape.head_dim * shape.itemsize
    query_once = walk.loop.query_rows_with_a_visit * row
    stat_once = walk.loop.query_rows_with_a_visit * STAT_BYTES
    passes[walk.entry] = {
        ("q", "read"): query_once,
        ("dout", "read"): query_once,
        ("lse", "read"): stat_once,
        ("delta", "read"): stat_once,
        ("k", "read"): walk.loop.key_rows_visited * row,
        ("v", "read"): walk.loop.key_rows_visited * row,
        ("dq", "write"): shape.query_bytes,
    }
    return with_options(passes, walk, beside=False)
