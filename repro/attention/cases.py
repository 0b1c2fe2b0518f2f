"""One random attention problem: shapes, masks, strides and types drawn from a seed, and checked.

Shared by the property tests and by ``python -m repro.fuzz``. A case is plain data, so a failure
is reported as one line that anybody can run again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from analysis.hardware import A100_80GB, H200, Gpu
from analysis.packed import Lengths
from analysis.shapes import AttentionShape, Tile
from kernels import dispatch
from kernels.attention import SHARED_LIMIT_BYTES, configure
from kernels.launches import AUTO, GRADIENTS
from kernels.philox import kept_weights
from repro.attention.bounds import beyond_bound, references
from repro.attention.by_sequence import separate_calls
from repro.attention.launcher import backend_of, host_as
from repro.attention.operator import flash_attention
from repro.attention.validation import FP8
from repro.attention.views import TORCH_TYPES, fits
from repro.plain_case import PlainCase
from repro.prediction import predict

__all__ = ["LAYOUTS", "TILES", "VALUES", "Case", "draw", "failure", "smaller", "tile_fits"]

#: "cut": rows of a wider tensor; "transposed": the kernels take a copy.
BIAS_LAYOUTS = ("plain", "cut", "transposed")
LAYOUTS = ("bhnd", "bnhd", "packed", "inner", "offset", "transposed", "expanded")
TILES = ((64, 64), (64, 32), (32, 64), (16, 16), (128, 64), (64, 128))
VALUES = ("normal", "outliers", "large")
#: Kernels and tiles are chosen for it as for the host backend.
HOST_GPU = replace(
    A100_80GB, name="host",
    shared_bytes_per_block=SHARED_LIMIT_BYTES, shared_bytes_per_sm=SHARED_LIMIT_BYTES + 1024,
)  # fmt: skip


@dataclass(frozen=True)
class Case(PlainCase):
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


def draw(seed: int, form: int, max_pairs: int = 40_000) -> Case:
    """A random case with at most ``max_pairs`` scores in all heads together.

    ``form`` decides what is compiled into the kernels (type, head dimension, tile, masks),
    ``seed`` everything else: a compiled form serves many cases.
    """
    random, shaping = Random(seed), Random(form)
    kv_heads = random.choice((1, 1, 1, 2, 3))
    heads = kv_heads * random.choice((1, 1, 1, 2, 3))
    batch = random.choice((1, 1, 2, 3))
    most = max(1, max_pairs // (batch * heads))
    seqlen_q = min(_length(random), most)
    seqlen_k = min(_length(random) if random.random() < 0.6 else seqlen_q, max(1, most // seqlen_q))
    low, high = shaping.choice(((1, 32), (33, 64), (33, 64), (65, 128), (129, 256)))
    head_dim = random.choice((high, high // 8 * 8, random.randrange(low, high + 1)))
    dtype = shaping.choice(("fp16", "bf16", "fp32"))
    sparse = shaping.random() < 0.25
    tile = shaping.choice(TILES) if sparse or shaping.random() < 0.5 else None
    dropout = shaping.random() < 0.3
    masked = shaping.random() < 0.5
    negative = shaping.random() < 0.2
    windowed = shaping.random() < 0.4
    if tile and not sparse and not tile_fits(tile, head_dim, dtype):
        tile = None
    capped, sloped, biased = (shaping.random() < 0.25 for _ in range(3))
    bias_gradient = biased and shaping.random() < 0.7
    case = Case(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        dtype=dtype,
        causal=shaping.random() < 0.5,
        key_keep=random.choice((0.1, 0.5, 0.9)) if masked else 0.0,
        block_keep=random.choice((0.2, 0.6, 1.0)) if sparse else 0.0,
        dropout_p=random.choice((0.1, 0.5, 1.0)) if dropout else 0.0,
        scale=random.choice((-0.2, 0.0) if negative else (None, None, 0.3, 1.0)),
        softcap=random.choice((0.5, 5.0, 50.0)) if capped else None,
        alibi=random.choice(("heads", "items")) if sloped else "",
        bias=(random.randrange(2), random.randrange(2)) if biased else None,
        bias_layout=random.choice(BIAS_LAYOUTS) if biased else "plain",
        bias_gradient=bias_gradient,
        deterministic=shaping.random() < 0.5,
        tile=tile,
        order=shaping.choice(("rows", "rows", "sawtooth")),
        window=(_side(random), _side(random)) if windowed else None,
        sinks=random.choice((0, 0, 1, 4, 70)) if windowed else 0,
        layout=random.choice(LAYOUTS),
        dout_layout=random.choice(LAYOUTS),
        values=random.choice(VALUES),
        needed=random.choice(
            ((True, True, True),) * 3 + ((True, False, False), (False, True, True))
        ),
        seed=random.randrange(2**31),
    )
    if shaping.random() < 0.25:
        packed = _packed(case, random, most)
        fits_hopper = dtype != "fp32" and low > 32 and not negative and shaping.random() < 0.6
        return _packed_on_hopper(packed, high) if fits_hopper else packed
    if dtype == "fp32":
        return case
    if shaping.random() >= 0.2:
        fits_hopper = low > 32 and not negative and shaping.random() < 0.4
        return _on_hopper(case, high) if fits_hopper else case
    return replace(
        case, fp8=True, head_dim=-(-head_dim // 16) * 16, needed=(False,) * 3, bias_gradient=False,
        scale_block=random.choice((None, 16, 48, 64, 128)),
    )  # fmt: skip


def _on_hopper(case: Case, head_dim: int) -> Case:
    """The case with a head dimension that the Hopper kernels have, in memory that TMA reaches."""
    layout, dout_layout = (
        "bhnd" if each == "expanded" else each for each in (case.layout, case.dout_layout)
    )
    return replace(
        case, card=dispatch.HOPPER, head_dim=head_dim, layout=layout, dout_layout=dout_layout
    )


def _packed(case: Case, random: Random, most: int) -> Case:
    """The case with sequences of many lengths, without what they do not go with."""
    count = random.choice((1, 2, 3, 5, 8))
    edge = max(1, math.isqrt(most // count))
    queries = tuple(random.choice((0, 1, min(_length(random), edge))) for _ in range(count))
    keys = tuple(random.choice((q, 0, 1, min(_length(random), edge))) for q in queries)
    if not sum(queries) * sum(keys):  # predictions are of kernels that run
        queries, keys = (1, *queries), (1, *keys)
    return replace(
        case, batch=1, queries=queries, keys=keys, key_keep=0.0, block_keep=0.0, bias=None,
        bias_layout="plain", bias_gradient=False, order="rows",
    )  # fmt: skip


def _packed_on_hopper(case: Case, head_dim: int) -> Case:
    """The packed case without what its Hopper kernels do not go with, as they would never run."""
    return replace(
        _on_hopper(case, head_dim), window=None, sinks=0, softcap=None, alibi="", dropout_p=0.0,
        tile=None,
    )  # fmt: skip


def tile_fits(tile: tuple[int, int], head_dim: int, dtype: str) -> bool:
    """Whether both passes have shared memory and threads for this tile."""
    try:
        for pass_ in ("forward", "backward"):
            configure(pass_, dtype, -(-head_dim // 8) * 8, tile=Tile(*tile), key_mask=True)
    except ValueError:
        return False
    return True


def _length(random: Random) -> int:
    edge = random.choice((1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200))
    return edge if random.random() < 0.7 else random.randrange(1, 200)


def _side(random: Random) -> int | None:
    return random.choice((None, 0, 1, 15, 16, 64, random.randrange(200)))


def smaller(case: Case) -> Iterator[Case]:
    """Simpler neighbours of a failing case, the most drastic simplifications first."""
    plain = Case()
    for name in ("card", "values", "layout", "dout_layout", "needed", "scale", "softcap", "alibi",
                 "bias_layout", "bias_gradient", "deterministic", "order", "causal", "window",
                 "sinks", "dropout_p", "key_keep", "scale_block", "dtype"):  # fmt: skip
        if getattr(case, name) != getattr(plain, name):
            yield replace(case, **{name: getattr(plain, name)})
    if case.bias is not None and not case.bias_gradient:
        yield replace(case, bias=None)
    if case.block_keep:
        yield replace(case, block_keep=0.0)
    elif case.tile:
        yield replace(case, tile=None)
    if case.heads != case.kv_heads:
        yield replace(case, heads=case.kv_heads)
    for at, (rows, columns) in enumerate(zip(case.queries, case.keys, strict=True)):
        for less in ((), ((rows // 2, columns),), ((rows, columns // 2),)):
            pairs = list(zip(case.queries, case.keys, strict=True))
            pairs[at : at + 1] = less
            queries, keys = (
                (tuple(side) for side in zip(*pairs, strict=True)) if pairs else ((), ())
            )
            if sum(queries) * sum(keys) and (queries, keys) != (case.queries, case.keys):
                yield replace(case, queries=queries, keys=keys)
    lengths = () if case.queries else ("batch", "seqlen_q", "seqlen_k")
    for name in (*lengths, "kv_heads", "head_dim"):
        value = getattr(case, name)
        for less in (getattr(plain, name), value // 2, value - 1):
            if getattr(plain, name) <= less < value:
                changes = {name: less}
                if name == "kv_heads":
                    changes["heads"] = less * (case.heads // case.kv_heads)
                yield replace(case, **changes)


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


def failure(case: Case, device: str = "cpu") -> str | None:
    """:func:`_failure`, with the kernels of the case's card."""
    with host_as(case.card or None):
        return _failure(case, device)


def _failure(case: Case, device: str) -> str | None:
    """Run a case, forward and backward; what is wrong with the result, or None.

    Every result must be within twice the framework's own error in the same type, plus one
    rounding of the largest value, plus a few fp32 roundings of the scores and of the summed terms,
    plus what the rounding of out does to the gradients through D = rowsum(dO∘O).
    Masked slots of k and v hold NaN.
    """
    generator = torch.Generator().manual_seed(case.seed)
    dtype = TORCH_TYPES[case.dtype]
    batch, seqlen_q, seqlen_k = case.sizes
    query = (batch, case.heads, seqlen_q, case.head_dim)
    key = (batch, case.kv_heads, seqlen_k, case.head_dim)
    q, k, v, dout = (
        arranged(_values(case, generator, *shape).to(dtype), layout)
        for shape, layout in (
            (query, case.layout), (key, case.layout), (key, case.layout), (query, case.dout_layout),
        )
    )  # fmt: skip
    options: dict[str, Any] = {"causal": case.causal, "window": case.window, "sinks": case.sinks}
    if case.key_keep:
        mask = torch.rand(case.batch, case.seqlen_k, generator=generator) < case.key_keep
        options["key_mask"] = mask
        away = ~mask[:, None, :, None]
        k, v = (arranged(t.masked_fill(away, math.nan), case.layout) for t in (k, v))
    if case.block_keep:
        assert case.tile is not None
        rows, columns = -(-case.seqlen_q // case.tile[0]), -(-case.seqlen_k // case.tile[1])
        size = (case.batch, case.heads, rows, columns)
        options["block_mask"] = torch.rand(size, generator=generator) < case.block_keep
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
    scale = 1.0 / math.sqrt(case.head_dim) if case.scale is None else case.scale
    changes: dict[str, Any] = {"softcap": case.softcap}
    if case.alibi:
        slopes = torch.rand(items[0], case.heads, generator=generator)
        changes["alibi_slopes"] = slopes if case.alibi == "items" else slopes[0]
    bias = _bias(case, generator)
    if bias is not None:
        changes["bias"] = bias

    scales: dict[str, Any] = {}
    operands = [q, k, v]
    if case.fp8:
        operands[1:], scales = _as_e4m3(case, generator, k, v)
        k, v = (_values_of(x, scales[name], case) for x, name in
                zip(operands[1:], ("k_scale", "v_scale"), strict=True))  # fmt: skip
    leaves = [
        t.detach().to(device).requires_grad_(wanted)
        for t, wanted in zip(operands, case.needed, strict=True)
    ]
    moved: dict[str, Any] = {
        n: t.to(device) if isinstance(t, Tensor) else t
        for n, t in (options | changes | scales | tables).items()
    }
    if bias is not None:
        moved["bias"] = moved["bias"].detach().requires_grad_(case.bias_gradient)
    counter = _Counter(device, H200 if case.card == dispatch.HOPPER else HOST_GPU)
    out, lse = flash_attention(
        *leaves, **moved, scale=case.scale, dropout_p=case.dropout_p, seed=case.seed,
        deterministic=case.deterministic, tile=case.tile, order=case.order, return_lse=True,
    )  # fmt: skip
    laid_out = {"q": leaves[0], "k": leaves[1], "v": leaves[2], "out": out}
    gapped = bias is not None and bias.shape[-1] > 1 and bias.stride(-1) != 1
    copied = ["bias"] if gapped else []
    shape = AttentionShape(
        batch, case.heads, seqlen_q, seqlen_k, case.head_dim, case.kv_heads, case.dtype,
        case.causal, case.window or (None, None), case.sinks, case.fp8, case.scale_block,
    )  # fmt: skip
    features = _features(case, options)
    complaint = counter.complaint(shape, "forward", laid_out, copied, features)
    wanted_leaves = [t for t in leaves if t.requires_grad]
    if case.bias_gradient:
        wanted_leaves.append(moved["bias"])
    grads: Iterator[Tensor] = iter(())
    if wanted_leaves:
        laid_out["dout"] = upstream = dout.to(device)
        grads = iter(torch.autograd.grad(out, wanted_leaves, upstream))
        complaint = complaint or counter.complaint(shape, "backward", laid_out, copied, features)
    if complaint:
        return complaint
    got = {"out": out, "lse": lse}
    got |= {n: next(grads) for n, w in zip(("dq", "dk", "dv"), case.needed, strict=True) if w}
    if case.bias_gradient:
        got["dbias"] = next(grads)

    drop: dict[str, Any] = {"dropout_p": case.dropout_p, "keep": keep}
    known = {"scale": scale} | drop | changes
    want, theirs = references(q, k, v, dout, lengths, case.tile, options, known)
    for name, result in got.items():
        complaint = beyond_bound(name, result, want, theirs, dtype)
        if complaint:
            return complaint
    if lengths is None or case.dropout_p:  # a sequence alone has the dropout mask of item 0
        return None
    apart = separate_calls(
        leaves[0], leaves[1], leaves[2], dout.to(device), lengths, **options, **changes,
        scale=case.scale, deterministic=case.deterministic, tile=case.tile,
    )  # fmt: skip
    for name in _same_bits(case) & set(got):
        if not torch.equal(got[name], getattr(apart, name)):
            return f"{name}: not the bits of separate calls"
    return None


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


def _as_e4m3(
    case: Case, generator: torch.Generator, *tensors: Tensor
) -> tuple[list[Tensor], dict[str, Any]]:
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
        self,
        shape: AttentionShape,
        pass_: str,
        tensors: dict[str, Tensor],
        copied: list[str],
        features: dict[str, Any],
    ) -> str | None:
        """Where the bytes counted since the last call differ from the prediction, or None."""
        if self._backend is None:
            return None
        copied = copied + [name for name, tensor in tensors.items() if not fits(tensor)]
        found = predict(AUTO, shape, pass_, self._gpu, copied=copied, **features).traffic
        counted = {kernel: entries for kernel, entries in self._backend.traffic.items() if entries}
        self._reset()
        wanted = {kernel: dict(entries) for kernel, entries in found.kernels.items() if entries}
        if counted == wanted:
            return None
        kernels = [k for k in {**counted, **wanted} if counted.get(k) != wanted.get(k)]
        kernel = kernels[0]
        return f"{pass_} {kernel}: counted {counted.get(kernel)}, predicted {wanted.get(kernel)}"


def _features(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a case that ``predict`` is told of."""
    mask = options.get("block_mask")
    return {
        "tile": None if case.tile is None else Tile(*case.tile),
        "key_mask": "key_mask" in options,
        "dropout": case.dropout_p > 0.0,
        "softcap": case.softcap is not None,
        "alibi": bool(case.alibi),
        "bias": bias_shape(case),
        "bias_gradient": case.bias_gradient,
        "block_mask": None if mask is None else mask.numpy(),
        "deterministic": case.deterministic,
        "order": case.order,
        "lengths": case.lengths,
        "gradients": [n for n, w in zip(GRADIENTS, case.needed, strict=True) if w],
    }
