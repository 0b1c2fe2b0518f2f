"""Standard attention: S and P written to memory (FlashAttention 2022, Alg. 0 and Alg. 3).

Three kernels forward, five backward. Products are tiled, so an operand of N·d elements is read
once per tile of the other operand; an N × N matrix is read or written exactly once per kernel.
The causal mask is applied but its empty tiles are not skipped, as in a framework's eager path.
The scale enters S, dQ and dK as they are written, so it needs no pass of its own.
"""

from analysis.shapes import AttentionShape, Tile
from analysis.sums import KernelBytes
from analysis.tile_loop import tile_loop


def standard_forward(shape: AttentionShape, tile: Tile) -> KernelBytes:
    """S = scale·QKᵀ (masked), P = softmax(S), O = PV."""
    tr, tc = _tile_counts(shape, tile)
    q, k, s = shape.query_bytes, shape.key_bytes, shape.score_bytes
    return {
        "standard_scores": {("q", "read"): tc * q, ("k", "read"): tr * k, ("s", "write"): s},
        "standard_softmax": {("s", "read"): s, ("p", "write"): s},
        "standard_output": {("p", "read"): s, ("v", "read"): tr * k, ("out", "write"): q},
    }


def standard_backward(shape: AttentionShape, tile: Tile) -> KernelBytes:
    """dV = PᵀdO, dP = dO·Vᵀ, dS = P∘(dP − rowsum(P∘dP)), dQ = scale·dS·K, dK = scale·dSᵀQ."""
    tr, tc = _tile_counts(shape, tile)
    q, k, s = shape.query_bytes, shape.key_bytes, shape.score_bytes
    return {
        "standard_dv": {("p", "read"): s, ("dout", "read"): tc * q, ("dv", "write"): k},
        "standard_dp": {("dout", "read"): tc * q, ("v", "read"): tr * k, ("dp", "write"): s},
        "standard_softmax_backward": {("p", "read"): s, ("dp", "read"): s, ("ds", "write"): s},
        "standard_dq": {("ds", "read"): s, ("k", "read"): tr * k, ("dq", "write"): q},
        "standard_dk": {("ds", "read"): s, ("q", "read"): tc * q, ("dk", "write"): k},
    }


def _tile_counts(shape: AttentionShape, tile: Tile) -> tuple[int, int]:
    if shape.kv_heads != shape.heads:
        raise ValueError(
            f"standard attention has one key/value head per query head, "
            f"got heads={shape.heads}, kv_heads={shape.kv_heads}"
        )
    loop = tile_loop(shape, tile)
    return loop.query_tiles, loop.key_tiles
