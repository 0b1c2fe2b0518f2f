"""The options of attention on the command line: its parameters, and the problems they ask for.

Both are read from the rows of ``analysis.features``, so that no command spells the list.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Annotated, Any, TypeVar

import typer

from analysis.feature import Fields, Spelling
from analysis.features import FEATURES
from repro.commands import completion, sweep

SPELLED: Mapping[str, Spelling] = {
    each.name.replace("-", "_"): each for feature in FEATURES.values() for each in feature.spelled
}
"""Parameter -> how it is spelled."""
Command = TypeVar("Command", bound=Callable[..., Any])


def with_options(command: Command) -> Command:
    """The command with a parameter for each spelling; it gets them as ``**options``."""
    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [each for spelling in SPELLED.values() for each in _parameters(spelling)]
    command.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    return command


def _parameters(spelling: Spelling) -> Iterator[inspect.Parameter]:
    name = f"--{spelling.name}"
    if spelling.kind == "flag":
        yield _parameter(spelling.name, Annotated[bool, typer.Option(name, help=spelling.help)], False)
        return
    words = (*spelling.words, "all") if spelling.kind == "words" else spelling.words
    complete = completion.of(words) if words else None
    kind = str | None if spelling.usual is None else str
    option = typer.Option(name, help=spelling.help, autocompletion=complete)
    yield _parameter(spelling.name, Annotated[kind, option], spelling.usual)
    if spelling.short is not None:
        flag, word = spelling.short
        stands_for = typer.Option(f"--{flag}", help=f"short for {name} {word}")
        yield _parameter(flag, Annotated[bool, stands_for], False)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name.replace("-", "_"), kind, default=default, annotation=annotation)


def choices(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the values that were typed, by parameter; None: nothing asked for.

    Raises ValueError, naming the option, for what is none of its values.
    """
    values = {name: _values(spelling, given) for name, spelling in SPELLED.items()}
    for name, spelling in SPELLED.items():
        if spelling.beside is None or given[name] is None:
            continue
        other, word = spelling.beside
        if word not in values[other.replace("-", "_")]:
            typed = given[other.replace("-", "_")]
            raise ValueError(f"--{spelling.name} {given[name]} with --{other} {typed}: it goes with {word}")
    found: list[dict[str, Any]] = []
    for combination in product(*values.values()):
        point = dict(zip(values, combination, strict=True))
        for name, spelling in SPELLED.items():
            if spelling.beside is not None and point[spelling.beside[0].replace("-", "_")] != spelling.beside[1]:
                point[name] = None
        if point not in found:
            found.append(point)
    return found


def _values(spelling: Spelling, given: Mapping[str, Any]) -> list[Any]:
    name, text = f"--{spelling.name}", given[spelling.name.replace("-", "_")]
    if spelling.kind == "flag":
        return [True if text else None]
    if text is None:
        return [None]
    if spelling.kind == "word":
        if text not in spelling.words:
            raise ValueError(f"{name} {text!r}: expected {', '.join(spelling.words)}")
        return [text]
    if spelling.short is not None and given[spelling.short[0].replace("-", "_")]:
        flag, word = spelling.short
        if text not in (spelling.usual, word):
            raise ValueError(f"--{flag} and {name} {text} contradict each other")
        text = word
    if spelling.kind == "words":
        return list(sweep.words(text, name, spelling.words))
    if spelling.kind == "numbers":
        return list(sweep.numbers(text, name, least=spelling.least))
    return list(sweep.windows(text)) if spelling.kind == "windows" else [sweep.seqlens(text)]


def fields_of(point: Mapping[str, Any], batch: int, heads: int) -> Fields:
    """What a combination makes of a problem, fields of its shape included."""
    fields: dict[str, Any] = {}
    for name, value in point.items():
        if value is not None:
            fields |= SPELLED[name].fields(value, (batch, heads))
    return fields
