"""Experiments on recomputed activations, training memory and several ranks."""
