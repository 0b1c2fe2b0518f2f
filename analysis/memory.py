"""Bytes attention keeps for its backward pass, and the peak while it runs, as lists of tensors.

A figure here is always the sum of a list of named tensors, so that a disagreement with a
measurement can be traced to the tensor that is missing or too much.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.shapes import ITEMSIZE, STAT_BYTES, AttentionShape, Tile
from analysis.sums.flash_sm90 import TURN_BYTES


@dataclass(frozen=True)
class LiveTensor:
    """One tensor alive at the moment in question."""

    name: str
    bytes: int


def total(tensors: list[LiveTensor]) -> int:
    """Bytes of a list of tensors."""
    return sum(tensor.bytes for tensor in tensors)


class _Sizes:
    """Makes the tensors of a shape: operands of N·d elements, score matrices, fp32 rows."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    def queries(self, *names: str) -> list[LiveTensor]:
        return [LiveTensor(name, self.shape.query_bytes) for name in names]

    def keys(self, *names: str) -> list[LiveTensor]:
        return [LiveTensor(name, self.shape.key_bytes) for name in names]

    def scores(self, *names: str) -> list[LiveTensor]:
        return [LiveTensor(name, self.shape.score_bytes) for name in names]

    def rows(self, *names: str) -> list[LiveTensor]:
        return [LiveTensor(name, self.shape.row_bytes) for name in names]

    def query_accumulators(self, *names: str) -> list[LiveTensor]:
        count = self.shape.query_bytes // self.shape.itemsize
        return [LiveTensor(name, count * ITEMSIZE["fp32"]) for name in names]


def saved_for_backward(algorithm: str, shape: AttentionShape, *, statistics: str = "lse") -> list[LiveTensor]:
    """What autograd holds between forward and backward.

    algorithm: "flash" (Q, K, V, O and row statistics), "standard" (Q, K, V and P, which is what
    the gradients of Alg. 3 of FlashAttention 2022 need) or "standard-with-scores" (also S and O,
    the study notes' count for claim K1). statistics: "lse", one fp32 number a row
    (FlashAttention-2), or "m, l", two (FlashAttention 2022).
    """
    make = _Sizes(shape)
    inputs = make.queries("q") + make.keys("k", "v")
    if algorithm == "flash":
        if statistics == "lse":
            return inputs + make.queries("out") + make.rows("lse")
        if statistics == "m, l":
            return inputs + make.queries("out") + make.rows("m", "l")
        raise ValueError(f"statistics={statistics!r} is neither 'lse' nor 'm, l'")
    if algorithm == "standard":
        return inputs + make.scores("p")
    if algorithm == "standard-with-scores":
        return inputs + make.queries("out") + make.scores("s", "p")
    raise ValueError(f"algorithm={algorithm!r} is not one of flash, standard, standard-with-scores")


def standard_backward_peak(shape: AttentionShape) -> list[LiveTensor]:
    """PyTorch eager, forward and backward, at the peak: inside softmax's backward.

    By then dV exists and dP has arrived; softmax's backward forms dP∘P before it writes dS. With
    contiguous inputs this is 4 N² + 6 Nd. It equals the H200's measured peak at every length from
    128 to 8192 once the matrix library's 64 MiB workspace is taken off.
    """
    make = _Sizes(shape)
    return make.queries("q", "out", "dout") + make.keys("k", "v", "dv") + make.scores("p", "dp", "dp * p", "ds")


def standard_backward_peak_2022(shape: AttentionShape) -> list[LiveTensor]:
    """The same moment in the FlashAttention paper's benchmark (App. E.6, Table 21): 4 N² + 10 Nd.

    The paper prints totals only. The count of four operands more is forced by its table, exact at
    all six lengths; the reading of them as the copies that batched products need, because there
    q, k, v are slices of one (B, N, 3, H, D) tensor, is ours.
    """
    make = _Sizes(shape)
    copies = make.queries("q, heads first", "dout, heads first")
    copies += make.keys("k, heads first", "v, heads first")
    return standard_backward_peak(shape) + copies


FLASH1_SINGLE_TILE_SEQLEN = 256
"""The released 2022 kernels hold up to 256 keys in one tile and then need no dQ accumulator."""


def flash1_backward_peak(shape: AttentionShape) -> list[LiveTensor]:
    """FlashAttention as released in 2022, forward and backward (Table 21): 13 Nd and two fp32 rows.

    With one key tile, N <= 256, dQ is complete after one pass and its fp32 accumulator (two Nd
    units) is not allocated: 11 Nd. As above the table fixes the counts; that dq, dk, dv exist
    both apart and packed as the gradient of the (B, N, 3, H, D) input is our reading.
    """
    make = _Sizes(shape)
    tensors = make.queries("q", "out", "dout", "dq", "dq in dqkv")
    tensors += make.keys("k", "v", "dk", "dv", "dk in dqkv", "dv in dqkv")
    tensors += make.rows("lse", "delta")
    if shape.seqlen_k > FLASH1_SINGLE_TILE_SEQLEN:
        tensors += make.query_accumulators("dq_accum")
    return tensors


def flash2_pytorch_backward_peak(shape: AttentionShape) -> list[LiveTensor]:
    """FlashAttention-2 inside PyTorch's scaled_dot_product_attention on (B, H, N, D) tensors.

    12 Nd and two rows: two operands are copied to the kernel's (B, N, H, D) layout (the profile
    shows two copy kernels before the backward). Equals the H200's measured peak at every length
    from 128 to 32768, less the 64 MiB workspace.
    """
    make = _Sizes(shape)
    return (
        make.queries("q", "out", "dout", "dq", "out, copied", "dout, copied")
        + make.keys("k", "v", "dk", "dv")
        + make.query_accumulators("dq_accum")
        + make.rows("lse", "delta")
    )


def flash_backward_peak(shape: AttentionShape, *, deterministic_key_tiles: int = 0) -> list[LiveTensor]:
    """Our own kernels: inputs, output, gradients, statistics and the fp32 accumulator of dQ.

    deterministic_key_tiles: with n > 0, dQ is kept as n partial accumulators, one a key tile,
    which brings back a term of N²·d/block_n.
    """
    make = _Sizes(shape)
    partials = [f"dq_accum {j}" for j in range(deterministic_key_tiles)] or ["dq_accum"]
    return (
        make.queries("q", "out", "dout", "dq")
        + make.keys("k", "v", "dk", "dv")
        + make.query_accumulators(*partials)
        + make.rows("lse", "delta")
    )


def flash_sm90_scratch(shape: AttentionShape, tile: Tile, *, deterministic: bool = False) -> list[LiveTensor]:
    """What our Hopper backward allocates: two row statistics and the fp32 accumulator of dQ for
    whole query tiles; deterministic: a counter a query tile as well."""
    tiles = shape.batch * shape.heads * -(-shape.seqlen_q // tile.block_m)
    rows = tiles * tile.block_m
    scratch = [LiveTensor(name, rows * STAT_BYTES) for name in ("lse2", "delta")]
    scratch.append(LiveTensor("dq_accum", rows * shape.head_dim * ITEMSIZE["fp32"]))
    if deterministic:
        scratch.append(LiveTensor("turns", tiles * TURN_BYTES))
    return scratch
