"""One attention problem as plain data, run through the operator and held to what is known of it.

:func:`failure` holds results to float64, bytes to ``predict``, and packed sequences to the bits of
separate calls. The conformance suite and the fuzz tests say which cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from sequence_by_sequence import by_sequence, separate_calls
from torch import Tensor

from analysis.hardware import H200, Gpu
from analysis.packed import Lengths
from analysis.problem import GRADIENTS, Problem
from analysis.shapes import AttentionShape, Tile
from kernels import dispatch
from kernels.launches import AUTO
from kernels.philox import kept_weights
from repro.attention.launcher import HOST_GPU, backend_of, host_as
from repro.attention.operator import flash_attention
from repro.attention.options import DIFFERENTIABLE
from repro.attention.reference import Reference, attention_reference, beyond_bound, framework_result, visible
from repro.attention.validation import FP8
from repro.attention.views import TORCH_TYPES, fits
from repro.prediction import predict

#: "cut": rows of a wider tensor; "transposed": the kernels take a copy.
BIAS_LAYOUTS = ("plain", "cut", "transposed")
LAYOUTS = ("bhnd", "bnhd", "packed", "inner", "offset", "transposed", "expanded")
VALUES = ("normal", "outliers", "large")


@dataclass(frozen=True)
class Case:
    """Everything that defines a problem. ``0`` in ``key_keep`` and ``block_keep`` means no mask.

    alibi: "heads" for slopes (H,), "items" for (B, H), "" for none.
    bias: (items, heads) of a bias, 0 for one and 1 for as many as there are; None for no bias.
    bias_layout: one of ``BIAS_LAYOUTS``. bias_gradient: whether it has a gradient.
    card: compute capability of the card whose kernels the host backend runs; "" for its own.
    fp8: k and v are e4m3, forward alone. scale_block: keys that share a scale.
    queries, keys: of packed sequences, in the place of batch, seqlen_q, seqlen_k; () for none.
    """

    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    seqlen_q: int = 1
    seqlen_k: int = 1
    head_dim: int = 8
    dtype: str = "fp32"
    causal: bool = False
    key_keep: float = 0.0
    block_keep: float = 0.0
    dropout_p: float = 0.0
    scale: float | None = None
    softcap: float | None = None
    alibi: str = ""
    bias: tuple[int, int] | None = None
    bias_layout: str = "plain"
    bias_gradient: bool = False
    sink_logits: bool = False
    deterministic: bool = False
    tile: tuple[int, int] | None = None
    order: str = "rows"
    window: tuple[int | None, int | None] | None = None
    sinks: int = 0
    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()
    layout: str = "bhnd"
    dout_layout: str = "bhnd"
    values: str = "normal"
    needed: tuple[bool, bool, bool] = (True, True, True)
    fp8: bool = False
    scale_block: int | None = None
    card: str = ""
    seed: int = 0

    def learns(self, name: str) -> bool:
        """Whether an option has a gradient here."""
        return self.bias_gradient if name == "bias" else any(self.needed)

    @property
    def lengths(self) -> Lengths | None:
        """Of packed sequences."""
        return Lengths(self.queries, self.keys) if self.queries else None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(items, queries, keys) of the arrays."""
        if self.queries:
            return 1, sum(self.queries), sum(self.keys)
        return self.batch, self.seqlen_q, self.seqlen_k


def references(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lengths: Lengths | None,
    block: tuple[int, int] | None,
    masks: dict[str, Any],
    known: dict[str, Any],
) -> tuple[Reference, Reference]:
    """Attention in float64, and the framework's in the type of q.

    masks: options of ``visible``, with ``block`` the size of a block mask's blocks; known: what
    both take. lengths: of packed sequences, each of which is computed by itself.
    """

    def framework(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **rest: Any) -> Reference:
        seen = visible(q.shape[0], q.shape[1], q.shape[2], k.shape[2], block=block, **masks)
        keys, values = (x.to(q.dtype) for x in (k, v))  # what e4m3 stands for is given in float64
        return framework_result(q, keys, values, dout, seen=seen, **rest)

    def exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **rest: Any) -> Reference:
        return attention_reference(q, k, v, dout, block=block, **masks, **rest)

    if lengths is None:
        return exact(q, k, v, dout, **known), framework(q, k, v, dout, **known)
    return (
        by_sequence(exact, q, k, v, dout, lengths, **known),
        by_sequence(framework, q, k, v, dout, lengths, **known),
    )


def _values(case: Case, generator: torch.Generator, *shape: int) -> Tensor:
    numbers = torch.randn(*shape, generator=generator)
    if case.values == "outliers":  # FlashAttention-3 (2024), Table 3: one in a thousand is large
        large = 10.0 * torch.randn(*shape, generator=generator)
        numbers += large * (torch.rand(*shape, generator=generator) < 0.001)
    elif case.values == "large":
        numbers *= 8.0
    return numbers


def bias_shape(case: Case) -> tuple[int, int] | None:
    """(items, heads) of the case's bias."""
    if case.bias is None:
        return None
    return (case.batch if case.bias[0] else 1, case.heads if case.bias[1] else 1)


def _bias(case: Case, generator: torch.Generator) -> Tensor | None:
    shared = bias_shape(case)
    if shared is None:
        return None
    values = torch.randn(*shared, case.seqlen_q, case.seqlen_k, generator=generator)
    bias = values.to(TORCH_TYPES[case.dtype])
    if case.bias_layout == "cut":
        wide = bias.new_zeros(*shared, case.seqlen_q, case.seqlen_k + 3)
        wide[..., 2:-1] = bias
        return wide[..., 2:-1]
    return bias.mT.contiguous().mT if case.bias_layout == "transposed" else bias


def arranged(tensor: Tensor, layout: str) -> Tensor:
    """The same (B, H, N, D) values behind other strides; "expanded" repeats item and head 0."""
    if layout == "bnhd":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed":
        return torch.stack([tensor, tensor, tensor], 3)[:, :, :, 1]
    if layout == "inner":
        return torch.stack([tensor, tensor], -1)[..., 1]
    if layout == "offset":
        return torch.cat([tensor.new_zeros(5), tensor.flatten()])[5:].view_as(tensor)
    if layout == "transposed":
        return tensor.mT.contiguous().mT
    if layout == "expanded":
        return tensor[:1, :1].expand_as(tensor)
    return tensor


@dataclass
class Call:
    """A case's tensors and options: as the operator takes them, and as the references do."""

    case: Case
    operands: list[Tensor]
    """q, k, v; k and v may be e4m3."""
    dout: Tensor
    exact: list[Tensor]
    """q, k, v; k and v as float64 where they are e4m3."""
    masks: dict[str, Any]
    """Of operator and references alike: which pairs are seen."""
    changes: dict[str, Any]
    """Of operator and references alike: what is done to the scores."""
    scales: dict[str, Any]
    """Of e4m3."""
    tables: dict[str, Any]
    """Of packed sequences."""
    keep: Tensor
    """The dropout mask."""

    @property
    def features(self) -> dict[str, Any]:
        """All that makes the call another one than that of q, k and v alone."""
        case = self.case
        return {
            **self.masks,
            **self.changes,
            **self.scales,
            **self.tables,
            "scale": case.scale,
            "dropout_p": case.dropout_p,
            "seed": case.seed,
            "deterministic": case.deterministic,
            "tile": case.tile,
            "order": case.order,
        }

    def leaves(self, device: str = "cpu") -> list[Tensor]:
        """q, k, v and the options that have a gradient: those that need one ask for it."""
        leaves = [
            t.detach().to(device).requires_grad_(wanted)
            for t, wanted in zip(self.operands, self.case.needed, strict=True)
        ]
        return leaves + [self.changes[name].detach().to(device).requires_grad_() for name in self.learned]

    @property
    def learned(self) -> list[str]:
        """Options whose gradient is asked for."""
        return [name for name in DIFFERENTIABLE if name in self.changes and self.case.learns(name)]

    def __call__(self, *leaves: Tensor, attend: Any = flash_attention, **more: Any) -> Any:
        """The operator, or something that is called like it, on :meth:`leaves`."""
        device = leaves[0].device
        moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in self.features.items()}
        moved |= dict(zip(self.learned, leaves[3:], strict=False))
        return attend(*leaves[:3], **moved, **more)


def call_of(case: Case) -> Call:
    """The case's numbers, drawn from its seed. Masked slots of k and v hold NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = TORCH_TYPES[case.dtype]
    batch, seqlen_q, seqlen_k = case.sizes
    query = (batch, case.heads, seqlen_q, case.head_dim)
    key = (batch, case.kv_heads, seqlen_k, case.head_dim)
    q, k, v, dout = (
        arranged(_values(case, generator, *shape).to(dtype), layout)
        for shape, layout in ((query, case.layout), (key, case.layout), (key, case.layout), (query, case.dout_layout))
    )
    masks: dict[str, Any] = {"causal": case.causal, "window": case.window, "sinks": case.sinks}
    if case.key_keep:
        mask = torch.rand(case.batch, case.seqlen_k, generator=generator) < case.key_keep
        masks["key_mask"] = mask
        away = ~mask[:, None, :, None]
        k, v = (arranged(t.masked_fill(away, math.nan), case.layout) for t in (k, v))
    if case.block_keep:
        assert case.tile is not None
        rows, columns = -(-case.seqlen_q // case.tile[0]), -(-case.seqlen_k // case.tile[1])
        size = (case.batch, case.heads, rows, columns)
        masks["block_mask"] = torch.rand(size, generator=generator) < case.block_keep
    if case.layout == "expanded" and case.key_keep:
        # One memory stands for all items: a slot is free to hold NaN only where all mask it.
        k, v = (torch.nan_to_num(t) for t in (k, v))
    lengths = case.lengths
    items = (batch, case.heads, seqlen_q, seqlen_k)
    tables: dict[str, Any] = {}
    if lengths is not None:
        items = (lengths.sequences, case.heads, lengths.longest_q, lengths.longest_k)
        for name, table in zip(("cu_seqlens_q", "cu_seqlens_k"), lengths.tables, strict=True):
            tables[name] = torch.tensor(table, dtype=torch.int32)
    keep = torch.from_numpy(kept_weights(case.seed, case.dropout_p, *items))
    changes: dict[str, Any] = {"softcap": case.softcap}
    if case.alibi:
        slopes = torch.rand(items[0], case.heads, generator=generator)
        changes["alibi_slopes"] = slopes if case.alibi == "items" else slopes[0]
    bias = _bias(case, generator)
    if bias is not None:
        changes["bias"] = bias
    if case.sink_logits:
        changes["sink_logits"] = 2.0 * torch.randn(case.heads, generator=generator)
    operands, exact, scales = [q, k, v], [q, k, v], dict[str, Any]()
    if case.fp8:
        operands[1:], scales = _as_e4m3(case, generator, k, v)
        exact[1] = _values_of(operands[1], scales["k_scale"], case)
        exact[2] = _values_of(operands[2], scales["v_scale"], case)
    return Call(case, operands, dout, exact, masks, changes, scales, tables, keep)


def failure(case: Case, device: str = "cpu") -> str | None:
    """Run a case, forward and backward, with the kernels of its card; what is wrong, or None."""
    with host_as(case.card or None):
        return _failure(call_of(case), device)


def _failure(call: Call, device: str) -> str | None:
    case, dtype = call.case, TORCH_TYPES[call.case.dtype]
    leaves = call.leaves(device)
    counter = _Counter(device, H200 if case.card == dispatch.HOPPER else HOST_GPU)
    out, lse = call(*leaves, return_lse=True)
    laid_out = {"q": leaves[0], "k": leaves[1], "v": leaves[2], "out": out}
    bias = call.changes.get("bias")
    gapped = bias is not None and bias.shape[-1] > 1 and bias.stride(-1) != 1
    copied = ["bias"] if gapped else []
    complaint = counter.complaint(case, "forward", laid_out, copied, call.masks)
    names = ("dq", "dk", "dv", *(f"d{name}" for name in call.learned))
    wanted = [n for n, x in zip(names, leaves, strict=True) if x.requires_grad]
    got = {"out": out, "lse": lse}
    if wanted:
        laid_out["dout"] = upstream = call.dout.to(device)
        grads = torch.autograd.grad(out, [x for x in leaves if x.requires_grad], upstream)
        got |= dict(zip(wanted, grads, strict=True))
        complaint = complaint or counter.complaint(case, "backward", laid_out, copied, call.masks)
    if complaint:
        return complaint

    want, theirs = references_of(call)
    for name, result in got.items():
        complaint = beyond_bound(name, result, want, theirs, dtype)
        if complaint:
            return complaint
    if case.lengths is None or case.dropout_p:  # a sequence alone has the dropout mask of item 0
        return None
    apart = separate_calls(
        *leaves[:3],
        call.dout.to(device),
        case.lengths,
        **call.masks,
        **call.changes,
        scale=case.scale,
        deterministic=case.deterministic,
        tile=case.tile,
    )
    for name in _same_bits(case) & set(got):
        if not torch.equal(got[name], getattr(apart, name)):
            return f"{name}: not the bits of separate calls"
    return None


def references_of(call: Call) -> tuple[Reference, Reference]:
    """Float64, and the framework in the case's type."""
    case = call.case
    scale = 1.0 / math.sqrt(case.head_dim) if case.scale is None else case.scale
    known = {"scale": scale, "dropout_p": case.dropout_p, "keep": call.keep, **call.changes}
    return references(*call.exact, call.dout, case.lengths, case.tile, call.masks, known)


def _same_bits(case: Case) -> set[str]:
    """Results of packed sequences whose terms separate calls add in the same order.

    dq is added up by atomic additions unless a fixed order is asked for. On a Hopper card packed
    sequences of head dimension 256 stay with sm_80's kernels; the backward has other tiles at 128
    without a mask, and is sm_80's where not all gradients are asked for, as separate calls do.
    """
    same = {"out", "lse", "dk", "dv", *(["dq"] if case.deterministic else [])}
    if case.card != dispatch.HOPPER:
        return same
    if case.head_dim == 256:
        return set()
    if (case.head_dim == 128 and not case.causal) or not all(case.needed):
        return same & {"out", "lse"}
    return same


def _as_e4m3(case: Case, generator: torch.Generator, *tensors: Tensor) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensors as e4m3, laid out as the case says, and scales of all sizes."""
    shape: tuple[int, ...] = (case.kv_heads,)
    if case.scale_block is not None:
        shape = (case.batch, case.kv_heads, -(-case.seqlen_k // case.scale_block))
    scales: dict[str, Any] = {
        name: torch.exp(torch.randn(shape, generator=generator)) for name in ("k_scale", "v_scale")
    }
    codes = [t.contiguous().to(FP8).view(torch.uint8) for t in tensors]
    laid_out = [arranged(x, case.layout).view(FP8) for x in codes]
    return laid_out, scales | {"scale_block": case.scale_block}


def _values_of(codes: Tensor, scales: Tensor, case: Case) -> Tensor:
    """What the e4m3 numbers stand for, in float64."""
    wide = scales.double()[None, :, None]
    if case.scale_block is not None:
        wide = scales.double().repeat_interleave(case.scale_block, 2)[..., : case.seqlen_k]
    return codes.double() * wide[..., None]


class _Counter:
    """Holds the bytes of each pass to their prediction, where the backend counts them."""

    def __init__(self, device: str, gpu: Gpu) -> None:
        self._gpu = gpu
        self._backend: Any = backend_of(torch.device(device)) if device == "cpu" else None
        self._reset()

    def _reset(self) -> None:
        if self._backend is not None:
            self._backend.reset()

    def complaint(
        self, case: Case, pass_: str, tensors: dict[str, Tensor], copied: list[str], masks: dict[str, Any]
    ) -> str | None:
        """Where the bytes counted since the last call differ from the prediction, or None."""
        if self._backend is None:
            return None
        copied = copied + [name for name, tensor in tensors.items() if not fits(tensor)]
        found = predict(AUTO, problem_of(case, masks), pass_, self._gpu, copied=copied).traffic
        counted = {kernel: entries for kernel, entries in self._backend.traffic.items() if entries}
        self._reset()
        wanted = {kernel: dict(entries) for kernel, entries in found.kernels.items() if entries}
        if counted == wanted:
            return None
        kernels = [k for k in {**counted, **wanted} if counted.get(k) != wanted.get(k)]
        kernel = kernels[0]
        return f"{pass_} {kernel}: counted {counted.get(kernel)}, predicted {wanted.get(kernel)}"


def shape_of(case: Case) -> AttentionShape:
    """The case as the formulas know it."""
    batch, seqlen_q, seqlen_k = case.sizes
    return AttentionShape(
        batch,
        case.heads,
        seqlen_q,
        seqlen_k,
        case.head_dim,
        case.kv_heads,
        case.dtype,
        case.causal,
        case.window or (None, None),
        case.sinks,
        case.fp8,
        case.scale_block,
    )


def problem_of(case: Case, masks: dict[str, Any] | None = None) -> Problem:
    """The case as predictions know it; masks: of its call, with the bits of a block mask."""
    mask = (masks or {}).get("block_mask")
    return Problem(
        shape_of(case),
        lengths=case.lengths,
        scale=case.scale,
        key_mask=case.key_keep > 0.0,
        block_mask=None if mask is None else mask.numpy(),
        dropout_p=case.dropout_p,
        softcap=case.softcap,
        alibi=bool(case.alibi),
        bias=bias_shape(case),
        bias_gradient=case.bias_gradient,
        sink_logits=case.sink_logits,
        sink_gradient=case.sink_logits and any(case.needed),
        gradients=[n for n, w in zip(GRADIENTS, case.needed, strict=True) if w],
        tile=None if case.tile is None else Tile(*case.tile),
        order=case.order,
        deterministic=case.deterministic,
    )
