"""``python -m repro archive``: what a paper's supplement needs, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repro.measuring import machine


def command(
    to: Annotated[Path | None, typer.Option(help="the .tar.gz to write (default: build/, by version)")] = None,
    drawn: Annotated[Path, typer.Option(help="the folder of figures and tables")] = machine.HOME / "figures" / "out",
) -> None:
    """Pack records, figures, tables, sources, environment and commit, with checksums."""
    from repro import archive

    version = machine.project_version()
    path = to or machine.HOME / "build" / f"recompute-repro-{version}-supplement.tar.gz"
    if not path.name.endswith(".tar.gz"):
        raise ValueError(f"--to {path}: expected a name ending in .tar.gz")
    names = archive.write(path, drawn)
    print(f"{path}: {len(names)} files, {path.stat().st_size / 1e6:.1f} MB")
