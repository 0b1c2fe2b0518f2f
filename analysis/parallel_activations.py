"""Bytes a transformer layer saves on each rank under tensor and sequence parallelism.

Korthikanti et al. 2022 (2205.05198), Sections 4 and 5, Table 2, item by item instead of in sum, for
any element size. s sequence, b micro-batch, h hidden, a heads, t tensor-parallel ranks; MLP 4h,
GeLU, dropout masks of one byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class LayerShape:
    """One transformer layer: (seqlen, batch, hidden), heads, MLP of width 4·hidden."""

    seqlen: int
    batch: int
    hidden: int
    heads: int

    def __post_init__(self) -> None:
        if min(self.seqlen, self.batch, self.hidden, self.heads) < 1:
            raise ValueError(f"sizes must be positive: {self}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}")


def saved_by_tensor(
    shape: LayerShape,
    *,
    ranks: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    itemsize: int = 2,
    statistics_itemsize: int = 0,
) -> dict[str, Fraction]:
    """Saved bytes of a layer on one rank, by tensor (Korthikanti 2022, Eqs. 1, 2, 4 and 6).

    ``statistics_itemsize`` is the size of a layer norm's mean and reciprocal deviation, which the
    paper ignores (0). Raises ValueError when heads or, in sequence parallelism, the sequence do not
    divide among the ranks.
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute must be one of {RECOMPUTE}, got {recompute!r}")
    if ranks < 1 or shape.heads % ranks:
        raise ValueError(f"heads {shape.heads} do not divide among {ranks} ranks")
    if sequence_parallel and shape.seqlen % ranks:
        raise ValueError(f"seqlen {shape.seqlen} does not divide among {ranks} ranks")
    sbh = Fraction(shape.seqlen * shape.batch * shape.hidden)
    scores = Fraction(shape.heads * shape.seqlen**2 * shape.batch)
    outside = sbh / (ranks if sequence_parallel else 1)  # norms, dropouts and their inputs
    rows = outside / shape.hidden
    inside = sbh / ranks
    if recompute == "full":
        return {"layer_input": itemsize * outside}
    saved = {
        "norm1_input": itemsize * outside,
        "qkv_input": itemsize * outside,
        "q": itemsize * inside,
        "k": itemsize * inside,
        "v": itemsize * inside,
        "softmax_output": itemsize * scores / ranks,
        "softmax_dropout_mask": scores / ranks,
        "softmax_dropout_output": itemsize * scores / ranks,
        "projection_input": itemsize * inside,
        "attention_dropout_mask": outside,
        "norm2_input": itemsize * outside,
        "mlp_input": itemsize * outside,
        "gelu_input": 4 * itemsize * inside,
        "gelu_output": 4 * itemsize * inside,
        "mlp_dropout_mask": outside,
    }
    if recompute == "selective":
        saved = {name: size for name, size in saved.items() if not name.startswith("softmax")}
    if statistics_itemsize:
        saved["norm_statistics"] = 4 * statistics_itemsize * rows
    return saved


def saved_bytes(shape: LayerShape, **options: int | bool | str) -> Fraction:
    """Sum of :func:`saved_by_tensor`, which takes the same options."""
    by_tensor: Mapping[str, Fraction] = saved_by_tensor(shape, **options)  # type: ignore[arg-type]
    return sum(by_tensor.values(), Fraction(0))


def layer_collectives(
    shape: LayerShape, ranks: int, *, sequence_parallel: bool = False, itemsize: int = 2
) -> dict[str, dict[str, int]]:
    """Collectives of one layer: pass -> collective -> bytes of the full tensors they work on.

    Tensor parallel: an all-reduce after the attention and after the MLP, and one before each in the
    backward. Sequence parallel replaces each by a reduce-scatter and an all-gather, the same ring
    traffic, and gathers both block inputs once more in the backward because only shards are saved.
    """
    full = itemsize * shape.seqlen * shape.batch * shape.hidden
    if ranks == 1:
        return {"forward": {}, "backward": {}}
    if not sequence_parallel:
        return {"forward": {"all_reduce": 2 * full}, "backward": {"all_reduce": 2 * full}}
    return {
        "forward": {"all_gather": 2 * full, "reduce_scatter": 2 * full},
        "backward": {"all_gather": 4 * full, "reduce_scatter": 2 * full},
    }


def decoder_model_bytes(
    *,
    batch: int,
    seqlen: int,
    hidden: int,
    heads: int,
    layers: int,
    mlp_hidden: int,
    itemsize: int = 2,
    attention_matrix: bool = True,
) -> int:
    """Saved bytes of a LLaMA-like stack: RMS norms, no dropout, a gated MLP, all layers.

    Per layer: two norm inputs, their outputs, q, k, v, the projection's input; gate, up, the
    activated gate and their product; and, unless attention recomputes it, the softmax output once.
    """
    tokens = batch * seqlen
    per_layer = (8 * hidden + 4 * mlp_hidden) * tokens * itemsize
    if attention_matrix:
        per_layer += batch * heads * seqlen**2 * itemsize
    return layers * per_layer
