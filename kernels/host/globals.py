"""Variables of a compiled kernel outside of its tensors: their bytes would not be counted."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Ours, and what the compiler itself keeps for start-up and exceptions.
KNOWN = re.compile(r"host_runtime|calls_of_clock|completed(\.\d+)?|__dso_handle|DW\.ref\..*")
OBJECT, THREAD_LOCAL = 1, 6
WRITABLE = re.compile(r"\.(data|bss|tdata|tbss)(\.(?!rel\.ro).*)?")


@dataclass(frozen=True)
class Variable:
    """A variable that a kernel can write to, and its size in bytes."""

    name: str
    nbytes: int


def variables(library: Path) -> list[Variable]:
    """Writable variables of a shared library, in no order, but for known ones. None where the
    format is not 64-bit ELF, little-endian."""
    data = library.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return []
    sections = list(_sections(data))
    found = {}
    for _, kind, offset, size, link in sections:
        if kind != 2:  # the table of all symbols
            continue
        names = sections[link][2]
        for at in range(offset, offset + size, 24):
            name, info, _, section, _, nbytes = struct.unpack_from("<IBBHQQ", data, at)
            of_data = nbytes and info & 15 in (OBJECT, THREAD_LOCAL)
            if not of_data or not 0 < section < len(sections):
                continue
            symbol = _text(data, names + name)
            variable = Variable(readable(symbol), nbytes)
            if WRITABLE.fullmatch(sections[section][0]) and not KNOWN.fullmatch(variable.name):
                found[symbol] = variable
    return list(found.values())


def _sections(data: bytes) -> Iterator[tuple[str, int, int, int, int]]:
    """Name, type, offset, size and link of each section."""
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count, of_names = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQII", data, start + i * size) for i in range(count)]
    for name, kind, _, _, offset, nbytes, link, _ in headers:
        yield _text(data, headers[of_names][4] + name), kind, offset, nbytes, link


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def readable(symbol: str) -> str:
    """The variable's own name in a mangled one: the last of those that follow their length."""
    found = symbol
    for match in re.finditer(r"\d+", symbol if symbol.startswith("_Z") else ""):
        name = symbol[match.end() : match.end() + int(match[0])]
        if len(name) == int(match[0]) and name.isidentifier():
            found = name
    return found
