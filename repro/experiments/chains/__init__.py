"""Experiments on what attention stands beside: matrix products and fused chains."""
