"""Launch ``fused_elementwise.cu``: chains of element-wise operations and layer norm, fused or not.

x, residual and y are dense (rows, cols) in fp16, bf16 or fp32; bias, gamma and beta are (cols,).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np

from analysis.arguments import checked, real
from analysis.fusion import ROWS_PER_BLOCK, THREADS, Operation, operations
from kernels.checks import require_int32, single
from kernels.ladder_arrays import flat_grid, require_fit
from kernels.launch import DTYPE_CODE, Argument, Array, Backend, IoType, Kernel, Word, contiguous_strides
from kernels.philox import drop_threshold, keep_scale

SCRATCH_BYTES = THREADS // 32 * 4
SHARED_LIMIT_BYTES = 48 * 1024


@checked
def elementwise_kernel(entry: str, dtype: IoType, vector: Annotated[int, (1, 4, 8)]) -> Kernel:
    """One entry point; ``vector`` elements move at once (1, or 16 bytes' worth)."""
    macros = {"DTYPE": DTYPE_CODE[dtype], "THREADS": THREADS, "ROWS": ROWS_PER_BLOCK, "VEC": vector}
    return Kernel("beside/fused_elementwise.cu", entry, tuple(macros.items()), THREADS)


def all_kernels() -> list[Kernel]:
    """Every entry point in bf16, vectorised, for compile tests."""
    entries = [
        operation.kernel
        for chain in ("scale-shift", "bias-gelu-dropout-residual", "layer-norm")
        for fused in (False, True)
        for operation in operations(chain, fused)
    ]
    return [elementwise_kernel(entry, "bf16", 8) for entry in entries]


@checked
def run_chain(
    backend: Backend,
    chain: str,
    arrays: Mapping[str, Array],
    *,
    fused: bool,
    scale: float = 1.0,
    shift: float = 0.0,
    dropout_p: float = 0.0,
    seed: Word = 0,
    eps: float = 1e-5,
    stream: Word | None = None,
) -> None:
    """Run a chain of ``analysis.fusion.CHAINS`` from ``arrays["x"]`` to ``arrays["y"]``.

    Args:
        arrays: "x", "y" and what the chain needs besides: "residual", "bias", "gamma", "beta".
        scale, shift: of "scale-shift". dropout_p, seed: of the dropout; the mask depends on
            (seed, element) only. eps: of the layer norm.

    Raises:
        ValueError: a missing array, or shapes, types or strides that disagree; nothing is launched.
    """
    scale, shift = single("scale", scale), single("shift", shift)
    eps = single("eps", real("eps", eps, least=0.0))
    steps = operations(chain, fused)
    x = _require(arrays, "x")
    if len(x.shape) != 2 or min(x.shape) < 1:
        raise ValueError(f"x must be (rows, cols) and not empty, got {x.shape}")
    require_int32("x", x.shape)
    if x.dtype not in DTYPE_CODE:
        raise ValueError(f"x is {x.dtype}, not one of {sorted(DTYPE_CODE)}")
    rows, cols = x.shape
    made = {name for step in steps for name in (*step.writes, *step.statistics_written)}
    held: dict[str, Array] = {}
    for step in steps:
        for name in (*step.reads, *step.vectors, *step.writes):
            if name in held:
                continue
            if name in made and name != "y":
                held[name] = backend.empty(name, x.shape, x.dtype)
                continue
            held[name] = _require(arrays, name)
            shape = (cols,) if name in step.vectors else x.shape
            if held[name].shape != shape or held[name].dtype != x.dtype:
                found = f"{held[name].shape} {held[name].dtype}"
                raise ValueError(f"{name} is {found}, x needs {shape} {x.dtype}")
            if held[name].strides != contiguous_strides(shape):
                raise ValueError(f"{name}: strides {held[name].strides} are not contiguous")
        for name in step.statistics_written:
            held[name] = backend.empty(name, (rows,), "fp32")
    width = 16 // x.itemsize
    aligned = cols % width == 0 and all(a.pointer % 16 == 0 for a in held.values())
    row_bytes = SCRATCH_BYTES + 3 * 4 * cols  # a row, gamma and beta in fp32
    if any(step.kernel == "layer_norm" for step in steps):
        require_fit(f"a row of {cols} elements", row_bytes, SHARED_LIMIT_BYTES)
    drop = (np.uint64(seed), np.uint32(drop_threshold(dropout_p)), np.float32(keep_scale(dropout_p)))
    tails: dict[str, tuple[np.generic, ...]] = {
        "scale": (np.float32(scale),),
        "shift": (np.float32(shift),),
        "scale_shift": (np.float32(scale), np.float32(shift)),
        "dropout": drop,
        "bias_gelu_dropout_residual": drop,
        "normalise": (np.float32(eps),),
        "layer_norm": (np.float32(eps),),
    }
    for step in steps:
        shared = SCRATCH_BYTES if step.row_a_block else 0
        if step.kernel == "layer_norm":
            shared = row_bytes
        backend.launch(
            elementwise_kernel(step.kernel, x.dtype, width if aligned else 1),
            flat_grid(rows if step.row_a_block else -(-rows // ROWS_PER_BLOCK)),
            shared,
            [*_order(step, held), *_sizes(step, rows, cols), *tails.get(step.kernel, ())],
            stream,
        )


def _require(arrays: Mapping[str, Array], name: str) -> Array:
    if name not in arrays:
        raise ValueError(f"array {name!r} is missing, got {sorted(arrays)}")
    return arrays[name]


def _order(step: Operation, held: Mapping[str, Array]) -> list[Argument]:
    """Arguments as the kernels take them: first input, vectors, other inputs, outputs."""
    inputs = [*step.reads[:1], *step.vectors, *step.reads[1:], *step.statistics_read]
    outputs = [*step.statistics_written, *step.writes]
    return [
        *(held[name].with_access("r", name) for name in inputs),
        *(held[name].with_access("w", name) for name in outputs),
    ]


def _sizes(step: Operation, rows: int, cols: int) -> list[np.generic]:
    return [np.int32(cols)] if step.row_a_block else [np.int32(rows), np.int32(cols)]
