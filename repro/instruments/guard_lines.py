"""What the guard and the process that it watches say to each other: names, and words of lines."""

from __future__ import annotations

from analysis.algorithms import PDL
from kernels import attention, hopper

#: The dispatched algorithm first, then the others and every form by its name.
NAMES = (*attention.HOPPER, *(name + PDL for name in (hopper.ALGORITHM, hopper.DETERMINISTIC)), *hopper.FORMS)
#: First words of the lines; fields are separated by tabs, since names hold spaces.
READY, BUILT, TRIED, WRONG = "ready", "built", "tried", "wrong"


def say(*fields: str) -> None:
    print("\t".join(field.replace("\n", " ") for field in fields), flush=True)
