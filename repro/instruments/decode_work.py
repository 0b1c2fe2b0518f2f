"""One step of decoding as a call to be timed or counted: caches in pages, the kernels' own driver.

Like ``repro.instruments.gpu_work`` it goes past the operator: nothing but the launches is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from analysis.decode import DecodeShape
from kernels import decode
from kernels.launch import Array, Backend
from kernels.launching.plan import record
from repro.attention.launcher import Repeated, backend_of
from repro.attention.quantize import quantize_e4m3
from repro.attention.views import TORCH_TYPES, array_of

__all__ = ["DecodeOperands"]


class DecodeOperands:
    """q ~ N(0, 1), K and V ~ N(0, 1) in pages in a random order, and results, on one device.

    ``shape`` has a page size and lengths of its own (``ragged``), as servers run it.
    """

    def __init__(self, shape: DecodeShape, device: str = "cuda") -> None:
        if shape.page_size is None or not shape.ragged:
            raise ValueError(f"page_size={shape.page_size}, ragged={shape.ragged}: pages and lengths are needed")
        self.shape = shape
        generator = torch.Generator(device=device).manual_seed(0)
        dtype = TORCH_TYPES[shape.dtype]

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        columns = -(-max(shape.seqlens) // shape.page_size)
        pages = shape.batch * columns
        self.q = normal(shape.batch, shape.heads, shape.seqlen_q, shape.head_dim)
        caches = [
            normal(pages, shape.page_size, shape.kv_heads, shape.head_dim) for _ in range(1 if shape.latent else 2)
        ]
        self.scales: list[Tensor] = []
        if shape.fp8:
            pairs = [quantize_e4m3(cache, 2, block=shape.scale_block) for cache in caches]
            caches, self.scales = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        self.caches = caches
        order = torch.randperm(pages, generator=generator, device=device)
        self.table = order.view(shape.batch, columns).to(torch.int32)
        self.lengths = torch.tensor(shape.seqlens, dtype=torch.int32, device=device)
        self.out = self.q.new_empty(*self.q.shape[:3], shape.values)
        self.lse = torch.empty(self.q.shape[:3], dtype=torch.float32, device=device)

    def arrays(self) -> dict[str, Array]:
        """The driver's arguments, by name."""
        tensors = {"q": self.q, "out": self.out, "lse": self.lse}
        tensors |= {"seqlens": self.lengths, "block_table": self.table}
        for name, cache in zip("kv", self.caches, strict=False):
            tensors[name] = (cache.view(torch.uint8) if self.shape.fp8 else cache).transpose(1, 2)
        for name, scale in zip(("k_scale", "v_scale"), self.scales, strict=False):
            blocks = self.shape.scale_block is not None
            tensors[name] = scale.transpose(1, 2)[..., None] if blocks else scale
        return {name: array_of(name, tensor) for name, tensor in tensors.items()}

    def launch(self, backend: Backend, splits: int | None = None) -> None:
        """Run the step once."""
        _launch(backend, self.arrays(), self.shape, splits)

    def call(self, splits: int | None = None) -> Callable[[], None]:
        """The step, recorded: a call queues its launches and does nothing else."""
        arrays = self.arrays()

        def driver(backend: Backend, at: dict[str, Array]) -> None:
            _launch(backend, at, self.shape, splits)

        plan = record(backend_of(self.q.device), arrays, driver)
        repeated = Repeated(plan, self.q.device)
        addresses = [array.pointer for array in arrays.values()]
        return lambda: repeated(list(addresses))

    def keys_and_values(self, item: int, kv_head: int) -> tuple[Tensor, Tensor]:
        """K and V (1, N, D) of a sequence's head in float64, as the cache holds them."""
        pages = self.table[item].long()
        found = []
        for i, cache in enumerate(self.caches):
            rows = cache[pages, :, kv_head].double()
            if self.shape.scale_block is not None:
                wide = self.scales[i].repeat_interleave(self.shape.scale_block, 1)
                rows *= wide[pages, : cache.shape[1], kv_head, None].double()
            elif self.scales:
                rows *= self.scales[i][kv_head].double()
            found.append(rows.flatten(0, 1)[None, : self.shape.seqlens[item]])
        return found[0], found[-1]

    def error(self, item: int = 0, kv_head: int = 0) -> float:
        """Largest error of out of the query heads that share a head of K and V, against float64."""
        from repro.instruments.exact import exact_attention

        group = self.shape.heads // self.shape.kv_heads
        heads = slice(kv_head * group, (kv_head + 1) * group)
        keys, values = self.keys_and_values(item, kv_head)
        q = self.q[item, heads].double()
        exact = exact_attention(q, keys, values, q, causal=True, backward=False)
        want = exact["out"][..., : self.shape.values]
        return float((self.out[item, heads].double() - want).abs().max())


def _launch(backend: Backend, at: dict[str, Array], shape: DecodeShape, splits: int | None) -> None:
    given: dict[str, Any] = {"v": None} | at
    decode.forward(backend, **given, scale=1 / math.sqrt(shape.head_dim), scale_block=shape.scale_block, splits=splits)
