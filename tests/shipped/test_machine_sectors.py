"""The bytes that torch's machine code moves, on record and run anew, beside an H200's counters."""

from __future__ import annotations

import json

import pytest

from repro.experiments import Context, tidy
from repro.experiments.bytes import machine_sectors
from repro.measuring.records import COMMITTED
from repro.shipped import library

#: By kernel and direction; the counters add what L1 does not keep, which is not modelled.
SHARE = 0.005


def test_every_kernel_on_record_is_within_half_a_percent_of_its_counter() -> None:
    rows = machine_sectors.beside(tidy(machine_sectors.WITH_COUNTERS, COMMITTED, local=False))
    assert len(rows) == 2 * len(machine_sectors.EXPERIMENT.cells())
    off = (rows["machine_code"] / rows["counter"] - 1).abs()
    assert off.max() <= SHARE
    assert (off == 0).sum() >= 0.75 * len(rows)
    spills = rows[rows["spilled"] > 0]
    assert set(spills["kernel"]) == {"forward", "backward"}
    assert (spills["machine_code"] == spills["counter"]).all()


def test_names_of_arrays() -> None:
    kernels = set(machine_sectors.UNFUSED.values())
    assert kernels == set(machine_sectors._ARRAYS)


@pytest.mark.skipif(library.library() is None, reason=library.MISSING)
@pytest.mark.parametrize("kernel", [pytest.param(name, marks=pytest.mark.thorough) for name in ("softmax", "forward")])
def test_a_run_gives_what_is_on_record(kernel: str) -> None:
    cell = [one for one in machine_sectors.EXPERIMENT.cells() if one["kernel"] == kernel][-1]
    lines = (COMMITTED / "host" / "machine-sectors.jsonl").read_text().splitlines()
    recorded = [row for row in map(json.loads, lines) if row["cell"] == cell.id]
    found = [row.to_json() for row in machine_sectors.EXPERIMENT.measured(cell, Context("cpu"))]
    key = ("metric", "tensor", "direction", "value")
    assert {tuple(row[k] for k in key) for row in found} == {tuple(row[k] for k in key) for row in recorded}
