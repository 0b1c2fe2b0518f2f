"""FlashAttention 2022, Fig. 2 left, by a card's counters, with a mask of padded keys and dropout."""

from __future__ import annotations

from dataclasses import replace

from repro.experiments.papers import fig2_left_traffic as plain
from repro.experiments.shared.profiled import seconds_of

EXPERIMENT = replace(
    plain.EXPERIMENT, name="fig2-left-traffic-masked", cells=lambda: plain.cells(masked=True), seconds=seconds_of(1, 1)
)
