"""From a source to a cubin: which NVRTC compiles, and what is kept of it between runs."""
