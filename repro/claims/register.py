"""The claims that are judged: each is one decorated function, which may stand in any module here.

::

    @claim(
        "K9",                                     # its name in tables, and in `repro judge K9`
        "the best tile is 128 to 256",            # what it says
        TILING, "section 4.1",                    # who says so, and where
        experiments=("tile-rules", "gpu-ladder"),  # whose records decide
        shown="tile_rules",                       # the figure that shows them
        conditions="...",                         # how the run differs from the source's
        overturn=(Scale({"metric": "time_ms"}),),  # changes of records that must change the verdict
    )
    def k9(frame: pandas.DataFrame) -> Finding:
        return Finding(parts=[...], predicted=..., measured=..., published=...)

``frame`` is the tidy frame of the experiments. Every module of a folder below is imported, so a new
claim is one function in one file.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.claims.protocol import Claim, Origin, Part

if TYPE_CHECKING:
    import pandas

    from repro.claims.mutations import Change, Mirror, Scale
    from repro.claims.works import Work

NOT_MEASURED = "not measured"
#: A number in a text that is not there, as Python writes it.
MISSING = re.compile(r"(?<![a-zA-Z])nan(?![a-wyz])")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a frame says of a claim; without parts it is not tested."""

    parts: Sequence[Part]
    predicted: str = "-"
    measured: str = NOT_MEASURED
    published: str = "-"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A claim before it is judged: what is claimed, by whom, and what judges it."""

    name: str
    statement: str
    work: Work
    where: str
    #: Whose records decide, and the figure (or experiment) that shows them.
    experiments: tuple[str, ...]
    shown: str
    judge: Callable[[pandas.DataFrame], Finding]
    #: How what is measured differs from the source's own run.
    conditions: str = ""
    #: What keeps the verdict down whatever agrees (see ``Claim``).
    chosen: str = ""
    other: str = ""
    partial: str = ""
    needs: str = ""
    #: Whether the predicted values decide: a formula off by 1.3 changes the verdict.
    compared: bool = True
    #: Changes of the records, each of which must change the verdict.
    overturn: tuple[Scale | Mirror, ...] = ()
    #: For a refuted claim: the records as they would have to be for it to be right.
    as_claimed: Change | None = None
    #: For a claim whose quantity nobody has measured: the test of what a record would do.
    no_records: str = ""

    @property
    def source(self) -> str:
        """Who says so, and where."""
        return f"{self.work.title}, {self.where}" if self.where else self.work.title

    @property
    def origin(self) -> Origin:
        """Whose claim it is."""
        return self.work.origin

    @property
    def command(self) -> str:
        """What judges it again: its figure, or an experiment that no figure shows."""
        if not self.shown:
            return "nothing here"
        return f"make measure EXPERIMENT={self.shown}" if "-" in self.shown else f"make figures/out/{self.shown}.svg"

    def judged(self, frame: pandas.DataFrame) -> Claim:
        """The claim as the frame has it."""
        return self.found(self.judge(frame))

    def found(self, finding: Finding) -> Claim:
        """The claim with this finding; a text about a number that is missing says so."""
        told: dict[str, Any] = {
            "predicted": finding.predicted,
            "measured": NOT_MEASURED if MISSING.search(finding.measured) else finding.measured,
            "published": "-" if MISSING.search(finding.published) else finding.published,
        }
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(Claim) if hasattr(self, f.name)}
        return Claim(**shared, **told, parts=tuple(finding.parts))


_ROWS: dict[str, Row] = {}
Judge = Callable[["pandas.DataFrame"], Finding]


def claim(name: str, statement: str, work: Work, where: str = "", **fields: Any) -> Callable[[Judge], Judge]:
    """Register the function that judges a claim, with the fields of :class:`Row`; ValueError if its
    name is taken."""

    def register(judge: Judge) -> Judge:
        if name in _ROWS:
            raise ValueError(f"{name!r} is claimed by {_ROWS[name].judge} and by {judge}")
        _ROWS[name] = Row(name=name, statement=statement, work=work, where=where, judge=judge, **fields)
        return judge

    return register


def untested(name: str, statement: str, work: Work, where: str, needs: str) -> None:
    """Register a claim of which nothing is on record, with what a test would take."""

    def nothing(frame: pandas.DataFrame) -> Finding:
        return Finding(parts=())

    claim(name, statement, work, where, experiments=(), shown="", needs=needs)(nothing)


@cache
def rows() -> dict[str, Row]:
    """Every claim by its name."""
    here = Path(__file__).parent
    for folder in sorted(path.parent for path in here.glob("*/__init__.py")):
        for module in pkgutil.iter_modules([str(folder)]):
            importlib.import_module(f"repro.claims.{folder.name}.{module.name}")
    return _ROWS
