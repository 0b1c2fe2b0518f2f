"""Kernels of others on an H200: times predicted from their machine code, beside measured ones.

FlashAttention-2 as torch runs it (``repro.timing.flash2_time``) and FlashAttention-4's Hopper
kernels (``repro.timing.flash4_time``). The rules were fixed before any prediction was compared:

- Judged are the times of one pass, without dropout, whose head dimension is on record.
- No clock was recorded. Predicted are two ends of a range: at 1.70 GHz, where attention at the
  power limit was seen, and at 1.98 GHz, the highest. Errors are at 1.70 GHz; beside them is how
  many times lie in the range widened by 10 % on both sides. The order and the ratios of rates need
  no clock.
- Times below 100 us at 1.70 GHz hold the host's part of a launch: they are listed, not judged.
- Cells are in two halves: sorted by the SHA-256 of their names, every second one belongs to the
  first. Whatever would have to be decided may be decided on the first half; the second is looked
  at once.

``python -m repro.timing peers`` adds what is new to the predictions, ``h200_predicted.csv`` in the
folder of each, and writes its table in docs/pages/time-validation.md. A cell on record keeps its
prediction.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

from analysis.files import write_whole
from analysis.flops import paper_flops
from analysis.hardware import H200, find_gpu
from analysis.loop_model.card import H200_NOMINAL, H200_SUSTAINED, Clock
from analysis.shapes import AttentionShape
from repro.measuring.records import Record, load
from repro.timing import flash2_time, flash4_time
from repro.timing.flash2_time import ON_H200
from repro.timing.time_validation import halves, kendall_tau

EXPERIMENTS = ("throughput", "fig3-runtime", "throughput-peers")
LEAST_S = 100e-6
WIDENED = 0.10
FLASH2 = "sdpa-flash2"
FLASH4 = "flash-attn-4 4.0.0b36 (Hopper path)"
FOLDERS = {FLASH2: flash2_time.FOLDER, FLASH4: flash4_time.FOLDER}
PREDICTED = "h200_predicted.csv"
COLUMNS = ("peer", "pass", "batch", "heads", "seqlen", "head_dim", "dtype", "causal", "sustained_s", "nominal_s")


@dataclass(frozen=True)
class Cell:
    """One time that was measured: whose, and of which pass and shape."""

    peer: str
    pass_: str
    shape: AttentionShape

    @property
    def fields(self) -> tuple[str, ...]:
        """As in the record of predictions."""
        s = self.shape
        return tuple(map(str, (self.peer, self.pass_, s.batch, s.heads, s.seqlen_q, s.head_dim, s.dtype, s.causal)))

    @property
    def name(self) -> str:
        return " ".join(self.fields)

    def seconds(self) -> tuple[float, float]:
        """Predicted at the sustained and at the highest clock."""

        def at(clock: Clock) -> float:
            if self.peer == FLASH4:
                return flash4_time.seconds(self.pass_, self.shape, clock)
            return flash2_time.seconds(self.pass_, self.shape, ON_H200, clock)

        return at(H200_SUSTAINED), at(H200_NOMINAL)


@dataclass(frozen=True)
class Comparison:
    """A measured time between the predicted ones."""

    cell: Cell
    measured_s: float
    sustained_s: float
    nominal_s: float
    first_half: bool

    @property
    def ratio(self) -> float:
        """Predicted at the sustained clock over measured."""
        return self.sustained_s / self.measured_s

    @property
    def within(self) -> bool:
        """Whether the measured time lies in the widened range."""
        low, high = self.nominal_s * (1 - WIDENED), self.sustained_s * (1 + WIDENED)
        return low <= self.measured_s <= high

    def tflops(self, seconds: float) -> float:
        return paper_flops(self.cell.shape, self.cell.pass_) / seconds / 1e12


def cell_of(row: Record) -> Cell:
    """The cell of a measured row."""
    shape = AttentionShape(
        row.batch or 0,
        row.heads or 0,
        row.seqlen_q or 0,
        row.seqlen_k or 0,
        row.head_dim or 0,
        dtype=str(row.dtype),
        causal=bool(row.causal),
    )
    return Cell(row.implementation, str(row.pass_), shape)


def rows() -> list[Record]:
    """Measured times of one pass of the peers."""
    return [row for row in load(EXPERIMENTS, local=False) if is_predicted(row)]


def is_predicted(row: Record) -> bool:
    """Whether a row has a time of code that was read, of a problem that it was followed on: self-
    attention whose keys have as many heads, without dropout and other masks than a causal one."""
    return (
        row.source == "measured"
        and row.implementation in FOLDERS
        and row.pass_ in ("forward", "backward")
        and row.value is not None
        and not row.dropout
        and not row.key_mask
        and row.kv_heads in (None, row.heads)
        and row.seqlen_k == row.seqlen_q
        and row.head_dim in flash2_time.HEAD_DIMS
        and find_gpu(str(row.device)) == H200
        and (row.implementation == FLASH4 or _of_torch(row) == flash2_time.version(ON_H200))
    )


def _of_torch(row: Record) -> str:
    """The release of torch that was timed, without its build."""
    return str(row.torch).partition("+")[0]


def measured_s(row: Record) -> float:
    """Seconds of a row, which is a time or a rate."""
    assert row.value is not None
    if row.metric == "time_ms":
        return row.value / 1e3
    cell = cell_of(row)
    return paper_flops(cell.shape, cell.pass_) / row.value / 1e12


def cells() -> list[Cell]:
    """All that have a time, each once."""
    return list({cell.name: cell for cell in map(cell_of, rows())}.values())


@cache
def predicted() -> dict[tuple[str, ...], tuple[float, float]]:
    """The recorded predictions in seconds, at the sustained and at the highest clock."""
    found = {}
    for folder in FOLDERS.values():
        with (folder / PREDICTED).open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                values = float(row["sustained_s"]), float(row["nominal_s"])
                found[tuple(row[name] for name in COLUMNS[:-2])] = values
    return found


def comparisons(measured: Iterable[Record] | None = None) -> list[Comparison]:
    """Measured times beside recorded predictions, or those of today where none is on record; by
    default all times that are."""
    measured = rows() if measured is None else measured
    first, _ = halves(cell.name for cell in cells())
    found = []
    for row in measured:
        cell = cell_of(row)
        slow, fast = predicted().get(cell.fields) or cell.seconds()
        found.append(Comparison(cell, measured_s(row), slow, fast, cell.name in first))
    return found


def judged(found: Sequence[Comparison]) -> list[Comparison]:
    """Those that a launch does not decide."""
    return [one for one in found if one.sustained_s >= LEAST_S]


@dataclass(frozen=True)
class Summary:
    """Of judged times: how many, the median and the worst error at 1.70 GHz, how many lie in the
    widened range, and Kendall's tau of the rates."""

    times: int
    median: float
    worst: float
    within: int
    tau: float


def summary(of: Sequence[Comparison]) -> Summary:
    """Of judged times. ValueError where there is one measured rate and not several."""
    errors = [abs(one.ratio - 1) for one in of]
    measured = [one.tflops(one.measured_s) for one in of]
    expected = [one.tflops(one.sustained_s) for one in of]
    within = sum(one.within for one in of)
    return Summary(len(of), median(errors), max(errors), within, kendall_tau(measured, expected))


def table() -> str:
    """A row for each peer, pass and head dimension, as Markdown."""
    found = judged(comparisons())
    lines = [
        "| | times | median | worst | first half: median | second half: median | worst | in the range | tau |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for peer, label in ((FLASH2, "FlashAttention-2"), (FLASH4, "FlashAttention-4")):
        for pass_ in ("forward", "backward"):
            for head_dim in flash2_time.HEAD_DIMS:
                of = [
                    one
                    for one in found
                    if (one.cell.peer, one.cell.pass_, one.cell.shape.head_dim) == (peer, pass_, head_dim)
                ]
                every, (first, second) = (
                    summary(of),
                    (summary([one for one in of if one.first_half == half]) for half in (True, False)),
                )
                errors = (every.median, every.worst, first.median, second.median, second.worst)
                shown = " | ".join(f"{100 * error:.1f} %" for error in errors)
                lines.append(
                    f"| {label}, {pass_}, d = {head_dim} | {every.times} | {shown} | {every.within} | {every.tau:.2f} |"
                )
    return "\n".join(lines)


def record() -> None:
    """Predicts what is new of the cells that have a time. Seconds."""
    for peer, folder in FOLDERS.items():
        path = folder / PREDICTED
        text = path.read_text(encoding="utf-8") if path.exists() else ",".join(COLUMNS) + "\n"
        known = {tuple(line.split(",")[:-2]) for line in text.splitlines()}
        for cell in cells():
            if cell.peer == peer and cell.fields not in known:
                values = [f"{value:.4e}" for value in cell.seconds()]
                text += ",".join((*cell.fields, *values)) + "\n"
        write_whole(path, text.encode())
    predicted.cache_clear()
