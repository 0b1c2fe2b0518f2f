"""Experiments that repeat a figure or table of a paper."""
