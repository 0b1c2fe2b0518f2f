"""Figures of layers and states that are spread over ranks."""
