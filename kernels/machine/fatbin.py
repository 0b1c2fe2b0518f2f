"""Cubins inside of a library or program: the fat binaries that nvcc puts into an ELF file.

Nothing is written anywhere; what is found is handed on in memory.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import struct
from collections.abc import Iterator
from functools import cache
from mmap import ACCESS_READ, mmap
from pathlib import Path

_MAGIC = struct.pack("<I", 0xBA55ED50)
_ELF_KIND = 2
_LZ4, _ZSTD = 0x2000, 0x8000


def cubins(path: Path, architecture: int) -> Iterator[bytes]:
    """The cubins for an architecture (80, 90) in a library, in the order they lie there.

    ValueError, one line: no such file, or compressed in a way that cannot be read here.
    """
    if not path.is_file():
        raise ValueError(f"no library at {path}")
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        at = data.find(_MAGIC)
        while at >= 0:
            header, size = struct.unpack_from("<HQ", data, at + 6)
            yield from _of_one(data, at + header, at + header + size, architecture)
            at = data.find(_MAGIC, at + header + size)


def _of_one(data: mmap, at: int, end: int, architecture: int) -> Iterator[bytes]:
    while at < end:
        kind, _, header, size, compressed = struct.unpack_from("<HHIQI", data, at)
        (target,) = struct.unpack_from("<I", data, at + 28)
        flags, _, plain = struct.unpack_from("<QQQ", data, at + 40)
        begin = at + header
        if kind == _ELF_KIND and target == architecture:
            content = data[begin : begin + (compressed or size)]
            yield _decompressed(content, plain, flags) if compressed else content
        at = begin + size


def _decompressed(content: bytes, nbytes: int, flags: int) -> bytes:
    if not flags & _ZSTD:
        how = "LZ4" if flags & _LZ4 else f"flags 0x{flags:x}"
        raise ValueError(f"a cubin that is compressed otherwise than by Zstandard ({how}) is not read here")
    plain = ctypes.create_string_buffer(nbytes)
    found = _zstd().ZSTD_decompress(plain, nbytes, content, len(content))
    if found != nbytes:
        raise ValueError(f"a cubin of {nbytes} bytes does not decompress")
    return plain.raw


@cache
def _zstd() -> ctypes.CDLL:
    name = ctypes.util.find_library("zstd")
    if name is None:
        raise ValueError("reading compressed cubins needs the system's libzstd")
    library = ctypes.CDLL(name)
    library.ZSTD_decompress.restype = ctypes.c_size_t
    library.ZSTD_decompress.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    return library
