"""Arguments of public functions: the right kind of thing, with a value that makes sense.

``TypeError`` for another kind, ``ValueError`` for another value; both name the argument and what
was given. Whole numbers of any library (NumPy's, a 0-d array's) are taken for what they are;
a bool is no number and a string is no list of strings.
"""

from __future__ import annotations

import math
import numbers
import operator
import reprlib
from collections.abc import Iterable
from typing import Any


def whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """A whole number within bounds, as int."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        raise TypeError(f"{name}={value!r} is a bool, not a whole number")
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}, not a whole number"
        ) from None
    if least is not None and found < least:
        raise ValueError(f"{name}={found} is below {least}")
    if most is not None and found > most:
        raise ValueError(f"{name}={found} is above {most}")
    return found


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number beyond the largest float
        return math.inf if value > 0 else -math.inf


def real(name: str, value: Any, least: float | None = None) -> float:
    """A finite real number that is no less than ``least``, as float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a real number")
    found = _as_float(value)
    if not math.isfinite(found):
        raise ValueError(f"{name}={found} is not finite")
    if least is not None and found < least:
        raise ValueError(f"{name}={found} is below {least}")
    return found


def flag(name: str, value: Any) -> bool:
    """True or False; not what happens to count as true, such as the text "no"."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not True or False")


def probability(name: str, value: Any) -> float:
    """A real number from 0 to 1, as float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a real number")
    found = _as_float(value)
    if not 0.0 <= found <= 1.0:  # also false for NaN
        raise ValueError(f"{name} must lie in [0, 1], got {found}")
    return found


def byte_count(name: str, value: Any) -> int:
    """Bytes: a whole number from 0 on. A float that is whole (2e9) is taken, NaN is not."""
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        if not math.isfinite(value) or not float(value).is_integer():
            raise ValueError(f"{name}={value} is not a whole number of bytes")
        value = int(float(value))
    return whole(name, value, least=0)


def instance(name: str, value: Any, *kinds: type) -> None:
    """Refuse what is of none of these classes; a long value is cut short in the message."""
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        found = type(value).__name__
        raise TypeError(f"{name}={reprlib.repr(value)} is a {found}, not a {wanted}")


def methods(name: str, value: Any, *wanted: str) -> None:
    """Refuse a thing without these methods: what stands for a protocol or, with ``__call__``, a
    function."""
    missing = [each for each in wanted if not callable(getattr(value, each, None))]
    if missing:
        found = type(value).__name__
        raise TypeError(f"{name}={reprlib.repr(value)} is a {found}, without {', '.join(missing)}")


def items(name: str, value: Any, *kinds: type) -> list[Any]:
    """A collection of things of these classes, as a list. One such thing alone is refused too: a
    tensor would be taken row by row."""
    if isinstance(value, (str, bytes, *kinds)) or not isinstance(value, Iterable):
        found = type(value).__name__
        raise TypeError(f"{name}={reprlib.repr(value)} is a {found}, not a collection")
    given = list(value)
    for i, each in enumerate(given):
        instance(f"{name}[{i}]", each, *kinds)
    return given


def names(name: str, value: Any) -> frozenset[str]:
    """A collection of strings. One string is refused: it would be taken letter by letter."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a collection of names")
    found = list(value)
    for each in found:
        if not isinstance(each, str):
            raise TypeError(f"{name}: {each!r} is a {type(each).__name__}, not a name")
    return frozenset(found)
