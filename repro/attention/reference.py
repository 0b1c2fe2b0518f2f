"""Dense attention in float64 on the CPU: the one answer every kernel is held to.

Nothing here is tiled, fused or fast. The (N, N) matrices are stored and the gradients are the
textbook ones (FlashAttention 2022, App. B.2, over the whole row), so an error in a tile loop
cannot be repeated here.

Conventions (shared by the operator, see :func:`repro.flash_attention`):

* causal is aligned bottom-right: query i sees key j when ``j <= i + seqlen_k - seqlen_q``;
* ``window`` (left, right) leaves query i the keys within it of its diagonal i + seqlen_k -
  seqlen_q, and the first ``sinks`` keys;
* ``key_mask`` (B, Nk) boolean, True = the key takes part;
* a row that sees no key has ``out = 0``, ``lse = -inf`` and neither takes nor sends gradient;
* a key that no row sees may hold anything, NaN included; for the kernels that is promised of keys
  that ``key_mask`` takes out, not of those that only a window hides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from analysis.feature import Pairs
from analysis.features import asked_for
from repro.attention.options import DIFFERENTIABLE
from repro.attention.validation import DTYPES

__all__ = ["Reference", "attention_reference", "beyond_bound", "changed", "framework_result", "max_error", "visible"]


@dataclass(frozen=True)
class Reference:
    """``out`` (B, H, Nq, D), ``lse`` (B, H, Nq) and, where a ``dout`` was given, the gradients.

    ``terms`` holds, for out and the gradients, the same sums over absolute values: dP - D cancels,
    and what rounding acts on is the size of the terms, not of the result. "dq through out" is the
    part of D = rowsum(dO∘O): a kernel makes D from an out that is already rounded to its type
    (FlashAttention-2, Alg. 2), which the dP it is subtracted from is not. ``score`` is the largest
    |score| of a weight that fp32 does not lose beside 1: a score off by one rounding changes its
    weight by that much. "lse through options", "dq through options" and "dk through options" are
    what the ``errors`` of options make of these (a cap in bf16; ``analysis.feature.Feature``).
    """

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dsink_logits: Tensor | None = None
    terms: Mapping[str, Tensor] | None = None
    score: float = 0.0


def visible(batch: int, heads: int, seqlen_q: int, seqlen_k: int, **options: Any) -> Tensor:
    """Boolean (B, H, Nq, Nk): which pairs take part.

    options: as in :func:`repro.flash_attention`; ``block_mask`` (rows, columns), (H, rows, columns)
    or (B, H, rows, columns) is expanded by ``block`` = (block_m, block_n) and cut to (Nq, Nk).
    """
    given = _on_cpu(options)
    seen = torch.ones(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool)
    for each in asked_for(given):
        if each.seen is not None:
            seen &= each.seen(_pairs(seqlen_q, seqlen_k), given)
    return seen


def _pairs(seqlen_q: int, seqlen_k: int) -> Pairs:
    return Pairs(torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)[None, :])


def _on_cpu(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items()}


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None = None,
    *,
    scale: float | None = None,
    dlse: Tensor | None = None,
    **options: Any,
) -> Reference:
    """Attention and its gradients in float64.

    Args:
        q: (B, H, Nq, D); ``k``, ``v``: (B, Hkv, Nk, D) with Hkv dividing H.
        dout: (B, H, Nq, D) incoming gradient; without it only the forward is computed.
        dlse: (B, H, Nq) incoming gradient of ``lse``.
        options: as in :func:`repro.flash_attention`, each what its row of ``analysis.features``
            says; ``block`` as in :func:`visible`, and ``keep``, boolean (B, H, Nq, Nk), True = the
            weight survived dropout with ``dropout_p``.

    Raises TypeError for an option that has no row.
    """
    given = {name: x.detach() if isinstance(x, Tensor) else x for name, x in _on_cpu(options).items()}
    io_type, bias = q.dtype, given.get("bias")
    inexact = [each for each in asked_for(given) if DTYPES.get(io_type) in each.errors]
    q, k, v = (t.detach().to("cpu", torch.float64) for t in (q, k, v))
    batch, heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k = k.shape[1:3]
    group = heads // kv_heads
    scale = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
    seen = visible(batch, heads, seqlen_q, seqlen_k, **given)
    # Slots nobody sees may hold NaN, and 0 * NaN is NaN, so they become 0 before any product.
    used = seen.view(batch, kv_heads, group, seqlen_q, seqlen_k).any(dim=(2, 3))[..., None]
    k_rows = torch.where(used, k, 0.0).repeat_interleave(group, 1)
    v_rows = torch.where(used, v, 0.0).repeat_interleave(group, 1)

    products = scale * (q @ k_rows.mT)
    scores, passed = changed(products, given)
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    extra = _joined(given)
    if extra is not None:
        lse = torch.logaddexp(lse, extra.double()[..., 0])
    finite = torch.where(torch.isneginf(lse), 0.0, lse)[..., None]
    weights = torch.exp(scores - finite)
    drop = _factor(given)
    dropped = weights * drop
    out = dropped @ v_rows
    if dout is None:
        return Reference(out, lse)

    dout = dout.detach().to("cpu", torch.float64)
    dv = dropped.mT @ dout
    dweights = (dout @ v_rows.mT) * drop
    # The sum is over the whole row: over one block only, it is wrong (study note fault F2).
    row_sum = (weights * dweights).sum(-1, keepdim=True)
    if dlse is not None:
        row_sum = row_sum - dlse.detach().to("cpu", torch.float64)[..., None]
    dbias = weights * (dweights - row_sum)
    dscores = scale * dbias * passed
    dq = dscores @ k_rows
    dk = dscores.mT @ q

    def fold(grad: Tensor) -> Tensor:
        return grad.view(batch, kv_heads, group, seqlen_k, head_dim).sum(2)

    dbias_sizes = weights * (dout.abs() @ v_rows.abs().mT * drop + row_sum.abs())
    dbias_through_out = weights * (dout * out).abs().sum(-1, keepdim=True)
    # 1 - tanh² is a difference of numbers near 1 where a cap holds: known to the rounding of 1.
    known = torch.as_tensor(passed).clamp_min(torch.finfo(torch.float32).eps)
    sizes, through_out = (abs(scale) * x * known for x in (dbias_sizes, dbias_through_out))
    terms = {
        "out": dropped @ v_rows.abs(),
        "dq": sizes @ k_rows.abs(),
        "dk": fold(sizes.mT @ q.abs()),
        "dv": fold(dropped.mT @ dout.abs()),
        "dq through out": through_out @ k_rows.abs(),
        "dk through out": fold(through_out.mT @ q.abs()),
    }
    for each in inexact:
        assert each.scores is not None
        error = each.errors[DTYPES[io_type]]
        alone, _ = each.scores(products, _pairs(seqlen_q, seqlen_k), given)
        slopes_off = 2 * error * abs(scale) * dbias_sizes
        terms |= {
            "lse through options": error * (weights * alone.abs()).sum(-1),
            "dq through options": slopes_off @ k_rows.abs(),
            "dk through options": fold(slopes_off.mT @ q.abs()),
        }
    own: dict[str, Any] = {}
    if bias is not None:
        own["dbias"] = dbias.sum_to_size(bias.shape)
        terms["dbias"] = dbias_sizes.sum_to_size(bias.shape)
        terms["dbias through out"] = dbias_through_out.sum_to_size(bias.shape)
    if extra is not None:  # its weight's gradient, of a value 0
        share = torch.exp(extra.double() - finite)
        row_size = (weights * (dout.abs() @ v_rows.abs().mT * drop)).sum(-1, keepdim=True)
        row_size = row_size if dlse is None else row_size + dlse.detach().cpu().double().abs()[..., None]
        through = share * (dout * out).abs().sum(-1, keepdim=True)
        own["dsink_logits"] = (-share * row_sum).sum((0, 2, 3))
        terms["dsink_logits"] = (share * row_size).sum((0, 2, 3))
        terms["dsink_logits through out"] = through.sum((0, 2, 3))
    heard = weights >= torch.finfo(torch.float32).eps / 2
    score = float(scores.masked_fill(~(seen & heard), 0.0).abs().max()) if scores.numel() else 0.0
    return Reference(out, lse, dq, fold(dk), fold(dv), **own, terms=terms, score=score)


def changed(scores: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, Tensor | float]:
    """Scores (B, H, Nq, Nk) as the softmax takes them, and the derivative of that change.

    In the type of ``scores``; differentiable. options: as in :func:`repro.flash_attention`, in the
    order of ``analysis.features``.
    """
    passed: Tensor | float = 1.0
    for each in asked_for(options):
        if each.scores is not None:
            scores, derivative = each.scores(scores, _pairs(*scores.shape[-2:]), options)
            passed = passed if derivative is None else derivative * passed
    return scores, passed


def _joined(options: Mapping[str, Any]) -> Tensor | None:
    """Logits (1, H, 1, 1) that join the softmax's denominator, or None."""
    found = [each.joins(options) for each in asked_for(options) if each.joins is not None]
    return found[0][None, :, None, None] if found else None


def _factor(options: Mapping[str, Any]) -> Tensor:
    """What weights are multiplied with."""
    factor = torch.ones((), dtype=torch.float64)
    for each in asked_for(options):
        if each.weights is not None:
            factor = factor * each.weights(options)
    return factor


def framework_result(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, seen: Tensor, scale: float, **options: Any
) -> Reference:
    """What the framework itself makes of the same inputs in their own type: the yardstick.

    Eager matmul and softmax with S and P stored in the io type, gradients by autograd. ``seen``
    (B, H, Nq, Nk) as :func:`visible` gives it; keys that no row sees are zeroed. options: as in
    :func:`attention_reference`, but for those that ``seen`` is made of.
    """
    given = _on_cpu(options)
    batch, heads, seqlen_q, seqlen_k = seen.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    used = seen.view(batch, kv_heads, group, seqlen_q, seqlen_k).any(dim=(2, 3))[..., None]
    leaves = [t.detach().cpu().requires_grad_() for t in (q, k, v)]
    k_rows, v_rows = (torch.where(used, t, t.new_zeros(())).repeat_interleave(group, 1) for t in leaves[1:])
    named = [name for name in DIFFERENTIABLE if given.get(name) is not None]
    for name in named:
        given[name] = given[name].detach().requires_grad_()
        leaves.append(given[name])
    scores, _ = changed((leaves[0] @ k_rows.mT) * scale, given)
    scores = scores.masked_fill(~seen, -math.inf)
    alive, extra = seen.any(-1, keepdim=True), _joined(given)
    if extra is not None:
        scores = torch.cat([scores, extra.to(scores.dtype).expand_as(alive)], -1)
        alive = torch.ones_like(alive)
    weights = torch.softmax(scores.masked_fill(~alive, 0.0), -1).masked_fill(~alive, 0.0)
    weights = weights[..., :seqlen_k] * _factor(given).to(weights.dtype)
    out = weights @ v_rows
    dq, dk, dv, *rest = torch.autograd.grad(out, leaves, dout.detach().cpu())
    lse = torch.logsumexp(scores.float(), -1)
    own: dict[str, Any] = {f"d{name}": grad for name, grad in zip(named, rest, strict=True)}
    return Reference(out.detach(), lse.detach(), dq, dk, dv, **own)


def max_error(result: Tensor, reference: Tensor) -> float:
    """Largest absolute difference; infinite when the two disagree about where they are finite.

    A NaN or an infinity on one side only is a failure **in both directions**: a NaN in the
    reference excuses nothing in the result. Equal infinities count as equal, NaNs never do.
    """
    if result.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(result.shape)} and {tuple(reference.shape)}")
    x = result.detach().to("cpu", torch.float64)
    y = reference.detach().to("cpu", torch.float64)
    if x.numel() == 0:
        return 0.0
    if bool(torch.isnan(x).any()) or bool(torch.isnan(y).any()):
        return math.inf
    same = x == y  # true for equal infinities, whose difference would be NaN
    difference = torch.where(same, 0.0, (x - y).abs())
    return float(difference.max())


def beyond_bound(name: str, result: Tensor, want: Reference, theirs: Reference, dtype: torch.dtype) -> str | None:
    """Where a result is further from ``want`` than it may be, or None.

    At most twice the framework's own error in the same type (``theirs``), plus one rounding of the
    largest value, plus a few fp32 roundings of the scores and of the summed terms, plus what the
    rounding of out does to the gradients through D = rowsum(dO∘O).
    """
    expected: Tensor = getattr(want, name)
    if result.shape != expected.shape:
        return f"{name}: shape {tuple(result.shape)}, not {tuple(expected.shape)}"
    x = result.detach().to("cpu", torch.float64)
    finite = expected.isfinite()
    if not torch.equal(torch.where(finite, 0.0, x), torch.where(finite, 0.0, expected)):
        return f"{name}: not the reference's infinities"
    if not bool(x[finite].isfinite().all()):
        return f"{name}: NaN or infinity where the reference is finite"
    if not bool(finite.any()):
        return None
    error = float((x - expected)[finite].abs().max())
    yardstick = (getattr(theirs, name).double() - expected)[finite].abs()
    # The row statistics are fp32 in every type.
    unit = torch.finfo(torch.float32 if name == "lse" else dtype).eps
    limit = 2.0 * float(yardstick.nan_to_num(0.0).max())
    limit += unit * float(expected[finite].abs().max())
    if want.terms is not None and name in want.terms:
        # Scores and sums are fp32 in every type: four roundings of each score, and of the terms.
        rounding = 4 * torch.finfo(torch.float32).eps * (1.0 + want.score)
        limit += rounding * float(want.terms[name].max())
        if f"{name} through out" in want.terms:
            limit += 0.5 * unit * float(want.terms[f"{name} through out"].max())
    else:  # lse, whose errors are those of the scores
        limit += 4 * unit * (1.0 + want.score)
    if want.terms is not None and f"{name} through options" in want.terms:
        limit += float(want.terms[f"{name} through options"].max())
    return f"{name}: error {error:.3g} above {limit:.3g}" if error > limit else None
