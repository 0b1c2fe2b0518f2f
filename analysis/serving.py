"""A step of decoding of a whole model, spread over GPUs by tensor parallelism: bytes and a bound.

A step makes one token (or a draft's ``width``) for each sequence. It reads every weight once, and
the cache of every sequence. Matrices, query heads and key/value heads are split over the ranks, as
Megatron-LM does (Shoeybi et al. 2019); where there are more ranks than key/value heads, several
ranks hold the same head.

Counted are weights and the attention; what a layer hands to the next, a few numbers a token, stays
in L2 and is left out, as are the norms' weights. So the bound is a bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.arguments import whole
from analysis.decode import DecodeShape
from analysis.decoders import HALF, Decoder
from analysis.gpu import Gpu
from analysis.model_states import ring_sent_bytes

__all__ = ["Part", "Step", "decoding_step"]


@dataclass(frozen=True)
class Part:
    """What one part of the model moves and computes in a step, on one rank."""

    name: str
    hbm_bytes: float
    flops: float


@dataclass(frozen=True)
class Step:
    """A step on one rank.

    Args:
        parts: of the whole model, one after the other.
        weight_bytes, cache_bytes: what the rank holds.
        sent_bytes: by a ring, for the two all-reduces of each layer; they are not in the bound.
        tokens: made by the step, of all sequences.
    """

    parts: tuple[Part, ...]
    weight_bytes: float
    cache_bytes: float
    sent_bytes: float
    tokens: int
    gpu: Gpu

    @property
    def hbm_seconds(self) -> float:
        """All bytes at the bandwidth of HBM."""
        return sum(part.hbm_bytes for part in self.parts) / self.gpu.hbm_bandwidth_bytes_per_s

    @property
    def tensor_seconds(self) -> float:
        """All products at the rate of 16-bit tensor cores."""
        return sum(part.flops for part in self.parts) / self.gpu.fp16_tensor_flops

    @property
    def bound_s(self) -> float:
        """No step is faster."""
        return max(self.hbm_seconds, self.tensor_seconds)

    @property
    def fits(self) -> bool:
        """Whether weights and cache have room in the memory of a rank."""
        return self.weight_bytes + self.cache_bytes <= self.gpu.memory_bytes


def decoding_step(
    model: Decoder, gpu: Gpu, *, context: int, batch: int = 1, width: int = 1, ranks: int = 1, fp8_cache: bool = False
) -> Step:
    """A step in which ``batch`` sequences of ``context`` keys get ``width`` tokens each.

    Weights are in 16 bits, the cache in 16 bits or e4m3. ValueError where the ranks do not divide
    the heads, or neither divide the key/value heads nor are a multiple of them.
    """
    sizes = {"context": context, "batch": batch, "width": width, "ranks": ranks}
    for name, size in sizes.items():
        whole(name, size, least=1)
    shared = model.groups % ranks and ranks % model.groups
    if model.heads % ranks or shared:
        raise ValueError(
            f"{ranks} ranks do not divide {model.heads} query heads and {model.groups} key/value heads evenly"
        )
    tokens = batch * width
    attention = DecodeShape(
        model.heads // ranks, max(1, model.groups // ranks), width, (context,) * batch, model.head_width, fp8=fp8_cache
    )
    of_keys = max(1, ranks // model.groups)  # ranks that hold the same key/value head
    elements = {
        half: model.layers * sum(inputs * outputs for inputs, outputs in matrices)
        for half, matrices in model.matrices().items()
    }
    elements["attention"] += (of_keys - 1) * model.layers * 2 * model.hidden * model.kv_width
    elements["logits"] = model.hidden * model.vocab
    names = {"attention": "projections of q, k, v and out", "mlp": "MLP", "logits": "logits"}
    parts = [
        Part(name, HALF * elements[key] / ranks, 2 * tokens * elements[key] / ranks) for key, name in names.items()
    ]
    parts.insert(
        1, Part("attention to the cache", model.layers * attention.compulsory_bytes, model.layers * attention.flops)
    )
    reduced = HALF * tokens * model.hidden
    embedding = 0 if model.one_embedding else HALF * elements["logits"] / ranks
    return Step(
        tuple(parts),
        weight_bytes=sum(HALF * count / ranks for count in elements.values()) + embedding,
        cache_bytes=model.layers * attention.token_bytes * context * batch,
        sent_bytes=2 * model.layers * ring_sent_bytes("all_reduce", reduced, ranks),
        tokens=tokens,
        gpu=gpu,
    )
