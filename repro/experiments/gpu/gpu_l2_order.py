"""The order in which thread blocks really walk, recorded by our forward and replayed through L2.

The kernel notes of each block its SM, when it started, when it was done with every 16 key tiles and
when it ended. Replayed through the simulated L2, the record leaves no pace to choose: what is then
fetched, beside the counter of the same launch in ``gpu-l2-registered``, tries the cache alone.
Beside it stands what says how well the pace was chosen: how much the blocks' durations differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from analysis.hardware import H200, find_gpu
from analysis.l2 import L2, replay
from analysis.l2.attention import query_tiles_outside
from analysis.l2.recorded import events, spread
from analysis.shapes import Tile
from kernels import attention, flash
from kernels.launch import Array, Backend
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.attention import cell, shape_of, tile_of

EVERY = 16
TILE = Tile(128, 64)
SAMPLED_SETS = 64
#: Blocks that run at a time on an H200: registers allow one on each SM.
WAVE = 132


def cells() -> list[Cell]:
    """Lengths that gpu-l2-registered has counters of, and a sawtooth."""
    long: dict[str, Any] = {"head_dim": 128, "dtype": "bf16"}
    listed = [cell("flash", "forward", TILE, seqlen=n, **long) for n in (65536, 131072)]
    return [*listed, cell("flash", "forward", TILE, seqlen=131072, order="sawtooth", wave=WAVE, **long)]


def run(backend: Backend, one: Cell, arrays: dict[str, Array], progress: Array, **more: Any) -> None:
    """Launch the forward of a cell with notes of its progress."""
    shape = shape_of(one)
    options: dict[str, Any] = {name: one[name] for name in ("order", "wave") if name in one}
    q, k, v, out = (arrays[name] for name in ("q", "k", "v", "out"))
    attention.forward(
        backend,
        "flash",
        q,
        k,
        v,
        out,
        {"lse": arrays["lse"]},
        scale=1 / math.sqrt(shape.head_dim),
        causal=shape.causal,
        tile=tile_of(one),
        progress=progress,
        progress_tiles=EVERY,
        **options,
        **more,
    )


def notes_shape(one: Cell) -> tuple[int, int]:
    """(blocks, notes) of a cell's launch."""
    shape, tile = shape_of(one), tile_of(one)
    blocks = shape.batch * shape.heads * -(-shape.seqlen_q // tile.block_m)
    return blocks, flash.progress_notes(shape.seqlen_k, tile.block_n, EVERY)


def recorded(one: Cell) -> np.ndarray:
    """The notes of a launch on the GPU, the second one: the first loads the module."""
    import torch

    from repro.attention.launcher import launcher_for, stream_of
    from repro.attention.views import array_of
    from repro.instruments.gpu_work import Operands

    operands = Operands(shape_of(one))
    q = operands.q
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    notes = torch.zeros(notes_shape(one), dtype=torch.int64, device=q.device)
    tensors = {"q": q, "k": operands.k, "v": operands.v, "out": out, "lse": lse}
    arrays = {name: array_of(name, tensor) for name, tensor in tensors.items()}
    for _ in range(2):
        notes.zero_()
        with launcher_for(q.device) as backend:
            run(backend, one, arrays, array_of("progress", notes), stream=stream_of(q.device))
    torch.cuda.synchronize()
    return notes.cpu().numpy()


def replayed(one: Cell, notes: np.ndarray, sms: int, l2: L2) -> Iterator[Row]:
    """The rows of a record of notes: bytes fetched on that order, spread of durations."""
    shape = shape_of(one)
    launch = query_tiles_outside(shape, tile_of(one), order=str(one.get("order", "rows")), wave=int(one.get("wave", 1)))
    sampled = min(SAMPLED_SETS, l2.sets)
    found = replay(launch, l2, sms, events(launch, notes, EVERY), sampled_sets=sampled)
    sizes = {"q": shape.query_bytes, "k": shape.key_bytes, "v": shape.key_bytes}
    fetched = sum(found[name].fetches * size for name, size in sizes.items())
    yield row("hbm_read_bytes", round(fetched), tool="recorded order, simulated L2")
    yield row("duration_spread", spread(notes), tool="standard deviation over mean, of blocks")


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """Record on the GPU, replay here."""
    from repro.measuring import machine

    card = machine.gpu()
    gpu = (card and find_gpu(card.name)) or H200
    notes = recorded(one)
    if not notes.any():
        raise RuntimeError("the kernel noted nothing")
    return replayed(one, notes, max(gpu.sms, int(notes[:, 0].max()) + 1), L2.of(gpu))


EXPERIMENT = Experiment("gpu-l2-order", cells, measure=measure, device="cuda", seconds=20)
