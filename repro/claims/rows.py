"""A judged claim in the catalogue's words, and where a judgement takes its frame from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from repro.claims.catalogue import CATALOGUE
from repro.claims.protocol import Claim, Part

if TYPE_CHECKING:
    import pandas

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Source:
    """A function that judges one claim from the frame of these experiments."""

    claim: str
    experiments: tuple[str, ...]
    judge: Callable[[pandas.DataFrame], Claim]


def claim(
    name: str,
    *,
    parts: Sequence[Part],
    predicted: str = "-",
    measured: str = NOT_MEASURED,
    published: str = "-",
    conditions: str | None = None,
) -> Claim:
    """A claim with the catalogue's wording; ``conditions`` replaces the catalogue's."""
    if name not in CATALOGUE:
        raise ValueError(f"{name!r} is not in the catalogue of claims")
    entry = CATALOGUE[name]
    return Claim(
        name=name, statement=entry.statement, source=entry.source, origin=entry.origin,
        predicted=predicted, measured=measured, published=published, parts=tuple(parts),
        unlike=entry.conditions if conditions is None else conditions, chosen=entry.chosen,
        command=entry.command,
    )  # fmt: skip
