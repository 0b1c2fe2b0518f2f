"""The fast form: queries outside forward, keys outside backward (FlashAttention-2, Alg. 1 and 2).

Forward, one thread block per (batch, head, query tile): Q once, K and V once per visited tile,
O and the log-sum-exp once. Backward, one thread block per (batch, key/value head, key tile):
K, V, dK, dV once; Q, dO, lse and delta once per visit; dQ leaves as fp32, either by atomic
addition or, deterministically, as one partial tile per visit. Rows are the real ones: a ragged
last tile moves what it has. The split backward takes dQ out of that loop and gives it one of its
own with queries outside, as in the forward pass: K and V are read once more per visit, and no sum
of dQ ever leaves the chip.

Options cost what they read. A key mask is one byte per key and visit. A block mask is one byte per
tile pair that the causal mask leaves, and saves the tiles it switches off. Dropout moves nothing:
its mask is drawn again from (seed, position) wherever it is needed. Neither does a cap of the
scores; ALiBi reads its head's slope, one fp32 number, where a block starts on a head. A bias is
N² again: an element for each visible pair, in every kernel that makes scores, and its gradient as
much once more. K and V of e4m3 are a byte an element, and a scale of each is read for 16 keys of
every visit, however many keys share it.
"""

from typing import TypeAlias

from analysis.flops import pairs_in_blocks
from analysis.shapes import SCALE_BYTES, SCALE_UNIT, STAT_BYTES, AttentionShape, Tile
from analysis.sums import KernelBytes
from analysis.tile_loop import BlockMask, tile_loop

MASK_BYTES = 1
"""Bytes of one entry of a key mask or of a block mask."""
SLOPE_BYTES = 4
"""Bytes of a head's ALiBi slope."""
BiasShape: TypeAlias = tuple[int, int]
"""(items, heads) of a bias (items, heads, Nq, Nk): 1, or as many as there are."""
BIAS_KERNELS = ("flash_bias_zero", "flash_bias_sum")
"""Those around the backward that the gradient of a bias may need."""


def flash_forward(
    shape: AttentionShape,
    tile: Tile,
    *,
    key_mask: bool = False,
    block_mask: BlockMask | None = None,
    mask_block: Tile | None = None,
    alibi: bool = False,
    bias: BiasShape | None = None,
) -> KernelBytes:
    """O = softmax(QKᵀ)V without S or P in memory. A query tile that meets no key reads nothing."""
    loop = tile_loop(shape, tile, block_mask, mask_block)
    heads = shape.batch * shape.heads
    row, key_row = shape.head_dim * shape.itemsize, shape.head_dim * shape.key_itemsize
    entries = {
        ("q", "read"): loop.query_rows_with_a_visit * row,
        ("k", "read"): loop.key_rows_visited * key_row,
        ("v", "read"): loop.key_rows_visited * key_row,
        ("out", "write"): shape.query_bytes,
        ("lse", "write"): shape.row_bytes,
    }
    if key_mask:
        entries["key_mask", "read"] = loop.key_rows_visited * MASK_BYTES
    if block_mask is not None:
        entries["block_mask", "read"] = heads * loop.pairs_left_by_causal * MASK_BYTES
    if alibi:
        entries["alibi_slopes", "read"] = loop.query_tiles_with_a_visit * SLOPE_BYTES
    if bias is not None:
        entries["bias", "read"] = _pairs(shape, tile, block_mask, mask_block) * shape.itemsize
    if shape.fp8:
        scales = loop.key_groups_visited(SCALE_UNIT) * SCALE_BYTES
        entries |= {("k_scale", "read"): scales, ("v_scale", "read"): scales}
    return {"flash_forward": entries}


def flash_backward(
    shape: AttentionShape,
    tile: Tile,
    *,
    deterministic: bool,
    key_mask: bool = False,
    block_mask: BlockMask | None = None,
    mask_block: Tile | None = None,
    lse_gradient: bool = False,
    alibi: bool = False,
    bias: BiasShape | None = None,
    bias_gradient: bool = False,
) -> KernelBytes:
    """dQ, dK, dV with P recomputed from lse, and delta = rowsum(dO∘O) computed beforehand.

    dK and dV are summed over the heads of a group inside one thread block, so K and V are read
    once per key/value head. A key tile that meets no query writes zeros and reads nothing.
    lse_gradient: the log-sum-exp was returned to the caller and has a gradient of its own.
    bias_gradient: the bias has one. Where heads or items share the bias it is added up in fp32: by
    atomic additions or, deterministically, by way of all of dS.
    """
    loop = tile_loop(shape, tile, block_mask, mask_block)
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

    if lse_gradient:
        preprocess["dlse", "read"] = shape.row_bytes
    if key_mask:
        main["key_mask", "read"] = loop.key_rows_with_a_visit * MASK_BYTES
    if block_mask is not None:
        looked_at = shape.batch * shape.heads * loop.pairs_left_by_causal * MASK_BYTES
        main["block_mask", "read"] = looked_at
        if deterministic:  # the postprocess must know which partial tiles were written
            postprocess["block_mask", "read"] = looked_at
    if alibi:
        main["alibi_slopes", "read"] = loop.visits * SLOPE_BYTES
    around: KernelBytes = {}
    if bias is not None:
        pairs = _pairs(shape, tile, block_mask, mask_block)
        main["bias", "read"] = pairs * shape.itemsize
        if bias_gradient:
            partial = shape.causal or shape.windowed or block_mask is not None
            sent, around = _bias_gradient(shape, bias, pairs, deterministic, partial)
            main |= sent
    return {
        **around,
        "flash_backward_preprocess": preprocess,
        "flash_backward": main,
        "flash_backward_postprocess": postprocess,
    }


def flash_backward_split(
    shape: AttentionShape,
    tile: Tile,
    *,
    key_mask: bool = False,
    block_mask: BlockMask | None = None,
    mask_block: Tile | None = None,
    lse_gradient: bool = False,
    dq_tile: Tile | None = None,
    alibi: bool = False,
    bias: BiasShape | None = None,
    bias_gradient: bool = False,
) -> KernelBytes:
    """dK and dV as in :func:`flash_backward`, dQ in a second pass with queries outside.

    Deterministic without a workspace. P and dP are computed twice: seven products, not five.
    dq_tile: of the second pass; by default ``tile``.
    """
    whole = flash_backward(
        shape,
        tile,
        deterministic=True,
        key_mask=key_mask,
        block_mask=block_mask,
        mask_block=mask_block,
        lse_gradient=lse_gradient,
        alibi=alibi,
        bias=bias,
        bias_gradient=bias_gradient,
    )
    main = {key: count for key, count in whole["flash_backward"].items() if key[0] != "dq_accum"}

    loop = tile_loop(shape, dq_tile or tile, block_mask, mask_block)
    row = shape.head_dim * shape.itemsize
    query_once = loop.query_rows_with_a_visit * row
    stat_once = loop.query_rows_with_a_visit * STAT_BYTES
    queries_outside = {
        ("q", "read"): query_once,
        ("dout", "read"): query_once,
        ("lse", "read"): stat_once,
        ("delta", "read"): stat_once,
        ("k", "read"): loop.key_rows_visited * row,
        ("v", "read"): loop.key_rows_visited * row,
        ("dq", "write"): shape.query_bytes,
    }
    if key_mask:
        queries_outside["key_mask", "read"] = loop.key_rows_visited * MASK_BYTES
    if block_mask is not None:
        looked_at = shape.batch * shape.heads * loop.pairs_left_by_causal * MASK_BYTES
        queries_outside["block_mask", "read"] = looked_at
    if alibi:
        outside = loop.query_tiles_with_a_visit
        queries_outside["alibi_slopes", "read"] = outside * SLOPE_BYTES
    if bias is not None:
        pairs = _pairs(shape, dq_tile or tile, block_mask, mask_block or tile)
        queries_outside["bias", "read"] = pairs * shape.itemsize
    around = {kernel: whole[kernel] for kernel in BIAS_KERNELS if kernel in whole}
    return {
        **around,
        "flash_backward_preprocess": whole["flash_backward_preprocess"],
        "flash_backward": main,
        "flash_backward_dq": queries_outside,
    }


def bias_elements(shape: AttentionShape, bias: BiasShape) -> int:
    """Elements of a bias. ValueError unless each of (items, heads) is 1 or as many as there are."""
    items, heads = bias
    if items not in (1, shape.batch) or heads not in (1, shape.heads):
        raise ValueError(f"bias={bias} is not (1 or {shape.batch}, 1 or {shape.heads}) items and heads")
    return items * heads * shape.seqlen_q * shape.seqlen_k


def _pairs(shape: AttentionShape, tile: Tile, block_mask: BlockMask | None, mask_block: Tile | None) -> int:
    """Pairs that the masks leave, in all heads of all items: each lies in one visited tile."""
    if block_mask is not None:
        return pairs_in_blocks(shape, block_mask, mask_block or tile)
    return shape.batch * shape.heads * shape.visible_pairs


def _bias_gradient(
    shape: AttentionShape, bias: BiasShape, pairs: int, deterministic: bool, partial: bool
) -> tuple[dict[tuple[str, str], int], KernelBytes]:
    """What the main kernel sends, and the kernels around it.

    partial: masks leave pairs that no tile visits, whose gradient has to be zeroed.
    """
    result = bias_elements(shape, bias)
    if bias == (shape.batch, shape.heads):
        around = {"flash_bias_zero": {("dbias", "write"): result * shape.itemsize}}
        return {("dbias", "write"): pairs * shape.itemsize}, around if partial else {}
    everything = shape.batch * shape.heads * shape.seqlen_q * shape.seqlen_k
    accumulated = (everything if deterministic else result) * STAT_BYTES
    around = {"flash_bias_sum": {("dbias_accum", "read"): accumulated, ("dbias", "write"): result * shape.itemsize}}
    if partial or not deterministic:
        around["flash_bias_zero"] = {("dbias_accum", "write"): accumulated}
    direction = "write" if deterministic else "atomic"
    return {("dbias_accum", direction): pairs * STAT_BYTES}, around
