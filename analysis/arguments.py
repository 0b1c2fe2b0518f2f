"""Arguments of public functions: the right kind of thing, with a value that makes sense.

``TypeError`` for another kind, ``ValueError`` for another value; both name the argument and what
was given. Whole numbers of any library (NumPy's, a 0-d array's) are taken for what they are;
a bool is no number and a string is no list of strings.
"""

from __future__ import annotations

import math
import numbers
import operator
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


def real(name: str, value: Any) -> float:
    """A finite real number, as float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a real number")
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"{name}={found} is not finite")
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
    found = float(value)
    if not 0.0 <= found <= 1.0:  # also false for NaN
        raise ValueError(f"{name} must lie in [0, 1], got {found}")
    return found


def byte_count(name: str, value: Any) -> int:
    """Bytes: a whole number from 0 on. A float that is whole (2e9) is taken, NaN is not."""
    if isinstance(value, float):
        if not math.isfinite(value) or not value.is_integer():
            raise ValueError(f"{name}={value} is not a whole number of bytes")
        value = int(value)
    return whole(name, value, least=0)


def names(name: str, value: Any) -> frozenset[str]:
    """A collection of strings. One string is refused: it would be taken letter by letter."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a collection of names")
    found = list(value)
    for each in found:
        if not isinstance(each, str):
            raise TypeError(f"{name}: {each!r} is a {type(each).__name__}, not a name")
    return frozenset(found)
