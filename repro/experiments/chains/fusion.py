"""Element-wise chains and layer norm: bytes unfused, fused, in torch eager and torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from analysis.fusion import CHAINS, passes, predict_fusion, total_bytes
from repro.experiments import Cell, Context, Experiment, Row, row

ROWS, COLS, DTYPE = 256, 1024, "fp32"
IMPLEMENTATIONS = ("unfused", "fused", "torch-eager", "torch-compile")
FULL_BYTES = ROWS * COLS * 4
DROPOUT = 0.1
#: What torch's eager operations move in passes; its dropout also writes a mask of one byte.
EAGER_BYTES = {
    "scale-shift": 4 * FULL_BYTES,
    "bias-gelu-dropout-residual": 9 * FULL_BYTES + FULL_BYTES // 4 + COLS * 4,
    # one operation: x, gamma, beta in; y, mean and reciprocal deviation out
    "layer-norm": 2 * FULL_BYTES + 2 * COLS * 4 + 2 * ROWS * 4,
}


def cells() -> list[Cell]:
    """Every chain in every implementation."""
    return [
        Cell(implementation=how, chain=chain, rows=ROWS, cols=COLS, dtype=DTYPE)
        for chain in CHAINS
        for how in IMPLEMENTATIONS
    ]


def predict(cell: Cell) -> Iterator[Row]:
    """Bytes of our kernels and of eager operations; a compiler should reach the fused passes."""
    chain, how = str(cell["chain"]), str(cell["implementation"])

    if how in ("unfused", "fused"):
        fused = how == "fused"
        value = total_bytes(predict_fusion(chain, fused, ROWS, COLS, DTYPE))
        yield row("passes", passes(chain, fused))
    elif how == "torch-eager":
        value = EAGER_BYTES[chain]
    else:
        value = passes(chain, True) * FULL_BYTES
    yield row("moved_bytes", value)


def measure(cell: Cell, context: Context) -> list[Row]:
    """Counted by the host backend, by operation, or by the compiler."""
    chain, how = str(cell["chain"]), str(cell["implementation"])

    if how in ("unfused", "fused"):
        value, tool = _kernels(chain, how == "fused", context), "host backend, counted"
    elif how == "torch-eager":
        from repro.training.op_bytes import OperationBytes

        function, args = _torch(chain)
        with OperationBytes() as counted:
            function(*args)
        value, tool = counted.total_bytes, "operands of dispatched operations"
    else:
        from repro.instruments.inductor_bytes import compiled_bytes

        function, args = _torch(chain)
        value, tool = compiled_bytes(function, *args), "inductor's account"
    return [row("moved_bytes", value, tool=tool)]


def _kernels(chain: str, fused: bool, context: Context) -> int:
    import numpy as np

    from kernels.beside.elementwise import run_chain
    from kernels.launch import from_numpy

    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return random.standard_normal(shape).astype(np.float32)

    full, vector = (ROWS, COLS), (COLS,)
    values = {name: normal(*full) for name in ("x", "residual", "y")}
    values |= {name: normal(*vector) for name in ("bias", "gamma", "beta")}
    backend = context.host()
    arrays = {name: from_numpy(name, x, "rw") for name, x in values.items()}
    run_chain(backend, chain, arrays, fused=fused, scale=1.7, shift=-0.3, dropout_p=DROPOUT, seed=1)
    return total_bytes(backend.traffic)


def _torch(chain: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    x, residual = torch.randn(ROWS, COLS), torch.randn(ROWS, COLS)
    bias, gamma, beta = torch.randn(COLS), torch.randn(COLS), torch.randn(COLS)
    if chain == "scale-shift":
        return (lambda x: x * 1.7 + -0.3), (x,)
    if chain == "layer-norm":
        return (lambda x, g, b: torch.native_layer_norm(x, [COLS], g, b, 1e-5)), (x, gamma, beta)

    def block(x: Any, bias: Any, residual: Any) -> Any:
        active = functional.gelu(x + bias, approximate="tanh")
        return torch.native_dropout(active, DROPOUT, True)[0] + residual

    return block, (x, bias, residual)


EXPERIMENT = Experiment(
    "fusion",
    cells,
    predict,
    measure,
    device="host",
    sources=("kernels/beside/fused_elementwise.cu", "kernels/beside/elementwise.py", "repro/training/op_bytes.py"),
    seconds=30,
    on_demand=True,
)
