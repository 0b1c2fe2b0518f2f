"""Files of rows, JSON Lines: written whole or not at all, locked while they change, and checked.

The rows of a cell are appended together: each line says how many follow it (``more``), so a cell of
which a crash or a full disk kept only a part is skipped when reading and cut off before the next
append. Each line ends with a checksum (``crc``), so a damaged one is noticed. What a killed writer
left beside a file is removed by the next run.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from analysis import files
from analysis.arguments import whole
from repro.measuring.row import ENVELOPE, Record

#: Version of the line format. 1: the fields alone. 2: also ``schema``, ``more`` and ``crc``.
SCHEMA = 2
#: Version -> what turns a row of that version into one of the next.
MIGRATIONS: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: dict}
_CRC = ',"crc":"'


def _lines(records: Iterable[Record]) -> str:
    """The rows of one append, a line each; whole numbers are written without ".0"."""
    rows = [r.to_json() for r in records]
    lines = []
    for more, row in zip(range(len(rows) - 1, -1, -1), rows, strict=True):
        if isinstance(row.get("value"), float) and row["value"].is_integer():
            row["value"] = int(row["value"])
        row["schema"] = SCHEMA
        if more:
            row["more"] = more
        body = json.dumps(row, ensure_ascii=False, separators=(",", ":"))[:-1]
        lines.append(f'{body}{_CRC}{zlib.crc32(body.encode()):08x}"}}\n')
    return "".join(lines)


def append(path: Path, records: Iterable[Record]) -> None:
    """Append the rows of a cell, all or none, and sync them; a torn tail is cut off first.

    OSError (disk full, ...) leaves the file as it was.
    """
    data = _lines(records).encode()
    if not data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path) as fd, _naming(path):
        start = _cut_torn_tail(fd)
        try:
            while data:
                data = data[os.write(fd, data) :]
            os.fsync(fd)
        except BaseException:
            os.ftruncate(fd, start)
            raise


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let an OSError say which file it is about: one of a file descriptor does not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, opened for appending and locked against other processes; made if it is missing."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # While this process waited, the holder may have put another file in its place.
            if path.exists() and os.path.samestat(os.fstat(fd), os.stat(path)):
                yield fd
                return
        finally:
            os.close(fd)


@contextlib.contextmanager
def exclusive(path: Path, waiting: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold an experiment's records for a whole run, so that two runs never measure the same cell.

    ``waiting`` is called once if another run holds them; then this one waits for its end. The lock
    is the kernel's, so a killed run leaves none behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.lock")
    while True:
        fd = os.open(beside, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(fd, fcntl.LOCK_EX)
            if beside.exists() and os.path.samestat(os.fstat(fd), os.stat(beside)):
                files.remove_leftovers(path)
                try:
                    yield
                finally:
                    beside.unlink(missing_ok=True)
                return
        finally:
            os.close(fd)


def _cut_torn_tail(fd: int) -> int:
    """Cut off what an interrupted append left, and no more: a last line that only its end is
    missing of counts, here as in :func:`numbered`; returns the size of the rest."""
    content = os.pread(fd, os.fstat(fd).st_size, 0)
    last = content[content.rfind(b"\n") + 1 :]
    if last.strip() and _is_json(last):
        os.write(fd, b"\n")
        content += b"\n"
    whole = content.rfind(b"\n") + 1
    while whole:
        start = content.rfind(b"\n", 0, whole - 1) + 1
        line = content[start:whole].strip()
        if not line or not _more(line):
            break
        whole = start
    if whole != len(content):
        os.ftruncate(fd, whole)
    return whole


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _more(line: bytes) -> int:
    """How many lines of the same append should follow; 0 where the line does not say."""
    try:
        more = json.loads(line).get("more", 0)
    except (ValueError, AttributeError, RecursionError):
        return 0  # whoever reads the file will be told
    return more if isinstance(more, int) else 0


def write(path: Path, records: Iterable[Record]) -> None:
    """Replace a file as a whole: the old one stays until the new one is complete."""
    text = "".join(_lines([r]) for r in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        files.write_whole(path, text.encode())


def read(path: Path) -> Iterator[Record]:
    """The rows of a file, in order. A missing file has none.

    What an interrupted append left at the end is skipped with a warning; a broken or damaged line
    elsewhere, or one of a schema that this program does not know, is a ValueError that names file
    and line.
    """
    return (row for _, row in numbered(path))


def numbered(path: Path) -> Iterator[tuple[int, Record]]:
    """:func:`read` with the number of each row's line."""
    if not path.exists():
        return
    # Some editors put a byte-order mark in front of what they save.
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    found: list[tuple[int, Record]] = []
    complete = 0  # rows up to the last append that is whole
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            if number == len(lines):  # no newline after it: the write was cut short
                warnings.warn(f"{path.name}: last line is torn, skipped", stacklevel=2)
                break
            raise ValueError(f"{path.name}, line {number}: not JSON ({error})") from None
        try:
            more = whole("more", row.get("more", 0), 0) if isinstance(row, dict) else 0
            found.append((number, Record.from_json(_opened(row, line))))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from None
        if not more:
            complete = len(found)
    if complete < len(found):
        warnings.warn(
            f"{path.name}: the last cell is incomplete, its {len(found) - complete} rows skipped",
            stacklevel=2,
        )
    yield from found[:complete]


def _opened(row: Any, line: bytes) -> dict[str, Any]:
    """The record's fields of a line, checked against its checksum and brought to SCHEMA."""
    if not isinstance(row, dict):
        raise ValueError(f"not a JSON object but a {type(row).__name__}")
    if "crc" in row:
        body, _, _ = line.rpartition(_CRC.encode())
        if row["crc"] != f"{zlib.crc32(body):08x}":
            raise ValueError(
                "the checksum does not match, so the line is not what was measured; restore it, "
                "or take its crc out if the change is meant"
            )
    schema = row.get("schema", 1)
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise ValueError(f"schema must be a version number, got {schema!r}")
    if schema > SCHEMA:
        raise ValueError(
            f"schema {schema} is newer than this program's {SCHEMA}; update the program"
        )
    row = {key: value for key, value in row.items() if key not in ENVELOPE}
    for version in range(schema, SCHEMA):
        row = MIGRATIONS[version](row)
    return row


def discard(path: Path, cells: set[str]) -> None:
    """Remove the rows of these cells, so that they can be measured again."""
    replace(path, cells, ())


def replace(path: Path, cells: set[str], rows: Iterable[Record]) -> None:
    """Put rows in the place of those of ``cells``, in one step."""
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        kept = [r for r in read(path) if r.cell not in cells]
        text = "".join(_lines([r]) for r in kept) + _lines(rows)
        files.write_whole(path, text.encode())
