"""What the tests of decoding share: steps, their float64 answer, their bytes.

Any cache that ``repro.decode_attention`` takes: lengths, pages, fp8 with scales, a latent, grouped
heads, drafts; :func:`failure` holds a step, whole and split, to float64 and its bytes to the prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from attention_support import normal
from torch import Tensor

import repro
from analysis.decode import DecodeShape
from analysis.sums.decode import flash_decode
from analysis.traffic import Traffic
from kernels.decode_config import configure
from repro.attention import launcher
from repro.attention.reference import Reference, attention_reference, beyond_bound, framework_result, visible
from repro.attention.validation import DTYPES

FP8 = torch.float8_e4m3fn
Counted = dict[str, dict[tuple[str, str], int]]


@dataclass(frozen=True)
class Problem:
    """Decoding with sequences of ``seqlens`` keys; ``page_size`` None: contiguous caches."""

    seqlens: tuple[int, ...] = (100, 37)
    heads: int = 4
    kv_heads: int = 2
    seqlen_q: int = 1
    head_dim: int = 64
    dtype: torch.dtype = torch.float16
    page_size: int | None = None
    fp8: bool = False
    scale_block: int | None = None
    """Keys that share a scale of fp8, drawn from all sizes; 0: those of a head; None: scales of 1."""
    latent: bool = False
    value_dim: int | None = None
    """Columns of a wide latent that are values."""
    causal: bool = True
    ragged: bool = True
    """The lengths are given as a tensor."""
    transposed: bool = False
    """Contiguous caches lie as (B, N, Hkv, D)."""
    size: float = 1.0
    """Of the queries' numbers."""
    splits: int | None = 1
    seed: int = 0
    device: str = "cpu"

    @property
    def room(self) -> int:
        """Keys that there is room for: a few more than the longest sequence has."""
        longest = max(self.seqlens)
        if self.page_size is not None:
            return -(-max(longest, 1) // self.page_size) * self.page_size
        return longest + 3 * self.ragged

    def contiguous(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of (B, H, N, D); the cache's numbers as its type holds them, in the type of q."""
        batch = len(self.seqlens)
        sizes = [(self.heads, self.seqlen_q), (self.kv_heads, self.room), (self.kv_heads, self.room)]
        q, k, v = (
            normal(batch, heads, length, self.head_dim, device=self.device, seed=3 * self.seed + i)
            for i, (heads, length) in enumerate(sizes)
        )
        q, k, v = ((self.size * q).to(self.dtype), k.to(self.dtype), v.to(self.dtype))
        if self.fp8:
            k, v = k.to(FP8).to(self.dtype), v.to(FP8).to(self.dtype)
        return q, k, v

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Of ``repro.decode_attention``. Whatever nobody may read holds NaN."""
        q, k, v = self.contiguous()
        options: dict[str, Any] = {"splits": self.splits, "causal": self.causal}
        if self.value_dim is not None:
            options["value_dim"] = self.value_dim
        for b, length in enumerate(self.seqlens):
            k[b, :, length:] = v[b, :, length:] = math.nan
        if self.ragged:
            options["seqlens_k"] = torch.tensor(self.seqlens, dtype=torch.int32, device=self.device)
        if self.page_size is not None:
            (k, v), options["block_table"] = self.paged(k, v)
        elif self.transposed:
            k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
        if self.fp8:
            k, v = k.to(FP8), v.to(FP8)
        if self.scale_block is not None:
            options["k_scale"] = self.scales(k, 1)
            if not self.latent:
                options["v_scale"] = self.scales(v, 2)
            if self.scale_block:
                options["scale_block"] = self.scale_block
        return (q, k, None if self.latent else v), options

    def paged(self, *tensors: Tensor) -> tuple[list[Tensor], Tensor]:
        """The same numbers in pages in a random order, and the table that names them."""
        assert self.page_size is not None
        batch, columns = len(self.seqlens), self.room // self.page_size
        generator = torch.Generator().manual_seed(self.seed)
        pages = batch * columns + 2
        table = torch.randperm(pages, generator=generator)[: batch * columns]
        table = table.view(batch, columns).to(self.device)
        caches = []
        for tensor in tensors:
            shape = (pages, self.page_size, self.kv_heads, self.head_dim)
            cache = torch.full(shape, math.nan, dtype=tensor.dtype, device=self.device)
            cache[table.flatten()] = tensor.transpose(1, 2).reshape(batch * columns, *shape[1:])
            caches.append(cache)
        return caches, table.to(torch.int32)

    def scales(self, cache: Tensor, seed: int) -> Tensor:
        """Scales of a cache, as ``repro.decode_attention`` takes them."""
        if not self.scale_block:
            return torch.exp(0.5 * normal(self.kv_heads, device=self.device, seed=seed))
        keys = 2 if self.page_size is None else 1
        shape = list(cache.shape[:3])
        shape[keys] = -(-shape[keys] // self.scale_block)
        return torch.exp(0.5 * normal(*shape, device=self.device, seed=seed))

    def references(self) -> list[tuple[Reference, Reference]]:
        """Of each sequence: float64, and what the framework makes in the type of q."""
        q, k, v = self.contiguous()
        if self.scale_block is not None:
            _, options = self.arguments()
            k, v = (self.scaled(x, options.get(n), options) for x, n in ((k, "k_scale"), (v, "v_scale")))
        found = []
        for b, length in enumerate(self.seqlens):
            rows, keys = q[b : b + 1], k[b : b + 1, :, :length]
            values = keys if self.latent else v[b : b + 1, :, :length]
            nothing = torch.zeros_like(rows)
            exact = attention_reference(rows, keys, values, nothing, causal=self.causal)
            seen = visible(1, self.heads, self.seqlen_q, length, causal=self.causal)
            given = (rows.cpu(), keys.to(q.dtype).cpu(), values.to(q.dtype).cpu(), nothing.cpu())
            theirs = framework_result(*given, seen=seen, scale=self.head_dim**-0.5)
            found.append((_cut(exact, self.value_dim), _cut(theirs, self.value_dim)))
        return found

    def answer(self) -> tuple[Tensor, Tensor]:
        """out and lse in float64."""
        exact = [of_one for of_one, _ in self.references()]
        return torch.cat([x.out for x in exact]), torch.cat([x.lse for x in exact])

    def scaled(self, x: Tensor, scales: Tensor | None, options: dict[str, Any]) -> Tensor:
        """Numbers (B, Hkv, room, D) times the scale of their key, in float64."""
        if scales is None:
            return x
        if not self.scale_block:
            wide = scales[None, :, None]
        elif self.page_size is None:
            wide = scales.repeat_interleave(self.scale_block, 2)[:, :, : self.room]
        else:
            wide = scales.repeat_interleave(self.scale_block, 1)[:, : self.page_size]
            pages = wide[options["block_table"].long()]  # (B, columns, page_size, Hkv)
            wide = pages.flatten(1, 2).transpose(1, 2)
        return x.double() * wide[..., None].double()

    def shape(self) -> DecodeShape:
        """As ``analysis`` names it."""
        return DecodeShape(
            self.heads,
            self.kv_heads,
            self.seqlen_q,
            self.seqlens,
            self.head_dim,
            DTYPES[self.dtype],
            self.fp8,
            self.latent,
            self.page_size,
            self.ragged,
            self.scale_block or None,
            self.value_dim,
        )

    def expected(self, splits: int) -> Counted:
        """Bytes by kernel, tensor and direction, without zeros."""
        if not self.room:
            return {}  # nothing is launched
        tile = configure(DTYPES[self.dtype], self.head_dim, self.shape().rows, latent=self.latent).tile
        kernels = Traffic(flash_decode(self.shape(), tile, splits)).kernels
        return {name: dict(entries) for name, entries in kernels.items()}

    def run(self, **options: Any) -> tuple[Tensor, Tensor]:
        """out and lse of the operator."""
        tensors, given = self.arguments()
        return repro.decode_attention(*tensors, return_lse=True, **given | options)

    def counted(self, **options: Any) -> tuple[tuple[Tensor, Tensor], Counted]:
        """Results, and the bytes that the host backend counts."""
        backend: Any = launcher.backend_of(torch.device("cpu"))
        backend.reset()
        results = self.run(**options)
        return results, {name: dict(entries) for name, entries in backend.traffic.items()}

    def but(self, **changes: Any) -> Problem:
        """The same with some fields changed."""
        return replace(self, **changes)


def _cut(found: Reference, columns: int | None) -> Reference:
    """With the columns of out that are values; the same bound for their terms."""
    terms = found.terms and {**found.terms, "out": found.terms["out"][..., :columns]}
    return replace(found, out=found.out[..., :columns], terms=terms)


def failure(problem: Problem) -> str | None:
    """Run a step in one piece and in ``splits``, on the host; what is wrong with a result, or None.

    out and lse within the bound of ``beyond_bound``; bytes as predicted, of every tensor.
    """
    want = problem.references()
    for splits in dict.fromkeys((1, problem.splits or 1)):
        (out, lse), counted = problem.counted(splits=splits)
        for b, (exact, theirs) in enumerate(want):
            for name, result in (("out", out), ("lse", lse)):
                complaint = beyond_bound(name, result[b : b + 1], exact, theirs, problem.dtype)
                if complaint:
                    return f"{splits} splits, sequence {b}, {complaint}"
        wanted = problem.expected(splits)
        if counted != wanted:
            return f"{splits} splits, bytes: counted {counted}, predicted {wanted}"
    return None
