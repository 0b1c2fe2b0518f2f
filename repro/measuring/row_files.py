"""Files of rows, JSON Lines: written whole or not at all, locked while they change, and checked.

A file has at most some hundred rows, so every change writes a new one beside it and puts it in the
place of the old: a crash or a full disk leaves the one or the other. Each line ends with a checksum
(``crc``), so a damaged one is noticed. What a killed writer left beside a file is removed by the
next run.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from analysis import files
from repro.measuring.row import ENVELOPE, Record

#: Version of the line format. 1: the fields alone. 2: also ``schema`` and ``crc`` (and once
#: ``more``, which is not read).
SCHEMA = 2
#: Version -> what turns a row of that version into one of the next.
MIGRATIONS: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: dict}
_CRC = ',"crc":"'


def _lines(records: Iterable[Record]) -> bytes:
    """A line a row; whole numbers are written without ".0"."""
    lines = []
    for record in records:
        row = record.to_json()
        if isinstance(row.get("value"), float) and row["value"].is_integer():
            row["value"] = int(row["value"])
        row["schema"] = SCHEMA
        body = json.dumps(row, ensure_ascii=False, separators=(",", ":"))[:-1]
        lines.append(f'{body}{_CRC}{zlib.crc32(body.encode()):08x}"}}\n')
    return "".join(lines).encode()


def append(path: Path, records: Iterable[Record]) -> None:
    """Append the rows of a cell, all or none.

    OSError (disk full, ...) leaves the file as it was.
    """
    data = _lines(records)
    if not data:
        return
    with _locked(path):
        before = path.read_bytes()
        if before and not before.endswith(b"\n"):
            before += b"\n"
        files.write_whole(path, before + data)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file's lock against other processes; the file is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # While this process waited, the holder may have put another file in its place.
            if path.exists() and os.path.samestat(os.fstat(fd), os.stat(path)):
                yield
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


def write(path: Path, records: Iterable[Record]) -> None:
    """Replace a file as a whole: the old one stays until the new one is complete."""
    data = _lines(records)
    with _locked(path):
        files.write_whole(path, data)


def read(path: Path) -> Iterator[Record]:
    """The rows of a file, in order. A missing file has none.

    A broken or damaged line, or one of a schema that this program does not know, is a ValueError
    that names file and line.
    """
    return (row for _, row in numbered(path))


def numbered(path: Path) -> Iterator[tuple[int, Record]]:
    """:func:`read` with the number of each row's line."""
    if not path.exists():
        return
    # Some editors put a byte-order mark in front of what they save.
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = Record.from_json(_opened(json.loads(line), line))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path.name}, line {number}: not JSON ({error})") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from None
        yield number, found


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
        raise ValueError(f"schema {schema} is newer than this program's {SCHEMA}; update the program")
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
    with _locked(path):
        kept = [r for r in read(path) if r.cell not in cells]
        files.write_whole(path, _lines([*kept, *rows]))
