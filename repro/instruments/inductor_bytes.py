"""Bytes that torch.compile's code reads and writes, by the compiler's own account.

Inductor sums, over the kernels it generates, the buffers each reads and writes. The account is
taken while compiling, so caches are off; it says what fusion left, not what a cache serves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LOGGER = "torch._inductor.compile_fx.__inductor_metrics"


def compiled_bytes(function: Callable[..., Any], *args: Any) -> int:
    """Bytes of one call of ``torch.compile(function)(*args)``.

    Raises RuntimeError when the compiler keeps no account (its metrics have moved or changed).
    """
    from torch._inductor import config, metrics

    torch._dynamo.reset()
    metrics.reset()
    with _accounting(), config.patch(fx_graph_cache=False):
        torch.compile(function)(*args)
    total = int(metrics.num_bytes_accessed)
    if total == 0:
        raise RuntimeError("this torch.compile reports no bytes (inductor metrics are empty)")
    return total


@contextmanager
def _accounting() -> Iterator[None]:
    """Inductor sums bytes only for a logger that listens; this one listens and prints nothing."""
    logger = logging.getLogger(_LOGGER)
    level, spread = logger.level, logger.propagate
    quiet = logging.NullHandler()
    logger.addHandler(quiet)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(quiet)
        logger.setLevel(level)
        logger.propagate = spread
