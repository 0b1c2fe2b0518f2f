"""How far a number may be from what is claimed, by the kind of quantity and not by the row.

Written before the rows were judged by it. A row that deviates says why, in its own words. Beside
the table two rules hold for every range:

- a value within :data:`EDGE` of a range's end (or within a tenth of the range, where that is less)
  is *on the edge*: neither reproduced nor refuted, but within limits. Exact counts have no edge;
- a claim about many lengths or models is judged by the share of them for which it is right, and
  only if the range that it names can hold that share of what was asked;
- limits are for what was run, and for shares of cases. Other printed numbers and derivations agree
  or do not.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """A kind of quantity: what agrees (a share of the expected value), and what does in part."""

    kind: str
    #: |found / expected - 1| up to this agrees.
    share: float
    #: found / expected from 1 / factor to factor agrees within limits; None: there is no such part.
    factor: float | None
    because: str

    @property
    def least(self) -> float:
        """The least that agrees within limits, of what was expected."""
        return 1 / (self.factor or 1)


#: Bytes, operations, runs and stages that were executed and counted.
COUNT = Tolerance("count", 0.0, None, "an integer; sums of floats are compared to 12 digits")
#: A hardware counter against a sum.
COUNTER = Tolerance(
    "counter",
    0.02,
    1.1,
    "counters of one kernel repeat within 2 %; metadata, evictions and a neighbour's traffic add to it",
)
#: Bytes that another program counts: allocators, hooks, sockets, cache simulators.
MEMORY = Tolerance(
    "memory",
    0.02,
    1.1,
    "allocators round up, sockets add headers, and statistics of a row are often left out of a formula",
)
#: Times, and ratios of times.
TIME = Tolerance(
    "time",
    0.15,
    1.5,
    "of the times recorded on CPUs, six in ten have every repetition within 15 % and 97 in 100 within "
    "half; the H200's records keep no repetitions",
)
#: Round numbers of a text ("up to 9x", "about 30 %"), whatever they are numbers of.
HEADLINE = Tolerance("headline", 0.1, 1.5, "one or two digits are printed")
#: Numbers printed in a table, against a formula or another place of the same paper.
PRINTED = Tolerance("printed", 0.015, None, "two or three digits are printed")
#: Points read off a figure.
DIGITISED = Tolerance(
    "digitised", 0.05, None, "the reading error that stands with the record, up to 0.03 of an axis that ends at 1"
)
#: Errors against float64.
ERROR = Tolerance("error", 1.0, None, "twice the error of the framework's own low precision")
#: Log-log slopes, absolute and not as a share.
EXPONENT = Tolerance("exponent", 0.1, None, "constant terms bend a slope over two octaves")
#: Bounds and intervals that the source states itself.
STATED = Tolerance("stated", 0.0, 1.1, "the source's own ends; a tenth beyond an interval is within limits")
#: Which of two is larger.
ORDER = Tolerance("order", 0.0, None, "more or less, faster or slower: 1 is the end")
#: The share of lengths, models or cards for which a claim must be right, all for reproduced.
SHARE = Tolerance("share", 0.0, 2.0, "half of what was asked is within limits")

TABLE = (COUNT, COUNTER, MEMORY, TIME, HEADLINE, PRINTED, DIGITISED, ERROR, EXPONENT, STATED, ORDER, SHARE)
#: Distance from a range's end, as a share of it, at which a value is on the edge.
EDGE = 0.02
