"""How a claim is judged: parts with the range that the claim allows, and what kind of evidence.

A verdict is never written down. It follows from the claim's parts: each part is one number, the
range in which the claim is right, and where the number comes from. The same range is printed as
what would overturn the claim, so the words and the judgement cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

from repro.claims.tolerances import COUNT, EDGE, EXPONENT, ORDER, SHARE, STATED, Tolerance


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


@dataclass(frozen=True)
class Part:
    """One number that a claim stands or falls with.

    ``value`` in [low, high] agrees; outside that but in ``limits`` it agrees within limits, and
    ``why`` says which. NaN means that there is no evidence; then ``otherwise`` is asked instead.
    Only evidence from something that was run can reproduce; all other evidence is consistent.
    ``kind`` is the rule that the range follows; ``why`` also tells how a row deviates from it.
    """

    what: str
    value: float
    evidence: Evidence
    _: KW_ONLY
    low: float = -math.inf
    high: float = math.inf
    limits: tuple[float, float] | None = None
    why: str = ""
    form: str = ".3g"
    otherwise: Part | None = None
    kind: Tolerance = STATED

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"{self.what}: low {self.low} is above high {self.high}")
        if (self.low, self.high) == (-math.inf, math.inf):
            raise ValueError(f"{self.what}: a part that allows every value cannot be overturned")
        if self.limits is not None:
            if not (self.limits[0] <= self.low and self.high <= self.limits[1]):
                raise ValueError(f"{self.what}: limits {self.limits} are narrower than {(self.low, self.high)}")
            if not self.why and self.kind is STATED:
                raise ValueError(f"{self.what}: limits {self.limits} without saying which they are")

    @property
    def decides(self) -> Part:
        """This part, or the one asked instead where this has no value."""
        if math.isnan(self.value) and self.otherwise is not None:
            return self.otherwise.decides
        return self

    @property
    def allowed(self) -> tuple[float, float]:
        """What does not overturn the claim: the limits, or the range where there are none."""
        return self.decides.limits or (self.decides.low, self.decides.high)

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
        low, high = self.allowed
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
        low, high = self.allowed
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
        if part.low <= part.value <= part.high or self.verdict is Verdict.REFUTED:
            return text
        near = part.kind is not SHARE and any(abs(part.value - end) < EDGE * abs(end) for end in self.allowed)
        why = part.why or f"within a factor of {part.kind.factor:g}"
        return f"{text} ({why}{', on the edge of the limits' if near else ''})"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim, judged: what it says, what was found, and what would overturn it.

    ``conditions`` says how they differ from the source's ("" where they are the same). What
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
    conditions: str
    chosen: str
    other: str
    partial: str
    needs: str
    command: str
    #: Whether the prediction decides anything, or only stands beside.
    compared: bool

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
    why: str = "",
    otherwise: Part | None = None,
) -> Part:
    """A part that asks whether found / expected is 1, within the tolerance of its kind.

    share: where the row deviates from its kind, with ``why``.
    """
    if share is not None and not why:
        raise ValueError(f"{what}: a tolerance of its own without saying why")
    share = max(kind.share if share is None else share, DIGITS)
    # What is printed or derived agrees or does not.
    factor = kind.factor if evidence.measured else None
    return Part(
        what,
        found / expected if expected else math.nan,
        evidence,
        low=1 - share,
        high=1 + share,
        limits=None if factor is None else (min(1 / factor, 1 - share), max(factor, 1 + share)),
        why=why,
        form=".4g",
        otherwise=otherwise,
        kind=kind,
    )


def exact(what: str, found: float, expected: float = 1) -> Part:
    """A part that asks whether what was executed and counted is exactly what is expected."""
    return agreement(what, found, expected, COUNT, Evidence.COUNTED)


def exponent(what: str, found: float, expected: float, evidence: Evidence) -> Part:
    """A part that asks for a log-log slope."""
    low, high = expected - EXPONENT.share, expected + EXPONENT.share
    return Part(what, round(found, 6) + 0.0, evidence, low=low, high=high, form=".2f", kind=EXPONENT)


def between(what: str, found: float, low: float, high: float, evidence: Evidence, form: str = ".3g") -> Part:
    """A part that asks for an interval that the source states; what was run may be a tenth beyond."""
    factor = STATED.factor or 1
    limits = (low / factor, high * factor) if evidence.measured else None
    return Part(what, found, evidence, low=low, high=high, limits=limits, why=STATED.because, form=form)


def more(what: str, found: float, evidence: Evidence, form: str = ".3g") -> Part:
    """A part that asks for a ratio above 1."""
    return Part(what, found, evidence, low=1.0, form=form, kind=ORDER)


def less(what: str, found: float, evidence: Evidence, form: str = ".3g") -> Part:
    """A part that asks for a ratio below 1."""
    return Part(what, found, evidence, high=1.0, form=form, kind=ORDER)


def share_of(what: str, right: Iterable[bool], evidence: Evidence, why: str, *, ask: float = 1.0) -> Part:
    """A part that asks in how many cases a claim is right: all, or half for within limits.

    ask: the largest share that the claim's own range can hold, where that is less than all.
    """
    cases = [bool(case) for case in right]
    value = sum(cases) / len(cases) if cases else math.nan
    limits = (ask * SHARE.least, 1.0)
    return Part(what, value, evidence, low=1.0, high=1.0, limits=limits, why=why, kind=SHARE)
