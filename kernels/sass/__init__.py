"""The machine code of compiled kernels: read, counted, and followed warp by warp. No GPU needed."""
