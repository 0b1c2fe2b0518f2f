"""``python -m repro judge``: a claim's verdict, part by part, and what judging it anew takes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from repro import claims, experiments
from repro.commands import output
from repro.experiments import run

if TYPE_CHECKING:
    import pandas


def command(
    row: Annotated[str | None, typer.Argument(help="a claim by its name, e.g. K6; all of them if none")] = None,
    again: Annotated[bool, typer.Option("--again", help="measure its experiments on this machine first")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Judge a claim: its verdict, each number with its range, and where each was measured.

    Without a row every claim is listed with its verdict.
    """
    rows = claims.rows()
    if row is None:
        found = claims.judge()
        if as_json:
            output.print_json([asdict(one) | {"verdict": one.verdict} for one in found])
        else:
            listed = [(one.name, one.verdict, one.statement) for one in found]
            output.print_table(("claim", "verdict", "what it says"), listed)
        return
    if row not in rows:
        near = difflib.get_close_matches(row, rows, n=3, cutoff=0.3)
        near = near or [name for name in rows if row.lower() in name.lower()][:3]
        raise ValueError(f"no claim {row!r}; near it: {', '.join(near) or 'none'}")
    known = rows[row]
    if again:
        measure(known)
    frame = experiments.tidy(known.experiments) if known.experiments else None
    one = known.found(claims.Finding(parts=())) if frame is None else known.judged(frame)
    if as_json:
        output.print_json(asdict(one) | {"verdict": one.verdict, "parts": [part_of(p) for p in one.parts]})
        return
    print(f"{one.name}: {one.statement}\n{one.source}\n\n{one.verdict.upper()} ({one.evidence})\n")
    for name in ("predicted", "measured", "published"):
        print(f"{name + ':':11}{getattr(one, name)}")
    for part in one.parts:
        words = part_of(part)
        print(f"\n- {words['number']}: {words['value']}, {words['verdict']}")
        print(f"  agrees in {words['agrees in']}, within limits in {words['within limits in']}; {words['evidence']}")
        print(f"  rule: {words['rule']}")
    print()
    for title, text in (
        ("conditions", one.conditions),
        ("chosen after seeing the data", one.chosen),
        ("consistent at most", one.other),
        ("within limits at most", one.partial),
        ("a test would take", one.needs),
    ):
        if text:
            print(f"{title}: {text}")
    if frame is not None:
        print("\nwhere it was measured:")
        print("\n".join(f"  {line}" for line in origins(frame)))
    print("\njudging it anew on this machine:")
    print("\n".join(f"  {line}" for line in reruns(known.experiments)) or "  nothing to run")


def part_of(part: claims.Part) -> dict[str, object]:
    """A part as a row of a table."""
    used = part.decides
    low, high = (f"{end:{used.form}}" for end in (used.low, used.high))
    limits = [f"{end:{used.form}}" for end in used.limits or ()]
    return {
        "number": used.what,
        "value": "not measured" if used.value != used.value else f"{used.value:{used.form}}",
        "agrees in": f"{low} to {high}",
        "within limits in": " to ".join(limits) or "-",
        "verdict": str(used.verdict),
        "evidence": str(used.evidence),
        "rule": f"{used.kind.kind}: {used.kind.because}" + f"; here: {used.why}" * bool(used.why),
    }


def origins(frame: pandas.DataFrame) -> Iterator[str]:
    """A line for each experiment and machine, and for each paper's place."""
    for column in ("device", "commit", "date", "origin", "tool"):
        if column not in frame:
            frame = frame.assign(**{column: None})
    measured = frame[(frame["source"] == "measured") & frame["value"].notna()]
    keys = ["experiment", "device", "commit"]
    for (name, device, commit), some in measured.groupby(keys, dropna=False):
        days = some["date"].dropna().astype(str).str[:10]
        when = f", {days.min()} to {days.max()}" if len(days) else ""
        place = f"commit {commit}" if isinstance(commit, str) else "its record names no commit"
        yield f"{name}: {len(some)} numbers on {device}{when}, {place}"
    printed = frame[frame["source"] == "published"]
    for origin, some in printed.groupby("origin"):
        yield f"published: {len(some)} numbers of {origin}"


def reruns(names: tuple[str, ...]) -> Iterator[str]:
    """What each experiment needs here, or why nobody can run it from this repository."""
    for name in names:
        if name not in experiments.names():
            yield f"{name}: records alone, printed or measured elsewhere; nothing here measures it"
            continue
        one = experiments.experiment(name)
        if one.measure is None:
            yield f"{name}: has no measure function; its records are all there is"
            continue
        reason = run.device_reason(one.device)
        yield f"{name}: " + (reason or f"about {one.seconds:.0f} s (`--again`)")


def measure(known: claims.Row) -> None:
    """Measure a row's experiments anew; ValueError names those that this machine cannot."""
    from repro import measure as measuring

    able = [
        name
        for name in known.experiments
        if name in experiments.names()
        and experiments.experiment(name).measure is not None
        and run.device_reason(experiments.experiment(name).device) is None
    ]
    if not able:
        reasons = "; ".join(reruns(known.experiments)) or known.needs or "it has no experiment"
        raise ValueError(f"{known.name} cannot be measured on this machine: {reasons}")
    measuring.measure(able, into=None, again=True, quick=False)
