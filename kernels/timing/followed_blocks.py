"""Blocks of the Hopper kernels followed through the model of an SM: clocks of a tile by its rounds.

Compiles a form, disassembles it, and follows single blocks of small problems
(``analysis.loop_model``); needs NVRTC, nvdisasm and a C compiler, no GPU.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean
from typing import Any

from analysis.loop_model import card
from analysis.loop_model.native import simulate
from analysis.loop_model.parameters import SM90
from analysis.loop_model.program import Program
from analysis.window import Sides
from kernels import hopper
from kernels.building.compile import compile_cubin
from kernels.launch import Argument, Array, Kernel, TensorMap, contiguous_strides, encode
from kernels.launching.plan import Launch as Recorded
from kernels.launching.plan import Recorder
from kernels.sass import loops
from kernels.sass.code import Code
from kernels.sass.kept import disassembled
from kernels.sass.operands import Launch, TensorMapArgument

Form = hopper.ForwardForm | hopper.BackwardForm
Features = tuple[str, ...]
"""Of a form, in the order "window", "softcap", "alibi", "fp16"; the type only beside a softcap."""

ARCH = "sm_90a"
ROUNDS = (2, 4, 8, 16)
"""Lengths of the loop that blocks are followed through."""
HEADS = 8
"""Of the small problems: as many tiles of one length lie side by side."""
SEEDS, START = 3, 400
"""Starts that are tried, as for the prototype (``repro.timing.prototype``)."""
NEVER = 1_000_000
UNFLAGGED = 0
DTYPE = "bf16"
"""fp16 has the same instructions but for the conversion, and the tanh of a softcap."""
BEFORE = 4
"""Key tiles in front of the window of a followed block."""
SMS = 132
"""That share L2."""


@dataclass(frozen=True)
class Single:
    """Device that a recorder is told of: one multiprocessor, so that block 0 takes all tiles."""

    multiprocessors: int = 1
    compute_capability: str = "90"


@cache
def code_of(kernel: Kernel, arch: str = ARCH) -> Code:
    """The machine code that the compiler makes of a kernel."""
    return disassembled(compile_cubin(kernel, arch).cubin, kernel.entry)


def launch_of(recorded: Recorded, taken: Sequence[int] = (), loaded: int | None = None) -> Launch:
    """A recorded launch as block 0 sees it."""
    return Launch(
        recorded.kernel.threads,
        recorded.grid,
        [_argument(argument) for argument in recorded.args],
        (0, 0, 0),
        taken,
        loaded=loaded,
    )


def _argument(argument: Argument) -> tuple[int, int | TensorMapArgument]:
    if isinstance(argument, TensorMap):
        row = argument.array.shape[-1] * argument.array.itemsize
        return 128, TensorMapArgument(argument.box_rows * row)
    data = encode(argument)
    return len(data), int.from_bytes(data, "little")


def stand_in(name: str, shape: tuple[int, ...], dtype: str, number: int) -> Array:
    """A dense array without memory, far from those of other numbers."""
    return Array(name, number << 36, shape, contiguous_strides(shape), dtype, "rw")


def dtype_of(features: Features) -> str:
    """The type of q, k and v."""
    return "fp16" if "fp16" in features else DTYPE


def _arrays(seqlen: int, head_dim: int, keys: int | None = None, dtype: str = DTYPE) -> dict[str, Array]:
    names = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    found = {}
    for n, name in enumerate(names):
        rows = keys if keys is not None and name[-1] in "kv" else seqlen
        found[name] = stand_in(name, (1, HEADS, rows, head_dim), dtype, n + 1)
    return found | {
        "lse": stand_in("lse", (1, HEADS, seqlen), "fp32", len(names) + 1),
        "alibi_slopes": stand_in("alibi_slopes", (1, HEADS, 1), "fp32", len(names) + 2),
    }


def _windowed(form: hopper.ForwardForm, rounds: int, dtype: str) -> tuple[dict[str, Array], Sides]:
    """One query tile in the middle of a long sequence, whose window ends on its diagonal and begins
    in the middle of a key tile, ``rounds`` tiles before the last one's end."""
    total = rounds + BEFORE
    keys, rows = total * form.block_n, form.tile.block_m
    first = BEFORE * form.block_n + form.block_n // 2
    return _arrays(rows, form.head_dim, keys, dtype), (max(0, keys - rows - first), 0)


def _windowed_backward(form: hopper.BackwardForm, rounds: int, dtype: str) -> tuple[dict[str, Array], Sides]:
    """The first of several key tiles, which ``rounds`` query tiles visit: its window begins on the
    diagonal and ends in the middle of a query tile."""
    block_m, block_n = form.tile.block_m, form.tile.block_n
    rows = rounds * block_m + BEFORE * block_n
    left = max(0, rounds * block_m - block_m // 2 - block_n)
    return _arrays(rows, form.head_dim, dtype=dtype), (left, 0)


def _clocks(recorded: Recorded, taken: Sequence[int] = (), loaded: int | None = None) -> float:
    launch = launch_of(recorded, taken, loaded)
    return clocks_of(loops.program(code_of(recorded.kernel), launch))


def clocks_of(found: Program) -> float:
    """Mean clocks of a block of warpgroups over starts, on one of an H200's SMs under load."""
    copied = card.copy_bytes_per_clock(SM90["copy_bytes"].value, card.H200_SUSTAINED, SMS)
    found_clocks = []
    for seed in range(SEEDS):
        draw = random.Random(seed)
        groups = [draw.randrange(START) if seed else 0 for _ in range(len(found.ways) // 4 + 1)]
        starts = [groups[warp // 4] for warp in range(len(found.ways))]
        of = simulate(found, seed=seed, start=starts, copy_bytes=copied)
        found_clocks.append(of.clocks)
    return mean(found_clocks)


def _changes(arrays: dict[str, Array], features: Features) -> dict[str, Any]:
    options = {"softcap": 1.0, "alibi_slopes": arrays["alibi_slopes"]}
    return {name: value for name, value in options.items() if name.removesuffix("_slopes") in features}


def points_of(
    form: Form, causal: bool, optimistic: bool = False, lengths: Sequence[int] = ROUNDS, features: Features = ()
) -> tuple[list[tuple[float, float]], float]:
    """Clocks of a tile by its rounds, and those that a block costs once beside its tiles.

    A form with one block a tile has nothing beside.
    """
    alone: list[tuple[float, float]] = []
    beside = []
    dtype = dtype_of(features)
    for rounds in lengths:
        recorder = Recorder(Single())
        if isinstance(form, hopper.BackwardForm):
            window: Sides = (None, None)
            arrays = _arrays(rounds * form.block_m, form.head_dim, dtype=dtype)
            if "window" in features:
                arrays, window = _windowed_backward(form, rounds, dtype)
            names = ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")
            hopper.backward(
                recorder,
                *(arrays[n] for n in names),
                scale=1.0,
                causal=causal,
                form=form,
                window=window,
                **_changes(arrays, features),
            )
        else:
            window = (None, None)
            arrays = _arrays(rounds * form.block_n, form.head_dim, dtype=dtype)
            if "window" in features:
                arrays, window = _windowed(form, rounds, dtype)
            operands = [arrays[n] for n in ("q", "k", "v", "out", "lse")]
            hopper.forward(
                recorder,
                *operands,
                scale=1.0,
                causal=causal,
                form=form,
                optimistic=optimistic,
                window=window,
                **_changes(arrays, features),
            )
            if optimistic:
                recorder.launches.pop()  # the repair
        main = max(recorder.launches, key=lambda launch: launch.shared_bytes)
        if isinstance(form, hopper.BackwardForm) or not form.persistent:
            alone.append((rounds, _clocks(main)))
            continue
        few, more = (_clocks(main, (*range(tiles - 1), NEVER)) for tiles in (2, 4))
        alone.append((rounds, (more - few) / 2))
        beside.append(few - (more - few))
    return alone, max(0.0, mean(beside)) if beside else 0.0


def repair_of(form: hopper.ForwardForm, causal: bool) -> tuple[float, float]:
    """Clocks of a block of the repair that finds one tile unflagged, and of each more."""
    points = []
    for rounds in (ROUNDS[0], ROUNDS[-1]):
        recorder = Recorder(Single())
        arrays = _arrays(rounds * form.block_n, form.head_dim)
        operands = [arrays[n] for n in ("q", "k", "v", "out", "lse")]
        hopper.forward(recorder, *operands, scale=1.0, causal=causal, form=form, optimistic=True)
        tiles = HEADS * -(-rounds * form.block_n // form.tile.block_m)
        points.append((tiles, _clocks(recorder.launches[-1], loaded=UNFLAGGED)))
    (few, first), (many, last) = points
    each = (last - first) / (many - few)
    return first - each * (few - 1), each
