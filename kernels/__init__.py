"""CUDA sources and two ways to run them: on a GPU through CuPy, on the host with counters."""

from pathlib import Path
from runpy import run_path

run_path(str(Path(__file__).parents[1] / "analysis" / "neighbours.py"))["require"]("analysis")
