"""Faults of the study notes."""
