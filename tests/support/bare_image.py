"""A Python without some packages, as a rented machine may be: ``WITHOUT=typer,cuda.bindings``.

Import this first in a test program; the packages named in the environment cannot be imported then.
"""

from __future__ import annotations

import os
import sys

#: What a machine with torch, CuPy, Triton and numpy may lack.
LACKING = (
    "annotated_types",
    "click",
    "cuda",
    "hypothesis",
    "matplotlib",
    "pandas",
    "pydantic",
    "pynvml",
    "rich",
    "scipy",
    "seaborn",
    "tabulate",
    "typer",
    "yaml",
)

for _name in filter(None, os.environ.get("WITHOUT", "").split(",")):
    sys.modules[_name] = None  # type: ignore[assignment]
