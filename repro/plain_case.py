"""What the fuzzer draws: plain data, so that a failing case is one line to run again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from analysis.arguments import check_fields, instance

__all__ = ["PlainCase"]


@dataclass(frozen=True)
class PlainCase:
    """Base of the frozen dataclasses of plain values; every field has a default."""

    def to_json(self) -> str:
        """The fields that differ from the default."""
        plain = asdict(type(self)())
        return json.dumps({n: v for n, v in asdict(self).items() if v != plain[n]})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of :meth:`to_json`; TypeError names an unknown field, or one of another kind."""
        given: dict[str, Any] = json.loads(text)
        instance("case", given, dict)
        lists = [f.name for f in fields(cls) if str(f.type).startswith("tuple")]
        for name in lists:
            if isinstance(given.get(name), list):
                given[name] = tuple(given[name])
        case = cls(**given)
        check_fields(case)
        return case
