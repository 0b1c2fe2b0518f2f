"""Finds kernels in torch's CUDA library.

    pip download torch==2.11.0 --no-deps -d FOLDER     # Linux x86_64, from the public index
    unzip -j FOLDER/torch-*.whl torch/lib/libtorch_cuda.so -d FOLDER
    export REPRO_LIBTORCH_CUDA=FOLDER/libtorch_cuda.so

A torch for CUDA that is installed has the library too, and is found without the variable.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kernels.machine import Program, load
from kernels.machine.fatbin import cubins

VARIABLE = "REPRO_LIBTORCH_CUDA"
MISSING = f"needs torch's CUDA library: set {VARIABLE} to a libtorch_cuda.so (repro/shipped/library.py says how)"

_NAME = re.compile(rb"\.text\.(_Z\w+)\0")
#: A program, and the name of an entry in it.
Found = tuple[Program, str]


def library() -> Path | None:
    """Where torch's CUDA library lies, or None."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    spec = importlib.util.find_spec("torch")
    folders = (spec.submodule_search_locations or []) if spec else []
    places = (Path(folder) / "lib" / "libtorch_cuda.so" for folder in folders)
    return next((place for place in places if place.is_file()), None)


def find(architecture: int, patterns: Sequence[str]) -> dict[str, Found]:
    """The first kernel whose mangled name holds each pattern, a regular expression.

    RuntimeError without the library; ValueError names the first pattern that is in no cubin.
    """
    path = library()
    if path is None:
        raise RuntimeError(MISSING)
    return _find(path, architecture, tuple(patterns))


@cache
def _find(path: Path, architecture: int, patterns: tuple[str, ...]) -> dict[str, Found]:
    left = list(patterns)
    found: dict[str, Found] = {}
    for cubin in cubins(path, architecture):
        names = _NAME.findall(cubin)
        here = {p: name for p in left if (name := next(filter(re.compile(p.encode()).search, names), None))}
        if here:
            program = load(cubin)
            found |= {pattern: (program, name.decode()) for pattern, name in here.items()}
            left = [pattern for pattern in left if pattern not in here]
        if not left:
            return found
    raise ValueError(f"{path.name} has no sm_{architecture} kernel {left[0]!r}")
