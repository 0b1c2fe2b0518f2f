"""``python -m repro cubin``: what a compiled kernel file holds, and whether it can run here."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from repro.commands import output


def command(
    file: Annotated[Path, typer.Argument(help="a cubin for sm_80, sm_90 or sm_90a")],
    entry: Annotated[str | None, typer.Option(help="one entry; default: all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the same as JSON")] = False,
) -> None:
    """Say what a compiled kernel file holds: entries, registers, instructions.

    Run it by kernels.machine.load(FILE).launch(...), without a GPU.
    """
    from kernels.machine import NotUnderstoodError, load

    try:
        program = load(file)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    found = []
    for name in (entry,) if entry else program.entries:
        facts = program.cubin.entry(name)
        try:
            mix = Counter(d.opcode.split(".")[0] for d in program.code(name))
            unknown = ""
        except NotUnderstoodError as error:
            mix, unknown = Counter(), str(error)
        found.append(
            {
                "entry": name,
                "architecture": f"sm_{program.cubin.architecture}",
                "parameters_bytes": [p.nbytes for p in facts.parameters],
                "registers": facts.registers,
                "shared_bytes": facts.shared_bytes,
                "local_bytes": facts.local_bytes,
                "instructions": dict(mix.most_common()),
                "not_understood": unknown,
            }
        )
    if as_json:
        output.print_json(found)
        return
    for facts_ in found:
        sizes = ", ".join(map(str, facts_["parameters_bytes"]))  # type: ignore[call-overload]
        print(f"{facts_['entry']}  {facts_['architecture']}")
        print(f"  parameters   {sizes or 'none'} bytes")
        print(
            f"  a thread     {facts_['registers']} registers, {facts_['local_bytes']} bytes local; "
            f"a block {facts_['shared_bytes']} bytes static shared"
        )
        mix_: dict[str, int] = facts_["instructions"]  # type: ignore[assignment]
        if facts_["not_understood"]:
            print(f"  the executor cannot run it: {facts_['not_understood']}")
        else:
            shown = ", ".join(f"{name} {count}" for name, count in list(mix_.items())[:12])
            print(f"  {sum(mix_.values())} instructions: {shown}{', …' if len(mix_) > 12 else ''}")
