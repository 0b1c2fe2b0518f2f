"""The model of time judged on a prototype whose kernels were timed on an H200.

``results/prototype`` holds the machine code of 42 variants and 78 times. The variants are in two
halves by a rule that knows nothing of the times: sorted by the SHA-256 of their names, every
second one belongs to the first half. What had to be decided between published mechanisms was
decided on the first half:

- products of several warpgroups in turn (against first come first served, and one group at a time);
- schedulers ask the oldest warp first (against greedy then youngest, and each in turn);
- one 1024-bit port for each of two register banks (against none that bind, and two);
- operands of one product fetched ahead (against none);
- copies at an equal share of L2's bandwidth (against the port of an SM);
- one access to shared memory for eight lanes that load the same row statistics (against eight);
- three starts to average over (against one);
- 1.70 GHz at N = 2048 too, where no clock was recorded.

The second half was looked at once, after that.

``python -m repro.timing prototype`` writes ``results/prototype/predicted.csv``.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

from repro.measuring.records import Record, load
from repro.timing import prototype
from repro.timing.prototype import FOLDER

EXPERIMENT = "prototype-time"
PREDICTED = FOLDER / "predicted.csv"
COLUMNS = ("variant", "seqlen", "clocks", "spread", "seconds")
FIRST_CALL = 1
"""Its variants ran one after another, at a lower clock: a kernel that it shares with call 5
(``causal_longest_first``, 16384) was at 635 of 717 TFLOP/s there."""


def halves(names: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """First and second half of the variants."""
    ranked = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return frozenset(ranked[0::2]), frozenset(ranked[1::2])


@dataclass(frozen=True)
class Comparison:
    """One measured time and the predicted one, at the sustained clock."""

    variant: str
    seqlen: int
    call: int
    measured_s: float
    predicted_s: float
    tflops: float
    first_half: bool

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_s / self.measured_s


@cache
def predicted() -> dict[tuple[str, int], dict[str, float]]:
    """The recorded predictions by variant and length."""
    with PREDICTED.open(encoding="utf-8") as file:
        return {
            (row["variant"], int(row["seqlen"])): {n: float(row[n]) for n in COLUMNS[2:]}
            for row in csv.DictReader(file)
        }


def comparisons(rows: Iterable[Record] | None = None) -> list[Comparison]:
    """Measured rates beside predicted times; by default all that are on record."""
    first, _ = halves(prototype.variants())
    found = []
    for row in load((EXPERIMENT,), local=False) if rows is None else rows:
        if row.value is None:
            continue
        variant, seqlen = prototype.variants()[row.implementation], row.seqlen_q
        assert seqlen is not None
        found.append(
            Comparison(
                variant.name,
                seqlen,
                row.extra["call"],
                variant.flops(seqlen) / row.value / 1e12,
                predicted()[variant.name, seqlen]["seconds"],
                row.value,
                variant.name in first,
            )
        )
    return found


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float:
    """Pairs in the same order less those in the opposite one, over pairs that differ in ``a``."""
    score = pairs = 0
    for i in range(len(a)):
        for j in range(i):
            if a[i] == a[j]:
                continue
            pairs += 1
            product = (a[i] - a[j]) * (b[i] - b[j])
            score += (product > 0) - (product < 0)
    if not pairs:
        raise ValueError("no two values differ")
    return score / pairs


def errors(rows: Iterable[Comparison]) -> tuple[float, float]:
    """Median and largest of |predicted / measured - 1|."""
    found = [abs(row.ratio - 1) for row in rows]
    return median(found), max(found)


def measured_cells() -> list[tuple[str, int]]:
    """Variants and lengths that have a time, each once."""
    rows = load((EXPERIMENT,), local=False)
    return sorted({(row.implementation, row.seqlen_q or 0) for row in rows})


def record() -> None:
    """Predicts every cell that has a time. About two minutes."""
    with PREDICTED.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for name, seqlen in measured_cells():
            clocks = prototype.clocks(name, seqlen)
            writer.writerow(
                (
                    name,
                    seqlen,
                    round(clocks),
                    round(prototype.spread(name, min(seqlen, 2048)), 4),
                    f"{prototype.seconds(name, seqlen):.4e}",
                )
            )
            file.flush()
