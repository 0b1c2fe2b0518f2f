"""One step of decoding as plain data, run through the operator and held to what is known of it.

Any cache that ``repro.decode_attention`` takes: lengths, pages that sequences share, fp8 with
scales, a latent, grouped heads, drafts; split and whole, each held to float64 and its bytes to
their prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from analysis.decode import DecodeShape
from analysis.sums.decode import flash_decode
from analysis.traffic import Traffic
from kernels.decode_config import configure
from repro.attention.decode import decode_attention
from repro.attention.launcher import backend_of
from repro.attention.reference import Reference, attention_reference, beyond_bound, framework_result, visible
from repro.attention.validation import FP8
from repro.attention.views import TORCH_TYPES

#: Behind the end of a sequence nothing is read: a page that no cache has.
NO_PAGE = 2**30


@dataclass(frozen=True)
class Case:
    """A step. ``page_size`` 0: contiguous caches; ``scale_block`` 0: a scale a head of fp8;
    ``value_dim`` 0: all columns of a latent are values.

    width: queries of a sequence. seqlens: keys of each, given to the kernel if ``ragged`` (without,
    the first is that of all). transposed: contiguous caches lie as (B, N, Hkv, D).
    """

    seqlens: tuple[int, ...] = (1,)
    heads: int = 1
    kv_heads: int = 1
    width: int = 1
    head_dim: int = 16
    dtype: str = "fp16"
    fp8: bool = False
    scale_block: int = 0
    latent: bool = False
    value_dim: int = 0
    page_size: int = 0
    ragged: bool = False
    transposed: bool = False
    causal: bool = True
    splits: int = 1
    large: bool = False
    seed: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        return self.seqlens if self.ragged else (self.seqlens[0],) * len(self.seqlens)

    @property
    def room(self) -> int:
        """Keys that the cache has room for; all of them are used where no lengths are given."""
        if self.page_size:
            return -(-max(*self.lengths, 1) // self.page_size) * self.page_size
        return max(self.lengths) + 3 * self.ragged


def failure(case: Case, device: str = "cpu") -> str | None:
    """Run a step in one piece and in ``splits``; what is wrong with a result, or None.

    out and lse within the bound of ``beyond_bound``; bytes as predicted, of every tensor.
    """
    generator = torch.Generator().manual_seed(case.seed)
    q, caches, options = _arguments(case, generator)
    want = [_exact(case, b, q, caches, options) for b in range(len(case.lengths))]
    given: dict[str, Any] = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in options.items()}
    keys, *values = (codes.to(device) for codes, _ in caches)
    for splits in dict.fromkeys((1, case.splits)):
        backend: Any = backend_of(torch.device(device)) if device == "cpu" else None
        if backend is not None:
            backend.reset()
        out, lse = decode_attention(
            q.to(device),
            keys,
            values[0] if values else None,
            splits=splits,
            causal=case.causal,
            return_lse=True,
            **given,
        )
        for b, (exact, theirs, dtype) in enumerate(want):
            if case.value_dim:
                exact, theirs = (_cut(x, case.value_dim) for x in (exact, theirs))
            for name, result in (("out", out), ("lse", lse)):
                complaint = beyond_bound(name, result[b : b + 1].cpu(), exact, theirs, dtype)
                if complaint:
                    return f"{splits} splits, sequence {b}, {complaint}"
        complaint = None if backend is None else _uncounted(case, splits, backend.traffic)
        if complaint:
            return f"{splits} splits, {complaint}"
    return None


def _cut(found: Reference, columns: int) -> Reference:
    """With the columns of out that are values; the same bound for their terms."""
    terms = found.terms and {**found.terms, "out": found.terms["out"][..., :columns]}
    return replace(found, out=found.out[..., :columns], terms=terms)


def _uncounted(case: Case, splits: int, traffic: dict[str, Any]) -> str | None:
    """Where the bytes counted differ from the prediction, or None."""
    shape = DecodeShape(
        case.heads,
        case.kv_heads,
        case.width,
        case.lengths,
        case.head_dim,
        case.dtype,
        case.fp8,
        case.latent,
        case.page_size or None,
        case.ragged,
        case.scale_block or None,
        case.value_dim or None,
    )
    if not case.room:
        return None  # nothing is launched
    tile = configure(case.dtype, case.head_dim, shape.rows, latent=case.latent).tile
    wanted = {n: dict(x) for n, x in Traffic(flash_decode(shape, tile, splits)).kernels.items()}
    counted = {name: dict(entries) for name, entries in traffic.items() if entries}
    wanted = {name: entries for name, entries in wanted.items() if entries}
    return None if counted == wanted else f"bytes: counted {counted}, predicted {wanted}"


Cache = tuple[Tensor, Tensor]
"""A cache as the operator takes it, and its numbers (B, Hkv, room, D) in float64."""


def _arguments(case: Case, generator: torch.Generator) -> tuple[Tensor, list[Cache], dict[str, Any]]:
    """q, K and V (a latent alone), and the operator's options."""
    batch, dtype = len(case.lengths), TORCH_TYPES[case.dtype]
    q = torch.randn(batch, case.heads, case.width, case.head_dim, generator=generator)
    q = (q * (8.0 if case.large else 1.0)).to(dtype)
    options: dict[str, Any] = {}
    if case.ragged:
        options["seqlens_k"] = torch.tensor(case.lengths, dtype=torch.int32)
    pages, table = batch, None
    if case.page_size:
        columns = case.room // case.page_size
        pages = batch * columns + 1
        table = torch.randint(pages, (batch, columns), generator=generator, dtype=torch.int32)
        used = torch.arange(columns) * case.page_size < options["seqlens_k"][:, None]
        options["block_table"] = torch.where(used, table, NO_PAGE).to(torch.int32)
    if case.scale_block:
        options["scale_block"] = case.scale_block
    if case.value_dim:
        options["value_dim"] = case.value_dim
    keys = case.page_size or case.room
    caches = []
    for name in ("k_scale",) if case.latent else ("k_scale", "v_scale"):
        numbers = torch.randn(pages, case.kv_heads, keys, case.head_dim, generator=generator)
        cache = numbers.to(FP8 if case.fp8 else dtype)
        exact = cache.double()
        if case.fp8:
            blocks = -(-keys // case.scale_block) if case.scale_block else 0
            shape = (pages, case.kv_heads, blocks) if case.scale_block else (case.kv_heads,)
            scales = torch.exp(torch.randn(shape, generator=generator))
            wide = scales.double()[None, :, None]
            if case.scale_block:
                wide = scales.double().repeat_interleave(case.scale_block, 2)[..., :keys]
            exact = exact * wide[..., None]
            options[name] = scales.transpose(1, 2) if case.page_size and case.scale_block else scales
        if table is not None:
            exact = exact[table.long()].transpose(1, 2).flatten(2, 3)
            cache = cache.view(torch.uint8) if case.fp8 else cache
            cache = cache.transpose(1, 2).contiguous()
            cache = cache.view(FP8) if case.fp8 else cache
        elif case.transposed:
            bits = cache.view(torch.uint8) if case.fp8 else cache
            bits = bits.transpose(1, 2).contiguous().transpose(1, 2)
            cache = bits.view(FP8) if case.fp8 else bits
        if table is None:
            for b, length in enumerate(case.lengths):  # nobody may read these
                cache[b, :, length:] = math.nan
        caches.append((cache, exact))
    return q, caches, options


def _exact(
    case: Case, item: int, q: Tensor, caches: list[Cache], options: dict[str, Any]
) -> tuple[Any, Any, torch.dtype]:
    """A sequence's answer in float64, and the framework's in the type of q."""
    length, rows = case.lengths[item], q[item : item + 1]
    k, v = (caches[i][1][item : item + 1, :, :length] for i in (0, -1))
    seen = visible(1, case.heads, case.width, length, causal=case.causal)
    exact = attention_reference(rows, k, v, torch.zeros_like(rows), causal=case.causal)
    theirs = framework_result(
        rows, k.to(q.dtype), v.to(q.dtype), torch.zeros_like(rows), seen=seen, scale=case.head_dim**-0.5
    )
    return exact, theirs, q.dtype
