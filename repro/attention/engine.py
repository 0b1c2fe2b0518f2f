"""From torch tensors to kernels: memory views, scratch, streams, and who runs them.

CUDA tensors go to the CuPy launcher on torch's current stream; CPU tensors go to the host
backend. Tensors cross by address (``data_ptr``), never through an array library, so bfloat16
needs no support from one. Scratch memory comes from torch's allocator on the current stream: no
second memory pool has to be told when a stream is done with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.launch import Argument, Array, Backend, Kernel
from repro.attention.validation import DTYPES

__all__ = ["CHECKS_VARIABLE", "Options", "backward", "forward", "host_backend"]

#: Set to 1 to run CPU tensors with the host backend's memory and race checks on.
CHECKS_VARIABLE = "REPRO_HOST_CHECKS"

_TORCH_TYPES = {name: dtype for dtype, name in DTYPES.items()} | {
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


@dataclass(frozen=True)
class Options:
    """What shapes the computation beside q, k and v; the operator's schema in the same order."""

    key_mask: Tensor | None
    block_mask: Tensor | None
    seed: Tensor | None
    causal: bool
    scale: float
    dropout_p: float
    tile: Sequence[int] | None
    deterministic: bool
