"""Which NVRTC library compiles, and loading it.

The one that the Python environment brings (torch 2.13 comes with 13.0), or the one that
``REPRO_NVRTC`` names: a file ``libnvrtc.so.13``, or a folder that holds one at any depth, such as
the target of ``pip install --no-deps --target newer nvidia-cuda-nvrtc==13.5.37``. A process loads
one and keeps it.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

VARIABLE = "REPRO_NVRTC"


def library() -> Path | None:
    """The file that ``REPRO_NVRTC`` names; None where it is not set.

    Raises:
        RuntimeError: it names no NVRTC library.
    """
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        return None
    path = Path(chosen)
    found = [path] if path.is_file() else sorted(path.rglob("libnvrtc.so.*"))
    if not found:
        raise RuntimeError(f"{VARIABLE}={chosen}: neither a file nor a folder with libnvrtc.so.*")
    return found[-1].resolve()


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
