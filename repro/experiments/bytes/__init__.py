"""Experiments that count bytes, and what is derived from counts."""
