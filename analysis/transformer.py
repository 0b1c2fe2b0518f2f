"""FLOPs of a transformer and bytes of a pipeline stage (Korthikanti et al. 2022, §4.2.3, App. A).

Symbols of the paper: B batch, s sequence, h hidden, a heads, L layers, v vocabulary, p pipeline
stages, m interleaved chunks per stage. What one layer saves (Table 2) is in
``analysis.parallel_activations``.
"""

from __future__ import annotations

from fractions import Fraction

from analysis.parallel_activations import LayerShape, saved_bytes


def forward_flops_per_layer(shape: LayerShape) -> int:
    """24Bsh² + 4Bs²h (App. A): products of h × h (four) and h × 4h (two), QKᵀ and PV."""
    b, s, h = shape.batch, shape.seqlen, shape.hidden
    return 24 * b * s * h**2 + 4 * b * s**2 * h


def model_flops(shape: LayerShape, layers: int, vocabulary: int) -> Fraction:
    """Eq. 7: one iteration without recomputation, 72BLsh²(1 + s/6h + v/12hL).

    Three forward passes' worth: the backward pass costs two.
    """
    return _iteration(shape, layers, vocabulary, Fraction(shape.seqlen, 6 * shape.hidden))


def _iteration(shape: LayerShape, layers: int, vocabulary: int, attention: Fraction) -> Fraction:
    logits = Fraction(vocabulary, 12 * shape.hidden * layers)
    return 72 * shape.batch * layers * shape.seqlen * shape.hidden**2 * (1 + attention + logits)


def pipeline_stage_bytes(
    shape: LayerShape,
    layers: int,
    *,
    ranks: int,
    sequence_parallel: bool = True,
    recompute: str = "none",
    pipeline: int = 1,
    interleaved: int = 1,
) -> Fraction:
    """Eq. 5: the first stage of 1F1B holds p microbatches of L/p layers, so L layers whatever p is.

    With m > 1 interleaved chunks per stage it is 1 + (p - 1)/(pm) times that.
    """
    if min(layers, pipeline, interleaved) < 1 or layers % pipeline:
        raise ValueError(f"layers={layers} do not divide among pipeline={pipeline} stages (interleaved={interleaved})")
    per_layer = saved_bytes(shape, ranks=ranks, sequence_parallel=sequence_parallel, recompute=recompute)
    if interleaved == 1:
        return layers * per_layer
    return layers * per_layer * (1 + Fraction(pipeline - 1, pipeline * interleaved))
