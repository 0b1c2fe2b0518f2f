"""Arguments of public functions: the right kind of thing, with a value that makes sense.

``TypeError`` for another kind, ``ValueError`` for another value; both name the argument and what
was given. Whole numbers of any library (NumPy's, a 0-d array's) are taken for what they are;
a bool is no number and a string is no list of strings.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import operator
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """A whole number within bounds, as int."""
    found = value if type(value) is int else _index(name, value)  # the usual kind at once
    if least is not None and found < least:
        raise ValueError(f"{name}={found} is below {least}")
    if most is not None and found > most:
        raise ValueError(f"{name}={found} is above {most}")
    return found


def _index(name: str, value: Any) -> int:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        raise TypeError(f"{name}={value!r} is a bool, not a whole number")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}, not a whole number"
        ) from None


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


def one_of(name: str, value: Any, choices: Iterable[Any]) -> Any:
    """The value, which must be among the choices."""
    if isinstance(choices, range):
        return whole(name, value, choices.start, choices.stop - 1)
    known = tuple(choices)
    if value not in known:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, known))}")
    return value


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Hold every argument of a call to its annotation, by the functions above, before the call.

    A whole number is no float's NaN, no bool and no text; a protocol is a thing with its methods;
    an annotation that is none of these kinds (a callable, an array-like) is left to the function.
    Annotated[str, ("a", "b")] is one of these texts, Annotated[int, range(4)] a number from 0 to 3.
    """
    signature = inspect.signature(function)
    hints: dict[str, Any] = {}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not hints:  # its module is complete now
            hints.update(typing.get_type_hints(function, include_extras=True))
        given = signature.bind(*args, **kwargs)
        for name, value in given.arguments.items():
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                value = {each: of_kind(each, found, hints[name]) for each, found in value.items()}
            elif kind is not inspect.Parameter.VAR_POSITIONAL and name in hints:
                value = of_kind(name, value, hints[name])
            given.arguments[name] = value
        return function(*given.args, **given.kwargs)

    return call


def check_fields(thing: Any) -> None:
    """Hold every field of a frozen dataclass to its annotation; for ``__post_init__``."""
    kind = type(thing)
    if kind not in _FIELDS:
        hints = typing.get_type_hints(kind, include_extras=True)
        _FIELDS[kind] = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    for name, hint in _FIELDS[kind].items():
        value = getattr(thing, name)
        found = of_kind(name, value, hint)
        if found is not value:
            object.__setattr__(thing, name, found)


_FIELDS: dict[type, dict[str, Any]] = {}


def of_kind(name: str, value: Any, hint: Any) -> Any:
    """The value, as the type that an annotation names; TypeError or ValueError if it cannot be."""
    if hint in _SIMPLE:
        return _SIMPLE[hint](name, value)
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in inside:
            return None
        wanted = [each for each in inside if each is not type(None)]
        return of_kind(name, value, wanted[0]) if len(wanted) == 1 else value
    if origin is typing.Annotated:  # with the choices there are
        return one_of(name, of_kind(name, value, inside[0]), inside[1])
    if origin is typing.Literal:
        return one_of(name, value, inside)
    if origin is tuple:
        instance(name, value, tuple, list)
        rest = inside[:1] * len(value) if inside[-1] is ... else inside
        if len(rest) != len(value):
            raise ValueError(f"{name}={value!r} has {len(value)} entries, not {len(rest)}")
        pairs = enumerate(zip(value, rest, strict=True))
        return tuple(of_kind(f"{name}[{i}]", each, kind) for i, (each, kind) in pairs)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        instance(name, value, origin)
        for key, each in value.items():
            of_kind(f"{name}[{key!r}]", each, inside[1])
    elif isinstance(hint, type) and getattr(hint, "_is_protocol", False):
        wanted = [m for m in {**hint.__annotations__, **vars(hint)} if not m.startswith("_")]
        missing = [each for each in wanted if not hasattr(value, each)]
        if missing:
            found = type(value).__name__
            raise TypeError(f"{name}={reprlib.repr(value)} is a {found}, without {missing[0]}")
    elif isinstance(hint, type) and hint not in (object, Any):
        instance(name, value, hint)
    return value


def _text(name: str, value: Any) -> str:
    instance(name, value, str)
    return str(value)


_SIMPLE: dict[Any, Callable[[str, Any], Any]] = {int: whole, float: real, bool: flag, str: _text}
