"""Starts ``repro.distributed.measure`` under torchrun on this machine and reads its rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from analysis.arguments import whole

ROOT = Path(__file__).resolve().parents[2]


def measured(ranks: int) -> list[dict[str, Any]]:
    """Everything that ``ranks`` processes hold and send, measured once a process.

    Raises RuntimeError with the failing rank's last line.
    """
    return _measured(whole("ranks", ranks, least=1))


@cache
def _measured(ranks: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "-m",
            "repro.distributed.measure",
            str(out),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=600,
            check=False,
        )
        if done.returncode or not out.exists():
            errors = [x for x in done.stderr.splitlines() if "Error" in x and "elastic" not in x]
            raise RuntimeError(f"torchrun failed: {(errors or ['no message'])[-1]}")
        rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
        return rows


def records_of(experiment: str, part: str, ranks: int, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of one cell, as rows of ``experiment``; RuntimeError when there are none."""
    found = [
        row | {"experiment": experiment}
        for row in measured(ranks)
        if row["experiment"] == part and all(row.get(k) == v for k, v in wanted.items())
    ]
    if not found:
        raise RuntimeError(f"{ranks} ranks measured nothing for {part} {wanted}")
    return found
