"""What a compiled kernel depends on, and keeping cubins between runs (see analysis/files.py)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from analysis.files import private, write_whole
from kernels.launch import INCLUDE_DIR

_DIGEST_BYTES = hashlib.sha256().digest_size


def digest(*parts: str | bytes) -> str:
    """Hash of the parts, each with its length so that no two lists of parts collide."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()[:32]


def write_checked(path: Path, data: bytes) -> None:
    """Keep ``data`` in the cache, followed by its digest; OSError names the file."""
    private(path.parent)
    write_whole(path, data + hashlib.sha256(data).digest())


def read_checked(path: Path) -> bytes | None:
    """What :func:`write_checked` kept there; None where it is missing or damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    data, found = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return data if hashlib.sha256(data).digest() == found else None


def read_all(paths: Iterable[Path]) -> str:
    """Names and contents of the files, in name order: what a cached object depends on."""
    return "".join(f"{path.name}\n{_text(path)}\n" for path in sorted(paths))


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
    return path.read_text(encoding="utf-8")
