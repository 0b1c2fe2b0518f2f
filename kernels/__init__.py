"""CUDA sources and two ways to run them: on a GPU through CuPy, on the host with counters."""
