"""Floating-point operations and exponentials of one attention pass.

Two counts. *Useful* work counts visible (query, key) pairs only: it is what the papers divide by
time when they print TFLOP/s (FlashAttention-2 §4.1 uses N²/2 pairs under the causal mask, here
the exact N(N+1)/2). *Executed* work counts whole visited tiles, masked entries included: it is
what the tensor cores are asked to do.
"""

from __future__ import annotations

import numpy as np

from analysis.shapes import AttentionShape, Tile
from analysis.tile_loop import BlockMask, tile_loop

FORWARD_PRODUCTS = 2
"""QKᵀ and PV."""
BACKWARD_PRODUCTS = 5
"""QKᵀ again, dV = PᵀdO, dP = dO·Vᵀ, dQ = dS·K, dK = dSᵀQ. Without recomputation it is four."""

THREADS_A_ROW = 4
"""Threads that share a row of scores in a tensor core's fragments; each rescales for itself."""

TANH_SPECIALS = {"fp16": 2, "bf16": 1, "fp32": 2}
"""Special-function operations of a capped score's tanh: itself, or an exponential and a reciprocal
(``kernels/include/scores.cuh``)."""

KV_PRODUCTS, DQ_PRODUCTS = 4, 3
"""Where dK and dV, and dQ, have a pass each: S and dP are made in both."""


def products(pass_: str, *, recompute: bool = True) -> int:
    """Matrix products of one pass, each 2·pairs·head_dim FLOPs."""
    if pass_ == "forward":
        return FORWARD_PRODUCTS
    if pass_ == "backward":
        return BACKWARD_PRODUCTS if recompute else BACKWARD_PRODUCTS - 1
    raise ValueError(f"pass_={pass_!r} is neither 'forward' nor 'backward'")


def paper_flops(shape: AttentionShape, pass_: str) -> float:
    """As FlashAttention-2 counts them (§4.1): 4 Nq Nk d a head forward, 2.5 times that backward,
    and half for a causal mask, whatever the tiles execute."""
    pairs = shape.batch * shape.heads * shape.seqlen_q * shape.seqlen_k
    return 2 * products(pass_) * pairs * shape.head_dim * (0.5 if shape.causal else 1.0)


def useful_flops(shape: AttentionShape, pass_: str, *, recompute: bool = True) -> int:
    """FLOPs of the matrix products over visible pairs, all batches and heads."""
    pairs = shape.batch * shape.heads * shape.visible_pairs
    return products(pass_, recompute=recompute) * 2 * pairs * shape.head_dim


def visited_pairs(shape: AttentionShape, tile: Tile) -> int:
    """(query, key) pairs inside visited tiles, for one head; ragged tiles count real rows."""
    return tile_loop(shape, tile).elements_left_by_causal


def executed_flops(shape: AttentionShape, tile: Tile, pass_: str, *, recompute: bool = True) -> int:
    """FLOPs of the matrix products over visited tiles."""
    pairs = shape.batch * shape.heads * visited_pairs(shape, tile)
    return products(pass_, recompute=recompute) * 2 * pairs * shape.head_dim


def executed_exponentials(shape: AttentionShape, tile: Tile, pass_: str, specials: int = 0) -> int:
    """Exponentials of the tiled form: one per visited pair, and in the forward pass one per row
    and visited tile to rescale what was accumulated before (FlashAttention-2, Alg. 1, line 10),
    which every one of the row's four threads computes for itself. ``specials``: other operations
    of the same units for each score (``analysis.features``).
    """
    loop = tile_loop(shape, tile)
    per_head = visited_pairs(shape, tile)
    if pass_ == "forward":
        per_head += THREADS_A_ROW * int(loop.query_rows @ loop.visits_of_query_tile)
    elif pass_ != "backward":
        raise ValueError(f"pass_={pass_!r} is neither 'forward' nor 'backward'")
    per_head += specials * visited_pairs(shape, tile)
    return shape.batch * shape.heads * per_head


def pairs_in_blocks(shape: AttentionShape, block_mask: BlockMask, block: Tile) -> int:
    """Visible (query, key) pairs in the blocks that are set, all batches and heads.

    block_mask: broadcasts to (B, H, blocks of rows, blocks of keys).
    """
    blocks = -(-shape.seqlen_k // block.block_n)
    edges = np.minimum(np.arange(blocks + 1) * block.block_n, shape.seqlen_k)
    of_row = np.diff(shape.visible.seen_before(edges), axis=1)
    of_block = np.add.reduceat(of_row, np.arange(0, shape.seqlen_q, block.block_m), axis=0)
    wanted = (shape.batch, shape.heads, *of_block.shape)
    return int((np.broadcast_to(block_mask, wanted) * of_block).sum())
