"""A new claim: what is said, by whom, which records decide, and what would change the verdict.

Here: heads that share K and V save nothing at the SM boundary, for every query head's blocks load
them again; what they save is memory and HBM. In the package the decorated function would stand in a
module of ``repro/claims/``, ``python -m repro judge "shared heads"`` would print the verdict, and a
test would change the records as ``overturn`` says and see the verdict change.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pandas
from add_experiment import frame

from repro.claims import Finding, claim, rows
from repro.claims.mutations import Scale
from repro.claims.protocol import exact
from repro.claims.values import pick, worst
from repro.claims.works import OURS

NAME = "shared heads"


@claim(
    NAME,
    "heads that share K and V move as many bytes at the SM boundary",
    OURS,
    experiments=("my-experiment",),
    shown="my-experiment",
    conditions="executed on the host; no card's counter yet",
    overturn=(Scale({"metric": "traffic_bytes", "kv_heads": 1}),),
)
def shared_heads(table: pandas.DataFrame) -> Finding:
    """Bytes with fewer heads of K and V over those with as many as query heads."""
    ratios = {}
    for source in ("predicted", "measured"):
        bytes_of = pick(table, metric="traffic_bytes", source=source).groupby("kv_heads")["value"].sum()
        ratios[source] = worst(bytes_of / bytes_of.get(8, float("nan")))
    return Finding(
        predicted=f"{ratios['predicted']:.2f} times",
        measured=f"{ratios['measured']:.2f} times",
        parts=[exact("bytes with shared heads over bytes without", ratios["measured"])],
    )


def main(results: Path) -> None:
    """The verdict, and the verdict if one number were another."""
    table = frame(results)
    judged = rows()[NAME].judged(table)
    print(f"{judged.statement}: {judged.verdict.value}, {judged.measured}")
    for change in rows()[NAME].overturn:
        for changed in change.both(table):
            found = rows()[NAME].judged(changed)
            print(f"with other records: {found.verdict.value}, {found.measured}")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
