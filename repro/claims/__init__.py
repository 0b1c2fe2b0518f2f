"""The claims that are judged: every verdict follows from numbers, none is typed.

``rows()`` has the papers' headlines, the study notes' claims K1 to K16 and the faults F1 to F7
found in them, and what this package says of its own models and kernels. Each is a function from a
tidy frame to the numbers that decide (``register``); ``protocol`` says how a verdict follows.
Judging needs neither a plotting library nor a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from repro.claims.protocol import Claim, Evidence, Origin, Part, Verdict, agreement
from repro.claims.register import NOT_MEASURED, Finding, Row, claim, rows

if TYPE_CHECKING:
    import pandas

__all__ = [
    "NOT_MEASURED",
    "Claim",
    "Evidence",
    "Finding",
    "Origin",
    "Part",
    "Row",
    "Verdict",
    "agreement",
    "claim",
    "judge",
    "rows",
]


def judge(
    names: Iterable[str] | None = None,
    *,
    local: bool = True,
    frames: Mapping[tuple[str, ...], pandas.DataFrame] | None = None,
) -> list[Claim]:
    """Judge these claims (default: all) from what is on record.

    local: False reads committed records only.
    frames: those of experiments that are at hand.
    """
    from repro.experiments import tidy

    known = dict(frames or {})
    found = []
    for name in rows() if names is None else names:
        row = rows()[name]
        if not row.experiments:
            found.append(row.found(Finding(parts=())))
            continue
        if row.experiments not in known:
            known[row.experiments] = tidy(row.experiments, local=local)
        found.append(row.judged(known[row.experiments]))
    return found
