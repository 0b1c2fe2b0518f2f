"""Models that ``plan`` knows by name, and models by import path, as chains of stages."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from analysis.decoders import Decoder
from analysis.rank_memory import RankBytes, Ranks, rank_bytes
from repro.commands import output, sweep
from repro.measuring.progress import counter

if TYPE_CHECKING:
    from analysis.checkpointing import Chain
    from analysis.hardware import Gpu


#: Sizes from the papers (GPT-2, GPT-3) and from the configurations that the authors publish with
#: their weights (Llama 3, Mistral, Qwen 2.5), at the sequence length of training or less.
PRESETS = {
    "gpt2-small": Decoder(12, 768, 12, 1024),
    "gpt2-medium": Decoder(24, 1024, 16, 1024),
    "gpt2-large": Decoder(36, 1280, 20, 1024),
    "gpt2-xl": Decoder(48, 1600, 25, 1024),
    "gpt3-6.7b": Decoder(32, 4096, 32, 2048),
    "gpt3-175b": Decoder(96, 12288, 96, 2048),
    "llama3-8b": Decoder(32, 4096, 32, 8192, 128256, "llama", 8, 14336),
    "llama3-70b": Decoder(80, 8192, 64, 8192, 128256, "llama", 8, 28672),
    "mistral-7b": Decoder(32, 4096, 32, 8192, 32000, "llama", 8, 14336),
    "qwen2.5-7b": Decoder(28, 3584, 28, 8192, 152064, "llama", 4, 18944, qkv_bias=True),
}
#: What --layers, --hidden and so on start from where a kind is named instead of a model.
KINDS_OF = {"gpt": PRESETS["gpt2-small"], "llama": PRESETS["llama3-8b"]}


def decoder_of(name: str, sizes: Mapping[str, int | None]) -> Decoder:
    """The preset of that name with other ``sizes`` (None: as it has them), or for the names "gpt"
    and "llama" one that ``sizes`` describe: hidden, layers and heads must be among them.

    Raises ValueError for an unknown name and for sizes that are missing or do not fit.
    """
    given: dict[str, Any] = {field: size for field, size in sizes.items() if size is not None}
    if name in PRESETS:
        return replace(PRESETS[name], **given)
    if name not in KINDS_OF:
        raise ValueError(
            f"no model {name!r}; known: {', '.join(PRESETS)}; gpt or llama with sizes of your "
            "own, chain-N, or module:name"
        )
    missing = [f"--{field}" for field in ("hidden", "layers", "heads") if field not in given]
    if missing:
        raise ValueError(f"model {name!r} has the sizes that you give it: {', '.join(missing)}")
    start = replace(KINDS_OF[name], hidden=1, heads=1, kv_heads=None, ffn=None)
    return replace(start, **given)


def transformer_chain(
    decoder: Decoder, *, batch: int, gpu: Gpu, attention: str = "flash", ranks: Ranks | None = None
) -> Chain:
    """Two stages a layer, "attention" and "mlp", with the bytes of ``Decoder.saved_bytes`` and the
    least seconds of :func:`stage_seconds`. Embedding and logits are left out.

    With ``ranks`` it is what one micro-batch is on one GPU of a pipeline stage: its layers, its
    part of the bytes, and of the seconds what tensor parallelism leaves, collectives left out.

    Raises ValueError for an unknown attention, or one that the GPU cannot run.
    """
    from analysis.checkpointing import Chain, Stage

    ranks = ranks or Ranks()
    ranks.check(decoder)
    tokens = decoder.seqlen * batch
    sequence = ranks.sequence_parallel
    saved = decoder.saved_bytes(tokens, decoder.seqlen, attention, tensor=ranks.tensor, sequence_parallel=sequence)
    seconds = stage_seconds(decoder, batch, gpu, attention)
    activation = 2 * tokens * decoder.hidden // (ranks.tensor if sequence else 1)
    stages = [
        Stage(
            activation,
            saved[kind],
            forward_s=forward / ranks.tensor,
            backward_s=backward / ranks.tensor,
            name=f"{kind} {layer + 1}",
            kind=kind,
        )
        for layer in range(decoder.layers // ranks.pipeline)
        for kind, (forward, backward) in seconds.items()
    ]
    return Chain(tuple(stages), input_bytes=activation, input_gradient_bytes=activation)


def layer_names(model: str, count: int) -> list[str] | None:
    """What transformers calls the layers of a named decoder; None for other chains."""
    known = PRESETS.get(model)
    kind = known.kind if known is not None else model
    where = {"gpt": "transformer.h", "llama": "model.layers"}.get(kind)
    return None if where is None else [f"{where}.{i}" for i in range(count)]


def stage_seconds(decoder: Decoder, batch: int, gpu: Gpu, attention: str) -> dict[str, tuple[float, float]]:
    """Seconds of a layer's halves, forward and backward, by the time model of ``predict``.

    Causal attention is what ``predict`` says of it: the kernel that dispatch picks, or of
    "standard" attention its kernels one by one (a key/value head for each query head). The products
    around it take what tensor cores or HBM take, operands and result once, and in the backward two
    as large. Norms and activations are left out.
    """
    from analysis.clocks import ceilings_of
    from analysis.shapes import AttentionShape
    from analysis.time_model import Work, predict_time
    from repro.prediction import AUTO, PASSES, predict

    tokens, ceilings = decoder.seqlen * batch, ceilings_of(gpu)
    standard = attention == "standard"
    shape = AttentionShape(
        batch,
        decoder.heads,
        decoder.seqlen,
        decoder.seqlen,
        decoder.head_width,
        decoder.heads if standard else decoder.groups,
        "bf16" if gpu.has_bf16 else "fp16",
        causal=True,
    )
    found = {}
    for half, matrices in decoder.matrices().items():
        works = {
            str(n): Work(
                flops=2 * tokens * inputs * outputs,
                hbm_bytes=2 * (tokens * inputs + inputs * outputs + tokens * outputs),
            )
            for n, (inputs, outputs) in enumerate(matrices)
        }
        products = predict_time(works, ceilings).seconds
        found[half] = [products, 2 * products]
    for n, pass_ in enumerate(PASSES):
        point = predict("standard" if standard else AUTO, shape, pass_, gpu)
        found["attention"][n] += point.time.seconds
    return {half: (forward, backward) for half, (forward, backward) in found.items()}


def imported(path: str) -> Any:
    """What ``module:name`` names, called if it is a function. ValueError where there is nothing."""
    module_name, _, name = path.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:  # no module; an empty or a relative name
        raise ValueError(f"model {path!r}: cannot import {module_name!r} ({error})") from None
    finally:
        sys.path.pop(0)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"model {path!r}: {module_name} has no {name!r}")
        found = getattr(found, part)
    return found() if callable(found) and not _is_module(found) else found


def is_whole(found: Any) -> bool:
    """A model that is called by its own forward: (model, args) or (model, args, kwargs), where the
    model is neither an nn.Sequential nor has a stages() method."""
    if not (isinstance(found, tuple) and len(found) in (2, 3) and _is_module(found[0])):
        return False
    from torch import nn

    model = found[0]
    parts = isinstance(model, nn.Sequential | nn.ModuleList)
    return not parts and not callable(getattr(model, "stages", None))


def imported_chain(path: str, found: Any, *, repeats: int) -> Chain:
    """The chain of what ``path`` named: a Chain, or a (sequential model, sample) pair, which is
    profiled (``repro.checkpointing.profile``), every stage ``repeats`` times.

    Raises ValueError for anything else.
    """
    from analysis.checkpointing import Chain

    if isinstance(found, Chain):
        return found
    if not (isinstance(found, tuple) and len(found) == 2):
        raise ValueError(
            f"model {path!r}: expected a Chain, a pair of a model and an input to profile it with, "
            f"or (model, arguments, keyword arguments), got a {type(found).__name__}"
        )
    from repro.checkpointing import profile

    model, sample = found
    with counter(f"profiling {path}") as progress:
        return profile(model, sample, repeats=repeats, progress=progress).chain


def _is_module(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


#: Stages of a chain given by its number alone.
LONGEST = 4096


def textbook_chain(name: str) -> Chain | None:
    """ "chain-64": 64 equal stages of 1 MiB that save nothing else; None if not so named."""
    from analysis.checkpointing import uniform_chain

    match = re.fullmatch(r"chain-(\d+)", name)
    if match is None:
        return None
    if int(match[1]) < 1:
        raise ValueError(f"model {name!r}: a chain needs at least 1 stage")
    if int(match[1]) > LONGEST:
        raise ValueError(
            f"model {name!r}: chains of more than {LONGEST} stages are not planned here, since "
            "tables grow with the square"
        )
    return uniform_chain(int(match[1]), activation_bytes=1 << 20)


def chain_of(
    model: str,
    *,
    found: Any = None,
    repeats: int = 3,
    batch: int = 1,
    attention: str = "flash",
    gpu: str = "H200",
    ranks: Ranks | None = None,
    **sizes: int | None,
) -> Chain:
    """The chain of a model by name ("gpt2-medium", "llama3-8b", "chain-64", ...) or import path, as
    ``python -m repro plan`` takes it, without running a named one.

    found: what the import path names, where the caller has it. repeats: timed runs of each of its
    stages. batch: micro-batch of a named decoder. gpu: whose time model times it. ranks: how it is
    spread over GPUs. sizes: layers, hidden, heads, head_dim, kv_heads, ffn, vocab, seqlen,
    tied of a named decoder.

    Raises ValueError that lists the names, or for sizes that the model does not take.
    """
    given = [
        f"--{name.replace('_', '-')}" + ("" if size is True else f" {size}") for name, size in sizes.items() if size
    ]
    chain = textbook_chain(model)
    if ":" in model or chain is not None:
        if given:
            raise ValueError(f"model {model!r} has its own sizes, not {', '.join(given)}")
        if ranks is not None and ranks != Ranks():
            raise ValueError(f"model {model!r} is a chain of stages: only named models are spread")
        return chain or imported_chain(model, imported(model) if found is None else found, repeats=repeats)
    return transformer_chain(
        decoder_of(model, sizes), batch=batch, attention=attention, gpu=sweep.gpus(gpu)[0], ranks=ranks
    )


@dataclass(frozen=True)
class Resident:
    """What a step of a named decoder holds beside its activations, by pipeline stage."""

    parameters: int
    bytes_a_parameter: float
    pipeline_stages: tuple[RankBytes, ...]

    @classmethod
    def of(
        cls, model: str, batch: int, bytes_a_parameter: float, sizes: dict[str, int | None], ranks: Ranks
    ) -> Resident:
        """ValueError for a model that is not a named decoder: a chain does not know its weights."""
        if ":" in model or textbook_chain(model) is not None:
            raise ValueError(
                f"--total-budget: model {model!r} is a chain of stages, whose weights are not "
                "known; --budget is of activations alone"
            )
        decoder = decoder_of(model, sizes)
        stages = rank_bytes(decoder, ranks, batch, bytes_a_parameter)
        return cls(decoder.parameters, bytes_a_parameter, tuple(stages))

    def left(self, total_bytes: int) -> int:
        """Bytes of ``total_bytes`` for the activations of one micro-batch, on the GPU that has the
        least: all that are in flight get as much. ValueError where there are none."""
        fullest = max(self.pipeline_stages, key=lambda stage: stage.total)
        if fullest.total >= total_bytes:
            raise ValueError(
                f"--total-budget of {total_bytes} bytes: weights, gradients, optimiser states and "
                f"logits alone take {fullest.total:.0f} bytes ({self}). "
                "--zero, --data, --tensor and --pipeline spread them over GPUs"
            )
        return min(int((total_bytes - stage.total) / stage.in_flight) for stage in self.pipeline_stages)

    def __str__(self) -> str:
        fullest = max(self.pipeline_stages, key=lambda stage: stage.total)
        parts = ", ".join(f"{name} {output.of_bytes(size)}" for name, size in fullest.parts.items() if size)
        where = f" on the fullest of {len(self.pipeline_stages)} pipeline stages" * (len(self.pipeline_stages) > 1)
        return (
            f"{self.parameters / 1e9:.3g} billion parameters at {self.bytes_a_parameter:g} bytes: "
            f"{parts}{where}; the rest is for activations"
        )
