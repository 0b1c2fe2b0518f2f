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
from collections.abc import Callable, Collection, Iterable, Mapping
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
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a whole number") from None


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
    if not -math.inf < found < math.inf:  # math.isfinite cannot be compiled where it is symbolic
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
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    checks: dict[str, Check] = {}
    others: list[Check] = []  # of the names that **kwargs takes

    def prepare() -> None:
        hints = typing.get_type_hints(function, include_extras=True)
        for p in parameters:
            check = check_of(hints[p.name]) if p.name in hints else _anything
            if p.kind is p.VAR_KEYWORD:
                others.append(check)
            elif p.kind is not p.VAR_POSITIONAL:
                checks[p.name] = check
        if not others:
            others.append(_anything)  # Python refuses the name

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not others:
            prepare()  # its module is complete now
        given: list[Any] = list(args)
        for i, (name, value) in enumerate(zip(positional, args, strict=False)):
            given[i] = checks[name](name, value)
        rest = others[0]
        named: dict[str, Any] = {name: checks.get(name, rest)(name, value) for name, value in kwargs.items()}
        return function(*given, **named)

    return call


def check_fields(thing: Any) -> None:
    """Hold every field of a frozen dataclass to its annotation; for ``__post_init__``."""
    kind = type(thing)
    if kind not in _FIELDS:
        hints = typing.get_type_hints(kind, include_extras=True)
        _FIELDS[kind] = [(f.name, check_of(hints[f.name])) for f in dataclasses.fields(kind)]
    for name, check in _FIELDS[kind]:
        value = getattr(thing, name)
        found = check(name, value)
        if found is not value:
            object.__setattr__(thing, name, found)


Check = Callable[[str, Any], Any]
"""Of a name and a value: the value as another type, or TypeError or ValueError."""

_FIELDS: dict[type, list[tuple[str, Check]]] = {}


@functools.cache
def check_of(hint: Any) -> Check:
    """What gives a value as the type that an annotation names, or raises if it cannot be."""
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        wanted = [each for each in inside if each is not type(None)]
        return _or_none(check_of(wanted[0])) if len(wanted) == 1 else _anything
    if origin is typing.Annotated:  # with the choices there are
        check, choices = check_of(inside[0]), inside[1]
        return lambda name, value: one_of(name, check(name, value), choices)
    if origin is typing.Literal:
        return lambda name, value: one_of(name, value, inside)
    if origin is tuple:
        return _each_of(inside)
    if origin is Collection and inside == (str,):
        return names
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(origin, check_of(inside[1]))
    if isinstance(hint, type) and getattr(hint, "_is_protocol", False):
        return _protocol(hint)
    if isinstance(hint, type) and hint not in (object, Any):
        return _instance(hint)
    return _anything


def _anything(name: str, value: Any) -> Any:
    return value


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _each_of(kinds: tuple[Any, ...]) -> Check:
    """A tuple of these kinds, or of the first one where the second is an ellipsis."""
    of_any_length = kinds[-1] is ...
    checks = [check_of(kind) for kind in kinds if kind is not ...]

    def check(name: str, value: Any) -> Any:
        instance(name, value, tuple, list)
        rest = checks * len(value) if of_any_length else checks
        if len(rest) != len(value):
            raise ValueError(f"{name}={value!r} has {len(value)} entries, not {len(rest)}")
        pairs = enumerate(zip(value, rest, strict=True))
        return tuple(of(f"{name}[{i}]", each) for i, (each, of) in pairs)

    return check


def _mapping(kind: type, of_value: Check) -> Check:
    def check(name: str, value: Any) -> Any:
        instance(name, value, kind)
        for key, each in value.items():
            of_value(f"{name}[{key!r}]", each)
        return value

    return check


def _protocol(kind: type) -> Check:
    wanted = [m for m in {**kind.__annotations__, **vars(kind)} if not m.startswith("_")]

    def check(name: str, value: Any) -> Any:
        missing = [each for each in wanted if not hasattr(value, each)]
        if missing:
            found = type(value).__name__
            raise TypeError(f"{name}={reprlib.repr(value)} is a {found}, without {missing[0]}")
        return value

    return check


def _instance(kind: type) -> Check:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            instance(name, value, kind)
        return value

    return check


def _text(name: str, value: Any) -> str:
    instance(name, value, str)
    return str(value)


_SIMPLE: dict[Any, Check] = {int: whole, float: real, bool: flag, str: _text}
