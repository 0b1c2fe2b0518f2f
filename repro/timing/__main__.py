"""``python -m repro.timing``: what follows from the machine code of kernels, ours and others'."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from repro import cli
from repro.timing import flash2_time, flash3_time, flash4_time, peers, tables, time_validation

app = typer.Typer(help=__doc__, no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(help="of the extracted cubins")]


@app.command("tables")
def write_tables(
    names: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(tables.TABLES)}; by default all")] = None,
) -> None:
    """Writes the pages' tables."""
    unknown = sorted(set(names or ()) - set(tables.TABLES))
    if unknown:
        raise ValueError(f"no table {', '.join(unknown)}; there are {', '.join(tables.TABLES)}")
    tables.write(names or tables.TABLES)


@app.command("peers")
def predict_peers() -> None:
    """Predicts what is new of the peers' times on an H200, and writes their table. Seconds."""
    peers.record()
    tables.write(["peers"])


@app.command("prototype")
def predict_prototype() -> None:
    """Predicts every variant of the prototype that has a time. About two minutes."""
    time_validation.record()


@app.command("flash2")
def record_flash2(
    folder: Folder,
    version: Annotated[str, typer.Argument(help="of torch, as 2.8.0")],
    arch: Annotated[str, typer.Option(help=" or ".join(flash2_time.TARGETS))] = "sm_80",
) -> None:
    """Records what the model says of torch's FlashAttention-2. A minute."""
    if arch not in flash2_time.TARGETS:
        raise ValueError(f"--arch {arch}: expected {' or '.join(flash2_time.TARGETS)}")
    flash2_time.record(folder, version, flash2_time.TARGETS[arch])


@app.command("flash3")
def record_flash3(folder: Folder, version: Annotated[str, typer.Argument(help="of fa3-fwd, as 0.0.3")]) -> None:
    """Records what the model says of FlashAttention-3's forwards. A minute."""
    flash3_time.record(folder, version)


@app.command("flash4")
def record_flash4(
    folder: Folder,
    version: Annotated[str, typer.Argument(help="of flash-attn-4, as 4.0.0b36")],
    dsl: Annotated[str, typer.Argument(help="of nvidia-cutlass-dsl, as 4.8.1")],
) -> None:
    """Records what the model says of FlashAttention-4's Hopper kernels. A minute."""
    flash4_time.record(folder, version, dsl)


if __name__ == "__main__":
    sys.exit(cli.run(app, "python -m repro.timing"))
