"""Clocks and seconds of our kernels, followed from their machine code and kept with its digest."""
