"""FlashAttention 2022: keys outside, queries inside, the running state in global memory.

Forward (Alg. 1 and 2), per key tile j: K_j and V_j once, then for every visited query tile Q_i,
O_i, l_i, m_i are read and O_i, l_i, m_i written back. Backward (Alg. 4), per key tile: K_j, V_j
in, dK_j, dV_j out, and per visited query tile Q_i, O_i, dO_i, dQ_i, l_i, m_i in, dQ_i out.

Three forms. *Literal* follows the algorithm's text: O, l, m (or dQ) are initialised in memory
first and read on every pass, and D_i = rowsum(dO_i∘O_i) is recomputed from O_i on every pass: in
units of N·d elements 3·Tc + 2 forward and 5·Tc + 4 backward, plus the initialisation. *Skip-first*
reads nothing back in the first pass, which initialises, and keeps D_i for the later ones: 3·Tc + 1
and 4·Tc + 4. These counts fit the bytes printed in the paper's Fig. 2; that does not make them what
its kernels did. *Released* is what the authors' code does: O (and dQ) stay in fp32 in a buffer of
their own until the last key tile, which writes them in the io dtype, and a row has one statistic,
the log-sum-exp: 2 + Tc + 4·(Tc − 1) + 1 = 5·Tc − 1 and 6·Tc + 2. Statistics come on top.

Under the causal mask a query tile that sees nothing of key tile j is passed over. Except in the
literal form the first pass still writes such a tile's initial state and reads nothing for it.

Block-sparse FlashAttention (Alg. 5) is the literal forward with the inner step left out where the
block mask is zero.
"""

from analysis.algorithms import Form
from analysis.shapes import STAT_BYTES, AttentionShape, Tile
from analysis.sums import KernelBytes
from analysis.tile_loop import BlockMask, TileLoop, tile_loop

ACCUMULATOR_BYTES = 4
"""Of an element of the released form's unfinished O and dQ."""


def flash1_forward(
    shape: AttentionShape, tile: Tile, *, form: Form, block_mask: BlockMask | None = None
) -> KernelBytes:
    """O and the row statistics by passes over the key tiles; O stays normalised."""
    if block_mask is not None and form != "literal":
        raise ValueError("a block mask is for flash1-literal: the first pass must visit every tile")
    _require_equal_heads(shape)
    loop = tile_loop(shape, tile, block_mask)
    row = shape.head_dim * shape.itemsize
    visited, empty = loop.query_rows_visited, _rows_without_a_visit(shape, loop)
    again = visited - loop.query_rows_with_a_visit
    if form == "released":
        unfinished = again * shape.head_dim * ACCUMULATOR_BYTES
        return {
            "flash1_forward": {
                ("k", "read"): loop.key_rows_with_a_visit * row,
                ("v", "read"): loop.key_rows_with_a_visit * row,
                ("q", "read"): visited * row,
                ("out_tmp", "read"): unfinished,
                ("out_tmp", "write"): unfinished,
                ("lse", "read"): again * STAT_BYTES,
                ("lse", "write"): (visited + empty) * STAT_BYTES,
                ("out", "write"): shape.query_bytes,
            }
        }
    literal = form == "literal"
    read_back, written = (visited, visited) if literal else (again, visited + empty)

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
    init = {("out", "write"): shape.query_bytes, ("l", "write"): shape.row_bytes, ("m", "write"): shape.row_bytes}
    return {"flash1_init": init, "flash1_forward": main}


def flash1_backward(shape: AttentionShape, tile: Tile, *, form: Form) -> KernelBytes:
    """dQ by passes over the key tiles; dK and dV once per key tile."""
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
    }
    statistics = ("lse",) if form == "released" else ("l", "m")
    main |= {(name, "read"): visited * STAT_BYTES for name in statistics}
    if form == "literal":
        main["out", "read"] = visited * row
        main["dq", "read"] = visited * row
        main["dq", "write"] = visited * row
        init = {("dq", "write"): shape.query_bytes}
        return {"flash1_backward_init": init, "flash1_backward": main}

    first_pass = loop.query_rows_with_a_visit
    main["out", "read"] = first_pass * row
    main["delta", "write"] = first_pass * STAT_BYTES
    main["delta", "read"] = (visited - first_pass) * STAT_BYTES
    if form == "released":
        unfinished = (visited - first_pass) * shape.head_dim * ACCUMULATOR_BYTES
        main["dq_tmp", "read"] = main["dq_tmp", "write"] = unfinished
        main["dq", "write"] = shape.query_bytes
        return {"flash1_backward": main}
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
