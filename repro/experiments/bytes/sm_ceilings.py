"""What a round of the tensor-core kernels asks of one SM's units, predicted and counted.

Predicted from the shapes (``analysis.sm_ceilings``): clocks of the tensor cores, exponentials and
shared memory. Counted: bytes of shared memory by the host backend, as the difference of runs that
differ by a round; for the Hopper kernels also instructions of a warp in the compiled code, on the
shortest way round the loop. Nothing here is timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from analysis.shapes import Tile
from analysis.sm_ceilings import KEYS, Round, backward_round, forward_round, warp_backward_round, warp_forward_round
from kernels.flash_config import configure
from repro.experiments import Cell, Context, Experiment, Row, UnavailableError, row

if TYPE_CHECKING:
    from kernels.hopper import BackwardForm
    from kernels.hopper_forms import ForwardForm
    from kernels.launch import Array

SM80 = "flash"
EXACT, OPTIMISTIC, DIRECT = "flash-sm90", "flash-sm90-optimistic", "flash-sm90, direct"
FIELDS = ("implementation", "pass", "head_dim", "block_m", "block_n")
#: The sm_80 kernels, the forms of Hopper's rule with one block a tile, and every form of the backward.
POINTS: tuple[tuple[Any, ...], ...] = (
    (SM80, "forward", 64, 128, 64),
    (SM80, "forward", 128, 128, 64),
    (SM80, "backward", 64, 64, 128),
    (SM80, "backward", 128, 64, 128),
    (EXACT, "forward", 64, 192, 128),
    (EXACT, "forward", 128, 128, 128),
    (EXACT, "forward", 128, 128, 176),
    (EXACT, "forward", 256, 128, 80),
    (OPTIMISTIC, "forward", 64, 192, 128),
    (OPTIMISTIC, "forward", 128, 128, 176),
    (EXACT, "backward", 64, 128, KEYS),
    (EXACT, "backward", 128, 64, KEYS),
    (EXACT, "backward", 128, 80, KEYS),
    (DIRECT, "backward", 128, 64, KEYS),
)


def cells() -> list[Cell]:
    """The forms."""
    return [Cell(**dict(zip(FIELDS, point, strict=True)), dtype="bf16", causal=False) for point in POINTS]


def round_of(cell: Cell) -> Round:
    """The cell's round, from the shapes."""
    head_dim, block_m, block_n = (int(cell[k]) for k in ("head_dim", "block_m", "block_n"))
    if cell["implementation"] == SM80:
        tile = Tile(block_m, block_n)
        warps = configure(str(cell["pass"]), "bf16", head_dim, tile=tile).num_warps
        of_warps = warp_forward_round if cell["pass"] == "forward" else warp_backward_round
        return of_warps(head_dim, block_m, block_n, warps)
    if cell["pass"] == "forward":
        optimistic = cell["implementation"] == OPTIMISTIC
        return forward_round(head_dim, block_m, block_n, optimistic=optimistic)
    return backward_round(head_dim, block_m, dq_from_registers=cell["implementation"] == DIRECT)


def predict(cell: Cell) -> Iterator[Row]:
    """Clocks of each unit, and the bytes of shared memory."""
    found = round_of(cell)
    for unit, clocks in found.clocks().items():
        yield row("round_clocks", clocks, kernel=unit)
    yield row("shared_bytes", found.all_shared_bytes)


def measure(cell: Cell, context: Context) -> list[Row]:
    """Bytes and instructions of a round, counted.

    Raises UnavailableError where the compiler (NVRTC) or the disassembler is missing.
    """

    counted = row("shared_bytes", shared_bytes(cell, context), tool="host backend, counted")
    if cell["implementation"] == SM80:  # loops within the loop: no one way round it
        return [counted]
    instructions = warp_instructions(cell)
    consumers = round_of(cell).consumers
    return [
        counted,
        row("warp_instructions", instructions, tool="nvdisasm, sm_90a"),
        row("round_clocks", instructions * consumers, kernel="issue slots", tool="nvdisasm, sm_90a"),
    ]


def form_of(cell: Cell) -> ForwardForm | BackwardForm:
    """The compiled form of the cell."""
    from kernels import hopper

    tile = Tile(int(cell["block_m"]), int(cell["block_n"]))
    if cell["pass"] == "forward":
        return hopper.form_of_tile(int(cell["head_dim"]), tile)
    form = hopper.backward_form(int(cell["head_dim"]), False, tile)
    return replace(form, dq_from_registers=cell["implementation"] == DIRECT)


def warp_instructions(cell: Cell) -> int:
    """Instructions a warp executes in a round without masks and repeated waits."""
    from kernels.building.compile import compile_cubin
    from kernels.hopper_forms import ForwardForm
    from kernels.sass.kept import disassembled

    form, dtype = form_of(cell), str(cell["dtype"])
    if isinstance(form, ForwardForm):
        part = "optimistic" if cell["implementation"] == OPTIMISTIC else ""
        kernel = form.kernel(dtype, False, part)
    else:
        kernel = form.kernel("", dtype, False)
    try:
        compiled = compile_cubin(kernel, "sm_90a")
        code = disassembled(compiled.cubin, kernel.entry)
    except (ImportError, RuntimeError) as error:
        raise UnavailableError(str(error)) from None
    return len(code.shortest_round("HGMMA"))


def shared_bytes(cell: Cell, context: Context) -> int:
    """Bytes of shared memory in a round: what a third round adds to two."""
    two, three = (_bytes_of(cell, context, rounds) for rounds in (2, 3))
    return three - two


def _bytes_of(cell: Cell, context: Context, rounds: int) -> int:
    """Bytes of shared memory in the main kernel of a problem of one block and ``rounds`` rounds."""
    import torch

    from repro.attention.views import array_of

    head_dim, block_m, block_n = (int(cell[k]) for k in ("head_dim", "block_m", "block_n"))
    forward = cell["pass"] == "forward"
    seqlen_q = block_m if forward else rounds * block_m
    seqlen_k = rounds * block_n if forward else block_n
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int) -> torch.Tensor:
        return torch.randn(1, 1, rows, head_dim, generator=generator).to(torch.bfloat16)

    q, k, v, dout = normal(seqlen_q), normal(seqlen_k), normal(seqlen_k), normal(seqlen_q)
    out, dq, dk, dv = (torch.empty_like(t) for t in (q, q, k, v))
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    arrays = {name: array_of(name, tensor) for name, tensor in tensors.items()}
    arrays["lse"] = array_of("lse", torch.empty(1, 1, seqlen_q))
    backend = context.host()
    _forward(backend, cell if forward else None, arrays)
    if not forward:
        backend.reset()
        _backward(backend, cell, arrays)
    (main,) = (
        traffic
        for entry, traffic in backend.shared_traffic.items()
        if not entry.endswith(("_preprocess", "_postprocess", "_repair"))
    )
    return sum(main.values())


def _forward(backend: Any, cell: Cell | None, at: dict[str, Array]) -> None:
    """The cell's forward; for a backward to come, whichever there is."""
    from kernels import attention, hopper

    operands, head_dim = (at["q"], at["k"], at["v"], at["out"]), at["q"].shape[3]
    scale = 1 / math.sqrt(head_dim)
    if cell is None or cell["implementation"] == SM80:
        tile = None if cell is None else Tile(int(cell["block_m"]), int(cell["block_n"]))
        stats = {"lse": at["lse"]}
        attention.forward(backend, SM80, *operands, stats, scale=scale, tile=tile)
        return
    form = form_of(cell)
    assert isinstance(form, hopper.ForwardForm)
    optimistic = cell["implementation"] == OPTIMISTIC
    hopper.forward(backend, *operands, at["lse"], scale=scale, form=form, optimistic=optimistic)


def _backward(backend: Any, cell: Cell, at: dict[str, Array]) -> None:
    from kernels import attention, hopper

    operands, gradients = (at["q"], at["k"], at["v"], at["out"]), (at["dq"], at["dk"], at["dv"])
    scale = 1 / math.sqrt(at["q"].shape[3])
    if cell["implementation"] == SM80:
        tile, stats = Tile(int(cell["block_m"]), int(cell["block_n"])), {"lse": at["lse"]}
        attention.backward(backend, SM80, *operands, at["dout"], stats, *gradients, scale=scale, tile=tile)
        return
    form = form_of(cell)
    assert isinstance(form, hopper.BackwardForm)
    hopper.backward(backend, *operands, at["dout"], at["lse"], *gradients, scale=scale, form=form)


EXPERIMENT = Experiment("sm-ceilings", cells, predict, measure, device="host", seconds=30)
