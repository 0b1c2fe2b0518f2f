"""The shape of one attention problem and of one tile: the arguments of every formula here.

Shapes are written (B, H, N, D): batch, heads, sequence length, head dimension. Queries are
(B, heads, seqlen_q, head_dim), keys and values (B, kv_heads, seqlen_k, head_dim).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from analysis.arguments import flag, whole
from analysis.window import Sides, Window, sides

ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4}
"""Bytes of one stored element."""

STAT_BYTES = 4
"""Bytes of one row statistic (lse, delta, m, l) and of one accumulator element: always fp32."""

FP8_BYTES = 1
"""Bytes of one e4m3 number."""
SCALE_BYTES = 4
"""Bytes of the fp32 number that e4m3 numbers are multiplied with."""
SCALE_UNIT = 16
"""Keys that share a scale are a multiple of this: those of one step of the kernels' products."""

ROW_ELEMENTS = 8
"""Kernels move rows 16 bytes at a time: 8 elements of a 16-bit type."""
KernelBytes: TypeAlias = Mapping[str, Mapping[tuple[str, str], int]]
"""Kernel -> (tensor, direction) -> bytes (``analysis.sums``)."""
BiasShape: TypeAlias = tuple[int, int]
"""(items, heads) of a bias (items, heads, Nq, Nk): 1, or as many as there are."""


@dataclass(frozen=True)
class AttentionShape:
    """One attention problem.

    Causal is bottom-right aligned: query i sees key j when j <= i + seqlen_k - seqlen_q.
    With kv_heads < heads, query head h reads key/value head h // group.

    Args:
        batch: B, problems of one shape in one call.
        heads: H, heads of q and out.
        seqlen_q: N of q (B, heads, seqlen_q, head_dim) and out.
        seqlen_k: N of k and v (B, kv_heads, seqlen_k, head_dim).
        head_dim: D, numbers of one row; kernels move it padded to a multiple of 8.
        kv_heads: heads of k and v, a divisor of ``heads``; None: as many as ``heads``.
        dtype: of q, k, v and out: "fp16", "bf16" or "fp32".
        causal: whether a query sees only the keys up to its own place from the end.
        window: (left, right), keys that a query sees before and after that place; None: all.
        sinks: keys from the first that a window hides from no query.
        fp8: k and v are e4m3 with scales (the forward alone); q and out are ``dtype``.
        scale_block: keys that share a scale of k, and one of v, a multiple of 16; None: a scale a
            key/value head.

    Raises:
        ValueError, TypeError: for anything no kernel could run, naming the values.
    """

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    kv_heads: int = None  # type: ignore[assignment]
    """Number of key/value heads; as many as query heads where none is given (None)."""
    dtype: str = "fp16"
    causal: bool = False
    window: Sides = (None, None)
    sinks: int = 0
    fp8: bool = False
    scale_block: int | None = None

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        for name in ("batch", "heads", "seqlen_q", "seqlen_k", "head_dim", "kv_heads"):
            object.__setattr__(self, name, whole(name, getattr(self, name), least=1))
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(ITEMSIZE)}")
        object.__setattr__(self, "causal", flag("causal", self.causal))
        object.__setattr__(self, "window", sides(self.window))
        object.__setattr__(self, "sinks", whole("sinks", self.sinks, least=0))
        object.__setattr__(self, "fp8", flag("fp8", self.fp8))
        if self.fp8:
            if self.dtype == "fp32":
                raise ValueError("k and v of e4m3 are multiplied in 16 bits, dtype is 'fp32'")
            if self.head_dim % 16:
                raise ValueError(f"head_dim={self.head_dim} is not a multiple of 16, as e4m3 rows need")
            scale_blocks(self.seqlen_k, self.scale_block)
        elif self.scale_block is not None:
            raise ValueError(f"scale_block={self.scale_block} with fp8={self.fp8}")

    @property
    def itemsize(self) -> int:
        """Bytes of one element of q or out; of k and v too, unless they are e4m3."""
        return ITEMSIZE[self.dtype]

    @property
    def key_itemsize(self) -> int:
        """Bytes of one element of k or v."""
        return FP8_BYTES if self.fp8 else self.itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of k_scale; also of v_scale. 0 where k and v have the type of q."""
        if not self.fp8:
            return 0
        if self.scale_block is None:
            return self.kv_heads * SCALE_BYTES  # the items of a batch share them
        blocks = scale_blocks(self.seqlen_k, self.scale_block)
        return self.batch * self.kv_heads * blocks * SCALE_BYTES

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def padded(self) -> AttentionShape:
        """The shape the kernels see: head_dim rounded up to a multiple of 8, zeros in the rest."""
        columns = aligned_head_dim(self.head_dim)
        return self if columns == self.head_dim else replace(self, head_dim=columns)

    @property
    def visible(self) -> Window:
        """What the causal mask, the window and the sinks leave."""
        return Window.of(self.seqlen_q, self.seqlen_k, causal=self.causal, window=self.window, sinks=self.sinks)

    @property
    def windowed(self) -> bool:
        """Whether a window hides anything; else it changes nothing, kernels included."""
        return self.visible.hides

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs that enter the softmax, for one head."""
        return self.visible.visible_pairs

    @property
    def query_bytes(self) -> int:
        """Bytes of q; also of out, dout and dq."""
        return self.batch * self.heads * self.seqlen_q * self.head_dim * self.itemsize

    @property
    def key_bytes(self) -> int:
        """Bytes of k; also of v, dk and dv."""
        return self.batch * self.kv_heads * self.seqlen_k * self.head_dim * self.key_itemsize

    @property
    def score_bytes(self) -> int:
        """Bytes of the score matrix S in the io dtype; also of P, dP and dS."""
        return self.batch * self.heads * self.seqlen_q * self.seqlen_k * self.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one fp32 number per query row: lse, delta, m or l."""
        return self.batch * self.heads * self.seqlen_q * STAT_BYTES


@dataclass(frozen=True)
class Tile:
    """What a block of threads holds at a time.

    Args:
        block_m: rows of q (the papers' Br).
        block_n: rows of k and v (the papers' Bc).

    Raises:
        ValueError, TypeError: a size that is not a whole number of at least 1.
    """

    block_m: int
    block_n: int

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n"):
            object.__setattr__(self, name, whole(name, getattr(self, name), least=1))


def bias_elements(shape: AttentionShape, bias: BiasShape) -> int:
    """Elements of a bias. ValueError unless each of (items, heads) is 1 or as many as there are."""
    items, heads = bias
    if items not in (1, shape.batch) or heads not in (1, shape.heads):
        raise ValueError(f"bias={bias} is not (1 or {shape.batch}, 1 or {shape.heads}) items and heads")
    return items * heads * shape.seqlen_q * shape.seqlen_k


def scale_blocks(keys: int, block: int | None) -> int:
    """Scales of a head with ``keys`` keys: one for ``block`` of them, or one (None).

    ValueError for a block that is no multiple of 16.
    """
    if block is None:
        return 1
    if whole("scale_block", block) < 1 or block % SCALE_UNIT:
        raise ValueError(f"scale_block={block} is not a multiple of {SCALE_UNIT}")
    return -(-keys // block)


def aligned_head_dim(head_dim: int) -> int:
    """Columns of the arrays that kernels get for ``head_dim``: a multiple of 8."""
    return -(-head_dim // ROW_ELEMENTS) * ROW_ELEMENTS
