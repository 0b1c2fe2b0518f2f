"""The same run as ``fig2-left-traffic`` with a mask of padded keys and dropout."""

from __future__ import annotations

from dataclasses import replace

from repro.experiments.papers import fig2_left_traffic as plain
from repro.experiments.shared.profiled import seconds_of

EXPERIMENT = replace(
    plain.EXPERIMENT,
    name="fig2-left-traffic-masked",
    title="the same with mask and dropout, operation by operation",
    cells=lambda: plain.cells(masked=True),
    seconds=seconds_of(1, 1),
)
