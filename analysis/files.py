"""Files that are kept between runs: where they go, whole or not at all, and safe to load.

Compiled code is run by whoever loads it, so it is kept only where nobody but this user can write,
and each file's name holds the digest of its content: a damaged or planted one is built again. A run
that is killed leaves a draft behind; the next one that writes in the same place removes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

#: The folder that holds our packages: the checkout, or site-packages.
ROOT = Path(__file__).resolve().parent.parent
CACHE_VARIABLE = "REPRO_CACHE_DIR"
_DRAFT = ".draft"


def cache_dir() -> Path:
    """The folder of what is built once and kept.

    ``REPRO_CACHE_DIR`` if set; else ``.cache`` of a checkout that this user can write; else
    ``recompute-repro`` in the user's cache folder (``XDG_CACHE_HOME`` or ``~/.cache``); else, for
    a user without a home, ``recompute-repro-<uid>`` in the folder for temporary files.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    if os.path.exists(ROOT / "pyproject.toml") and can_write(ROOT / ".cache"):
        return ROOT / ".cache"
    try:
        own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recompute-repro"
    except RuntimeError:  # no HOME, and the system does not know this user
        own = None
    if own is not None and own.is_absolute() and can_write(own):
        return own
    return Path(tempfile.gettempdir()) / f"recompute-repro-{os.getuid()}"


def can_write(folder: Path) -> bool:
    """Whether files can be made in it, or in the nearest folder above that exists."""
    # os.path: a pathlib test raises where a folder above may not be searched.
    place = next(p for p in (folder, *folder.parents) if os.path.exists(p))
    return os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)


def private(folder: Path) -> Path:
    """``folder``, made if it is missing, for files that this process will load.

    Raises:
        PermissionError: other users can put files there; the message names the folder.
        OSError: it cannot be made.
    """
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o755)
    for place in (folder.parent, folder):
        found = place.stat()
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise PermissionError(f"every user of this machine can write to {place}, and what lies there is run")
    if not _is_trusted(found):
        raise PermissionError(f"{folder} belongs to another user (uid {found.st_uid}), and what lies there is run")
    if found.st_mode & stat.S_IWGRP and found.st_uid == os.geteuid():
        folder.chmod(stat.S_IMODE(found.st_mode) & ~stat.S_IWGRP)
    return folder


def _is_trusted(found: os.stat_result) -> bool:
    """Whether it belongs to this user, to root, or to whoever owns our own source files."""
    if not hasattr(os, "geteuid"):
        return True
    return found.st_uid in (os.geteuid(), 0, Path(__file__).stat().st_uid)


def find_library(place: Path) -> Path | None:
    """The shared library kept in ``place``, None if there is none that is whole and ours."""
    for file in sorted(place.glob("*.so")):
        with contextlib.suppress(OSError):
            found = file.stat()
            ours = _is_trusted(found) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if ours and file.stem == _digest(file.read_bytes()):
                return file
            file.unlink()
    return None


def keep_library(built: Path, place: Path) -> Path:
    """Move a shared library, built in a :func:`workshop`, to ``place``; returns its path there."""
    built.chmod(0o755)
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=0o755)
    kept = place / f"{_digest(built.read_bytes())}.so"
    os.replace(built, kept)
    return kept


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


@contextlib.contextmanager
def workshop(folder: Path) -> Iterator[Path]:
    """A folder for drafts inside ``folder``, removed afterwards.

    This process holds a lock in it, so the workshops of processes that were killed are known by
    their free locks, and go when the next one opens. OSError if it cannot be made.
    """
    with contextlib.ExitStack() as stack:
        with _held(folder / ".lock"):
            for left in folder.glob(f"*{_DRAFT}"):
                if left.is_dir() and _is_free(left / "lock"):
                    shutil.rmtree(left, ignore_errors=True)
            made = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, suffix=_DRAFT)))
            stack.enter_context(_held(made / "lock"))
        yield made


def write_whole(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Put ``data`` at ``path`` so that every other process sees the old file or the new one.

    durable: also after the machine has lost its power.
    OSError (disk full, no permission) names ``path`` and leaves the old file.
    """
    draft: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        handle, draft = _new_draft(path)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.chmod(draft, 0o644)
            os.replace(draft, path)
    except BaseException as error:
        if draft is not None:
            draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            raise type(error)(error.errno, os.strerror(error.errno), str(path)) from None
        raise


def remove_leftovers(path: Path) -> None:
    """Remove the drafts of this file whose writers were killed."""
    for left in path.parent.glob(f".{_escaped(path.name)}.*{_DRAFT}"):
        if _is_free(left):
            left.unlink(missing_ok=True)


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _new_draft(path: Path) -> tuple[int, Path]:
    while True:
        handle, name = tempfile.mkstemp(_DRAFT, f".{path.name}.", path.parent)
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        # Another process may have taken it for a leftover before it was locked.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(name)):
                return handle, Path(name)
        os.close(handle)


def _is_free(path: Path) -> bool:
    """Whether nobody holds the lock of this file; also where the file is missing."""
    if fcntl is None:
        return False
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Hold a lock file's lock; it is given back when the process ends, however it ends."""
    with open(path, "ab") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
