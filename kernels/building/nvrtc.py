"""Which NVRTC library compiles, and loading it.

The one that the Python environment brings (torch 2.13 comes with 13.0), or the one that
``REPRO_NVRTC`` names: a file ``libnvrtc.so.13``, or a folder that holds one at any depth, such as
the target of ``pip install --no-deps --target newer nvidia-cuda-nvrtc==13.5.37``. A process loads
one and keeps it.

ptxas orders instructions differently from version to version, and what a Hopper kernel is worth
hangs on that order. ``REPRO_NVRTC_SECOND`` names one more library, by file or folder as above: the
audit and the tests of machine code then look at the code of both (:func:`versions`).
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

VARIABLE = "REPRO_NVRTC"
SECOND = "REPRO_NVRTC_SECOND"


def library(variable: str = VARIABLE) -> Path | None:
    """The file that ``REPRO_NVRTC``, or another variable, names; None where it is not set.

    Raises:
        RuntimeError: it names no NVRTC library.
    """
    chosen = os.environ.get(variable)
    if not chosen:
        return None
    path = Path(chosen)
    found = [path] if path.is_file() else sorted(path.rglob("libnvrtc.so.*"))
    if not found:
        raise RuntimeError(f"{variable}={chosen}: neither a file nor a folder with libnvrtc.so.*")
    return found[-1].resolve()


def second_version() -> str | None:
    """Version of the library that ``REPRO_NVRTC_SECOND`` names; None where it is not set.

    Raises:
        RuntimeError: it names no NVRTC library, or one without its builtins beside it.
    """
    path = library(SECOND)
    if path is None:
        return None
    beside = [p.name for p in path.parent.glob("libnvrtc-builtins.so.*")]
    if len(beside) != 1:
        raise RuntimeError(f"{SECOND}={path}: {len(beside)} files libnvrtc-builtins.so.* beside it, not one")
    return beside[0].split(".so.")[1]


def versions() -> tuple[str, ...]:
    """The version that compiles in this process and, where it is another one, the second.

    Raises as :func:`load` and :func:`second_version`.
    """
    return tuple(version for version in dict.fromkeys((load(), second_version())) if version)


def second_library(version: str) -> Path:
    """The second library's file.

    Raises:
        ValueError: that is not of this version.
    """
    path = library(SECOND)
    if path is None or second_version() != version:
        raise ValueError(f"NVRTC {version} is not at hand, only {' and '.join(versions())}: {SECOND} names a library")
    return path


def load() -> str:
    """Load NVRTC for :mod:`cuda.bindings` and return its version, e.g. ``"13.0"``.

    Raises:
        ImportError, OSError, RuntimeError: cuda-bindings or the library is missing, or this process
            has loaded another NVRTC than the one that ``REPRO_NVRTC`` names.
    """
    chosen = library()
    wanted = _version(_open(chosen)) if chosen else None
    from cuda.bindings import nvrtc
    from cuda.pathfinder import load_nvidia_dynamic_lib

    # 13.0 does not look for its builtins beside itself, and only whoever loads NVRTC first through
    # cuda-pathfinder gets them from there. torch may have been first.
    _open_builtins(chosen or Path(load_nvidia_dynamic_lib("nvrtc").abs_path))
    status, major, minor = nvrtc.nvrtcVersion()
    if int(status) != 0:
        raise RuntimeError(f"nvrtcVersion returned {status}")
    version = f"{major}.{minor}"
    if wanted and version != wanted:
        raise RuntimeError(
            f"{VARIABLE} names NVRTC {wanted}, but this process has already loaded {version}: "
            "set it before Python starts, and compile before torch is imported"
        )
    return version


@cache
def _open(path: Path) -> ctypes.CDLL:
    """Loaded so that a later search for its name finds it."""
    _open_builtins(path)
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise RuntimeError(f"{VARIABLE}={path} cannot be loaded: {error}") from None


@cache
def _open_builtins(path: Path) -> None:
    for beside in sorted(path.resolve().parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(beside), mode=ctypes.RTLD_GLOBAL)


def _version(handle: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    handle.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"
