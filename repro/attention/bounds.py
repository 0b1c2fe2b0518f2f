"""What a case's results are held to: float64, and the framework's own error beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from analysis.packed import Lengths
from repro.attention.by_sequence import by_sequence
from repro.attention.reference import Reference, attention_reference, framework_result, visible

__all__ = ["beyond_bound", "references"]


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


def beyond_bound(
    name: str, result: Tensor, want: Reference, theirs: Reference, dtype: torch.dtype
) -> str | None:
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
        if name in ("dq", "dk", "dbias"):
            limit += 0.5 * unit * float(want.terms[f"{name} through out"].max())
    else:  # lse, whose errors are those of the scores
        limit += 4 * unit * (1.0 + want.score)
    if want.terms is not None and f"{name} through cap" in want.terms:
        limit += float(want.terms[f"{name} through cap"].max())
    return f"{name}: error {error:.3g} above {limit:.3g}" if error > limit else None
