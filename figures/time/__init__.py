"""Figures of predicted and measured time."""
