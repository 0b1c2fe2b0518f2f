"""The measuring code of the GPU experiments, run through on a card that does nothing; JSON.

    python tests/support/rehearsal.py

A rented card runs this code for the first time when every second counts. Here torch's CUDA calls
are answered by stand-ins, tensors stay on the CPU, and launches end in ``fake_driver``: no number
means anything, but every line runs, down to the arguments of the driver.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bare_image  # noqa: F401  first: it hides packages
import fake_driver
import torch
from torch.overrides import TorchFunctionMode


class Event:
    """Time on the host's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3 + 1e-3


class Current:
    """``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class OnTheHost(TorchFunctionMode):
    """Makes tensors for "cuda" on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {k: v for k, v in (kwargs or {}).items() if k != "pin_memory"}
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        return func(*args, **given)


def pretend() -> None:
    """A Hopper card, as far as the experiments ask."""
    answers: dict[str, Any] = {
        "is_available": True,
        "init": None,
        "synchronize": None,
        "empty_cache": None,
        "current_device": 0,
        "current_stream": SimpleNamespace(cuda_stream=0),
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(multi_processor_count=132, name="NVIDIA H200"),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    torch.cuda.Event, torch.cuda.device = Event, Current
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    generator = torch.Generator
    torch.Generator = lambda device="cpu": generator()


def small(cell: Any) -> Any:
    """The cell's kernels on 70 rows."""
    from repro.experiments import Cell

    values = {("pass_" if k == "pass" else k): v for k, v in cell.items()}
    rows = min(int(cell["seqlen_q"]), 70)  # decoding has few
    values |= {"batch": 1, "heads": 2, "kv_heads": 2, "seqlen_q": rows, "seqlen_k": 70}
    return Cell(**values | ({"window_left": 16} if "window_left" in cell else {}))


def unwritten(module: Any) -> dict[str, Any]:
    """What is said of kernels that write nothing, as here: their results are wrong."""
    from repro.experiments import Context

    rows = module.EXPERIMENT.measured(small(module.cells()[0]), Context("cuda"))
    return {
        "experiment": "wrong",
        "cell": {},
        "timed": [r.implementation for r in rows if r.value],
        "refused": {r.implementation: r.error for r in rows if r.error},
    }


def undecoded(module: Any) -> dict[str, Any]:
    """The same of the decoding kernels, by the number of splits."""
    from repro.experiments import Context

    rows = module.EXPERIMENT.measured(small(module.cells()[0]), Context("cuda"))
    return {
        "experiment": "wrong decoding",
        "cell": {},
        "timed": [r.value for r in rows if r.value],
        "refused": {r.extra["splits"]: r.error for r in rows if r.error},
    }


def report() -> list[dict[str, Any]]:
    from repro.experiments import Context
    from repro.experiments.gpu import (
        gpu_ceilings,
        gpu_decode,
        gpu_features,
        gpu_forms,
        gpu_ladder,
        gpu_optimistic,
        gpu_throughput,
    )
    from repro.instruments import decode_work, exact
    from repro.instruments.timing import TorchDevice

    TorchDevice.FLUSH_BYTES = 1 << 20
    found = [unwritten(gpu_throughput)]
    found.append(undecoded(gpu_decode))
    found.append(unwritten(gpu_features) | {"experiment": "wrong features"})
    exact.Errors.beyond = lambda *_: None  # type: ignore[method-assign, assignment]
    decode_work.DecodeOperands.error = lambda *_: 0.0  # type: ignore[method-assign, assignment]
    modules = (gpu_throughput, gpu_forms, gpu_features, gpu_optimistic, gpu_ladder, gpu_decode)
    for module in modules:
        alike: dict[Any, Any] = {}
        for cell in module.cells():
            names = ("implementation", "pass", "head_dim", "forms", "sharing", "feature")
            kind = [cell.get(name) for name in names]
            alike.setdefault(tuple(kind), cell)
        for cell in alike.values():
            rows = module.EXPERIMENT.measured(small(cell), Context("cuda"))
            found.append(
                {
                    "experiment": module.EXPERIMENT.name,
                    "cell": dict(cell),
                    "timed": sorted({r.implementation for r in rows if r.value is not None}),
                    "refused": {r.implementation: r.error for r in rows if r.error},
                }
            )
    for cell in gpu_ceilings.cells():
        if cell["implementation"] in ("sm-boundary-read", "shared-memory-read", "mma-sync", "exp2"):
            rows = gpu_ceilings.EXPERIMENT.measured(cell, Context("cuda"))
            found.append(
                {
                    "experiment": gpu_ceilings.EXPERIMENT.name,
                    "cell": dict(cell),
                    "refused": {},
                    "timed": [r.implementation for r in rows if r.value],
                }
            )
    return found


def noted() -> list[list[int]]:
    """Shapes of the notes of progress, which stay empty here."""
    from repro.experiments.gpu import gpu_l2_order

    return [list(gpu_l2_order.recorded(small(cell)).shape) for cell in gpu_l2_order.cells()]


def counted_refusals() -> str:
    """What the program that ncu profiles says of the cells it is given; nothing if they run."""
    from repro.experiments.gpu import gpu_l2_registered, gpu_sm_units, gpu_traffic
    from repro.instruments import counted

    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(said):
        path = Path(folder) / "cells.json"
        cells = [small(cell) for cell in gpu_traffic.cells() + gpu_l2_registered.cells()]
        cells = [c for c in cells if c["implementation"] != gpu_l2_registered.PEER]
        cells += [gpu_sm_units._as_run(small(cell)) for cell in gpu_sm_units.cells()]
        path.write_text(json.dumps(cells))
        counted.main(path)
    return said.getvalue()


if __name__ == "__main__":
    pretend()
    fake_driver.install()
    from kernels.launching.cupy_backend import CupyBackend
    from repro.attention import launcher

    card = CupyBackend()
    launcher._host = lambda checks: card
    with OnTheHost():
        print(json.dumps({"measured": report(), "counted": counted_refusals(), "noted": noted()}))
