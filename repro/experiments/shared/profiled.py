"""Cells that a profiler counts: a batch in one profiled process.

The first cell of a batch waits for all of it and the rest are at hand. A process takes seconds to
start, and what it has counted is lost when it is stopped, so a batch is neither one cell nor all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from repro.experiments import Cell, UnavailableError
from repro.instruments.counters import CounterError, CounterTimeoutError
from repro.measuring import processes

K = TypeVar("K")


class Profiled(Generic[K]):
    """The kernels of each cell, profiled when the first cell of its batch is asked for.

    Args:
        cells: all cells of the experiment.
        profile: ``counted.count_cells`` or ``counted.watch_cells``.
        batch: cells of one process.
        limit_s: seconds for the process, the profiler and everything under it.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        profile: Callable[..., list[list[K]]],
        *,
        batch: int,
        limit_s: float,
        as_run: Callable[[Cell], Mapping[str, Any]] = dict,
    ) -> None:
        self._cells, self._profile, self._as_run = list(cells), profile, as_run
        self._batch, self._limit_s = batch, limit_s
        self._found: dict[int, list[list[K]] | CounterError] = {}

    def kernels(self, cell: Cell) -> list[K]:
        """What was counted of a cell's kernels.

        Raises UnavailableError where the profiler refuses, and RuntimeError where the batch took
        too long (the next one has its turn) or the cell launched nothing.
        """
        number, place = divmod([c.id for c in self._cells].index(cell.id), self._batch)
        if number not in self._found:  # an error is kept, so that cells do not ask again
            self._found[number] = self._ask(number)
        found = self._found[number]
        if isinstance(found, CounterTimeoutError):
            raise RuntimeError(str(found))
        if isinstance(found, CounterError):
            raise UnavailableError(str(found))
        if not found[place]:
            raise RuntimeError("the cell launched no kernel; its error is in the profiled process' log")
        return found[place]

    def _ask(self, number: int) -> list[list[K]] | CounterError:
        listed = self._cells[number * self._batch : (number + 1) * self._batch]
        limit_s = processes.time_left(self._limit_s)
        try:
            return self._profile([self._as_run(cell) for cell in listed], timeout_s=limit_s)
        except CounterError as error:
            return error


def seconds_of(cells: int, batch: int) -> float:
    """Rough time of profiling: the start of each process, and a second for a cell's passes."""
    return 12.0 * -(-cells // batch) + 1.5 * cells
