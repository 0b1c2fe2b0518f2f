"""CUDA sources and the two ways to run them: on a GPU through CuPy, or on the host with counters."""
