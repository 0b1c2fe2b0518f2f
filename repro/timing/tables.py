"""Tables of the pages that follow from the model of time: where each stands and what makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kernels.pages import Block
from kernels.timing import hopper_time
from repro.timing import ampere_tiles, ampere_validation, flash3_time, hopper_choice, packed_time, peers, round_clocks

COMMAND = "repro.timing tables"
TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "a100": ("time-validation.md", ampere_validation.table),
    "tiles": ("time-validation.md", ampere_tiles.table),
    "peers": ("time-validation.md", peers.table),
    "fa3-code": ("time-validation.md", flash3_time.table),
    "forms": ("time-validation.md", hopper_time.form_table),
    "choice": ("hopper-code.md", hopper_choice.table),
    "rounds": ("hopper-code.md", round_clocks.table),
    "features": ("hopper-code.md", hopper_time.feature_table),
    "packed": ("packed.md", packed_time.table),
}
"""Name of a table -> its page, and its Markdown. ``tiles`` and ``rounds`` follow machine code and
take a minute; the others are made from records."""


def block(name: str) -> Block:
    """Where a table stands."""
    return Block(TABLES[name][0], name, COMMAND)


def write(names: Iterable[str]) -> None:
    """Writes tables into their pages."""
    for name in names:
        block(name).write(TABLES[name][1]())
