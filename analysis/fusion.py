"""Passes over memory and bytes of element-wise chains and layer norm, unfused and fused.

A pass is one read or write of all rows x cols elements. An unfused chain writes every intermediate
result and reads it again; fused, only what goes in and what comes out moves. Per-column vectors
(bias, gamma, beta) and row statistics are counted too; they are no passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.shapes import ITEMSIZE, STAT_BYTES

#: Rows a block goes down with its column vectors in registers; threads of a block.
ROWS_PER_BLOCK = 16
THREADS = 256


@dataclass(frozen=True)
class Operation:
    """One kernel: full tensors it reads and writes, column vectors, row statistics."""

    kernel: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    vectors: tuple[str, ...] = ()
    statistics_read: tuple[str, ...] = ()
    statistics_written: tuple[str, ...] = ()
    row_a_block: bool = False

    @property
    def passes(self) -> int:
        """Full-tensor reads and writes."""
        return len(self.reads) + len(self.writes)


#: chain -> unfused operations, fused operation
CHAINS: dict[str, tuple[tuple[Operation, ...], Operation]] = {
    "scale-shift": (
        (Operation("scale", ("x",), ("scaled",)), Operation("shift", ("scaled",), ("y",))),
        Operation("scale_shift", ("x",), ("y",)),
    ),
    "bias-gelu-dropout-residual": (
        (
            Operation("bias_add", ("x",), ("biased",), ("bias",)),
            Operation("gelu", ("biased",), ("activated",)),
            Operation("dropout", ("activated",), ("dropped",)),
            Operation("residual_add", ("dropped", "residual"), ("y",)),
        ),
        Operation("bias_gelu_dropout_residual", ("x", "residual"), ("y",), ("bias",)),
    ),
    "layer-norm": (
        (
            Operation("row_mean", ("x",), (), statistics_written=("mean",), row_a_block=True),
            Operation("row_variance", ("x",), (), (), ("mean",), ("variance",), True),
            Operation("normalise", ("x",), ("normalised",), statistics_read=("mean", "variance"), row_a_block=True),
            Operation("affine", ("normalised",), ("y",), ("gamma", "beta")),
        ),
        Operation("layer_norm", ("x",), ("y",), ("gamma", "beta")),
    ),
}


def operations(chain: str, fused: bool) -> tuple[Operation, ...]:
    """The kernels of a chain, in order."""
    if chain not in CHAINS:
        raise ValueError(f"chain must be one of {sorted(CHAINS)}, got {chain!r}")
    unfused, one = CHAINS[chain]
    return (one,) if fused else unfused


def passes(chain: str, fused: bool) -> int:
    """Passes over memory of a chain."""
    return sum(operation.passes for operation in operations(chain, fused))


def predict_fusion(chain: str, fused: bool, rows: int, cols: int, dtype: str) -> dict[str, dict[tuple[str, str], int]]:
    """Kernel -> (tensor, direction) -> bytes at the SM boundary, as the host backend counts."""
    if min(rows, cols) < 1:
        raise ValueError(f"rows {rows} and cols {cols} must be positive")
    full = rows * cols * ITEMSIZE[dtype]
    counted: dict[str, dict[tuple[str, str], int]] = {}
    for operation in operations(chain, fused):
        blocks = rows if operation.row_a_block else -(-rows // ROWS_PER_BLOCK)
        counted[operation.kernel] = {
            **{(name, "read"): full for name in operation.reads},
            **{(name, "write"): full for name in operation.writes},
            **{(name, "read"): blocks * cols * ITEMSIZE[dtype] for name in operation.vectors},
            # one lane of every warp reads a statistic and hands it to the others
            **{(name, "read"): rows * THREADS // 32 * STAT_BYTES for name in operation.statistics_read},
            **{(name, "write"): rows * STAT_BYTES for name in operation.statistics_written},
        }
    return counted


def total_bytes(counted: dict[str, dict[tuple[str, str], int]]) -> int:
    """All bytes of a prediction or of the host backend's counters."""
    return sum(nbytes for kernel in counted.values() for nbytes in kernel.values())
