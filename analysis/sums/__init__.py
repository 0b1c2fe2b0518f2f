"""Exact byte counts at the SM boundary, one module per family of kernels.

Every function returns {kernel: {(tensor, direction): bytes}} for the whole (B, H, N, D) problem,
directions being "read", "write" and "atomic" (a reduction sent to L2 without reading back).
``analysis.traffic`` is the front door.
"""

from analysis.shapes import KernelBytes

__all__ = ["KernelBytes"]
