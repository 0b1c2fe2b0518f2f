"""Standard attention on the papers' two-level machine: passes over N × N and N × d tensors.

On that machine every kernel reads each operand from slow memory once and writes each result
once; an N × N matrix does not fit in between. So the cost of an implementation is decided by
its list of kernels alone. The lists here are data, the totals are added up from them, and a
kernel's row can be compared with a hardware counter.

Units: one N² unit is B·h·Nq·Nk elements, one Nd unit B·h·N·d elements, both of the io dtype; the
dropout mask is one byte an element, half an fp16 unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from analysis.shapes import AttentionShape

DROPOUT_MASK_BYTES = 1


@dataclass(frozen=True)
class Passes:
    """Whole-tensor passes: over scores (N²), dropout masks (N², one byte each), operands (Nd)."""

    scores: int = 0
    masks: int = 0
    operands: int = 0

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.scores + other.scores, self.masks + other.masks, self.operands + other.operands)

    def bytes(self, shape: AttentionShape) -> int:
        """Bytes these passes move. Operands count as Nq·d; use it with seqlen_q == seqlen_k."""
        if shape.seqlen_q != shape.seqlen_k or shape.kv_heads != shape.heads:
            raise ValueError(
                "pass counts treat q and k alike, got "
                f"seqlen_q={shape.seqlen_q}, seqlen_k={shape.seqlen_k}, "
                f"heads={shape.heads}, kv_heads={shape.kv_heads}"
            )
        mask_bytes = shape.score_bytes // shape.itemsize * DROPOUT_MASK_BYTES
        return self.scores * shape.score_bytes + self.masks * mask_bytes + self.operands * shape.query_bytes

    def score_units(self, itemsize: int = 2) -> Fraction:
        """N² units, dropout masks included at their size."""
        return self.scores + Fraction(self.masks * DROPOUT_MASK_BYTES, itemsize)


@dataclass(frozen=True)
class KernelPasses:
    """One kernel of an implementation: what it reads and what it writes."""

    kernel: str
    pass_: str
    reads: Passes
    writes: Passes


def _forward(kernel: str, reads: Passes, writes: Passes) -> KernelPasses:
    return KernelPasses(kernel, "forward", reads, writes)


def _backward(kernel: str, reads: Passes, writes: Passes) -> KernelPasses:
    return KernelPasses(kernel, "backward", reads, writes)


_S1, _S2, _O1, _O2 = Passes(scores=1), Passes(scores=2), Passes(operands=1), Passes(operands=2)
_S1_MASK = Passes(scores=1, masks=1)

# The matrix products, alike in every variant.
_SCORES = _forward("S = QKᵀ", _O2, _S1)
_OUTPUT = _forward("O = PV", _S1 + _O1, _O1)
_DV = _backward("dV = PᵀdO", _S1 + _O1, _O1)
_DP = _backward("dP = dO·Vᵀ", _O2, _S1)
_DQ = _backward("dQ = dS·K", _S1 + _O1, _O1)
_DK = _backward("dK = dSᵀQ", _S1 + _O1, _O1)
# What stands between them.
_SCALE = _forward("scale", _S1, _S1)
_MASK = _forward("mask", _S1, _S1)
_SOFTMAX = _forward("softmax", _S1, _S1)
_DROPOUT = _forward("dropout", _S1, _S1_MASK)
_DROPOUT_BACKWARD = _backward("dropout backward", _S1_MASK, _S1)
_SOFTMAX_BACKWARD = _backward("softmax backward", _S2, _S1)
_SOFTMAX_BACKWARD_PRODUCT = _backward("dP∘P", _S2, _S1)
_MASK_BACKWARD = _backward("mask backward", _S1, _S1)
_SCALE_BACKWARD = _backward("scale backward", _S1, _S1)
_TRANSPOSE = _backward("copy of a transposed gradient", _O1, _O1)

ALGORITHM_0_AND_3 = (_SCORES, _SOFTMAX, _OUTPUT, _DV, _DP, _SOFTMAX_BACKWARD, _DQ, _DK)
"""FlashAttention 2022, Alg. 0 and Alg. 3: three kernels and five, 11 N² + 12 Nd."""

PAPER_MASKED_DROPOUT = (
    _SCORES,
    _MASK,
    _SOFTMAX,
    _DROPOUT,
    _OUTPUT,
    _DV,
    _DP,
    _DROPOUT_BACKWARD,
    _SOFTMAX_BACKWARD,
    _DQ,
    _DK,
)
"""The kernels of FlashAttention 2022, Fig. 1 right, and their backward: 18 N² + 12 Nd.

The scale rides in the product (baddbmm). The mask is added, so its backward passes the gradient
through and needs no kernel. At the shape of Fig. 2 left this is 40.27 GB; the paper prints 40.3.
"""

PAPER_MASKED_FILL = (_SCORES, _MASK, _SOFTMAX, _OUTPUT, _DV, _DP, _SOFTMAX_BACKWARD, _MASK_BACKWARD, _DQ, _DK)
"""No dropout, and a filled mask, whose backward is a kernel of its own: 15 N² + 12 Nd."""

PAPER_MASKED_SPLIT_SOFTMAX = (
    _SCORES,
    _MASK,
    _SOFTMAX,
    _OUTPUT,
    _DV,
    _DP,
    _SOFTMAX_BACKWARD_PRODUCT,
    _SOFTMAX_BACKWARD,
    _DQ,
    _DK,
)
"""No dropout, an added mask, softmax backward in two kernels: 16 N² + 12 Nd.

The NeurIPS version prints 35.3 GB for a masked run without dropout; 15 N² + 12 Nd gives 33.8 and
16 N² + 12 Nd 36.0, so neither list is exactly what was measured.
"""

EAGER = (
    _SCORES,
    _SCALE,
    _SOFTMAX,
    _OUTPUT,
    _DV,
    _DP,
    _SOFTMAX_BACKWARD_PRODUCT,
    _SOFTMAX_BACKWARD,
    _SCALE_BACKWARD,
    _DQ,
    _DK,
    _TRANSPOSE,
)
"""PyTorch 2.11 eager, no mask, no dropout, in order of launch: 18 N² + 14 Nd.

The same 18 as the paper's masked run with dropout, for other reasons: the scale is a kernel of
its own both ways and softmax backward is two.
"""

EAGER_MASKED_DROPOUT = (
    _SCORES,
    _SCALE,
    _MASK,
    _SOFTMAX,
    _DROPOUT,
    _OUTPUT,
    _DV,
    _DP,
    _DROPOUT_BACKWARD,
    _SOFTMAX_BACKWARD_PRODUCT,
    _SOFTMAX_BACKWARD,
    _SCALE_BACKWARD,
    _DQ,
    _DK,
    _TRANSPOSE,
)
"""PyTorch 2.11 eager, additive mask and dropout, in order of launch: 25 N² + 14 Nd."""

IMPLEMENTATIONS = {
    "algorithm-0-and-3": ALGORITHM_0_AND_3,
    "paper-masked-dropout": PAPER_MASKED_DROPOUT,
    "paper-masked-fill": PAPER_MASKED_FILL,
    "paper-masked-split-softmax": PAPER_MASKED_SPLIT_SOFTMAX,
    "eager": EAGER,
    "eager-masked-dropout": EAGER_MASKED_DROPOUT,
}


def total_passes(kernels: tuple[KernelPasses, ...], pass_: str | None = None) -> Passes:
    """All reads and writes of a list of kernels, of one pass or of both."""
    total = Passes()
    for kernel in kernels:
        if pass_ is None or kernel.pass_ == pass_:
            total = total + kernel.reads + kernel.writes
    return total


def total_bytes(kernels: tuple[KernelPasses, ...], shape: AttentionShape, pass_: str | None = None) -> int:
    """Bytes moved on the two-level machine."""
    return total_passes(kernels, pass_).bytes(shape)
