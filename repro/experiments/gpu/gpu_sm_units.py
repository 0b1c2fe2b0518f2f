"""How busy an SM's units are while our kernels run, by hardware counters.

``sm-ceilings`` says which unit sets the pace of a round and how much of the time the tensor cores
can be busy at most. Here Nsight Compute says how busy units were: tensor cores, shared memory's
banks, the special-function units, the schedulers. Every percentage that its sections give of them
is kept under its own name, since names differ from card to card.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from analysis.shapes import Tile
from kernels import hopper
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.bytes.sm_ceilings import DIRECT, EXACT, SM80, round_of
from repro.experiments.gpu.gpu_throughput import of_tokens
from repro.experiments.shared.profiled import Profiled, seconds_of
from repro.instruments.counters import KernelBusy

#: Cells of one profiled process, and seconds for it; each kernel is replayed some dozens of times.
BATCH = 4
LIMIT_S = 45.0
SEQLEN = 8192


def cells() -> list[Cell]:
    """Every form of the backward, the forward's of the rule, and the sm_80 kernels."""
    forwards = [hopper.forward_form(head_dim, False, SEQLEN) for head_dim in (128, 64, 256)]
    return [
        *(
            of_tokens(f"{EXACT} {form.name}", "backward", SEQLEN, form.head_dim, form.tile)
            for form in hopper.BACKWARD_FORMS
        ),
        *(of_tokens(f"{EXACT} {form.name}", "forward", SEQLEN, form.head_dim, form.tile) for form in forwards),
        of_tokens(SM80, "forward", SEQLEN, 128, Tile(128, 64)),
        of_tokens(SM80, "backward", SEQLEN, 128, Tile(64, 128)),
    ]


def predict(one: Cell) -> Iterator[Row]:
    """Percent of the time that the tensor cores can be busy at most, by the SM's other units."""
    name = str(one["implementation"])
    kind = SM80 if name == SM80 else DIRECT if name.endswith("direct") else EXACT
    found = round_of(Cell(**{**one, "implementation": kind}))
    yield row("tensor_busy_at_most", 100 * found.tensor_share(), unit="%", tool="clocks of a round")


@cache
def watched() -> Profiled[KernelBusy]:
    """The counters of this process' run."""
    from repro.instruments.counted import watch_cells

    return Profiled(cells(), watch_cells, batch=BATCH, limit_s=LIMIT_S, as_run=_as_run)


def _as_run(cell: Cell) -> dict[str, Any]:
    """A form has its tile; only the sm_80 kernels are told theirs."""
    given = dict(cell)
    if cell["implementation"] != SM80:
        del given["block_m"], given["block_n"]
    return given


def measure(one: Cell, context: Context) -> list[Row]:
    """Every percentage of every kernel of the cell."""
    kernels = watched().kernels(one)
    return [
        row("unit_busy", percent, unit="%", kernel=kernel.name, counter=counter, tool="ncu")
        for kernel in kernels
        for counter, percent in kernel.percent.items()
    ]


EXPERIMENT = Experiment("gpu-sm-units", cells, predict, measure, device="cuda", seconds=seconds_of(len(cells()), BATCH))
