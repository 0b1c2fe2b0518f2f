"""How a claim is judged: parts with the range that the claim allows, and what kind of evidence.

A verdict is never written down. It follows from the claim's parts: each part is one number, the
range in which the claim is right, and where the number comes from. The same range is printed as
what would overturn the claim, so the words and the judgement cannot differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from repro.claims.tolerances import COUNT, EDGE, EXPONENT, Tolerance


class Evidence(StrEnum):
    """Where the number that decides comes from, the strongest kind first."""

    HARDWARE = "hardware counter or clock"
    EXECUTED = "machine code executed"
    COUNTED = "executed and counted on the host"
    OTHER = "another program's count"
    PUBLISHED = "published numbers only"
    DERIVED = "derivation only"

    @property
    def measured(self) -> bool:
        """Whether something was run."""
        return self in (Evidence.HARDWARE, Evidence.EXECUTED, Evidence.COUNTED, Evidence.OTHER)


class Verdict(StrEnum):
    """What the evidence says, the weakest first: a claim is as good as its weakest part."""

    REFUTED = "refuted"
    NOT_TESTED = "not tested"
    CONSISTENT = "consistent"
    WITHIN_LIMITS = "reproduced within limits"
    REPRODUCED = "reproduced"

    @property
    def meaning(self) -> str:
        """One line for the reader of a table."""
        return _MEANINGS[self]


_MEANINGS = {
    Verdict.REPRODUCED: "the claim's own quantity, measured or counted in a run, agrees",
    Verdict.WITHIN_LIMITS: "what was run agrees in part: in a wider range, or in some cases only",
    Verdict.CONSISTENT: "published numbers or a derivation agree, or it was chosen to match",
    Verdict.REFUTED: "the evidence lies outside what the claim allows",
    Verdict.NOT_TESTED: "there is no evidence that decides; the last section says what would",
}


class Origin(StrEnum):
    """Who makes the claim."""

    PAPER = "paper"
    NOTE = "study note"
    OURS = "this package"


#: Of sums of floats: two orders of the same additions differ in the digits after these.
DIGITS = 1e-12


@dataclass(frozen=True, kw_only=True)
class Part:
    """One number that a claim stands or falls with.

    ``value`` in [low, high] agrees; outside that but in ``limits`` it agrees within limits, and
    ``why`` says which. NaN means that there is no evidence; then ``otherwise`` is asked instead.
    Only evidence from something that was run can reproduce; all other evidence is consistent.
    """

    what: str
    value: float
    evidence: Evidence
    low: float = -math.inf
    high: float = math.inf
    limits: tuple[float, float] | None = None
    why: str = ""
    form: str = ".3g"
    otherwise: Part | None = None

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"{self.what}: low {self.low} is above high {self.high}")
        if (self.low, self.high) == (-math.inf, math.inf):
            raise ValueError(f"{self.what}: a part that allows every value cannot be overturned")
        if self.limits is not None:
            if not (self.limits[0] <= self.low and self.high <= self.limits[1]):
                raise ValueError(f"{self.what}: limits {self.limits} are narrower than {(self.low, self.high)}")
            if not self.why:
                raise ValueError(f"{self.what}: limits {self.limits} without saying which they are")

    @property
    def decides(self) -> Part:
        """This part, or the one asked instead where this has no value."""
        if math.isnan(self.value) and self.otherwise is not None:
            return self.otherwise.decides
        return self

    @property
    def on_the_edge(self) -> bool:
        """Whether the value is so near to an end of the range that neither side is sure."""
        part = self.decides
        narrow = (part.high - part.low) / 10
        return narrow > 0 and any(
            abs(part.value - end) < min(EDGE * abs(end), narrow) for end in (part.low, part.high) if math.isfinite(end)
        )

    @property
    def verdict(self) -> Verdict:
        """What this part alone says."""
        part = self.decides
        if math.isnan(part.value):
            return Verdict.NOT_TESTED
        low, high = part.limits or (part.low, part.high)
        if part.on_the_edge or low <= part.value <= high:
            if not part.evidence.measured:
                return Verdict.CONSISTENT
            inside = part.low <= part.value <= part.high and not part.on_the_edge
            return Verdict.REPRODUCED if inside else Verdict.WITHIN_LIMITS
        return Verdict.REFUTED

    @property
    def falsifier(self) -> str:
        """The values that would overturn the claim, in words."""
        part = self.decides
        low, high = part.limits or (part.low, part.high)
        least, most = f"{low:{part.form}}", f"{high:{part.form}}"
        if low == -math.inf:
            return f"{part.what} above {most}"
        if high == math.inf:
            return f"{part.what} below {least}"
        if least == most:
            return f"{part.what} other than {least}"
        return f"{part.what} outside {least} to {most}"

    @property
    def finding(self) -> str:
        """The value, and the limits where they matter."""
        part = self.decides
        if math.isnan(part.value):
            return f"{part.what}: not measured"
        text = f"{part.what} {part.value:{part.form}}"
        if part.on_the_edge:
            return f"{text} (on the edge)"
        if not part.low <= part.value <= part.high and self.verdict is not Verdict.REFUTED:
            text += f" ({part.why})"
        return text


@dataclass(frozen=True)
class Claim:
    """One claim, judged: what it says, what was found, and what would overturn it.

    ``unlike`` says how the conditions differ from the source's ("" where they are the same). What
    a verdict cannot go beyond, each with its reason ("" for none): ``chosen``, coefficients chosen
    after seeing the source's numbers, and ``other``, another quantity or other conditions than the
    source's, leave consistent; ``partial``, only some of the cases, leaves within limits;
    ``needs``, what a test would take that nothing here has, leaves not tested.
    """

    name: str
    statement: str
    source: str
    origin: Origin
    predicted: str
    measured: str
    published: str
    parts: tuple[Part, ...]
    unlike: str
    chosen: str
    command: str
    other: str = ""
    partial: str = ""
    needs: str = ""
    #: Whether the prediction decides anything, or only stands beside.
    compared: bool = True

    @property
    def verdict(self) -> Verdict:
        """The weakest part's verdict, and no more than the claim's conditions allow."""
        if self.needs:
            return Verdict.NOT_TESTED
        order = list(Verdict)
        found = [p.verdict for p in self.parts] or [Verdict.NOT_TESTED]
        if self.chosen or self.other:
            found.append(Verdict.CONSISTENT)
        if self.partial:
            found.append(Verdict.WITHIN_LIMITS)
        return min(found, key=order.index)

    @property
    def evidence(self) -> str:
        """The kinds of evidence of the parts that have a value, the strongest first."""
        kinds = {p.decides.evidence for p in self.parts if p.verdict is not Verdict.NOT_TESTED}
        return " + ".join(kind for kind in Evidence if kind in kinds) or "none"

    @property
    def falsifier(self) -> str:
        """What would overturn the claim."""
        return "; ".join(p.falsifier for p in self.parts) or "no test yet"

    @property
    def findings(self) -> str:
        """Every part with its value; where they differ, each part's own verdict."""
        mixed = len({p.verdict for p in self.parts}) > 1
        return "; ".join(
            f"{p.finding}: {p.verdict}" if mixed and p.verdict is not Verdict.NOT_TESTED else p.finding
            for p in self.parts
        )


def agreement(
    what: str,
    found: float,
    expected: float,
    kind: Tolerance,
    evidence: Evidence,
    *,
    share: float | None = None,
    limits: float | None = None,
    why: str = "",
    otherwise: Part | None = None,
) -> Part:
    """A part that asks whether found / expected is 1, within the tolerance of its kind.

    share, limits: where the row deviates from its kind, with ``why``; limits is a factor up or
    down: 1.5 allows 1/1.5 to 1.5.
    """
    if (share is not None or limits is not None) and not why:
        raise ValueError(f"{what}: a tolerance of its own without saying why")
    share, factor = kind.share if share is None else share, limits
    if limits is None and evidence.measured:  # what is printed or derived agrees or does not
        factor = kind.factor
    low, high = 1 - max(share, DIGITS), 1 + max(share, DIGITS)
    return Part(
        what=what,
        value=found / expected if expected else math.nan,
        low=low,
        high=high,
        evidence=evidence,
        limits=None if factor is None else (min(1 / factor, low), max(factor, high)),
        why=why or kind.because,
        form=".4g",
        otherwise=otherwise,
    )


def exact(what: str, found: float, expected: float = 1) -> Part:
    """A part that asks whether what was executed and counted is exactly what is expected."""
    return agreement(what, found, expected, COUNT, Evidence.COUNTED)


def exponent(what: str, found: float, expected: float, evidence: Evidence) -> Part:
    """A part that asks for a log-log slope."""
    low, high = expected - EXPONENT.share, expected + EXPONENT.share
    return Part(what=what, value=found, low=low, high=high, evidence=evidence, form=".2f")
