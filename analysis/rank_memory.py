"""What each GPU holds when the training of a decoder is spread over many, part by part.

Four ways at once: data parallel ranks hold copies, whose states ZeRO shards (Rajbhandari et al.
2020); tensor parallel ranks hold a part of every matrix and head (Shoeybi et al. 2019), and of what
lies between them too under sequence parallelism (Korthikanti et al. 2022); pipeline stages hold a
part of the layers, and the first of them as many micro-batches as there are stages (1F1B).

Not counted: buckets of gradients, workspaces of libraries, fragmentation of the allocator.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.arguments import flag, whole
from analysis.decoders import FP32, HALF, Decoder
from analysis.model_states import STAGES, model_state_bytes

__all__ = ["RankBytes", "Ranks", "rank_bytes"]


@dataclass(frozen=True)
class Ranks:
    """How a model is spread.

    Args:
        data, tensor, pipeline: ranks of each kind; their product is the number of GPUs.
        sequence_parallel: whether tensor parallel ranks share out norms and dropouts too.
        zero: what data parallel ranks shard: 0 nothing, 1 optimiser, 2 gradients, 3 parameters too.
        microbatches: of a step; None: as many as there are pipeline stages.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    microbatches: int | None = None

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline"):
            whole(name, getattr(self, name), least=1)
        if self.microbatches is not None:
            whole("microbatches", self.microbatches, least=1)
        flag("sequence_parallel", self.sequence_parallel)
        if self.zero not in STAGES:
            raise ValueError(f"zero={self.zero} is not one of {', '.join(map(str, STAGES))}")

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.data * self.tensor * self.pipeline

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations pipeline stage ``stage`` (from 0) holds under 1F1B."""
        most = self.pipeline if self.microbatches is None else self.microbatches
        return min(self.pipeline - stage, most)

    def check(self, model: Decoder) -> None:
        """ValueError where the model does not divide among the ranks."""
        for what, count, parts in (
            ("layers", model.layers, self.pipeline),
            ("heads", model.heads, self.tensor),
            ("heads of k and v", model.groups, self.tensor),
            ("the MLP's width", model.width, self.tensor),
        ):
            if count % parts:
                raise ValueError(f"{what} {count} do not divide among {parts} ranks")
        if self.sequence_parallel and model.seqlen % self.tensor:
            raise ValueError(f"seqlen {model.seqlen} does not divide among {self.tensor} ranks")


@dataclass(frozen=True)
class RankBytes:
    """What a GPU of one pipeline stage holds beside its activations, in bytes."""

    stage: int
    in_flight: int
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return sum(self.parts.values())


def rank_bytes(model: Decoder, ranks: Ranks, micro_batch: int = 1, bytes_a_parameter: float = 16) -> list[RankBytes]:
    """What the GPUs of each pipeline stage hold beside activations, of ``micro_batch`` sequences.

    Of the bytes a parameter an eighth are the parameter and an eighth its gradient, as with Adam in
    mixed precision: 2, 2 and 12 of 16. Buffers are what a collective
    gathers before it is used: under sequence parallelism the input of half a layer, under ZeRO 3
    the parameters of a layer. ValueError where the model does not divide among the ranks.
    """
    ranks.check(model)
    tokens = micro_batch * model.seqlen
    found = []
    for stage in range(ranks.pipeline):
        count = parameters_of(model, ranks, stage)
        eighth = bytes_a_parameter / 8
        states = model_state_bytes(
            count, ranks.data, ranks.zero, parameter_bytes=eighth, gradient_bytes=eighth, optimizer_bytes=6 * eighth
        )
        parts = {"parameters": states.parameters, "gradients": states.gradients, "optimiser": states.optimizer}
        if stage == ranks.pipeline - 1:
            parts["logits"] = FP32 * tokens * model.vocab / ranks.tensor
        buffers = 0.0
        if ranks.sequence_parallel and ranks.tensor > 1:
            buffers += HALF * tokens * model.hidden
        if ranks.zero == 3 and ranks.data > 1:
            buffers += HALF * _layer_parameters(model, ranks.tensor)
        parts["buffers of collectives"] = buffers
        found.append(RankBytes(stage, ranks.in_flight(stage), parts))
    return found


def parameters_of(model: Decoder, ranks: Ranks, stage: int) -> float:
    """Parameters on a GPU of a pipeline stage, before ZeRO shards them.

    Embeddings are on the first stage, the last norm and the logits on the last; a model that
    uses one matrix for both holds it on both where they are not the same.
    """
    count = model.layers / ranks.pipeline * _layer_parameters(model, ranks.tensor)
    words = model.vocab * model.hidden / ranks.tensor
    first, last = stage == 0, stage == ranks.pipeline - 1
    if first:
        count += words + (model.seqlen * model.hidden if model.kind == "gpt" else 0)
    if last:
        count += (2 if model.kind == "gpt" else 1) * model.hidden
        count += 0 if first and model.one_embedding else words
    return count


def _layer_parameters(model: Decoder, tensor: int) -> float:
    """Of one layer on one rank: matrices, and the biases of columns, in parts; the rest whole."""
    h, a, g, f = model.hidden, model.q_width, model.kv_width, model.width
    matrices = sum(inputs * outputs for half in model.matrices().values() for inputs, outputs in half)
    if model.kind == "gpt":
        return (matrices + 3 * h + f) / tensor + 6 * h  # two norms, biases of the two rows
    return (matrices + (a + 2 * g) * model.qkv_bias) / tensor + 2 * h
