"""The attention algorithms of the package: what tells one from another, each of them once.

Names appear in records, on command lines and in figures; everything else asks for the fields here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Literal

Form = Literal["literal", "skip-first", "released"]
"""Of FlashAttention 2022: as printed, without a read-back in the first pass, the authors' code."""


class Family(Enum):
    """The kernels that an algorithm belongs to, a step of the ladder each (kernels/README.md)."""

    STANDARD = "standard"
    """Scores and weights in memory (FlashAttention 2022, Alg. 0 and 3)."""
    FLASH1 = "flash1"
    """Keys outside, the running state in memory (FlashAttention 2022, Alg. 1, 2 and 4)."""
    FLASH = "flash"
    """Queries outside, sm_80 instructions (FlashAttention-2, Alg. 1 and 2)."""
    HOPPER = "flash-sm90"
    """TMA, wgmma and warp specialisation (FlashAttention-3)."""


class DqSum(Enum):
    """How the backward adds up dq over the key tiles."""

    ATOMIC = "atomic additions, in any order"
    WORKSPACE = "a partial sum a key tile, added up in order afterwards"
    ORDERED = "atomic additions in turns"
    SEPARATE_PASS = "a pass of its own, with the queries outside"
    IN_PLACE = "by the one block that walks a head"


@dataclass(frozen=True)
class Algorithm:
    """name: in records and on command lines. summary: one line, what it is.

    dq: how the backward adds up dq. form: of FlashAttention 2022, "" for all others.
    optimistic: the forward guesses the row maximum and repairs what overflows.
    """

    name: str
    family: Family
    summary: str
    dq: DqSum = DqSum.ATOMIC
    form: Form | Literal[""] = ""
    optimistic: bool = False

    @property
    def tiled(self) -> bool:
        """Whether the scores stay on the chip."""
        return self.family is not Family.STANDARD

    @property
    def deterministic(self) -> bool:
        """Whether dq is the same bit for bit in every run."""
        return self.dq is not DqSum.ATOMIC


_ALL = (
    Algorithm("flash", Family.FLASH, "FlashAttention-2: queries outside, sm_80 tensor cores"),
    Algorithm(
        "flash-deterministic",
        Family.FLASH,
        "flash, whose backward keeps a partial dq a key tile and adds them in order",
        DqSum.WORKSPACE,
    ),
    Algorithm(
        "flash-split",
        Family.FLASH,
        "flash, whose backward makes dq in a pass of its own: fixed order, no workspace",
        DqSum.SEPARATE_PASS,
    ),
    Algorithm("flash-sm90", Family.HOPPER, "FlashAttention-3: TMA and wgmma, Hopper only"),
    Algorithm(
        "flash-sm90-optimistic",
        Family.HOPPER,
        "flash-sm90, whose forward guesses the row maximum and repairs (bf16)",
        optimistic=True,
    ),
    Algorithm(
        "flash-sm90-deterministic",
        Family.HOPPER,
        "flash-sm90, whose backward adds dq in turns: a fixed order",
        DqSum.ORDERED,
    ),
    Algorithm(
        "standard", Family.STANDARD, "S and P in memory, three kernels forward and five backward", DqSum.IN_PLACE
    ),
    Algorithm(
        "flash1-literal",
        Family.FLASH1,
        "FlashAttention 2022 as printed: keys outside, O, l, m re-read at every step",
        DqSum.IN_PLACE,
        form="literal",
    ),
    Algorithm(
        "flash1-skip-first",
        Family.FLASH1,
        "FlashAttention 2022 without a read-back in the first pass",
        DqSum.IN_PLACE,
        form="skip-first",
    ),
    Algorithm(
        "flash1-released",
        Family.FLASH1,
        "FlashAttention 2022 as released: an unfinished O and dq in fp32",
        DqSum.IN_PLACE,
        form="released",
    ),
)

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({each.name: each for each in _ALL})
"""Name -> algorithm."""


ORDERS = ("rows", "sawtooth")
"""Of a block's walk: as the kernel does by itself, or the other way round in every second wave of
blocks, which then begin with what the wave before touched last (``analysis.l2``)."""


def check_order(name: str, pass_: str, order: str) -> None:
    """ValueError for an order that is none, or that a pass of the algorithm does not have."""
    if order not in ORDERS:
        raise ValueError(f"order={order!r} is not one of {', '.join(ORDERS)}")
    if order == "rows":
        return
    chosen = find(name)
    why = None
    if chosen.family not in (Family.FLASH, Family.HOPPER):
        why = "no block of it walks what others share"
    elif pass_ == "forward" and chosen.optimistic:
        why = "it takes its reference from the tiles that the other way meets last"
    elif pass_ == "backward" and chosen.dq is DqSum.ORDERED:
        why = "a wave would wait for the turns of the one before"
    if why is not None:
        raise ValueError(f"the {pass_} of {name} has no order={order!r}, rows alone: {why}")


PDL = " pdl"
"""Ending of names in records: the kernels of a pass overlap where they meet (programmatic dependent
launch, an option of a launch that changes neither bytes nor results)."""


def without_launch(name: str) -> tuple[str, bool]:
    """The algorithm's name, and whether its kernels are launched with :data:`PDL`."""
    return name.removesuffix(PDL), name.endswith(PDL)


def find(name: str) -> Algorithm:
    """The algorithm of a name, however it is launched. ValueError lists the names there are."""
    name, _ = without_launch(name)
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm={name!r} is not one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def of_family(*families: Family) -> tuple[str, ...]:
    """Names of the algorithms of some families, in the order above."""
    return tuple(each.name for each in _ALL if each.family in families)
