"""Disassembled once: machine code is kept as a listing beside the compiled kernels.

A cubin's digest is the key, so a kernel that is compiled anew is disassembled anew, and what is at
hand can be read without nvdisasm.
"""

from __future__ import annotations

from analysis.files import cache_dir
from kernels.building.cache import digest, read_checked, write_checked
from kernels.sass.code import Code, disassemble
from kernels.sass.listing import listing, parse_listing

FORM = "1"
"""Of the listing; another one is not read."""


def disassembled(cubin: bytes, entry: str) -> Code:
    """The code of one entry point. RuntimeError, in one line, without nvdisasm or entry."""
    path = cache_dir() / "sass" / f"{entry[:80]}-{digest(cubin, entry, FORM)}.txt"
    kept = read_checked(path)
    if kept is None:
        kept = listing(disassemble(cubin, entry)).encode()
        write_checked(path, kept)
    return parse_listing(kept.decode().splitlines())
