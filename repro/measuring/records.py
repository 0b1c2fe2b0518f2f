"""Records: one measured, predicted or published number a row, kept as JSON Lines.

A row says what was run (experiment, implementation, pass, shape (B, H, N, D), tile), what came out
(metric, value, unit, spread) and where it comes from (source, tool, device, versions, date, or the
paper's table or figure with how far that reading can be trusted). A cell that failed is a row too:
``error`` holds the message and ``value`` is absent, so a gap in a figure has a reason on record.

Files are ``results/<machine>/<experiment>.jsonl``. The rows of a cell are appended together: each
line says how many follow it (``more``), so a cell of which a crash or a full disk kept only a part
is skipped when reading and cut off before the next append. Each line ends with a checksum
(``crc``), so a damaged one is noticed. A file is locked while it changes, and what a killed writer
left beside it is removed by the next run. Fields this module does not know are kept as they are.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import math
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.arguments import instance, whole
from repro.measuring import machine

if TYPE_CHECKING:
    import pandas

SOURCES = ("predicted", "measured", "published")
PASSES = ("forward", "backward", "forward+backward", "-")
LEVELS = ("sm", "hbm")

#: Version of the line format. 1: the fields alone. 2: also ``schema``, ``more`` and ``crc``.
SCHEMA = 2
#: Version -> what turns a row of that version into one of the next.
MIGRATIONS: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: dict}
#: Fields of a line that are not fields of the record.
ENVELOPE = ("schema", "more", "crc")

#: Folder with one sub-folder per machine, and one named ``published``. ``REPRO_RESULTS`` moves it,
#: so that a run on a rented machine leaves its records where they can be taken away.
RESULTS = Path(os.environ.get("REPRO_RESULTS") or machine.HOME / "results")


def _delivered() -> Path | None:
    own = machine.ROOT if machine.CHECKOUT else Path(__file__).parents[1]
    place = own / "results"
    return place if place.is_dir() and place.resolve() != RESULTS.resolve() else None


#: The records that the project comes with, where they do not lie in RESULTS: only read. An
#: installed package has them inside.
DELIVERED = _delivered()

Scalar = str | int | float | bool

#: What a folder under results/ may be called: it becomes a path and a heading.
FOLDER = re.compile(r"[a-z0-9_-][a-z0-9._-]*")
#: Folders of other numbers: what is in them.
RESERVED = {"published": "the papers' numbers", "registered": "predictions made before a run"}


def require_folder(name: str) -> str:
    """The name, if measurements may be written to ``results/<name>``.

    ValueError for one that is a path or has other characters than ``[a-z0-9._-]``, and for the
    folders of other numbers: ``published`` (the papers') and ``registered`` (predictions).
    """
    instance("folder of results", name, str)
    if not FOLDER.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be a folder of results: letters a to z, digits, '.', '_' and '-' only"
        )
    if name in RESERVED:
        raise ValueError(f"{name!r} holds {RESERVED[name]}; no results go there")
    return name


@dataclass(frozen=True, kw_only=True)
class Record:
    """One row. Absent fields are None and are not written.

    ``level`` tells the two kinds of traffic apart: "sm" is what crosses the boundary between L2 and
    the multiprocessors, "hbm" what reaches DRAM. ``cell`` identifies the point of the experiment
    that this row is part of; a run resumes by it.

    Raises ValueError or TypeError, naming the offending values, when a row cannot be right.
    """

    experiment: str
    implementation: str
    metric: str
    source: str
    value: float | None = None
    unit: str | None = None
    pass_: str = "-"
    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    seqlen_q: int | None = None
    seqlen_k: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    causal: bool | None = None
    dropout: float | None = None
    key_mask: bool | None = None
    block_m: int | None = None
    block_n: int | None = None
    level: str | None = None
    kernel: str | None = None
    tensor: str | None = None
    direction: str | None = None
    scale_factor: float | None = None  # value = counted on a smaller run x this (1 head -> B*H)
    spread_min: float | None = None
    spread_max: float | None = None
    spread_n: int | None = None
    tool: str | None = None
    origin: str | None = None  # published: paper and table or figure
    confidence: str | None = None  # published: "table", "label", "digitised ±0.03 GB", ...
    note: str | None = None
    error: str | None = None
    cell: str | None = None
    sources: str | None = None  # digest of the code that was measured
    device: str | None = None
    driver: str | None = None
    torch: str | None = None
    cuda: str | None = None
    date: str | None = None
    commit: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("experiment", "implementation", "metric"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise TypeError(f"{name} must be a non-empty string, got {getattr(self, name)!r}")
        for names, kind, what in _TYPES:
            for name in names:
                found = getattr(self, name)
                if found is not None and not isinstance(found, kind):
                    raise TypeError(f"{name} must be {what}, got {found!r}")
        if self.source not in SOURCES:
            raise ValueError(f"source must be one of {SOURCES}, got {self.source!r}")
        if self.level is not None and self.level not in LEVELS:
            raise ValueError(f"level must be one of {LEVELS}, got {self.level!r}")
        if (self.value is None) == (self.error is None):
            raise ValueError(
                f"a row has either a value or an error, got value={self.value!r} and "
                f"error={self.error!r} ({self.experiment}, {self.implementation}, {self.metric})"
            )
        if self.value is not None and not self.unit:
            raise ValueError(f"value {self.value!r} of {self.metric} needs a unit")
        for name in _NUMBERS:
            number = getattr(self, name)
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise TypeError(f"{name} must be a number, got {number!r}")
            if not _finite(number):
                raise ValueError(f"{name} must be finite, got {number!r}; use error instead")
        for name in _COUNTS:
            count = getattr(self, name)
            if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
                raise TypeError(f"{name} must be an integer, got {count!r}")
            if count is not None and count < 0:
                raise ValueError(f"{name} must not be negative, got {count}")
        clash = set(self.extra) & (_NAMES | set(ENVELOPE))
        if clash:
            raise ValueError(f"extra repeats fields of the record: {sorted(clash)}")

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object, absent fields left out, ``pass_`` spelled ``pass``."""
        row = {
            _spelled(f.name): getattr(self, f.name)
            for f in fields(self)
            if f.name != "extra" and getattr(self, f.name) is not None
        }
        return row | dict(self.extra)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Record:
        """The record of a JSON object; unknown fields go to ``extra``."""
        known = {("pass_" if k == "pass" else k): v for k, v in row.items() if k in _SPELLED}
        missing = _REQUIRED - set(known)
        if missing:
            raise ValueError(f"row lacks {sorted(missing)}: {dict(row)}")
        return cls(**known, extra={k: v for k, v in row.items() if k not in _SPELLED})


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number beyond the largest float
        return False


_COUNTS = (
    "batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim",
    "block_m", "block_n", "spread_n",
)  # fmt: skip
_NUMBERS = ("value", "dropout", "scale_factor", "spread_min", "spread_max")
_FLAGS = ("causal", "key_mask")
_TEXTS = tuple(
    f.name for f in fields(Record) if f.name not in (*_COUNTS, *_NUMBERS, *_FLAGS, "extra")
)
_TYPES = ((_TEXTS, str, "a string"), (_FLAGS, bool, "true or false"))
_NAMES = {f.name for f in fields(Record)} - {"extra"}
_SPELLED = (_NAMES - {"pass_"}) | {"pass"}
_REQUIRED = {"experiment", "implementation", "metric", "source"}


def _spelled(name: str) -> str:
    return "pass" if name == "pass_" else name


def record(cell: Mapping[str, Scalar], /, **values: Any) -> Record:
    """A record whose shape fields come from ``cell`` and the rest from ``values``.

    ``cell`` maps JSON field names (``pass``, ``seqlen_q``, ...) to values; ``values`` win.
    """
    if "pass_" in values:
        values["pass"] = values.pop("pass_")
    return Record.from_json({**cell, **values})


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


_CRC = ',"crc":"'


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
                _remove_leftovers(path)
                try:
                    yield
                finally:
                    beside.unlink(missing_ok=True)
                return
        finally:
            os.close(fd)


def _draft(path: Path) -> Path:
    """Where a new version of a file is written; one at a time, since the file is locked."""
    return path.with_name(f".{path.name}.draft")


def _remove_leftovers(path: Path) -> None:
    """Remove what writers of this file that were killed have left beside it."""
    if not path.exists():
        return
    with _locked(path):  # no one is writing
        for left in path.parent.glob(f".{path.name}.*"):
            if left.suffix != ".lock":
                left.unlink(missing_ok=True)


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
        _replace(path, text)


def _replace(path: Path, text: str) -> None:
    """Put a new version in the place of a file that the caller has locked."""
    draft = _draft(path)
    try:
        with _naming(path), open(draft, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


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
        _replace(path, "".join(_lines([r]) for r in kept) + _lines(rows))


def frame(records: Iterable[Record]) -> pandas.DataFrame:
    """One tidy frame, a row per record, always with every known column.

    Columns carry the JSON names (``pass``); fields of ``extra`` become columns of their own.
    """
    import pandas

    rows = [r.to_json() for r in records]
    extra = sorted({k for row in rows for k in row} - _SPELLED)
    columns = [_spelled(f.name) for f in fields(Record) if f.name != "extra"] + extra
    table = pandas.DataFrame(rows, columns=columns, dtype=object)
    for name in ("value", "dropout", "spread_min", "spread_max", "scale_factor", *_COUNTS):
        table[name] = pandas.to_numeric(table[name])
    for name in extra:  # numbers stay numbers, anything else stays as it was written
        if table[name].map(lambda x: isinstance(x, int | float) or x is None).all():
            table[name] = pandas.to_numeric(table[name])
    return table


def machines() -> list[str]:
    """The machines (and ``published``) that there are records of."""
    return sorted({p.name for root in _roots() for p in root.glob("*") if p.is_dir()})


def files(machine: str = "*") -> list[Path]:
    """All record files of a machine, of every one by default; the project's own come last."""
    found = (sorted(root.glob(f"{machine}/*.jsonl")) for root in _roots())
    return [path for paths in found for path in paths]


def recorded(machine: str, experiment: str, root: Path | None = None) -> list[Record]:
    """A machine's rows of an experiment: those under RESULTS, and the project's other cells."""
    found: list[Record] = []
    for place in _roots() if root is None else (root,):
        rows = list(read(place / machine / f"{experiment}.jsonl"))
        if found:
            known = {r.cell for r in found}
            rows = [r for r in rows if r.cell and r.cell not in known]
        found += rows
    return found


def _roots() -> tuple[Path, ...]:
    return (RESULTS,) if DELIVERED is None else (RESULTS, DELIVERED)


def load(
    experiments: Sequence[str], root: Path | None = None, *, local: bool = True
) -> list[Record]:
    """Everything on record for these experiments, from all machines and papers.

    ``results/local`` holds what this very machine measured with the host backend and on its CPU,
    ``results/host`` the same cells as committed by the authors: where both have a cell, the local
    one is used. ``local=False`` leaves this machine out: committed records only. Each row gets
    ``machine``, the folder's name.
    """
    here = machines() if root is None else sorted(p.name for p in root.glob("*") if p.is_dir())
    found: list[Record] = []
    for name in experiments:
        local_rows = recorded("local", name, root) if local else ()
        mine = {r.cell for r in local_rows if r.cell and r.error is None}
        for folder in here:
            if folder == "local" and not local:
                continue
            for r in recorded(folder, name, root):
                if folder == "host" and r.cell in mine:
                    continue
                if folder == "local" and r.cell and r.cell not in mine:
                    continue  # failed here; the authors' row, if any, stands
                found.append(Record.from_json(r.to_json() | {"machine": folder}))
    return found
