"""From a driver's launches to the GPU: recorded plans, CuPy, and NVIDIA's own calls."""
