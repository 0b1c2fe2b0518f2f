"""Decoding: few queries, a long cache of K and V. What it moves at least, how long that takes, and
into how many parts the keys of a sequence are best split.

Every query head of a group reads the same K and V, so a token's cache is read once per key/value
head if the rows of a group are worked on together. Nothing is used twice beyond that: each byte of
the cache meets group · Nq rows and is done with. So the time is the cache's bytes over the
bandwidth of HBM as long as the rows are few (:func:`rows_at_the_ridge`), and what lowers it is
what makes the cache smaller: fewer key/value heads (GQA, MQA), one latent for keys and values
(MLA), fewer bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from analysis.arguments import check_fields, checked, whole
from analysis.gpu import Gpu
from analysis.shapes import FP8_BYTES, ITEMSIZE, SCALE_BYTES, STAT_BYTES, scale_blocks


@dataclass(frozen=True)
class DecodeShape:
    """One step of decoding.

    Args:
        heads: H, of q and out (B, H, Nq, D).
        kv_heads: Hkv, of the cache; divides H.
        seqlen_q: Nq, queries of a sequence: 1, or more where a draft is verified (speculation).
        seqlens: keys of each sequence, as many as there are sequences.
        head_dim: D.
        dtype: of q and out: "fp16", "bf16" or "fp32".
        fp8: K and V are e4m3 with fp32 scales.
        scale_block: keys that share a scale, a multiple of 16; None: all of a head.
        value_dim: columns of a latent, from the first, that are values, and of out; None: all.
        latent: the values are the keys, one tensor is cached (MLA with its projections absorbed).
        page_size: keys of a page, or None where K and V of a sequence are contiguous.
        ragged: the kernels are given the lengths; False: all sequences have as many keys.
    """

    heads: int
    kv_heads: int
    seqlen_q: int
    seqlens: tuple[int, ...]
    head_dim: int
    dtype: str = "bf16"
    fp8: bool = False
    latent: bool = False
    page_size: int | None = None
    ragged: bool = False
    scale_block: int | None = None
    value_dim: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("heads", "kv_heads", "seqlen_q", "head_dim"):
            whole(name, getattr(self, name), least=1)
        for i, keys in enumerate(self.seqlens):
            whole(f"seqlens[{i}]", keys, least=0)
        if self.page_size is not None:
            whole("page_size", self.page_size, least=1)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(ITEMSIZE)}")
        if self.scale_block is not None and not self.fp8:
            raise ValueError(f"scale_block={self.scale_block} with fp8={self.fp8}")
        scale_blocks(0, self.scale_block)
        if self.value_dim is not None:
            whole("value_dim", self.value_dim, least=1, most=self.head_dim)
            if not self.latent:
                raise ValueError(f"value_dim={self.value_dim} with latent={self.latent}")
        if not self.ragged and len(set(self.seqlens)) > 1:
            raise ValueError(f"seqlens={self.seqlens} differ, but ragged={self.ragged}")

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.seqlens)

    @property
    def rows(self) -> int:
        """Query rows that read the same keys: those of the heads of a group."""
        return self.heads // self.kv_heads * self.seqlen_q

    @property
    def cache_itemsize(self) -> int:
        """Bytes of an element of the cache."""
        return FP8_BYTES if self.fp8 else ITEMSIZE[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of the cache that one token takes, of one layer; each step reads them again."""
        tensors = 1 if self.latent else 2
        return tensors * self.kv_heads * self.head_dim * self.cache_itemsize

    @property
    def values(self) -> int:
        """Columns of out."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def query_bytes(self) -> int:
        """Bytes of q."""
        elements = self.batch * self.heads * self.seqlen_q * self.head_dim
        return elements * ITEMSIZE[self.dtype]

    @property
    def out_bytes(self) -> int:
        """Bytes of out; as many as of q but for a latent of which only a part is values."""
        return self.query_bytes // self.head_dim * self.values

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of blocks of keys; those of heads, a few numbers, are not counted."""
        if self.scale_block is None:
            return 0
        page = self.page_size or max(self.seqlens, default=0)
        a_page = scale_blocks(page, self.scale_block)
        count = sum(
            keys // page * a_page + scale_blocks(keys % page, self.scale_block) for keys in self.seqlens if keys
        )
        return (1 if self.latent else 2) * self.kv_heads * count * SCALE_BYTES

    @property
    def compulsory_bytes(self) -> int:
        """The lower bound: the cache, its scales and q read once, out and lse written once.

        No exact algorithm moves less, whatever the size M of the fast memory: every key changes
        the result. FlashAttention's Θ(N²d²/M) becomes Θ(Nq·Nk·d²/M) here, which is below the
        Nk·d of the cache as soon as the rows fit on chip, Nq·d <= M: then one pass over the cache
        is optimal, and no M makes it cheaper (:func:`passes`).
        """
        stats = self.batch * self.heads * self.seqlen_q * STAT_BYTES
        cache = sum(self.seqlens) * self.token_bytes + self.scale_bytes
        return cache + self.query_bytes + self.out_bytes + stats

    @property
    def flops(self) -> int:
        """Of the two products, 2 a multiply-add; what a causal mask takes out is counted too."""
        columns = self.head_dim + self.values
        return 2 * self.heads * self.seqlen_q * columns * sum(self.seqlens)


@checked
def passes(rows: int, head_dim: int, fast_elements: int) -> int:
    """How often a tiling reads the cache: once if the rows of q fit into M elements."""
    return max(1, math.ceil(rows * head_dim / fast_elements))


def hbm_seconds(shape: DecodeShape, gpu: Gpu) -> float:
    """The compulsory bytes at the bandwidth of HBM. Partial results stay in L2."""
    return shape.compulsory_bytes / gpu.hbm_bandwidth_bytes_per_s


def tensor_seconds(shape: DecodeShape, gpu: Gpu) -> float:
    """The products at the rate of 16-bit tensor cores."""
    return shape.flops / gpu.fp16_tensor_flops


def seconds(shape: DecodeShape, gpu: Gpu) -> float:
    """The roofline: the slower of the two."""
    return max(hbm_seconds(shape, gpu), tensor_seconds(shape, gpu))


def rows_at_the_ridge(shape: DecodeShape, gpu: Gpu) -> float:
    """Rows a key/value head at which the tensor cores take as long as HBM, for a long cache.

    A key meets 2·rows·(D + Dv) operations for its bytes, D·cache_itemsize of K and as many of V.
    """
    key_bytes = shape.token_bytes / shape.kv_heads
    operations = 2 * (shape.head_dim + shape.values)
    return gpu.fp16_tensor_flops / gpu.hbm_bandwidth_bytes_per_s * key_bytes / operations


@lru_cache(maxsize=4096)
@checked
def best_splits(*, blocks: int, tiles: int, at_once: int, tile_bytes: int, partial_bytes: int) -> int:
    """Parts that the keys of a sequence are best split into.

    Time is counted in bytes that one thread block moves: whole waves of blocks, each as long as
    the longest split, and the partial results written and read once more, shared out over the
    card. The least time wins, of equal ones the fewest splits.

    Args:
        blocks: thread blocks without a split, (batch, key/value head, row tile).
        tiles: key tiles of the longest sequence.
        at_once: blocks that run at a time: SMs times blocks an SM.
        tile_bytes: of K and V, one tile.
        partial_bytes: of out and lse in fp32, one block.
    """

    best, least = 1, float(-(-blocks // at_once) * tiles * tile_bytes)
    for splits in range(2, tiles + 1):
        partial = 2 * blocks * splits * partial_bytes / at_once
        if partial >= least:
            break  # so do all larger numbers
        waves = -(-blocks * splits // at_once)
        time = waves * -(-tiles // splits) * tile_bytes + partial
        if time < least:
            best, least = splits, time
    return best


@checked
def splits_without_end(seqlen_k: int, rows: int, head_dim: int, token_head_bytes: int) -> float:
    """The best number of splits where SMs are plentiful: one block each, the sum of a row serial.

    Reading the cache takes Nk·b/S (b bytes a key and key/value head), adding up S partial results
    4·(D + 1)·rows·S bytes; the sum is least at S = sqrt(Nk·b / (4·(D + 1)·rows)). So splits grow as
    the root of the context, and the step takes the root of the time, not a constant.
    """
    return math.sqrt(seqlen_k * token_head_bytes / (STAT_BYTES * (head_dim + 1) * rows))
