"""Attention in float64, and how far implementations are from it.

An implementation is wrong where a result is further off than twice the best competing one, which
has rounded P and dS to the same type, and one rounding of the result itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repro.instruments.gpu_work import Operands, Pass

#: The heads whose results are held against float64: (item of the batch, head), the first and last.
CHECKED_HEADS = ((0, 0), (-1, -1))
#: One more rounding of a result to bf16, relative.
ROUNDING = 2.0**-9


@dataclass(frozen=True)
class Errors:
    """Largest errors of an implementation's results, and the largest exact values."""

    worst: Mapping[str, float]
    largest: Mapping[str, float]

    def beyond(self, others: Sequence[Errors]) -> str | None:
        """Which result is further off than twice the best of the others, and one rounding; None
        where none is, or where there are no others."""
        for name, error in self.worst.items():
            best = min((other.worst[name] for other in others), default=math.inf)
            bound = 2 * best + ROUNDING * self.largest[name]
            if not error <= bound:  # a NaN is no number below
                return f"{name} is off by {error:.3g}, more than {bound:.3g}"
        return None


def errors(works: Mapping[str, Pass], operands: Operands, pass_: str) -> dict[str, Errors]:
    """The errors of every implementation on two heads (the same number of heads for q, k, v)."""
    names = ("out",) if pass_ == "forward" else ("dq", "dk", "dv")
    worst: dict[str, dict[str, float]] = {work: dict.fromkeys(names, 0.0) for work in works}
    largest = dict.fromkeys(names, 0.0)
    results = {name: work.results() for name, work in works.items()}
    for item, head in CHECKED_HEADS:
        given = (operands.q, operands.k, operands.v, operands.dout)
        exact = exact_attention(
            *(t[item, head][None].double() for t in given), causal=operands.shape.causal, backward=pass_ == "backward"
        )
        for i, name in enumerate(names):
            largest[name] = max(largest[name], float(exact[name].abs().max()))
            for work, got in results.items():
                error = float((got[i][item, head].double() - exact[name][0]).abs().max())
                worst[work][name] = error if math.isnan(error) else max(worst[work][name], error)
    return {work: Errors(found, largest) for work, found in worst.items()}


#: Elements of the scores that the exact results hold at once: 256 MB each in float64.
CHUNK = 1 << 25


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    causal: bool,
    backward: bool = True,
    left: int | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
) -> dict[str, Tensor]:
    """out and, with ``backward``, dq, dk, dv of q, dout (H, Nq, D) and k, v (Hkv, Nk, D).

    In the type of the arguments, some rows at a time. Causal is bottom-right; every row sees a key.
    The scale is 1 / sqrt(D). left: keys before its diagonal that a query sees. softcap, and slopes
    (H,) of ALiBi, change scores as ``kernels.scores.ScoreChanges`` says.
    """
    heads, rows, head_dim = q.shape
    group, scale = heads // k.shape[0], 1 / math.sqrt(head_dim)
    keys, values = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    found = {"out": torch.empty_like(q), "dq": torch.empty_like(q)}
    found |= {"dk": torch.zeros_like(keys), "dv": torch.zeros_like(values)}
    step = max(1, CHUNK // (heads * keys.shape[1]))
    for start in range(0, rows, step):
        at = slice(start, min(start + step, rows))
        s = scale * (q[:, at] @ keys.transpose(-1, -2))
        passed: Tensor | float = 1.0
        if softcap is not None:
            share = torch.tanh(s / softcap)
            passed, s = 1 - share.square(), softcap * share
        diagonal = torch.arange(at.start, at.stop, device=q.device) + keys.shape[1] - rows
        distance = diagonal[:, None] - torch.arange(keys.shape[1], device=q.device)[None]
        if slopes is not None:
            s -= slopes.to(s.dtype)[:, None, None] * distance.abs()
        if causal:
            s.masked_fill_(distance < 0, -math.inf)
        if left is not None:
            s.masked_fill_(distance > left, -math.inf)
        p = torch.softmax(s, -1)
        found["out"][:, at] = p @ values
        if not backward:
            continue
        dp = dout[:, at] @ values.transpose(-1, -2)
        ds = scale * passed * p * (dp - (dp * p).sum(-1, keepdim=True))
        found["dq"][:, at] = ds @ keys
        found["dk"] += ds.transpose(-1, -2) @ q[:, at]
        found["dv"] += p.transpose(-1, -2) @ dout[:, at]
    for name in ("dk", "dv"):
        found[name] = found[name].unflatten(0, (-1, group)).sum(1)
    return found if backward else {"out": found["out"]}
