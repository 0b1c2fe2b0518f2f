"""The sliding window as the sm_80 flash kernels get it (``include/window.cuh``)."""

from __future__ import annotations

import numpy as np

from analysis.window import Sides, Window, sides
from kernels.launch import Argument, Array


def window_of(q: Array, k: Array, causal: bool, window: Sides, sinks: int) -> Window | None:
    """What the kernels are to hide beside the causal mask; None for a window that hides nothing.

    q, k: (B, H, N, D); arrays of another rank are left to the check of shapes.
    """
    if len(q.shape) != 4 or len(k.shape) != 4:
        return None
    found = Window.of(q.shape[2], k.shape[2], causal=causal, window=sides(window), sinks=sinks)
    return found if found.hides else None


def window_arguments(window: Window | None) -> list[Argument]:
    """Of a kernel with WINDOW 1, none for others."""
    if window is None:
        return []
    return [np.int32(window.left), np.int32(window.right), np.int32(window.sinks)]
