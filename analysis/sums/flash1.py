"""FlashAttention 2022: keys outside, queries inside, the running state in global memory.

Forward (Alg. 1 and 2), per key tile j: K_j and V_j once, then for every visited query tile Q_i,
O_i, l_i, m_i are read and O_i, l_i, m_i written back. Backward (Alg. 4), per key tile: K_j, V_j
in, dK_j, dV_j out, and per visited query tile Q_i, O_i, dO_i, dQ_i, l_i, m_i in, dQ_i out.

Two variants. *Literal* follows the algorithm's text: O, l, m (or dQ) are initialised in memory
first and read on every pass, and D_i = rowsum(dO_i∘O_i) is recomputed from O_i on every pass: in
units of N·d elements 3·Tc + 2 forward and 5·Tc + 4 backward, plus the initialisation. *Released*
is what the authors' kernels do, and what the paper's measured HBM accesses show: the first pass
has nothing to read, so it initialises, and it also stores D_i for the later ones: 3·Tc + 1 and
4·Tc + 4, plus statistics.

Under the causal mask a query tile that sees nothing of key tile j is passed over. The released
variant's first pass still writes such a tile's initial state, without reading anything for it.

Block-sparse FlashAttention (Alg. 5) is the literal forward with the inner step left out where the
block mask is zero.
"""

from analysis.shapes import STAT_BYTES, AttentionShape, Tile
from analysis.sums import KernelBytes
from analysis.tile_loop import BlockMask, TileLoop, tile_loop


def flash1_forward(
    shape: AttentionShape, tile: Tile, *, literal: bool, block_mask: BlockMask | None = None
) -> KernelBytes:
    """O, l, m by passes over the key tiles; O stays normalised and is stored in the io dtype."""
    if block_mask is not None and not literal:
        raise ValueError("a block mask is for flash1-literal: the first pass must visit every tile")
    _require_equal_heads(shape)
    loop = tile_loop(shape, tile, block_mask)
    row = shape.head_dim * shape.itemsize
    visited = loop.query_rows_visited
    if literal:
        read_back, written = visited, visited
    else:
        read_back = visited - loop.query_rows_with_a_visit
        written = visited + _rows_without_a_visit(shape, loop)

    main = {
        ("k", "read"): loop.key_rows_with_a_visit * row,
        ("v", "read"): loop.key_rows_with_a_visit * row,
        ("q", "read"): visited * row,
        ("out", "read"): read_back * row,
        ("l", "read"): read_back * STAT_BYTES,
        ("m", "read"): read_back * STAT_BYTES,
        ("out", "write"): written * row,
        ("l", "write"): written * STAT_BYTES,
        ("m", "write"): written * STAT_BYTES,
    }
    if not literal:
        return {"flash1_forward": main}
    init = {
        ("out", "write"): shape.query_bytes,
        ("l", "write"): shape.row_bytes,
        ("m", "write"): shape.row_bytes,
    }
    return {"flash1_init": init, "flash1_forward": main}


def flash1_backward(shape: AttentionShape, tile: Tile, *, literal: bool) -> KernelBytes:
    """dQ by passes over the key tiles, stored in the io dtype; dK and dV once per key tile."""
    _require_equal_heads(shape)
    loop = tile_loop(shape, tile)
    row = shape.head_dim * shape.itemsize
    visited = loop.query_rows_visited

    main = {
        ("k", "read"): loop.key_rows_with_a_visit * row,
        ("v", "read"): loop.key_rows_with_a_visit * row,
        ("dk", "write"): shape.key_bytes,
        ("dv", "write"): shape.key_bytes,
        ("q", "read"): visited * row,
        ("dout", "read"): visited * row,
        ("l", "read"): visited * STAT_BYTES,
        ("m", "read"): visited * STAT_BYTES,
    }
    if literal:
        main["out", "read"] = visited * row
        main["dq", "read"] = visited * row
        main["dq", "write"] = visited * row
        init = {("dq", "write"): shape.query_bytes}
        return {"flash1_backward_init": init, "flash1_backward": main}

    first_pass = loop.query_rows_with_a_visit
    main["out", "read"] = first_pass * row
    main["delta", "write"] = first_pass * STAT_BYTES
    main["delta", "read"] = (visited - first_pass) * STAT_BYTES
    main["dq", "read"] = (visited - first_pass) * row
    main["dq", "write"] = (visited + _rows_without_a_visit(shape, loop)) * row
    return {"flash1_backward": main}


def _rows_without_a_visit(shape: AttentionShape, loop: TileLoop) -> int:
    return shape.batch * shape.heads * shape.seqlen_q - loop.query_rows_with_a_visit


def _require_equal_heads(shape: AttentionShape) -> None:
    if shape.kv_heads != shape.heads:
        raise ValueError(
            f"FlashAttention 2022 has one key/value head per query head, "
            f"got heads={shape.heads}, kv_heads={shape.kv_heads}"
        )
