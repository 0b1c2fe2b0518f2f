"""The tiling ladder of a matrix product: bytes at each level against tile size, counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from analysis.gemm import GemmShape, GemmTile, predict_gemm, square
from repro.experiments import Cell, Context, Experiment, Row, row

SIDE = 192
#: (form, tile): global traffic follows the block tile, shared traffic the thread or warp tile.
POINTS: tuple[tuple[str, GemmTile | None], ...] = (
    ("naive", None),
    *(("tiled", square(side)) for side in (8, 16, 32)),
    ("three-level", GemmTile(32, 32, 16, 16, 32, 4, 4)),
    ("three-level", GemmTile(64, 64, 16, 32, 32, 8, 4)),
    ("three-level", GemmTile(96, 96, 16, 48, 48, 12, 6)),
    ("tensor-core", GemmTile(32, 32, 32, 16, 32)),
    ("tensor-core", GemmTile(64, 64, 32, 32, 32)),
    ("tensor-core", GemmTile(96, 96, 32, 48, 48)),
)


def cells() -> list[Cell]:
    """One product of SIDE x SIDE matrices each."""
    found = []
    for form, tile in POINTS:
        sizes = {} if tile is None else {k: v for k, v in vars(tile).items() if v}
        dtype = "fp16" if form == "tensor-core" else "fp32"
        found.append(Cell(implementation=form, side=SIDE, dtype=dtype, **sizes))
    return found


def tile_of(cell: Cell) -> GemmTile | None:
    """The cell's tile."""
    names = ("block_m", "block_n", "block_k", "warp_m", "warp_n", "thread_m", "thread_n")
    if "block_m" not in cell:
        return None
    return GemmTile(*(int(cell.get(name, 0)) for name in names))


def predict(cell: Cell) -> Iterator[Row]:
    """Bytes by tensor at the SM boundary, and in and out of shared memory."""
    shape = GemmShape(SIDE, SIDE, SIDE, str(cell["dtype"]))
    traffic = predict_gemm(str(cell["implementation"]), shape, tile_of(cell))
    found = {("a", "read"): traffic.a_read, ("b", "read"): traffic.b_read, ("c", "write"): traffic.c_write}
    shared = {"read": traffic.shared_read, "write": traffic.shared_write}
    yield from _rows(found, shared)


def measure(cell: Cell, context: Context) -> Iterator[Row]:
    """The kernel, executed and counted on the host backend; the result is checked."""
    import numpy as np

    from kernels.beside.gemm import gemm
    from kernels.launch import NUMPY_TYPES, from_numpy

    random = np.random.default_rng(0)
    dtype = NUMPY_TYPES[str(cell["dtype"])]
    a, b = (random.integers(-3, 4, (SIDE, SIDE)).astype(dtype) for _ in range(2))
    c = np.full((SIDE, SIDE), np.nan, dtype)
    backend = context.host()
    x, y = (from_numpy(name, values, "r") for name, values in (("a", a), ("b", b)))
    gemm(backend, str(cell["implementation"]), x, y, from_numpy("c", c, "w"), tile_of(cell))
    if not np.array_equal(c.astype(np.float64), a.astype(np.float64) @ b.astype(np.float64)):
        raise RuntimeError("the product of small integers is not exact")
    ((entry, counted),) = backend.traffic.items()
    return _rows(counted, backend.shared_traffic[entry], tool="host backend, counted", kernel=entry)


def _rows(counted: dict[tuple[str, str], int], shared: dict[str, int], **common: Any) -> Iterator[Row]:
    for (tensor, direction), value in counted.items():
        yield row("global_bytes", value, level="sm", tensor=tensor, direction=direction, **common)
    for direction, value in shared.items():
        yield row("shared_bytes", value, direction=direction, **common)


EXPERIMENT = Experiment(
    "gemm-ladder",
    cells,
    predict,
    measure,
    device="host",
    sources=(
        "kernels/beside/gemm.py",
        "kernels/beside/gemm_naive.cu",
        "kernels/beside/gemm_tiled.cu",
        "kernels/beside/gemm_three_level.cu",
        "kernels/beside/gemm_tensor_core.cu",
        "kernels/include",
        "kernels/host",
    ),
    seconds=15,
)
