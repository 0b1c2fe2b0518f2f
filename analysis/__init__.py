"""Analytical cost models of attention and of checkpointing (theory only: no torch, no device)."""
