"""The claims that are judged, in one place: every one is computed, none is typed.

``CATALOGUE`` lists what must be judged: the study notes' claims K1 to K16, the faults F1 to F7
found in them, and the papers' headlines. A verdict comes from a figure (``figures/NAME.py``, next
to the data it draws) or from a function here. Each function takes the tidy frame of its
``experiments`` and returns a :class:`Claim`. What has no data yet says so ("open: not measured")
instead of vanishing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

NOT_MEASURED = "not measured yet"
OPEN = "open: not measured"


@dataclass(frozen=True)
class Claim:
    """One claim, judged.

    ``verdict`` starts with "holds", "holds within limits", "does not hold" or "open";
    ``tolerance`` says what agreement means here.
    """

    claim: str
    statement: str
    predicted: str
    measured: str
    published: str
    tolerance: str
    verdict: str
    command: str


@dataclass(frozen=True)
class Source:
    """A function that judges one claim from the frame of these experiments."""

    claim: str
    experiments: tuple[str, ...]
    judge: Callable[[pandas.DataFrame], Claim]


#: Claim -> (what it says, where it stands). The verdict table has at least these rows.
CATALOGUE: dict[str, tuple[str, str]] = {
    "K1": ("flash saves 4Nd + 2N elements, standard 2N² more", "note 000, 4.1"),
    "K2": ("flash backward is only 30 to 50 % slower than standard, not 2x", "note 000, 6.2"),
    "K3, speed": ("overall speed-up 2 to 4x", "note 000, 9.2"),
    "K3, memory": ("memory 5 to 20x less", "note 000, 9.2"),
    "K4": ("recompute pays from N > 2048 and not below 512", "note 000, 8.1"),
    "K5": ("tiling reduces accesses although tiles are loaded many times", "note 001"),
    "K6": ("store-all O(L), recompute-all O(1) and O(L²), sqrt O(√L) and O(L)", "note 002, 2.1"),
    "K7": ("exponential spacing gives O(log L) memory and compute", "note 002, 2.2"),
    "K8": ("flash: 0.1x memory, 1.2x compute; aggressive: 0.05x, 2.0x", "note 002, 3.2"),
    "K9": ("best tile about 128 to 256; tile <= sqrt(SRAM / (3 d 4 B))", "note 002, 4.1"),
    "K10": ("checkpointing costs (1 + 1/k) forward", "note 003, 2.3"),
    "K11": ("+33 % compute buys 4 to 5x memory", "note 003, 4.2"),
    "K12": ("a 1x4096x4096 bf16 activation is 32 MiB; they dominate a 7B model", "note 003, 3.1"),
    "K13": ("unfused scale-and-bias moves twice the fused bytes", "note 003, 3.2"),
    "K14": ("the non-reentrant mode lowers memory, the reentrant one less", "note 004, 1.2"),
    "K15": ("recomputation may change gradients slightly", "note 001"),
    "K16": ("recomputing can be faster than storing", "notes 000, 2.2 and 003, 4.2"),
    "F1": ("online update of a normalised output without the old row sum", "note 002, 1.4"),
    "F2": ("softmax gradient with the sum over one block only", "note 000, 4.3"),
    "F3": ("offload whose backward doubles the gradient", "note 004, 2.1"),
    "F4": ("states at 2^k alone give O(log L) memory", "note 002, 2.2"),
    "F5": ("segment-wise recomputation costs 1/k of a forward", "note 003, 2.3"),
    "F6": ("reentrant checkpoints keep intermediate results, the others none", "note 004, 1"),
    "F7": ("tile rule sqrt(SRAM / (3 d 4 B))", "note 002, 4.1"),
    "FA-1 9x accesses": ("up to 9x fewer HBM accesses", "FlashAttention 2022, Fig. 2"),
    "FA-1 20x memory": ("up to 20x less memory", "FlashAttention 2022, Fig. 3"),
    "FA-1 Fig. 1 right": ("7.6x faster attention on GPT-2", "FlashAttention 2022, Fig. 1"),
    "FA-2 throughput": ("up to 230 TFLOP/s, 73 % of an A100", "FlashAttention-2 2023"),
    "FA-3 throughput": ("up to 740 TFLOP/s fp16, 75 % of an H100", "FlashAttention-3 2024"),
    "Rabe & Staats": ("59x less overhead inference, 32x training, N = 16384", "2112.05682"),
    "Korthikanti 5x": ("sequence parallel and selective recomputation save 5x", "2205.05198"),
    "Korthikanti 4 %": ("and cost 4 % of time instead of 39 %", "2205.05198, Table 4"),
    "ZeRO Table 1": ("model states by stage and number of ranks", "1910.02054, Table 1"),
    "ZeRO volume": ("2Ψ, 3Ψ with sharded parameters", "1910.02054, Section 7"),
}  # fmt: skip


def sources() -> tuple[Source, ...]:
    """The claims judged here (the others are judged by figures)."""
    from repro.claims import attention, faults, states

    return (*attention.SOURCES, *faults.SOURCES, *states.SOURCES)


def judge(*, local: bool = True) -> list[Claim]:
    """Judge them from what is on record; ``local=False`` reads committed records only."""
    from repro.experiments import tidy

    frames: dict[tuple[str, ...], pandas.DataFrame] = {}
    found = []
    for source in sources():
        if source.experiments not in frames:
            frames[source.experiments] = tidy(source.experiments, local=local)
        found.append(source.judge(frames[source.experiments]))
    return found


def missing(judged: Sequence[str]) -> list[Claim]:
    """Open rows for the catalogue's claims that nothing has judged."""
    judged_parts = {name.split(",")[0] for name in judged}
    return [
        Claim(
            name, statement, "-", NOT_MEASURED, "-", "-", f"open: not judged ({where})",
            "make measure",
        )
        for name, (statement, where) in CATALOGUE.items()
        if name not in judged and name not in judged_parts
    ]  # fmt: skip


def claim(
    name: str,
    *,
    predicted: str,
    measured: str,
    verdict: str,
    published: str = "-",
    tolerance: str = "-",
    command: str = "python -m figures verdicts",
) -> Claim:
    """A claim with the catalogue's wording."""
    if name not in CATALOGUE:
        raise ValueError(f"{name!r} is not in the catalogue of claims")
    return Claim(
        name, CATALOGUE[name][0], predicted, measured, published, tolerance, verdict, command
    )
