"""One row of a record: what was run, what came out, and where it comes from.

The shape (B, H, N, D), the pass and the tile say what was run; metric, value, unit and spread what
came out; source, tool, device, versions and date, or the paper's table or figure with how far that
reading can be trusted, where it comes from. A cell that failed is a row too: ``error`` holds the
message and ``value`` is absent, so a gap in a figure has a reason on record. Fields this module
does not know are kept as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

SOURCES = ("predicted", "measured", "published")
PASSES = ("forward", "backward", "forward+backward", "-")
LEVELS = ("sm", "hbm")
#: Fields of a line that are not fields of the record.
ENVELOPE = ("schema", "more", "crc")

Scalar = str | int | float | bool


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
        for name in COUNTS:
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
            spelled(f.name): getattr(self, f.name)
            for f in fields(self)
            if f.name != "extra" and getattr(self, f.name) is not None
        }
        return row | dict(self.extra)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Record:
        """The record of a JSON object; unknown fields go to ``extra``."""
        known = {("pass_" if k == "pass" else k): v for k, v in row.items() if k in SPELLED}
        missing = _REQUIRED - set(known)
        if missing:
            raise ValueError(f"row lacks {sorted(missing)}: {dict(row)}")
        return cls(**known, extra={k: v for k, v in row.items() if k not in SPELLED})


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number beyond the largest float
        return False


COUNTS = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "block_m", "block_n", "spread_n")
_NUMBERS = ("value", "dropout", "scale_factor", "spread_min", "spread_max")
_FLAGS = ("causal", "key_mask")
_TEXTS = tuple(f.name for f in fields(Record) if f.name not in (*COUNTS, *_NUMBERS, *_FLAGS, "extra"))
_TYPES = ((_TEXTS, str, "a string"), (_FLAGS, bool, "true or false"))
_NAMES = {f.name for f in fields(Record)} - {"extra"}
SPELLED = (_NAMES - {"pass_"}) | {"pass"}
_REQUIRED = {"experiment", "implementation", "metric", "source"}


def spelled(name: str) -> str:
    """A field's name in JSON: ``pass`` for ``pass_``."""
    return "pass" if name == "pass_" else name


def record(cell: Mapping[str, Scalar], /, **values: Any) -> Record:
    """A record whose shape fields come from ``cell`` and the rest from ``values``.

    ``cell`` maps JSON field names (``pass``, ``seqlen_q``, ...) to values; ``values`` win.
    """
    if "pass_" in values:
        values["pass"] = values.pop("pass_")
    return Record.from_json({**cell, **values})


#: A number and what is said of it, before it is known of which cell of which experiment it is.
Row = dict[str, Any]

#: What a metric's name ends with -> its unit; what ends otherwise is a pure number.
UNITS = {
    "bytes": "B",
    "bytes_per_layer": "B",
    "s": "s",
    "ms": "ms",
    "us": "us",
    "flops": "FLOP",
    "tflops": "TFLOP/s",
    "clocks": "clocks",
    "bytes_in": "B",
    "bytes_out": "B",
}


def unit_of(metric: str) -> str:
    """The unit of a metric by the end of its name: "B" of ``peak_bytes``, "1" of ``imbalance``."""
    for ending, unit in UNITS.items():
        if f"_{metric}".endswith(f"_{ending}"):
            return unit
    return "1"


def spread(samples: Sequence[float]) -> dict[str, float]:
    """The fields of a row that say how far repeated measurements are apart."""
    return {"spread_min": min(samples), "spread_max": max(samples), "spread_n": len(samples)}


def row(metric: str, value: float | None = None, /, **fields: Any) -> Row:
    """One number of a cell: ``row("peak_bytes", 4096, tool="allocator")``.

    fields: of the record, ``unit`` where :func:`unit_of` is not right. What could not be had is a
    row with ``error`` and no value.
    """
    if value is not None:
        fields = {"value": value, "unit": unit_of(metric)} | fields
    return {"metric": metric} | fields
