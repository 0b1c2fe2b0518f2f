"""The table of memory levels: what is measured, what is not, and the notes' numbers judged."""

from __future__ import annotations

import math
import re

import pandas
import pytest

from figures.bytes import memory_hierarchy
from repro.experiments import record, tidy
from repro.experiments.bytes.memory_hierarchy import LATENCY, MEASURED
from repro.experiments.gpu import gpu_ceilings
from repro.measuring.records import frame


@pytest.fixture(scope="module")
def recorded() -> pandas.DataFrame:
    return tidy(memory_hierarchy.EXPERIMENTS, local=False)


def probes(device: str) -> pandas.DataFrame:
    """A record of every probe, each with another value."""
    return frame(
        record(
            {},
            experiment=gpu_ceilings.EXPERIMENT.name,
            implementation=name,
            source="measured",
            metric=metric,
            unit=unit,
            value=100.0 + i,
            device=device,
            tool="a fake clock",
        )
        for i, (name, (metric, unit)) in enumerate(gpu_ceilings.PROBES.items())
    )


def test_what_no_record_has_is_not_measured_and_no_number(recorded: pandas.DataFrame) -> None:
    nothing = recorded[recorded["source"] != "measured"]
    table = memory_hierarchy.levels(nothing)
    assert table[["measured", "measured_ridge", "latency_ns"]].isna().all(axis=None)
    lines = [line for line in memory_hierarchy.page(nothing).splitlines() if "| L2 " in line]
    cells = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert cells[2:4] == ["12 TB/s", "not measured"]
    assert cells[6:9] == ["-", "not measured", "-"]


def test_records_of_the_probes_fill_every_cell_and_win_over_older_ones(recorded: pandas.DataFrame) -> None:
    table = memory_hierarchy.levels(pandas.concat([recorded, probes("NVIDIA H200")]))
    table = table.set_index("level")
    order = list(gpu_ceilings.PROBES)
    for level, ways in MEASURED.items():
        assert table.loc[level, "measured"] == 100.0 + order.index(ways[0][1])
        assert table.loc[level, "tool"] == "a fake clock"
    for level, (_, probe) in LATENCY.items():
        assert table.loc[level, "latency_ns"] == 100.0 + order.index(probe)
    ridge = table.loc["tensor cores", "measured"] / table.loc["HBM", "measured"]
    assert table.loc["HBM", "measured_ridge"] == ridge


def test_another_card_gets_a_table_of_its_own(recorded: pandas.DataFrame) -> None:
    both = pandas.concat([recorded, probes("NVIDIA H100 80GB HBM3"), probes("NVIDIA X1")])
    assert memory_hierarchy.cards(both) == ["H200", "H100-SXM5-80GB"]
    assert re.findall("^## (.+)$", memory_hierarchy.page(both), re.MULTILINE)[:2] == ["H200", "H100-SXM5-80GB"]
    theirs = memory_hierarchy.levels(both).set_index(["card", "level"])
    assert math.isnan(theirs.loc[("H200", "shared memory"), "measured"])
    memory_hierarchy.draw(both)
