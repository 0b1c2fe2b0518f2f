"""What a cubin holds: entry points with their parameters, memory and constants. No GPU needed."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

ARCHITECTURES = {80: "sm_80", 90: "sm_90"}
FIRST_PARAMETER = {80: 0x160, 90: 0x210}
"""Where parameters begin in constant bank 0."""

# Attributes of .nv.info sections.
_PARAMETER, _PARAMETER_BANK, _FRAME = 0x17, 0x0A, 0x12
_REGISTERS, _EXTERNS = 0x2F, 0x0F
_VALUE_FORMAT = 4

_ABSOLUTE_64, _LOW_32, _HIGH_32, _ABSOLUTE_32 = 2, 0x38, 0x39, 1


@dataclass(frozen=True)
class Parameter:
    """Bytes of a parameter, and where it lies among the parameters."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    data: bytes
    nbytes: int
    info: int
    alignment: int


@dataclass(frozen=True)
class Entry:
    """An entry point of a cubin.

    shared_bytes: static shared memory of a block; local_bytes: of a thread.
    """

    name: str
    parameters: tuple[Parameter, ...]
    registers: int
    shared_bytes: int
    local_bytes: int


@dataclass(frozen=True)
class Cubin:
    """A cubin's entries, constant banks and initial global variables.

    constants: bank -> bytes, of an entry or of the module; globals_: the module's variables.
    """

    architecture: int
    entries: dict[str, Entry]
    sections: dict[str, Section]
    symbols: list[tuple[str, int, int, int]] = field(default_factory=list)
    """name, section, value, size."""

    def entry(self, name: str) -> Entry:
        """ValueError names the entry and those that there are."""
        if name not in self.entries:
            raise ValueError(f"no entry {name!r}: there are {', '.join(sorted(self.entries))}")
        return self.entries[name]


def read(data: bytes) -> Cubin:
    """Parse a cubin. ValueError, one line, for anything else."""
    if data[:4] != b"\x7fELF" or len(data) < 64:
        raise ValueError("this is no cubin: no ELF file")
    machine = struct.unpack_from("<H", data, 18)[0]
    if machine != 190:
        raise ValueError(f"this is no cubin: an ELF file for machine {machine}, not 190")
    flags = struct.unpack_from("<I", data, 0x30)[0]
    # CUDA 13 keeps the architecture in bits 8 to 15, before it was in 0 to 7.
    architecture = next((a for a in (flags >> 8 & 0xFF, flags & 0xFF) if a in ARCHITECTURES), None)
    if architecture is None:
        raise ValueError(f"a cubin for sm_{flags >> 8 & 0xFF or flags & 0xFF}; this runs sm_80, sm_90, sm_90a")
    sections = _sections(data)
    symbols = _symbols(sections)
    names = [s.name for s in sections]
    by_name = {s.name: s for s in sections}
    entries = {}
    for section in sections:
        if not section.name.startswith(".nv.info."):
            continue
        name = section.name.removeprefix(".nv.info.")
        if f".text.{name}" in by_name:
            entries[name] = _entry(name, section, by_name, symbols, names)
    return Cubin(architecture, entries, by_name, symbols)


def _sections(data: bytes) -> list[Section]:
    start = struct.unpack_from("<Q", data, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    raw = [struct.unpack_from("<IIQQQQIIQQ", data, start + k * size) for k in range(count)]
    text = raw[names][4]
    found = []
    for name, kind, _, _, offset, nbytes, _, info, alignment, _ in raw:
        end = data.index(b"\0", text + name)
        content = b"" if kind == 8 else data[offset : offset + nbytes]
        found.append(Section(data[text + name : end].decode(), kind, content, nbytes, info, alignment))
    return found


def _symbols(sections: list[Section]) -> list[tuple[str, int, int, int]]:
    table = next((s for s in sections if s.kind == 2), None)
    strings = next((s for s in sections if s.name == ".strtab"), None)
    if table is None or strings is None:
        return []
    found = []
    for at in range(0, len(table.data), 24):
        name, _, _, section, value, size = struct.unpack_from("<IBBHQQ", table.data, at)
        end = strings.data.index(b"\0", name)
        found.append((strings.data[name:end].decode(), section, value, size))
    return found


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while at + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        content = struct.pack("<H", value)
        if form == _VALUE_FORMAT:
            content = data[at : at + value]
            at += value
        found.append((attribute, content))
    return found


def _entry(
    name: str, info: Section, sections: dict[str, Section], symbols: list[tuple[str, int, int, int]], names: list[str]
) -> Entry:
    parameters = {}
    for attribute, content in _attributes(info.data):
        if attribute == _PARAMETER:
            _, ordinal, offset, packed = struct.unpack("<IHHI", content)
            parameters[ordinal] = Parameter(offset, packed >> 18)
    symbol = next((k for k, s in enumerate(symbols) if s[0] == name), None)
    registers = local = 0
    for attribute, content in _attributes(sections[".nv.info"].data):
        if attribute in (_REGISTERS, _FRAME) and len(content) == 8:
            which, value = struct.unpack("<II", content)
            if which == symbol and attribute == _REGISTERS:
                registers = value
            # The least stack that the functions called need comes with the entry's own.
            if which == symbol and attribute == _FRAME:
                local = value
    shared = sections.get(f".nv.shared.{name}")
    reserved = 1024 if ".nv.shared.reserved.0" in names else 0
    return Entry(
        name,
        tuple(parameters[k] for k in sorted(parameters)),
        registers,
        max(0, (shared.nbytes if shared else 0) - (reserved if shared else 0)),
        local,
    )
