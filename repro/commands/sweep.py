"""What a field may be on the command line: one value, a list, a range, or a mixture of those."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from analysis.hardware import GPUS, Gpu
from analysis.packed import Lengths
from analysis.shapes import Tile
from analysis.window import Sides
from repro.commands.gpus import find

#: More points than anyone reads, and a few seconds of work.
LIMIT = 20_000
_NUMBER = re.compile(r"(\d+)([kK]?)")
_SPELLING = "a number (16k is 16384), a list 1,2,8, or a range 512:16384:*2 or 64:256:+64"


def numbers(text: str, option: str, least: int = 1) -> list[int]:
    """ "512", "16k", "1,2,8", "512:16384:*2", "64:256:+64"; the end of a range is included.

    Raises ValueError, naming the option, for anything else.
    """
    found: list[int] = []
    for part in text.split(","):
        part = part.strip()
        found += _range(part, option) if ":" in part else [_number(part, option, least)]
    return list(dict.fromkeys(found))


def _number(text: str, option: str, least: int = 1) -> int:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{option} {text!r}: expected {_SPELLING}")
    value = int(match[1]) * (1024 if match[2] else 1)
    if value < least:
        raise ValueError(f"{option} {text!r}: {value} is below {least}")
    return value


def _range(text: str, option: str) -> list[int]:
    ends = text.split(":")
    if len(ends) != 3 or not ends[2]:
        raise ValueError(f"{option} {text!r}: expected {_SPELLING}")
    value, last = _number(ends[0], option), _number(ends[1], option)
    times = ends[2].startswith("*")
    step = _number(ends[2].lstrip("*+") if ends[2][0] in "*+" else ends[2], option)
    if step < (2 if times else 1) or value < 1:
        raise ValueError(f"{option} {text!r}: the range does not grow")
    if last < value:
        raise ValueError(f"{option} {text!r}: {last} is below {value}")
    found = []
    while value <= last:
        found.append(value)
        if len(found) > LIMIT:
            raise ValueError(f"{option} {text!r}: more than {LIMIT} values")
        value = value * step if times else value + step
    return found


def windows(text: str) -> list[Sides]:
    """ "1024,0" as (left, right), "none" for no bound, "none,0" for none on a side; several as
    "256,0;1024,0". Raises ValueError for anything else."""
    found: list[Sides] = []
    for part in text.split(";"):
        ends = [end.strip() for end in part.split(",")]
        if ends == ["none"]:
            ends *= 2
        if len(ends) != 2:
            raise ValueError(f"--window {part!r}: expected left,right as 1024,0 or none,0, or none")
        left, right = (None if e == "none" else _number(e, "--window", 0) for e in ends)
        found.append((left, right))
    return list(dict.fromkeys(found))


def seqlens(text: str) -> Lengths:
    """ "1,17,300" as the lengths of packed sequences, or the name of a file with numbers in it.

    Raises ValueError for anything else, and for no tokens at all.
    """
    file = Path(text)
    if file.is_file():
        text = ",".join(file.read_text(encoding="utf-8").replace(",", " ").split())
    elif file.suffix or file.name != text:
        raise ValueError(f"--seqlens {text!r}: there is no such file")
    found = Lengths.equal(_number(part.strip(), "--seqlens", 0) for part in text.split(","))
    if not found.total_q:
        raise ValueError(f"--seqlens {text!r} has no tokens")
    return found


def words(text: str, option: str, allowed: Sequence[str], every: Sequence[str] | None = None) -> list[str]:
    """A list of names; "all" stands for ``every``, by default all that are allowed. Raises
    ValueError with those allowed."""
    if text == "all":
        return list(allowed if every is None else every)
    chosen = [part.strip() for part in text.split(",")]
    for word in chosen:
        if word not in allowed:
            raise ValueError(f"{option} {word!r}: expected {', '.join(allowed)} or all")
    return list(dict.fromkeys(chosen))


def tiles(text: str) -> list[Tile | None]:
    """ "128x64", a list of those, "auto" (None), or "all": 16 to 256 both ways."""
    if text == "all":
        blocks = (16, 32, 64, 128, 256)
        return [Tile(m, n) for m in blocks for n in blocks]
    found: list[Tile | None] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)", part.strip())
        if part.strip() == "auto":
            found.append(None)
        elif match:
            found.append(Tile(int(match[1]), int(match[2])))
        else:
            raise ValueError(f"--tile {part!r}: expected block_m x block_n as 128x64, auto or all")
    return found


def gpus(text: str) -> list[Gpu]:
    """GPUs by name, file or module (``repro.commands.gpus``), a list of those, or "all"."""
    if text == "all":
        return list(GPUS.values())
    return [find(part.strip()) for part in text.split(",")]


_UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def byte_count(text: str, option: str) -> int:
    """ "8GiB", "80 GB", "1.5MiB" or plain bytes. Raises ValueError naming the units."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    by_name = {unit.lower(): size for unit, size in _UNITS.items()}
    if match is None or match[2].lower() not in by_name:
        raise ValueError(f"{option} {text!r}: expected bytes as 8GiB, 80GB or 1073741824")
    return int(float(match[1]) * by_name[match[2].lower()])
