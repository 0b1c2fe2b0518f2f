"""The process that ncu profiles: runs cells one after the other, each behind a marker.

    python -m repro.instruments.counted CELLS.json

CELLS.json is a list of cells as ``gpu_work.cell_work`` takes them. A cell that fails is named on
standard error and leaves its marker alone, so that the others keep their places.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from repro import cli
from repro.instruments.counters import (
    MARKER,
    NVTX_RANGE,
    CounterError,
    K,
    KernelBusy,
    KernelCount,
    count_kernels,
    split_by_cell,
    watch_kernels,
)
from repro.measuring import processes


def count_cells(
    cells: Sequence[Mapping[str, Any]], *, timeout_s: float, ncu: str | None = None
) -> list[list[KernelCount]]:
    """Counters of every cell's kernels, in the order of the cells. Raises CounterError."""
    return _each_cell(cells, count_kernels, timeout_s, ncu)


def watch_cells(
    cells: Sequence[Mapping[str, Any]], *, timeout_s: float, ncu: str | None = None
) -> list[list[KernelBusy]]:
    """How busy every cell's kernels kept the units, in the order of the cells."""
    return _each_cell(cells, watch_kernels, timeout_s, ncu)


def _each_cell(
    cells: Sequence[Mapping[str, Any]], profile: Callable[..., list[K]], timeout_s: float, ncu: str | None
) -> list[list[K]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cells.json"
        path.write_text(json.dumps([dict(cell) for cell in cells]), encoding="utf-8")
        command = [sys.executable, "-m", "repro.instruments.counted", str(path)]
        found = split_by_cell(profile(command, timeout_s=timeout_s, ncu=ncu))
    missing = [i for i in range(len(cells)) if not found.get(i)]
    if len(missing) == len(cells):
        raise CounterError("no cell launched a kernel between its marker and the next")
    return [found.get(i, []) for i in range(len(cells))]


def main(path: Path) -> None:
    """Run the cells, each once unprofiled (compilation, first touch) and once in the range."""
    import cupy
    import torch

    from repro.instruments import pytorch_attention
    from repro.instruments.gpu_work import cell_work
    from repro.measuring.cells import Cell

    marker = cupy.RawKernel(f'extern "C" __global__ void {MARKER}() {{}}', MARKER)
    torch.cuda.init()
    for index, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        run = None
        try:
            # The runs of 2022 name mask and dropout, and are PyTorch's own.
            run = (pytorch_attention.whole if "dropout" in cell else cell_work)(Cell(**cell))
            run()
            torch.cuda.synchronize()
        except Exception as error:  # the other cells still count
            first = (str(error).strip() or "no message").splitlines()[0]
            print(f"cell {index}: {type(error).__name__}: {first}", file=sys.stderr)
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        torch.cuda.nvtx.range_push(NVTX_RANGE)
        with stream:
            marker((index + 1,), (1,), ())
        if run is not None:
            run()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()
        del run
        torch.cuda.empty_cache()


if __name__ == "__main__":
    processes.die_with_parent()  # ncu, which is killed if it takes too long
    sys.exit(cli.program(lambda: main(Path(sys.argv[1]))))
