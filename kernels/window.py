"""The sliding window as the flash kernels get it (``include/window.cuh``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from analysis.packed import Lengths
from analysis.window import Sides, Window, sides
from kernels.launch import Argument, Array


def window_of(
    q: Array, k: Array, causal: bool, window: Sides, sinks: int, lengths: Lengths | None = None
) -> Window | None:
    """What the kernels are to hide beside the causal mask; None for a window that hides nothing.

    q, k: (B, H, N, D); arrays of another rank are left to the check of shapes.
    lengths: of packed sequences; a window is one that hides something in one of them.
    """
    if len(q.shape) != 4 or len(k.shape) != 4:
        return None
    size = (q.shape[2], k.shape[2])
    if not hides([size] if lengths is None else lengths.pairs, causal, window, sinks):
        return None
    return Window.of(*size, causal=causal, window=sides(window), sinks=sinks)


def hides(sizes: Iterable[tuple[int, int]], causal: bool, window: Sides, sinks: int) -> bool:
    """Whether the window hides anything in a sequence of one of the sizes (queries, keys)."""
    asked: dict[str, Any] = {"causal": causal, "window": sides(window), "sinks": sinks}
    return any(Window.of(*size, **asked).hides for size in sizes)


def window_arguments(window: Window | None) -> list[Argument]:
    """Of a kernel with WINDOW 1, none for others."""
    if window is None:
        return []
    return [np.int32(window.left), np.int32(window.right), np.int32(window.sinks)]
