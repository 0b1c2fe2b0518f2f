"""What the tests of decoding share: problems, their float64 answer, their bytes."""

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
from repro.attention.reference import attention_reference
from repro.attention.validation import DTYPES

FP8 = torch.float8_e4m3fn


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
    """Keys that share a scale of fp8, drawn from all sizes; None: scales of 1."""
    latent: bool = False
    value_dim: int | None = None
    """Columns of a wide latent that are values."""
    causal: bool = True
    ragged: bool = True
    """The lengths are given as a tensor."""
    splits: int | None = 1
    seed: int = 0
    device: str = "cpu"

    @property
    def room(self) -> int:
        """Keys that there is room for: a few more than the longest sequence has."""
        longest = max(self.seqlens)
        if self.page_size is not None:
            return -(-longest // self.page_size) * self.page_size
        return longest + 3 * self.ragged

    def contiguous(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of (B, H, N, D); the cache's numbers as its type holds them, in the type of q."""
        batch = len(self.seqlens)
        q, k, v = (
            normal(batch, heads, length, self.head_dim, dtype=self.dtype, device=self.device, seed=3 * self.seed + i)
            for i, (heads, length) in enumerate(
                [(self.heads, self.seqlen_q), (self.kv_heads, self.room), (self.kv_heads, self.room)]
            )
        )
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
            lengths = torch.tensor(self.seqlens, dtype=torch.int32, device=self.device)
            options["seqlens_k"] = lengths
        if self.page_size is not None:
            (k, v), options["block_table"] = self.paged(k, v)
        if self.fp8:
            k, v = k.to(FP8), v.to(FP8)
        if self.scale_block is not None:
            scales = {"k_scale": self.scales(k, 1), "v_scale": self.scales(v, 2)}
            options |= {n: x for n, x in scales.items() if n == "k_scale" or not self.latent}
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
            rows = tensor.transpose(1, 2).reshape(batch * columns, *shape[1:])
            cache[table.flatten()] = rows
            caches.append(cache)
        return caches, table.to(torch.int32)

    def scales(self, cache: Tensor, seed: int) -> Tensor:
        """Scales of blocks of a cache's keys, as ``repro.decode_attention`` takes them."""
        assert self.scale_block is not None
        keys = 2 if self.page_size is None else 1
        shape = list(cache.shape[:3])
        shape[keys] = -(-shape[keys] // self.scale_block)
        return torch.exp(0.5 * normal(*shape, device=self.device, seed=seed))

    def answer(self) -> tuple[Tensor, Tensor]:
        """out and lse in float64."""
        q, k, v = self.contiguous()
        if self.scale_block is not None:
            (_, _, _), options = self.arguments()
            k, v = (self.scaled(x, options.get(n)) for x, n in ((k, "k_scale"), (v, "v_scale")))
        parts = []
        for b, length in enumerate(self.seqlens):
            rows = slice(b, b + 1)
            keys, values = k[rows, :, :length], v[rows, :, :length]
            values = keys if self.latent else values
            parts.append(attention_reference(q[rows], keys, values, causal=self.causal))
        out = torch.cat([p.out for p in parts])
        return out[..., : self.value_dim], torch.cat([p.lse for p in parts])

    def scaled(self, x: Tensor, scales: Tensor | None) -> Tensor:
        """Numbers (B, Hkv, room, D) times the scale of their key, in float64."""
        if scales is None:
            return x
        assert self.scale_block is not None
        if self.page_size is None:
            wide = scales.repeat_interleave(self.scale_block, 2)[:, :, : self.room]
        else:
            _, options = self.arguments()
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
            self.scale_block,
            self.value_dim,
        )

    def expected(self, splits: int) -> dict[str, dict[tuple[str, str], int]]:
        """Bytes by kernel, tensor and direction, without zeros."""
        tile = configure(DTYPES[self.dtype], self.head_dim, self.shape().rows, latent=self.latent).tile
        kernels = Traffic(flash_decode(self.shape(), tile, splits)).kernels
        return {name: dict(entries) for name, entries in kernels.items()}

    def run(self, **options: Any) -> tuple[Tensor, Tensor]:
        """out and lse of the operator."""
        tensors, given = self.arguments()
        return repro.decode_attention(*tensors, return_lse=True, **given | options)

    def counted(self) -> tuple[tuple[Tensor, Tensor], dict[str, dict[tuple[str, str], int]]]:
        """Results, and the bytes that the host backend counts."""
        backend: Any = launcher.backend_of(torch.device("cpu"))
        backend.reset()
        results = self.run()
        return results, {name: dict(entries) for name, entries in backend.traffic.items()}

    def but(self, **changes: Any) -> Problem:
        """The same with some fields changed."""
        return replace(self, **changes)
