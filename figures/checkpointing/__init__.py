"""Figures of recomputed activations."""
