"""Where every record comes from: one row per file and kind of origin, each file with its digest."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from repro.measuring import records
from repro.measuring.records import Record


@dataclass(frozen=True)
class Origin:
    """What a group of records of one file has in common."""

    source: str
    where: str  # device, or the paper's table or figure
    how: str  # tool, or how a published number was read
    versions: str
    date: str
    commit: str
    records: int
    failed: int


@dataclass(frozen=True)
class SourceFile:
    """A file of records. ``name`` is relative to results/."""

    name: str
    content: bytes
    origins: tuple[Origin, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def records(self) -> int:
        return sum(origin.records for origin in self.origins)


def files(root: Path | None = None) -> list[SourceFile]:
    """All record files, by machine and experiment."""
    paths = records.files() if root is None else sorted(root.glob("*/*.jsonl"))
    return [
        SourceFile(f"{path.parent.name}/{path.name}", path.read_bytes(), _origins(path))
        for path in sorted(paths, key=lambda path: (path.parent.name, path.name))
    ]


def _origins(path: Path) -> tuple[Origin, ...]:
    kinds: Counter[Kind] = Counter()
    failed: Counter[Kind] = Counter()
    for r in records.read(path):
        kinds[_kind(r)] += 1
        failed[_kind(r)] += r.error is not None
    return tuple(Origin(*kind, records=count, failed=failed[kind]) for kind, count in sorted(kinds.items()))


Kind = tuple[str, str, str, str, str, str]


def _kind(r: Record) -> Kind:
    if r.source == "published":
        return (r.source, r.origin or "", r.confidence or "", "", "", "")
    names = {"driver": r.driver, "torch": r.torch, "cuda": r.cuda} | {
        name: r.extra.get(name) for name in ("cupy", "numpy", "python", "cudnn")
    }
    versions = ", ".join(f"{name} {value}" for name, value in names.items() if value)
    return (r.source, r.device or "", r.tool or "", versions, r.date or "", r.commit or "")
