"""Attention: the operator, the variants it is compared with, and the float64 reference."""

from repro.attention.operator import flash_attention

__all__ = ["flash_attention"]
