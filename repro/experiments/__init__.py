"""Experiments: each is a list of cells that can be predicted, measured and compared.

To add one, write a module in one of the folders here, ``my_experiment.py``, that ends with ::

    EXPERIMENT = Experiment("my-experiment", cells, predict, measure, device="host")

- the first line of its docstring is its title;
- ``cells()`` lists the points, each a ``Cell`` of record fields (implementation, pass, shape, ...);
- ``predict(cell)`` yields what the formulas of ``analysis`` expect (cheap, pure), a ``row(metric,
  value, tool=...)`` each;
- ``measure(cell, context)`` runs the cell and yields what came out, in rows too.

The experiment makes records of the rows: its name, the cell's fields and where a number comes from
need not be said. Predictions are evaluated when a frame is made and never stored; measurements are
stored cell by cell by ``repro.experiments.run`` under ``results/<machine>/<name>.jsonl``. Import
torch, cupy and kernels inside ``measure``, so that drawing a figure needs none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from repro.measuring.cells import Cell
from repro.measuring.modules import in_folders
from repro.measuring.records import Record, frame, load, record
from repro.measuring.row import Row, row, spread

if TYPE_CHECKING:
    import pandas

__all__ = [
    "Cell",
    "Context",
    "Experiment",
    "Row",
    "UnavailableError",
    "experiment",
    "names",
    "record",
    "row",
    "spread",
    "tidy",
]

#: Where an experiment is measured: "host" runs kernels through the counting host backend, "cpu"
#: runs torch on the CPU, "cuda" needs a GPU, "none" has recorded and published rows only.
DEVICES = ("host", "cpu", "cuda", "none")
SMALL = "small"


class UnavailableError(RuntimeError):
    """No cell of the experiment can be measured here; the message is one line, cause and cure.

    Raised by ``measure``. A failure of one cell alone is any other exception.
    """


@dataclass
class Context:
    """What a measurement may use. ``host()`` is the counting backend, made on first use."""

    device: str
    checks: bool = True
    _backend: Any = field(default=None, repr=False)

    def host(self) -> Any:
        """The host backend, shared by the cells of a run; its counters are reset for the caller."""
        if self._backend is None:
            from kernels.host import HostBackend

            self._backend = HostBackend(checks=self.checks)
        self._backend.reset()
        return self._backend


def nothing(cell: Cell) -> Iterable[Row]:
    """No prediction."""
    return ()


@dataclass(frozen=True)
class Experiment:
    """Name, cells, formula and measurement of one experiment (see the module's docstring)."""

    name: str
    cells: Callable[[], Iterable[Cell]] = list
    predict: Callable[[Cell], Iterable[Row]] = nothing
    measure: Callable[[Cell, Context], Iterable[Row]] | None = None
    device: str = "none"
    #: Cells that are predicted alone, e.g. where a curve goes on beyond what is measured.
    also: Callable[[], Iterable[Cell]] = list
    #: Folders and files whose change makes recorded cells stale, relative to the repository.
    sources: Sequence[str] = ("kernels",)
    #: Long ones that ``make figures`` draws from the committed records; ``make measure`` runs them.
    on_demand: bool = False
    #: Sizes other than the usual ones; records of another scale do not enter the frame.
    scale: str = SMALL
    #: Rough time of a whole measurement, for the order of work and the list of figures.
    seconds: float = 0.0
    #: False where a CPU counts bytes or compares values, whoever else runs; the host always does.
    timed: bool = True

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(f"device must be one of {DEVICES}, got {self.device!r}")
        if (self.measure is None) != (self.device == "none"):
            raise ValueError(
                f"{self.name}: measure is {'absent' if self.measure is None else 'given'} but device is {self.device!r}"
            )

    def predicted(self, cell: Cell) -> list[Record]:
        """The records that the formulas expect of a cell."""
        return self.records(cell, self.predict(cell), "predicted")

    def measured(self, cell: Cell, context: Context) -> list[Record]:
        """The records of a run of a cell."""
        if self.measure is None:
            raise ValueError(f"{self.name} measures nothing")
        return self.records(cell, self.measure(cell, context), "measured")

    def records(self, cell: Cell, rows: Iterable[Row], source: str) -> list[Record]:
        """Records of a cell's rows; what a row says itself wins."""
        common = {"experiment": self.name, "source": source, "cell": cell.id}
        return [record(cell, **(common | given)) for given in rows]

    @property
    def needs_quiet(self) -> bool:
        """Whether its numbers would be others if something else used the machine."""
        return self.device == "cuda" or (self.device == "cpu" and self.timed)


@cache
def _modules() -> dict[str, str]:
    """Name of an experiment -> its module."""
    found = in_folders(__name__, __file__, without=("shared",))
    return {stem.replace("_", "-"): module for stem, module in found.items()}


@cache
def names() -> tuple[str, ...]:
    """All experiments, by name."""
    return tuple(sorted(_modules()))


def module_of(name: str) -> ModuleType:
    """The module of an experiment; ValueError lists the known ones."""
    if name not in names():
        raise ValueError(f"no experiment {name!r}; known: {', '.join(names())}")
    return importlib.import_module(_modules()[name])


def title(name: str) -> str:
    """What an experiment shows, in a line: the first of its module's docstring."""
    return (module_of(name).__doc__ or name).strip().splitlines()[0].rstrip(".")


def experiment(name: str) -> Experiment:
    """The experiment of that name; ValueError lists the known ones."""
    module = module_of(name)
    found: Experiment = module.EXPERIMENT
    if found.name != name:
        raise ValueError(f"module {module.__name__} defines experiment {found.name!r}")
    return found


@cache
def _predicted(known: Experiment) -> tuple[frozenset[str], tuple[Record, ...]]:
    """The fields of an experiment's cells, and every prediction; pure, so made once a process."""
    cells = list(known.cells())
    rows = [r for cell in (*cells, *known.also()) for r in known.predicted(cell)]
    return frozenset(field for cell in cells for field in cell), tuple(rows)


def tidy(selected: Sequence[str], root: Path | None = None, *, local: bool = True) -> pandas.DataFrame:
    """Predicted, measured and published rows of these experiments in one tidy frame.

    A name without a module stands for records only (published or measured elsewhere).
    ``local=False`` leaves out what this machine measured: committed records only.
    """
    predicted: list[Record] = []
    fields: set[str] = set()
    scales: dict[str, str] = {}
    for name in selected:
        if name in names():
            known = experiment(name)
            scales[name] = known.scale
            names_of_cells, rows = _predicted(known)
            fields |= names_of_cells
            predicted += rows
    recorded = [
        r
        for r in load(selected, root, local=local)
        if r.source != "measured" or r.extra.get("scale", SMALL) == scales.get(r.experiment, SMALL)
    ]
    table = frame(predicted + recorded)
    for missing in sorted(fields - set(table.columns)):
        table[missing] = None  # a field of the cells is a column even where nothing is recorded
    return table
