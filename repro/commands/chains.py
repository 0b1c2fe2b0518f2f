"""Models that ``plan`` knows by name, and models by import path, as chains of stages."""

from __future__ import annotations

import importlib
import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from analysis.parallel_activations import LayerShape, saved_by_tensor

if TYPE_CHECKING:
    from analysis.checkpointing import Chain


@dataclass(frozen=True)
class Preset:
    """A GPT: MLP of width 4·hidden, dropout, half precision (Korthikanti et al. 2022, §4.1)."""

    layers: int
    hidden: int
    heads: int
    seqlen: int


PRESETS = {
    "gpt2-small": Preset(12, 768, 12, 1024),
    "gpt2-medium": Preset(24, 1024, 16, 1024),
    "gpt2-large": Preset(36, 1280, 20, 1024),
    "gpt2-xl": Preset(48, 1600, 25, 1024),
    "gpt3-6.7b": Preset(32, 4096, 32, 2048),
    "gpt3-175b": Preset(96, 12288, 96, 2048),
}


def transformer_chain(
    preset: Preset,
    *,
    batch: int,
    flops_per_s: float,
    seqlen: int | None = None,
    layers: int | None = None,
    attention: str = "flash",
) -> Chain:
    """Two stages a layer, "attention" and "mlp", with the saved bytes of Korthikanti 2022, Eq. 1.

    attention: "standard" saves softmax output, dropout mask and dropout output; "flash" recomputes
    them and saves one fp32 number a row. Seconds are the products' FLOPs (App. A) over
    ``flops_per_s``, twice that backward: what matters to a plan is their ratio between stages.
    Embedding and logits are left out. Raises ValueError for an unknown attention.
    """
    from analysis.checkpointing import Chain, Stage

    if attention not in ("flash", "standard"):
        raise ValueError(f"attention={attention!r} is neither 'flash' nor 'standard'")
    shape = LayerShape(seqlen or preset.seqlen, batch, preset.hidden, preset.heads)
    saved = saved_by_tensor(shape, recompute="selective" if attention == "flash" else "none")
    tokens, h = shape.seqlen * shape.batch, shape.hidden
    of_mlp = ("mlp_input", "gelu_input", "gelu_output", "mlp_dropout_mask")
    outputs = ("norm1_input", "norm2_input")  # what the stage before has made
    mlp_bytes = int(sum(saved[name] for name in of_mlp))
    attention_bytes = int(
        sum(size for name, size in saved.items() if name not in (*of_mlp, *outputs))
    )
    if attention == "flash":
        attention_bytes += 4 * shape.heads * tokens  # lse
    activation = 2 * tokens * h
    products = {
        "attention": 8 * tokens * h**2 + 4 * tokens * shape.seqlen * h,
        "mlp": 16 * tokens * h**2,
    }
    stages = [
        Stage(
            activation,
            {"attention": attention_bytes, "mlp": mlp_bytes}[kind],
            forward_s=flops / flops_per_s,
            backward_s=2 * flops / flops_per_s,
            name=f"{kind} {layer + 1}",
            kind=kind,
        )
        for layer in range(layers or preset.layers)
        for kind, flops in products.items()
    ]
    return Chain(tuple(stages), input_bytes=activation, input_gradient_bytes=activation)


def imported(path: str) -> Any:
    """What ``module:name`` names, called if it is a function. ValueError where there is nothing."""
    module_name, _, name = path.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
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
    return profile(model, sample, repeats=repeats).chain


def _is_module(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def textbook_chain(name: str) -> Chain | None:
    """ "chain-64": 64 equal stages of 1 MiB that save nothing else; None if not so named."""
    from analysis.checkpointing import uniform_chain

    match = re.fullmatch(r"chain-(\d+)", name)
    if match is None:
        return None
    if int(match[1]) < 1:
        raise ValueError(f"model {name!r}: a chain needs at least 1 stage")
    return uniform_chain(int(match[1]), activation_bytes=1 << 20)
