"""FlashAttention and gradient checkpointing, predicted, measured and published side by side.

``import repro`` is cheap: torch and the kernels are imported when a name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from repro.attention.module import FlashAttention
    from repro.attention.operator import flash_attention

__all__ = ["FlashAttention", "flash_attention"]

_HOME = {
    "FlashAttention": "repro.attention.module",
    "flash_attention": "repro.attention.operator",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'repro' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
