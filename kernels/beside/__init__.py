"""Kernels beside attention: matrix products, elementwise chains, online softmax, probes of a card.

Each has its source here; its driver runs it on any backend, as those of attention do.
"""
