"""The first start of torch, CUDA, cuBLAS and CuPy, which on a cold machine takes a minute or more.

    python -m repro.instruments.warm_up

Run before any limit counts: afterwards the system has the libraries' pages, and CuPy's cache the
first module.
"""

from __future__ import annotations

import sys
import time

from repro import cli
from repro.measuring import processes
from repro.measuring.progress import say


def warm_up(device: str = "cuda") -> int:
    """Start what the GPU experiments use; returns the number of multiprocessors.

    Raises RuntimeError where something of it does not start.
    """
    import torch

    from repro.attention.launcher import backend_of

    if device == "cpu":
        return backend_of(torch.device("cpu")).multiprocessors
    torch.cuda.init()
    for dtype in (torch.bfloat16, torch.float64):  # cuBLAS loads kernels for each
        a = torch.ones(128, 128, dtype=dtype, device=device)
        torch.matmul(a, a)
    torch.cuda.synchronize()
    backend = backend_of(torch.device(device, torch.cuda.current_device()))
    return backend.multiprocessors


def main() -> None:
    """Warm up and say how long it took."""
    started = time.monotonic()
    multiprocessors = warm_up()
    say(f"torch, cuBLAS and CuPy work, {multiprocessors} SMs, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    processes.die_with_parent()
    sys.exit(cli.program(main))
