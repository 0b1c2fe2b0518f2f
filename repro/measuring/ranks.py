"""One run shared by several processes, as ``torchrun -m repro measure`` starts them.

Every process is a *rank* and knows its place from the environment: RANK of WORLD_SIZE, and
LOCAL_RANK on its machine. Rank r takes cells r, r + WORLD_SIZE, r + 2 WORLD_SIZE, ... of an
experiment in the order in which it lists them, whatever is on record, so no rank needs to hear of
another. It works on GPU LOCAL_RANK and writes ``<experiment>.rank<r>.jsonl``, which nobody else
writes; ``make import-results`` merges these files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Rank:
    """This process among those of the run. ValueError where the numbers contradict each other."""

    index: int
    local: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.size:
            raise ValueError(f"RANK={self.index} is not one of WORLD_SIZE={self.size} ranks")
        if not 0 <= self.local <= self.index:
            raise ValueError(f"LOCAL_RANK={self.local} does not fit RANK={self.index}")

    def share(self, items: Sequence[T]) -> list[T]:
        """The items of this rank; those of all ranks are all items, each once."""
        return list(items[self.index :: self.size])

    def file(self, path: Path) -> Path:
        """``x.jsonl`` -> ``x.rank1.jsonl``."""
        return path.with_name(f"{path.stem}.rank{self.index}{path.suffix}")


def current(environment: Mapping[str, str] = os.environ) -> Rank | None:
    """The rank that the environment names; None where there is none, or only one."""
    if int(_number(environment, "WORLD_SIZE", "1")) == 1:
        return None
    index = _number(environment, "RANK", None)
    return Rank(index, _number(environment, "LOCAL_RANK", str(index)), _number(environment, "WORLD_SIZE"))


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    if text is None:
        raise ValueError(f"WORLD_SIZE={environment['WORLD_SIZE']} but {name} is not set")
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"{name}={text!r} is not a number")
    return int(text)


def take_gpu(rank: Rank, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let this process, and what it starts, see GPU LOCAL_RANK only. Before torch or CuPy start.

    ValueError where CUDA_VISIBLE_DEVICES names fewer GPUs than there are ranks here.
    """
    named = [name for name in environment.get(VISIBLE, "").split(",") if name]
    if named and rank.local >= len(named):
        raise ValueError(f"LOCAL_RANK={rank.local} but {VISIBLE}={environment[VISIBLE]}")
    environment[VISIBLE] = named[rank.local] if named else str(rank.local)


def merged(path: Path) -> Path | None:
    """``x.rank1.jsonl`` -> ``x.jsonl``; None for a file that is of no rank."""
    found = re.fullmatch(r"(.+)\.rank\d+", path.stem)
    return path.with_name(found[1] + path.suffix) if found else None
