"""Options that change scores or weights, in the order in which they do."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from analysis.feature import TENSOR_CORES, Feature, Fields, Given, Pairs, Sizes, Spelling, Walk
from analysis.flops import TANH_SPECIALS
from analysis.problem import Problem
from analysis.shapes import STAT_BYTES, KernelBytes, bias_elements

LOGIT_BYTES = 4
"""Bytes of a head's sink logit."""
SLOPE_BYTES = 4
"""Bytes of a head's ALiBi slope."""
TANH_APPROX = 2.0**-11
"""Relative error of tanh.approx by the PTX manual: of a capped score in bf16. Its derivative
1 - tanh² is then off by twice that. An eighth of what rounding a score to bf16 costs at most."""
BIASES = {"none": None, "full": (True, True), "heads": (False, True), "items": (True, False), "one": (False, False)}
"""What the command line calls a bias -> whether items and heads have their own."""


def _kept(given: Given) -> Any:
    """What a weight is multiplied with: 0 where it is dropped."""
    p, keep = given["dropout_p"], given.get("keep")
    if p <= 0.0:
        return 1.0
    if keep is None:
        raise ValueError(f"dropout_p = {p} needs the keep mask, got None")
    return keep.double() * (1.0 / (1.0 - p) if p < 1.0 else 0.0)


DROPOUT = Feature(
    "dropout",
    "dropout",
    "dropout_p",
    lambda p: p.dropout_p > 0.0,
    lambda r, p: {"dropout_p": r.choice((0.1, 0.5, 1.0))},
    "DROPOUT",
    registers=True,
    given=("dropout_p", "keep"),
    weights=_kept,
    shown={"`dropout_p`": {"dropout_p": 0.5}},
)


def _cap(scores: Any, at: Pairs, given: Given) -> tuple[Any, Any]:
    cap = given["softcap"]
    share = scores / cap
    # 1 - tanh², which cancels where tanh is 1: even float64 has 0 left there, the kernels more.
    return cap * share.tanh(), share.cosh().pow(-2)


SOFTCAP = Feature(
    "softcap",
    "a softcap",
    "softcap",
    lambda p: p.softcap is not None,
    lambda r, p: {"softcap": r.choice((0.5, 5.0, 50.0))},
    "SOFTCAP",
    TENSOR_CORES,
    specials=TANH_SPECIALS,
    registers=True,
    given=("softcap",),
    scores=_cap,
    errors={"bf16": TANH_APPROX},
    spelled=(
        Spelling("softcap", "scores are capped by a tanh: exponentials, no bytes", lambda _, heads: {"softcap": True}),
    ),
    shown={
        "`softcap`": {"softcap": True},
        "`softcap` at head dimension 64": {"head_dim": 64, "softcap": True},
        "the same in fp16": {"head_dim": 64, "dtype": "fp16", "softcap": True},
        "`softcap` and `window` at head dimension 64": {"head_dim": 64, "window": (128, 0), "softcap": True},
    },
)


def _slopes(problem: Problem) -> Mapping[str, tuple[tuple[int, ...], str]]:
    items = problem.shape.batch if problem.lengths is None else problem.lengths.sequences
    return {"alibi_slopes": ((items, problem.shape.heads, 1), "fp32")}


def _distances(scores: Any, at: Pairs, given: Given) -> tuple[Any, Any]:
    slopes = given["alibi_slopes"].expand(scores.shape[:2])[..., None, None]
    return scores - slopes.to(scores.dtype) * (at.diagonal - at.keys).abs(), None


ALIBI = Feature(
    "alibi",
    "ALiBi",
    "alibi_slopes",
    lambda p: p.alibi,
    lambda r, p: {"alibi": True},
    "ALIBI",
    TENSOR_CORES,
    registers=True,
    arrays=_slopes,
    reads=lambda walk: {"alibi_slopes": walk.starts * SLOPE_BYTES},
    sizes=lambda shape: {"alibi_slopes": shape.heads * SLOPE_BYTES},  # where the items share them
    given=("alibi_slopes",),
    scores=_distances,
    spelled=(
        Spelling("alibi", "a distance times the head's slope is taken off scores", lambda _, heads: {"alibi": True}),
    ),
    shown={
        "`alibi_slopes`": {"alibi": True},
        "`softcap` and `alibi_slopes` at head dimension 64": {"head_dim": 64, "softcap": True, "alibi": True},
    },
)


def _bias(random: Random, problem: Problem) -> Fields:
    shape = problem.shape
    return {"bias": (random.choice((1, shape.batch)), random.choice((1, shape.heads)))}


def bias_array(problem: Problem) -> tuple[tuple[int, ...], str]:
    """Shape and type of a bias and of its gradient."""
    assert problem.bias is not None
    return (*problem.bias, problem.shape.seqlen_q, problem.shape.seqlen_k), problem.shape.dtype


def _named_bias(word: str, sizes: tuple[int, int]) -> Fields:
    own = BIASES[word]
    if own is None:
        return {}
    items, heads = (size if its_own else 1 for size, its_own in zip(sizes, own, strict=True))
    return {"bias": (items, heads), "bias_gradient": True}


BIAS = Feature(
    "bias",
    "a bias",
    "bias",
    lambda p: p.bias is not None,
    _bias,
    "BIAS",
    with_packed=False,
    registers=True,
    arrays=lambda p: {"bias": bias_array(p)},
    reads=lambda walk: {"bias": walk.pairs * walk.shape.itemsize},
    given=("bias",),
    scores=lambda scores, at, given: (scores + given["bias"].to(scores.dtype), None),
    spelled=(
        Spelling(
            "bias",
            "a stored bias with its gradient: none, full (B, H), heads (1, H), items (B, 1), one (1, 1)",
            _named_bias,
            "word",
            tuple(BIASES),
            "none",
        ),
    ),
    shown={"`bias`, and its gradient": {"bias": (1, 4), "bias_gradient": True}},
)


def _bias_gradient(walk: Walk) -> KernelBytes:
    """What the main kernel sends, and the kernels around it: sums of what heads or items share are
    added up in fp32, by atomic additions or, deterministically, by way of all of dS."""
    shape, bias = walk.shape, walk.options["bias"]
    deterministic = walk.options.get("deterministic", False)
    # Masks leave pairs that no tile visits, whose gradient has to be zeroed.
    partial = shape.causal or shape.windowed or walk.block_mask is not None
    result = bias_elements(shape, bias)
    if bias == (shape.batch, shape.heads):
        zeroed = {"flash_bias_zero": {("dbias", "write"): result * shape.itemsize}} if partial else {}
        return {walk.entry: {("dbias", "write"): walk.pairs * shape.itemsize}, **zeroed}
    everything = walk.heads * shape.seqlen_q * shape.seqlen_k
    accumulated = (everything if deterministic else result) * STAT_BYTES
    sent = {("dbias_accum", "write" if deterministic else "atomic"): walk.pairs * STAT_BYTES}
    summed = {("dbias_accum", "read"): accumulated, ("dbias", "write"): result * shape.itemsize}
    zeroed = {"flash_bias_zero": {("dbias_accum", "write"): accumulated}}
    return {walk.entry: sent, **(zeroed if partial or not deterministic else {}), "flash_bias_sum": summed}


BIAS_GRADIENT = Feature(
    "bias_gradient",
    "the gradient of a bias",
    "dbias",
    lambda p: p.bias_gradient,
    lambda r, p: None if p.bias is None else {"bias_gradient": True},
    passes=("backward",),
    with_packed=False,
    arrays=lambda p: {"dbias": bias_array(p)},
    beside=_bias_gradient,
)


def _logits(problem: Problem, *names: str) -> Sizes:
    return dict.fromkeys(names, ((problem.shape.heads,), "fp32"))


def _sinks_read(walk: Walk) -> Mapping[str, int]:
    """The backward has them in lse."""
    if walk.entry != "flash_forward":
        return {}
    return {"sink_logits": walk.heads * walk.loop.query_tiles * LOGIT_BYTES}


SINK_LOGITS = Feature(
    "sink_logits",
    "sink logits",
    "sink_logits",
    lambda p: p.sink_logits,
    lambda r, p: {"sink_logits": True},
    "SINK_LOGITS",
    with_packed=False,
    kernels=("forward",),
    arrays=lambda p: _logits(p, "sink_logits"),
    reads=_sinks_read,
    sizes=lambda shape: dict.fromkeys(("sink_logits", "dsink_logits"), shape.heads * LOGIT_BYTES),
    given=("sink_logits",),
    joins=lambda given: given["sink_logits"],
    spelled=(
        Spelling(
            "sink-logits",
            "a learned logit a head joins the softmax's denominator, with its gradient",
            lambda _, heads: {"sink_logits": True, "sink_gradient": True},
        ),
    ),
    shown={"`sink_logits`, and their gradient": {"sink_logits": True, "sink_gradient": True}},
)


def _sink_gradient(walk: Walk) -> KernelBytes:
    rows, logits = walk.shape.row_bytes, walk.shape.heads * LOGIT_BYTES
    moved = {("lse", "read"): rows, ("delta", "read"): rows}
    return {"flash_sink_postprocess": {**moved, ("sink_logits", "read"): logits, ("dsink_logits", "write"): logits}}


SINK_GRADIENT = Feature(
    "sink_gradient",
    "the gradient of sink logits",
    "dsink_logits",
    lambda p: p.sink_gradient,
    lambda r, p: {"sink_gradient": True} if p.sink_logits else None,
    passes=("backward",),
    with_packed=False,
    arrays=lambda p: _logits(p, "sink_logits", "dsink_logits"),
    beside=_sink_gradient,
)


def _dlse(walk: Walk) -> KernelBytes:
    return {f"{walk.entry}_preprocess": {("dlse", "read"): walk.shape.row_bytes}}


LSE_GRADIENT = Feature(
    "lse_gradient",
    "a gradient of lse",
    "dlse",
    lambda p: p.lse_gradient,
    lambda r, p: {"lse_gradient": True},
    families=TENSOR_CORES,
    optimistic=True,
    passes=("backward",),
    arrays=lambda p: {"dlse": ((p.shape.batch, p.shape.heads, p.shape.seqlen_q), "fp32")},
    beside=_dlse,
    shown={"`return_lse`, with a gradient of lse": {"lse_gradient": True}},
)
