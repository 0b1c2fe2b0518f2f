"""Kernels that PyTorch ships compiled for GPUs, run here as machine code.

They are known to be right on cards, so they judge the executor; and a card's counters of them are
on record, so what the executor counts is held to those. Nothing of them is kept.
"""
