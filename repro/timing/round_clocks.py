"""Clocks of one round of the main loop, predicted: our Hopper forms beside the prototype's loops.

The prototype was timed on an H200 and ours have not been, so its loops are the yardstick. A round
is one more key tile of the forward (query tile of the backward) in a block alone on its SM. Both
come from machine code of NVRTC 13.0 by the same model of an SM (``analysis.loop_model``).

``python -m repro.timing tables rounds`` writes the table of ``docs/pages/hopper-code.md``. Under a
minute.
"""

from __future__ import annotations

from tabulate import tabulate

from kernels import hopper
from kernels.timing import hopper_time
from repro.timing import prototype

#: The prototype's variant that the page's table of machine code has beside a form.
VARIANTS = {
    "d64 192x128, pingpong": "d64",
    "d64 192x128, persistent, pingpong": "cross_64",
    "d128 128x128, pingpong": "C3",
    "d128 128x128, persistent, pingpong": "C3_persistent",
    "d128 128x176, pingpong": "C3_176",
    "d64 128x128": "backward_64",
    "d128 64x128": "backward_128_64",
    "d128 80x128": "backward_128_80",
}


def ours(form: hopper.ForwardForm | hopper.BackwardForm) -> float:
    """Clocks that one more round adds to a tile of 8 rounds, exact, without a mask.

    Raises LookupError when the form's clocks are not on record.
    """
    line = hopper_time.recorded(form, False).line
    return (line(16) - line(8)) / 8


def of_prototype(name: str) -> float:
    """Clocks that one more round adds to a variant's tile of 1,024 keys or more, without a mask."""
    v = prototype.variants()[name]
    rounds_of = v.block_m if v.backward else v.block_n

    def clocks(seqlen: int) -> float:
        if not v.persistent:
            return prototype.block_clocks(name, seqlen)
        two, four = (prototype.block_clocks(name, seqlen, tiles=tiles * prototype.MULTIPROCESSORS) for tiles in (2, 4))
        return (four - two) / 2

    rounds = -(-2048 // rounds_of) - -(-1024 // rounds_of)
    return (clocks(2048) - clocks(1024)) / rounds


def table() -> str:
    """Every form that the model covers, and the prototype's loop beside it."""
    rows = []
    for form in hopper_time.predictable():
        mine = ours(form)
        name = VARIANTS.get(form.name)
        theirs = None if name is None else of_prototype(name)
        beside = ("", "", "") if theirs is None else (name, f"{theirs:.0f}", f"{mine / theirs:.2f}")
        rows.append((form.name, f"{mine:.0f}", *beside))
    headers = ("loop", "clocks a round", "prototype's", "clocks a round", "ours / prototype's")
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True)
