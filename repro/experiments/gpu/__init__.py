"""Experiments that only a GPU can measure."""
