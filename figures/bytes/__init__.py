"""Figures of counted and predicted bytes."""
