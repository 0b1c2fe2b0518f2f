"""Where compiled kernels are kept between runs, and writing there safely."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from kernels.launch import INCLUDE_DIR, KERNELS_DIR


def cache_dir() -> Path:
    """The folder of compiled kernels.

    ``REPRO_CACHE_DIR`` if set; else ``.cache`` of a writable checkout; else
    ``~/.cache/recompute-repro``.
    """
    chosen = os.environ.get("REPRO_CACHE_DIR")
    if chosen:
        return Path(chosen)
    root = KERNELS_DIR.parent
    if (root / "pyproject.toml").exists() and os.access(root, os.W_OK):
        return root / ".cache"
    return Path.home() / ".cache" / "recompute-repro"


def digest(*parts: str | bytes) -> str:
    """Hash of the parts, each with its length so that no two lists of parts collide."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()[:32]


def write_atomically(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` so that another process sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_all(paths: Iterable[Path]) -> str:
    """Names and contents of the files, in name order: what a cached object depends on."""
    return "".join(f"{path.name}\n{path.read_text()}\n" for path in sorted(paths))


def headers(text: str) -> str:
    """Text of the headers in ``include/`` that a source includes, directly or through another.

    A kernel depends on these alone, so a change of one header leaves the other kernels compiled.
    """
    found: dict[str, Path] = {}
    waiting = [text]
    while waiting:
        for name in re.findall(r'^\s*#\s*include\s+"([\w.]+)"', waiting.pop(), re.MULTILINE):
            path = INCLUDE_DIR / name
            if name not in found and path.exists():  # the host's own headers lie elsewhere
                found[name] = path
                waiting.append(_text(path))
    return read_all(found.values())


@cache
def _text(path: Path) -> str:
    return path.read_text()
