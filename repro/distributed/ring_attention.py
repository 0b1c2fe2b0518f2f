"""Ring attention: every rank holds a part of the sequence, keys and values travel around the ring.

Each rank attends its queries to the keys and values that pass by and merges the partial results by
their log-sum-exp, which is exact: softmax over all keys is a weighted mean of softmaxes over parts.
The backward recomputes each part from the final log-sum-exp (FlashAttention's backward) and lets
dk, dv travel with the keys they belong to. Liu et al. 2023 (2310.01889); the local operator is
ours.

Sequences are placed as equal chunks: "contiguous" gives rank r chunk r of P; "zigzag" cuts 2P
chunks and gives rank r chunks r and 2P-1-r, so that causal attention costs every rank the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from analysis.arguments import flag, instance, methods, real, whole
from repro.attention.options import Options

PLACEMENTS = ("contiguous", "zigzag")


class LocalAttention(Protocol):
    """Attention on one rank: q (B, H, N, D), k and v (B, Hkv, M, D)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """(out, lse), lse (B, H, N) natural logarithm, -inf where nothing is seen."""

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of these keys' share, given the merged ``out`` and ``lse``."""


class FlashLocal:
    """Our operator on each rank."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        import repro.attention.operator  # noqa: F401  (registers the operators)

        out, lse = torch.ops.repro.flash_attention(q, k, v, *_options(causal, scale))
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        import repro.attention.operator  # noqa: F401

        dq, dk, dv, *_ = torch.ops.repro.flash_attention_backward(
            dout, None, q, k, v, out, lse, *_options(causal, scale), [True, True, True]
        )
        return dq, dk, dv


def _options(causal: bool, scale: float) -> Options:
    return Options(causal=causal, scale=scale)


class DenseLocal:
    """Plain torch on each rank, in the inputs' type: the reference, usable in float64."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        scores = _scores(q, k, causal, scale)
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - _finite(lse)[..., None])
        return weights @ _expand(v, q), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = torch.exp(_scores(q, k, causal, scale) - _finite(lse)[..., None])
        delta = (dout * out).sum(-1, keepdim=True)
        ds = weights * (dout @ _expand(v, q).transpose(-1, -2) - delta) * scale
        dk, dv = ds.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ dout
        return ds @ _expand(k, q), _fold(dk, k), _fold(dv, v)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = (q @ _expand(k, q).transpose(-1, -2)) * scale
    if causal:
        n, m = scores.shape[-2:]
        hidden = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _expand(k: Tensor, q: Tensor) -> Tensor:
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _fold(dk: Tensor, k: Tensor) -> Tensor:
    return dk.unflatten(1, (k.shape[1], -1)).sum(2)


def _finite(lse: Tensor) -> Tensor:
    return torch.where(lse == -math.inf, 0.0, lse)


def _check_results(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        instance(name, tensor, Tensor)
        if not tensor.is_floating_point():
            raise TypeError(f"{name} is {tensor.dtype}, not a floating-point type")
    shapes = [tuple(tensor.shape) for tensor in (out_a, lse_a, out_b, lse_b)]
    if len(shapes[0]) != 4 or shapes != [shapes[0], shapes[0][:3]] * 2:
        raise ValueError(
            "merge takes out (B, H, N, D) and lse (B, H, N) twice, got "
            f"out_a {shapes[0]}, lse_a {shapes[1]}, out_b {shapes[2]}, lse_b {shapes[3]}"
        )
    if len({out_a.device, lse_a.device, out_b.device, lse_b.device}) > 1:
        raise ValueError(
            f"out_a is on {out_a.device}, lse_a {lse_a.device}, out_b {out_b.device}, lse_b {lse_b.device}"
        )


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys from the results over each.

    out (B, H, N, D), lse (B, H, N). A row that sees nothing on one side keeps the other side's
    result exactly; one that sees nothing at all stays out = 0, lse = -inf. Associative and
    commutative up to rounding: (m, d) ⊕ (m', d') of Milakov & Gimelshein 2018, in logarithms.
    """
    _check_results(out_a, lse_a, out_b, lse_b)
    lse = torch.logaddexp(lse_a, lse_b)
    # From the larger one, not from lse: its rounding would scale the whole row.
    top = _finite(torch.maximum(lse_a, lse_b))
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = torch.where(lse == -math.inf, 1.0, weight_a + weight_b)
    share_a, share_b = (weight_a / total)[..., None], (weight_b / total)[..., None]
    return out_a * share_a + out_b * share_b, lse


@dataclass(frozen=True)
class _Part:
    """A run of consecutive positions: where it starts in the sequence and in the local tensor."""

    start: int
    first: int
    length: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.length)


def parts(rank: int, ranks: int, local: int, placement: str) -> list[_Part]:
    """The runs of positions that ``rank`` holds, of ``local`` rows each rank."""
    ranks = whole("ranks", ranks, least=1)
    rank, local = whole("rank", rank, least=0, most=ranks - 1), whole("local", local, least=0)
    if placement not in PLACEMENTS:
        raise ValueError(f"placement must be one of {PLACEMENTS}, got {placement!r}")
    if placement == "contiguous":
        return [_Part(rank * local, 0, local)]
    if local % 2:
        raise ValueError(f"zigzag placement needs an even number of local rows, got {local}")
    half = local // 2
    return [_Part(rank * half, 0, half), _Part((2 * ranks - 1 - rank) * half, half, half)]


def take_local(x: Tensor, rank: int, ranks: int, placement: str = "contiguous") -> Tensor:
    """The rows (dimension 2) of a whole (B, H, N, D) tensor that ``rank`` holds."""
    instance("x", x, Tensor)
    if x.dim() != 4:
        raise ValueError(f"x must have 4 dimensions (B, H, N, D), got shape {tuple(x.shape)}")
    ranks = whole("ranks", ranks, least=1)
    if x.shape[2] % ranks:
        raise ValueError(f"seqlen {x.shape[2]} does not divide among {ranks} ranks")
    held = parts(rank, ranks, x.shape[2] // ranks, placement)
    return torch.cat([x[:, :, p.start : p.start + p.length] for p in held], 2)


def _pairs(mine: list[_Part], theirs: list[_Part], causal: bool) -> Iterator[tuple[_Part, _Part, bool]]:
    """Pairs of parts with anything to compute, and whether the pair is on the diagonal."""
    for a in mine:
        for b in theirs:
            if not causal or b.start < a.start:
                yield a, b, False
            elif a.start == b.start:
                yield a, b, True


class _Ring:
    """Passes tensors to the next rank; several in one message round."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        everyone = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._next = everyone[(self.rank + 1) % self.ranks]
        self._previous = everyone[(self.rank - 1) % self.ranks]

    def pass_on(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[dist.Work]]:
        """Start sending to the next rank and receiving from the previous one."""
        arriving = [torch.empty_like(t) for t in tensors]
        ops = [dist.P2POp(dist.isend, t, self._next, self.group) for t in tensors]
        ops += [dist.P2POp(dist.irecv, t, self._previous, self.group) for t in arriving]
        return arriving, dist.batch_isend_irecv(ops)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
        placement: str,
        group: dist.ProcessGroup | None,
        local: LocalAttention,
    ) -> tuple[Tensor, Tensor]:
        ring = _Ring(group)
        held = [parts(r, ring.ranks, q.shape[2], placement) for r in range(ring.ranks)]
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], -math.inf, dtype=wide, device=q.device)
        here = [k.contiguous(), v.contiguous()]
        for step in range(ring.ranks):
            works: list[dist.Work] = []
            if step < ring.ranks - 1:  # the next keys travel while these are used
                arriving, works = ring.pass_on(here)
            owner = (ring.rank - step) % ring.ranks
            for a, b, diagonal in _pairs(held[ring.rank], held[owner], causal):
                part, part_lse = local.forward(
                    q[:, :, a.rows], here[0][:, :, b.rows], here[1][:, :, b.rows], diagonal, scale
                )
                out[:, :, a.rows], lse[:, :, a.rows] = merge(
                    out[:, :, a.rows], lse[:, :, a.rows], part.to(wide), part_lse.to(wide)
                )
            for work in works:
                work.wait()
            if works:
                here = arriving
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.options = (causal, scale, placement, group, local)
        ctx.mark_non_differentiable(lse)
        return result, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        causal, scale, placement, group, local = ctx.options
        dout = grads[0].contiguous()
        ring = _Ring(group)
        held = [parts(r, ring.ranks, q.shape[2], placement) for r in range(ring.ranks)]
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        here = [k.contiguous(), v.contiguous()]
        # The sums for the keys at hand; they go around the whole ring and end at home.
        sums = [torch.zeros(t.shape, dtype=wide, device=t.device) for t in (k, v)]
        for step in range(ring.ranks):
            works: list[dist.Work] = []
            if step < ring.ranks - 1:
                arriving, works = ring.pass_on(here)
            owner = (ring.rank - step) % ring.ranks
            for a, b, diagonal in _pairs(held[ring.rank], held[owner], causal):
                part = local.backward(
                    dout[:, :, a.rows],
                    q[:, :, a.rows],
                    here[0][:, :, b.rows],
                    here[1][:, :, b.rows],
                    out[:, :, a.rows],
                    lse[:, :, a.rows],
                    diagonal,
                    scale,
                )
                dq[:, :, a.rows] += part[0]
                sums[0][:, :, b.rows] += part[1]
                sums[1][:, :, b.rows] += part[2]
            if ring.ranks > 1:
                sums, handed = ring.pass_on(sums)
                for work in [*works, *handed]:
                    work.wait()
            if works:
                here = arriving
        return (dq.to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype), *(None,) * 5)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    placement: str = "contiguous",
    group: dist.ProcessGroup | None = None,
    local: LocalAttention | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence that is spread over the ranks of ``group``.

    Args:
        q: this rank's queries (B, H, N/P, D).
        k, v: this rank's keys and values (B, Hkv, N/P, D), Hkv divides H.
        causal: position i sees position j when j <= i, over the whole sequence.
        scale: default 1/sqrt(D).
        placement: which positions a rank holds, see the module's docstring and ``take_local``.
        local: attention on one rank; default :class:`FlashLocal`.

    Returns:
        This rank's rows of the output, like q; with ``return_lse`` also lse (B, H, N/P).

    Raises:
        TypeError: what is no dense floating tensor, types or devices that differ, another kind of
            option.
        ValueError: shapes that disagree, a scale that is not finite, or an unknown placement.

    Each rank sends its keys and values P-1 times forward and P-1 times backward, and the fp32 sums
    dk, dv P times (``analysis.ring.ring_bytes``).
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        instance(name, tensor, Tensor)
        if tensor.is_nested or tensor.layout != torch.strided or not tensor.is_floating_point():
            kind = "nested" if tensor.is_nested else f"{tensor.dtype}, {tensor.layout}"
            raise TypeError(f"{name} is {kind}; dense tensors of a floating type are needed")
        if tensor.dtype != q.dtype:
            raise TypeError(f"q and {name} differ in type: {q.dtype} and {tensor.dtype}")
        if tensor.device != q.device:
            raise TypeError(f"q and {name} are on different devices: {q.device}, {tensor.device}")
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"ring attention needs (B, H, N, D) with equal local lengths, got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]) or (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise ValueError(
            "q and k must agree in batch and head dimension, and the heads of k divide those of q; "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}"
        )
    if q.shape[3] == 0:
        raise ValueError(f"head dimension must be at least 1, got q {tuple(q.shape)}")
    causal, return_lse = flag("causal", causal), flag("return_lse", return_lse)
    if group is not None:
        instance("group", group, dist.ProcessGroup)
    if local is not None:
        methods("local", local, "forward", "backward")
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else real("scale", scale)
    parts(0, 1, q.shape[2], placement)
    out, lse = _RingAttention.apply(q, k, v, causal, scale, placement, group, FlashLocal() if local is None else local)
    return (out, lse) if return_lse else out
