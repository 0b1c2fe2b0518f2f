"""Sizes of the tiny language model, apart from it: whoever draws its figure needs no torch."""

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 2, 2, 4
