"""FlashAttention and gradient checkpointing, predicted, measured and published side by side.

``import repro`` is cheap: torch and the kernels are imported when a name is first used.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import TYPE_CHECKING, Any

run_path(str(Path(__file__).parents[1] / "analysis" / "neighbours.py"))["require"]("analysis", "kernels")

if TYPE_CHECKING:
    from analysis.hardware import GPUS, Gpu, gpu_named
    from analysis.packed import Lengths
    from analysis.shapes import AttentionShape, Tile
    from repro.attention.decode import decode_attention
    from repro.attention.flex import flex_attention, flex_options
    from repro.attention.module import FlashAttention
    from repro.attention.operator import flash_attention
    from repro.attention.sdpa import scaled_dot_product_attention
    from repro.checkpointing import plan, profile
    from repro.commands.chains import chain_of
    from repro.prediction import Prediction, predict

    __version__: str

__all__ = [
    "GPUS",
    "AttentionShape",
    "FlashAttention",
    "Gpu",
    "Lengths",
    "Prediction",
    "Tile",
    "__version__",
    "chain_of",
    "decode_attention",
    "flash_attention",
    "flex_attention",
    "flex_options",
    "gpu_named",
    "plan",
    "predict",
    "profile",
    "scaled_dot_product_attention",
]

_HOME = {
    "AttentionShape": "analysis.shapes",
    "FlashAttention": "repro.attention.module",
    "GPUS": "analysis.hardware",
    "Gpu": "analysis.hardware",
    "Lengths": "analysis.packed",
    "Prediction": "repro.prediction",
    "Tile": "analysis.shapes",
    "chain_of": "repro.commands.chains",
    "decode_attention": "repro.attention.decode",
    "flash_attention": "repro.attention.operator",
    "flex_attention": "repro.attention.flex",
    "flex_options": "repro.attention.flex",
    "gpu_named": "analysis.hardware",
    "plan": "repro.checkpointing",
    "predict": "repro.prediction",
    "profile": "repro.checkpointing",
    "scaled_dot_product_attention": "repro.attention.sdpa",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from repro.measuring.machine import project_version

        return project_version()
    if name not in _HOME:
        raise AttributeError(f"module 'repro' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
