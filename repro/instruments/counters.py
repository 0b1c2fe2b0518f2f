"""Bytes that really moved, from the card's hardware counters, by driving Nsight Compute's ``ncu``.

One profiled process counts many cells. Inside it every cell launches the tiny kernel
``cell_marker`` with a grid of (index + 1) blocks and then its own work, all within the NVTX range
``measured``; the kernels between two markers belong to the first one's cell. So neither the number
nor the names of a cell's kernels need to be known beforehand, and warm-up outside the range is
neither profiled nor slowed down.

ncu replays each kernel several times with memory restored in between, so kernels that add to
memory (atomic dQ) count as if run once.

What the counters mean here:

- ``hbm`` read and write: bytes between L2 and DRAM. Writes are reported, not judged: dirty lines
  may still be in L2 when the kernel ends.
- ``sm`` read and write: bytes between L2 and the L1 caches of the SMs. On the H200 records both
  are exact for element-wise and softmax kernels. A register spill shows up here as extra writes
  (and, if it falls out of L1, reads): a kernel whose writes exceed what it stores deserves a look
  at its local memory first.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from repro.measuring import processes

#: (level, direction) -> metric of ncu.
METRICS: Mapping[tuple[str, str], str] = {
    ("hbm", "read"): "dram__bytes_read.sum",
    ("hbm", "write"): "dram__bytes_write.sum",
    ("sm", "read"): "l1tex__m_xbar2l1tex_read_bytes.sum",
    ("sm", "write"): "l1tex__m_l1tex2xbar_write_bytes.sum",
}
#: Sections of ncu that say how busy units were. Named instead of metrics, whose names differ from
#: one architecture to the next.
BUSY_SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables")
#: Of their percentages those that bound a tensor-core kernel.
BUSY = re.compile(r"tensor|shared|data_bank|data_pipe|_xu_|issue|throughput")
MARKER = "cell_marker"
NVTX_RANGE = "measured"


class CounterError(RuntimeError):
    """The counters could not be read; the message is one line with the cause and its cure."""


class CounterTimeoutError(CounterError):
    """The profiled process took longer than it was given; another one may not."""


@dataclass(frozen=True)
class KernelCount:
    """Counters of one kernel launch."""

    name: str
    grid: tuple[int, int, int]
    bytes: Mapping[tuple[str, str], int]


@dataclass(frozen=True)
class KernelBusy:
    """How busy one kernel launch kept the units: ncu's metric -> percent of what they can do."""

    name: str
    grid: tuple[int, int, int]
    percent: Mapping[str, float]


K = TypeVar("K", KernelCount, KernelBusy)
#: What ncu is asked for: the bytes, or how busy units were.
COUNT = ("--metrics", ",".join(METRICS.values()))
HOW_BUSY = tuple(word for section in BUSY_SECTIONS for word in ("--section", section))


def ncu_command(command: Sequence[str], log: Path, ncu: str, asked: Sequence[str] = COUNT) -> list[str]:
    """The ncu call that profiles ``command`` and writes one CSV row per kernel to ``log``."""
    return [
        ncu,
        *asked,
        "--nvtx",
        "--nvtx-include",
        f"{NVTX_RANGE}/",
        "--clock-control",
        "none",
        "--replay-mode",
        "kernel",
        "--target-processes",
        "all",
        "--page",
        "raw",
        "--csv",
        "--print-units",
        "base",
        "--log-file",
        str(log),
        *command,
    ]


def count_kernels(command: Sequence[str], *, timeout_s: float, ncu: str | None = None) -> list[KernelCount]:
    """Run ``command`` under ncu and return the counters of its measured kernels, in order.

    Raises CounterError when ncu is missing, refused, times out, or counted nothing.
    """
    return parse_csv(_page(command, COUNT, timeout_s, ncu))


def watch_kernels(command: Sequence[str], *, timeout_s: float, ncu: str | None = None) -> list[KernelBusy]:
    """The same for how busy units were."""
    return parse_busy(_page(command, HOW_BUSY, timeout_s, ncu))


def _page(command: Sequence[str], asked: Sequence[str], timeout_s: float, ncu: str | None) -> str:
    """ncu's raw CSV page of the measured kernels."""
    tool = ncu or shutil.which("ncu")
    if tool is None:
        raise CounterError("ncu (Nsight Compute) is not on PATH: install it or use recorded counts")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        try:
            done = processes.run(
                ncu_command(command, log, tool, asked), timeout_s=timeout_s, env={**os.environ, "PYTHONUNBUFFERED": "1"}
            )
        except subprocess.TimeoutExpired:
            raise CounterTimeoutError(f"ncu did not finish within {timeout_s:g} s") from None
        except OSError as error:
            raise CounterError(f"ncu could not be started: {error}") from None
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        everything = "\n".join((text, done.stdout, done.stderr))
        cause = known_cause(everything)
        if cause:
            raise CounterError(cause)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise CounterError(f"the profiled command ended with {done.returncode}: {last}")
        return text


def known_cause(output: str) -> str | None:
    """One line for the refusals people meet, or None."""
    if "ERR_NVGPUCTRPERM" in output:
        return (
            "no permission to read GPU counters (ERR_NVGPUCTRPERM): run as root or load the "
            "driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if "LibraryNotLoaded" in output or "Failed to initialize the profiler" in output:
        return "ncu could not initialise the profiler: the driver does not expose counters here"
    if re.search(r"==ERROR== .*[Uu]nknown (option|metric)|Failed to find metric", output):
        line = next(li for li in output.splitlines() if "==ERROR==" in li or "metric" in li)
        return f"ncu refused the call: {line.strip()}"
    if "No kernels were profiled" in output:
        return f"ncu profiled no kernel inside the NVTX range {NVTX_RANGE!r}"
    return None


def parse_csv(text: str) -> list[KernelCount]:
    """Kernel counts from ncu's raw CSV page (a header row, a row of units, one row per kernel).

    Raises CounterError when a metric's column is missing, a value is no number, or a unit is not
    byte (so that a kilobyte is never taken for a byte).
    """
    units, kernels = _table(text)
    for metric in METRICS.values():
        if metric not in units:
            raise CounterError(f"ncu wrote no column {metric}")
        if units[metric] not in ("byte", "bytes", "B"):
            raise CounterError(f"ncu gave {metric} in {units[metric]!r}, not in bytes")
    counts = []
    for row in kernels:
        try:
            counted = {key: round(float(row[metric].replace(",", ""))) for key, metric in METRICS.items()}
        except (ValueError, AttributeError):
            values = {metric: row[metric] for metric in METRICS.values()}
            raise CounterError(f"ncu gave no number for {row['Kernel Name']}: {values}") from None
        counts.append(KernelCount(_base_name(row["Kernel Name"]), _grid(row), counted))
    return counts


def parse_busy(text: str) -> list[KernelBusy]:
    """The percentages of ``BUSY`` in ncu's raw CSV page. A cell without a number is left out.

    Raises CounterError when there is no such column: another ncu, other names.
    """
    units, kernels = _table(text)
    columns = [name for name, unit in units.items() if unit == "%" and BUSY.search(name)]
    if not columns:
        raise CounterError(f"ncu wrote no percentage of {BUSY.pattern}")
    found = []
    for row in kernels:
        percent = {}
        for name in columns:
            try:
                percent[name] = float(row[name].replace(",", ""))
            except (ValueError, AttributeError):
                continue
        found.append(KernelBusy(_base_name(row["Kernel Name"]), _grid(row), percent))
    return found


def _table(text: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The row of units and those of the kernels. CounterError when there are none."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    if len(rows) < 2:
        raise CounterError("ncu wrote no kernel rows")
    return rows[0], rows[1:]


def _base_name(name: str) -> str:
    """``void ns::kernel<T>(args)`` -> ``kernel``; our own entries are plain names already."""
    return re.sub(r"[<(].*", "", name).split("::")[-1].split()[-1]


def _grid(row: Mapping[str, str]) -> tuple[int, int, int]:
    numbers = [int(n) for n in re.findall(r"\d+", row.get("Grid Size", ""))]
    if len(numbers) != 3:
        raise CounterError(f"ncu gave grid size {row.get('Grid Size')!r} of {row['Kernel Name']}")
    return numbers[0], numbers[1], numbers[2]


def split_by_cell(counts: Sequence[K]) -> dict[int, list[K]]:
    """Kernels by the index of the cell whose marker came last.

    Raises CounterError when a kernel comes before the first marker.
    """
    cells: dict[int, list[K]] = {}
    current: int | None = None
    for count in counts:
        if count.name == MARKER:
            current = count.grid[0] - 1
            cells[current] = []
        elif current is None:
            raise CounterError(f"kernel {count.name} was counted before the first cell marker")
        else:
            cells[current].append(count)
    return cells
