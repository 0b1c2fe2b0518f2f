"""Store, recompute or offload what a layer saves: step time and bytes on an emulated host link.

A chain of linear + GELU layers on the CPU. The "device" is torch's memory, the "host" a second
pool; a worker thread a direction copies, paced to a bandwidth, so that the overlap of copies and
computation is real. The same executor drives CUDA streams where there is a GPU. Predicted bytes by
hand; predicted times by ``analysis.offload.step_timeline`` from the measured layer costs (figure).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from analysis.offload import Action
from repro.experiments import Cell, Context, Experiment, Row, row, spread

if TYPE_CHECKING:
    from torch import Tensor, nn

ROWS, WIDTH, DEPTH = 1024, 512, 8
REPEATS = 8
#: Link bandwidths in MB/s: around the crossover of this layer on a CPU core.
BANDWIDTHS_MB_S = (50, 100, 200, 400, 800, 1600)
#: A linear layer saves its input and a GELU its input: both fp32.
SAVED_BYTES = 2 * 4 * ROWS * WIDTH


ACTIONS: tuple[Action, ...] = ("store", "recompute", "offload")


def cells() -> list[Cell]:
    """One bandwidth each; the three ways are timed in turn, so that they see the same machine."""
    return [
        Cell(implementation="three-ways", link_mb_s=bandwidth, rows=ROWS, width=WIDTH, depth=DEPTH)
        for bandwidth in BANDWIDTHS_MB_S
    ]


def predict(cell: Cell) -> Iterator[Row]:
    """Bytes that move each way. Times follow from measured costs, in the figure."""
    for direction in ("out", "in"):
        yield row("moved_bytes", DEPTH * SAVED_BYTES, direction=direction)


def layers() -> list[nn.Module]:
    """The chain."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)]


def measure(cell: Cell, context: Context) -> Iterator[Row]:
    """Seconds of the fastest step each way, the layer costs, and bytes moved."""
    import torch

    from repro.training.link import HostLink
    from repro.training.offload import OffloadSavedTensors

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    link = HostLink(float(cell["link_mb_s"]) * 1e6)
    times: dict[str, list[tuple[float, float]]] = {action: [] for action in ACTIONS}
    try:
        chain = layers()
        offload = OffloadSavedTensors(chain, link=link)
        x = torch.randn(ROWS, WIDTH)
        for repeat in range(REPEATS + 1):
            for action, found in times.items():
                seconds = step(chain, x, action, offload)
                if repeat:  # the first is the warm-up
                    found.append(seconds)
    finally:
        torch.set_num_threads(threads)
        link.close()
    steps = {action: [f + b for f, b in found] for action, found in times.items()}
    series = {f"{action}_step_s": found for action, found in steps.items()}
    series["forward_s"] = [forward for forward, _ in times["store"]]
    series["backward_s"] = [backward for _, backward in times["store"]]
    for metric, seconds_of_each in series.items():
        yield row(metric, min(seconds_of_each), **spread(seconds_of_each), tool=f"perf_counter, min of {REPEATS}")
    for direction, total in (("out", link.bytes_out), ("in", link.bytes_in)):
        yield row("moved_bytes", total / (REPEATS + 1), direction=direction, tool="counted by the link")


def step(chain: list[nn.Module], x: Tensor, action: str, offload: Any) -> tuple[float, float]:
    """Seconds of one forward and one backward pass under one action for every layer."""
    from torch.utils.checkpoint import checkpoint

    start = time.perf_counter()
    h = x.detach().clone().requires_grad_()
    for layer in chain:
        if action == "recompute":
            h = checkpoint(layer, h, use_reentrant=False)
        elif action == "offload":
            with offload:
                h = layer(h)
        else:
            h = layer(h)
    loss = h.sum()
    middle = time.perf_counter()
    loss.backward()
    return middle - start, time.perf_counter() - middle


EXPERIMENT = Experiment(
    "offload",
    cells,
    predict,
    measure,
    device="cpu",
    sources=("repro/training/offload.py", "repro/training/link.py"),
    seconds=25,
    on_demand=True,
)
