"""Activation bytes of a transformer layer (Korthikanti et al. 2022, §4 and Table 2).

Symbols of the paper: s sequence, b microbatch, h hidden, a heads, t tensor-parallel ranks, L
layers, v vocabulary. 16-bit activations, one-byte dropout masks, MLP of width 4h; means, variances and
other O(sb) buffers are left out. Each layer is a list of named tensors; the coefficients 34 and
5as/h of Eq. 1 are sums over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class LayerShape:
    """s, b, h, a of one transformer layer; every field at least 1."""

    seqlen: int
    microbatch: int
    hidden: int
    heads: int

    def __post_init__(self) -> None:
        for name in ("seqlen", "microbatch", "hidden", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is below 1")

    @property
    def sbh(self) -> int:
        return self.seqlen * self.microbatch * self.hidden

    @property
    def as2b(self) -> int:
        """Elements of all heads' score matrices."""
        return self.heads * self.seqlen**2 * self.microbatch


@dataclass(frozen=True)
class Activation:
    """One stored tensor: bytes per element of sbh and of as²b, and what the parallel forms do.

    split_by: "tensor" where tensor parallelism already divides it over the t ranks, "sequence"
    where only sequence parallelism does. recomputed: dropped by selective recomputation (§5).
    """

    name: str
    sbh_bytes: int = 0
    as2b_bytes: int = 0
    split_by: str = "tensor"
    recomputed: bool = False


LAYER: tuple[Activation, ...] = (
    Activation("layer norm 1 input", 2, split_by="sequence"),
    Activation("input of the Q, K, V products", 2, split_by="sequence"),
    Activation("Q and K", 4),
    Activation("softmax output", as2b_bytes=2, recomputed=True),
    Activation("softmax dropout mask", as2b_bytes=1, recomputed=True),
    Activation("softmax dropout output", as2b_bytes=2, recomputed=True),
    Activation("V", 2),
    Activation("input of the output projection", 2),
    Activation("attention dropout mask", 1, split_by="sequence"),
    Activation("layer norm 2 input", 2, split_by="sequence"),
    Activation("input of the first MLP product", 2, split_by="sequence"),
    Activation("GeLU input", 8),
    Activation("input of the second MLP product", 8),
    Activation("MLP dropout mask", 1, split_by="sequence"),
)


def activation_bytes_per_layer(
    shape: LayerShape,
    *,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> Fraction:
    """Bytes one rank stores for one layer, a row of Table 2 (exact, as a fraction).

    recompute: "none"; "selective", which drops what recomputing softmax and dropout brings back;
    or "full", which keeps the layer's input only, 2sbh on every rank.
    """
    if tensor_parallel < 1:
        raise ValueError(f"tensor_parallel={tensor_parallel} is below 1")
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute={recompute!r} is not none, selective or full")
    if recompute == "full":
        return Fraction(2 * shape.sbh)
    kept = [a for a in LAYER if not (recompute == "selective" and a.recomputed)]
    total = Fraction(0)
    for activation in kept:
        whole = activation.sbh_bytes * shape.sbh + activation.as2b_bytes * shape.as2b
        divided = activation.split_by == "tensor" or sequence_parallel
        total += Fraction(whole, tensor_parallel if divided else 1)
    return total


def forward_flops_per_layer(shape: LayerShape) -> int:
    """24Bsh² + 4Bs²h (App. A): four h × h and two h × 4h products, QKᵀ and PV."""
    s, b, h = shape.seqlen, shape.microbatch, shape.hidden
    return 24 * b * s * h**2 + 4 * b * s**2 * h


def model_flops(shape: LayerShape, layers: int, vocabulary: int) -> Fraction:
    """Eq. 7: FLOPs of one iteration, 72BLsh²(1 + s/6h + v/12hL), backward twice the forward."""
    return _iteration_flops(shape, layers, vocabulary, attention_share=6)


def hardware_flops_selective(shape: LayerShape, layers: int, vocabulary: int) -> Fraction:
    """Eq. 8: with selective recomputation, as the paper prints it: 1 + s/3h + v/12hL.

    The term s/6h of Eq. 7 is three passes over 4Bs²h; one more forward pass makes it s/6h·4/3 =
    2s/9h. The paper doubles it.
    """
    return _iteration_flops(shape, layers, vocabulary, attention_share=3)


def _iteration_flops(
    shape: LayerShape, layers: int, vocabulary: int, *, attention_share: int
) -> Fraction:
    s, b, h = shape.seqlen, shape.microbatch, shape.hidden
    correction = 1 + Fraction(s, attention_share * h) + Fraction(vocabulary, 12 * h * layers)
    return 72 * b * layers * s * h**2 * correction


def pipeline_stage_bytes(
    shape: LayerShape,
    layers: int,
    *,
    tensor_parallel: int,
    sequence_parallel: bool = True,
    recompute: str = "none",
    pipeline: int = 1,
    interleaving: int = 1,
) -> Fraction:
    """Eq. 5: the first stage holds p microbatches of L/p layers, L layers' worth whatever p is.

    With an interleaved schedule of m stages per rank it is 1 + (p-1)/(pm) times that.
    """
    per_layer = activation_bytes_per_layer(
        shape,
        tensor_parallel=tensor_parallel,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    total = per_layer * layers
    if interleaving > 1:
        total *= 1 + Fraction(pipeline - 1, pipeline * interleaving)
    return total
