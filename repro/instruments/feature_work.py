"""A pass with a sliding window, a softcap, ALiBi or packed sequences as a call to be timed.

Like ``repro.instruments.gpu_work`` it goes past the operator: nothing but the launches is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from analysis.algorithms import Family, find
from analysis.packed import Lengths
from analysis.shapes import AttentionShape
from kernels import attention
from kernels.launch import Array, Backend
from kernels.launching.plan import record
from kernels.packed import Packed
from repro.attention.launcher import Repeated, backend_of
from repro.attention.views import array_of
from repro.instruments import hopper_guard
from repro.instruments.exact import Errors, exact_attention
from repro.instruments.gpu_work import Operands, Work

__all__ = ["FeatureOperands"]

#: Standard deviation of the scores under a softcap: at 1 the cap of 30 changes less than bf16 does.
CAPPED_SPREAD = 4.0


class FeatureOperands(Operands):
    """``gpu_work.Operands`` (as many heads of keys as of queries), results, and what scores get.

    shape: with its window. alibi: with slopes 2^(-8 (h + 1) / H) of head h. lengths: of packed
    sequences; ``shape`` is then that of the packed arrays.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        softcap: float | None = None,
        alibi: bool = False,
        lengths: Lengths | None = None,
        device: str = "cuda",
    ) -> None:
        super().__init__(shape, device)
        self.softcap, self.lengths = softcap, lengths
        if softcap is not None:
            self.q *= CAPPED_SPREAD
        rows = self.q.shape[:3]
        self.results = {name: torch.empty_like(self.q) for name in ("out", "dq", "dk", "dv")}
        self.tensors = {name: getattr(self, name) for name in ("q", "k", "v", "dout")}
        self.tensors |= self.results
        self.tensors["lse"] = torch.empty(rows, dtype=torch.float32, device=device)
        self.slopes: Tensor | None = None
        if alibi:
            numbers = torch.arange(1, shape.heads + 1, dtype=torch.float32, device=device)
            self.slopes = torch.exp2(-8 * numbers / shape.heads)
            self.tensors["alibi_slopes"] = self.slopes.expand(rows[:2])[..., None]
        if lengths is not None:
            for side, table in zip("qk", lengths.tables, strict=True):
                starts = torch.tensor(table, dtype=torch.int32, device=device)
                self.tensors[f"cu_seqlens_{side}"] = starts

    def launch(self, backend: Backend, at: dict[str, Array], algorithm: str, pass_: str) -> None:
        """Queue a pass of an algorithm of ``kernels.attention``, which picks its form by rule."""
        options: dict[str, Any] = {
            "scale": 1 / math.sqrt(self.shape.head_dim),
            "causal": self.shape.causal,
            "window": self.shape.window,
            "softcap": self.softcap,
            "alibi_slopes": at.get("alibi_slopes"),
        }
        if self.lengths is not None:
            options["packed"] = Packed(at["cu_seqlens_q"], at["cu_seqlens_k"], self.lengths)
        first, stats = (at["q"], at["k"], at["v"], at["out"]), {"lse": at["lse"]}
        if pass_ == "forward":
            attention.forward(backend, algorithm, *first, stats, **options)
            return
        gradients = (at["dq"], at["dk"], at["dv"])
        attention.backward(backend, algorithm, *first, at["dout"], stats, *gradients, **options)

    def call(self, algorithm: str, pass_: str) -> Work:
        """The pass, recorded, and run once on results that are all NaN before; a backward behind
        the algorithm's own forward. RuntimeError for a Hopper algorithm that the guard refuses."""
        hopper = find(algorithm).family is Family.HOPPER
        reason = hopper_guard.refusal(algorithm) if hopper and self.q.is_cuda else None
        if reason is not None:
            raise RuntimeError(reason)
        for result in self.results.values():
            result.fill_(math.nan)
        work = self._recorded(algorithm, "forward")
        work()
        if pass_ == "backward":
            work = self._recorded(algorithm, "backward")
            work()
        return work

    def _recorded(self, algorithm: str, pass_: str) -> Work:
        arrays = {name: array_of(name, tensor) for name, tensor in self.tensors.items()}
        device = self.q.device
        plan = record(backend_of(device), arrays, lambda backend, at: self.launch(backend, at, algorithm, pass_))
        repeated = Repeated(plan, device)
        addresses = [array.pointer for array in arrays.values()]
        return lambda: repeated(list(addresses))

    def errors(self, pass_: str) -> tuple[Errors, Errors]:
        """How far the latest results are from float64, and how far attention in the type of q is
        that stores S and P: of two heads, or of all sequences."""
        names = ("out",) if pass_ == "forward" else ("dq", "dk", "dv")
        ours, stored, largest = (dict.fromkeys(names, 0.0) for _ in range(3))
        for item, heads, rows in self._pieces():
            given = [x[item, heads, rows] for x in (self.q, self.k, self.v, self.dout)]
            options: dict[str, Any] = {
                "causal": self.shape.causal,
                "left": self.shape.window[0],
                "softcap": self.softcap,
                "slopes": None if self.slopes is None else self.slopes[heads],
                "backward": pass_ == "backward",
            }
            exact = exact_attention(*(x.double() for x in given), **options)
            rounded = exact_attention(*given, **options)
            for name in names:
                want = exact[name]
                largest[name] = max(largest[name], float(want.abs().max()))
                got = self.results[name][item, heads, rows]
                for worst, result in ((ours, got), (stored, rounded[name])):
                    error = float((result.double() - want).abs().max())
                    worst[name] = error if math.isnan(error) else max(worst[name], error)
        return Errors(ours, largest), Errors(stored, largest)

    def _pieces(self) -> Iterator[tuple[int, slice, slice]]:
        """(item, heads, rows) of what is compared: attention by itself."""
        if self.lengths is None:
            yield 0, slice(0, 1), slice(None)
            yield -1, slice(self.shape.heads - 1, None), slice(None)
            return
        start = 0
        for rows in self.lengths.queries:
            if rows:
                yield 0, slice(None), slice(start, start + rows)
            start += rows
