"""``python -m repro doctor``: what this machine can do, and why not the rest."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from repro.commands import output


def command(as_json: Annotated[bool, typer.Option("--json", help="findings as JSON")] = False) -> None:
    """Say what this machine can do; for each "no", the cause and a cure.

    Fails only if something is missing that `make figures` needs.
    """
    from repro import doctor

    found = list(doctor.findings())
    if as_json:
        output.print_json([asdict(f) for f in found])
    else:
        print(doctor.text(found))
    if not doctor.complete(found):
        raise ValueError("something that is needed is missing, see above")
