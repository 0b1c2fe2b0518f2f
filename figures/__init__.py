"""One module per figure or table: each reads the records and draws."""

from pathlib import Path
from runpy import run_path

run_path(str(Path(__file__).parents[1] / "analysis" / "neighbours.py"))["require"]("analysis", "kernels", "repro")
