"""What one SM does in a round of a kernel's main loop, and which of its units sets the pace.

A round of the forward is one key tile for a tile of queries, a round of the backward one query tile
for a tile of keys, by all warps of the block that compute. Per round each unit is busy for a number
of clocks that follows from the shapes alone:

- tensor cores: the products' FLOPs;
- exponentials: one a score, and in the forward with the exact softmax one more for each of the four
  threads that hold a row, to rescale it;
- shared memory: every byte that a product reads from it, every byte that copies bring, and what
  threads write and read besides. On Hopper (:func:`forward_round`, :func:`backward_round`) a
  ``wgmma`` of 64 x n x 16 reads the 16 columns of its n-row operand once for four warps, and those
  of its 64-row operand unless they are in registers. Before (:func:`warp_forward_round`,
  :func:`warp_backward_round`) every warp loads its operands itself: what all warps need is read as
  often as there are warps;
- issue slots: the instructions a warp executes, one warp of each consumer warpgroup to a scheduler.
  Only the compiler knows their number; it is an argument here.

The slowest unit bounds the round from below, as if all overlapped perfectly: a bound beside that of
``analysis.time_model``, whose ceilings (tensor cores, exponentials, SM boundary, HBM) leave out the
memory and the schedulers of the SM itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from analysis.flops import THREADS_A_ROW
from analysis.gpu_file import SM
from analysis.hardware import EXP_PER_CLOCK_PER_SM, SHARED_BYTES_PER_CLOCK_PER_SM

HOPPER_TENSOR_FLOPS: int = SM[9, 0]["tensor_flops_per_clock"]
ITEMSIZE = 2
WARPGROUP_ROWS = 64
WARPS = 4
"""Of a warpgroup; also an SM's schedulers, one warp of the group to each."""
KEYS = 128
"""Key rows of a backward block: two consumer warpgroups of 64."""
CONSUMERS_BACKWARD = 2
UNITS = ("tensor cores", "exponentials", "shared memory", "issue slots")


@dataclass(frozen=True)
class Round:
    """One round on one SM.

    shared_bytes: what threads, products and copies ask of shared memory, by purpose.
    repeated_bytes: how much of it costs nothing, since threads of one instruction ask for the same.
    consumers: warps that compute, a scheduler.
    """

    flops: int
    exponentials: int
    shared_bytes: Mapping[str, int]
    repeated_bytes: int
    consumers: int

    @property
    def all_shared_bytes(self) -> int:
        """Bytes asked of shared memory, as the host backend counts them."""
        return sum(self.shared_bytes.values())

    def clocks(
        self, instructions: int | None = None, tensor_flops_per_clock: int = HOPPER_TENSOR_FLOPS
    ) -> dict[str, float]:
        """Clocks each unit is busy. instructions: of a warp in a round; None leaves them out."""
        served = self.all_shared_bytes - self.repeated_bytes
        found = {
            "tensor cores": self.flops / tensor_flops_per_clock,
            "exponentials": self.exponentials / EXP_PER_CLOCK_PER_SM,
            "shared memory": served / SHARED_BYTES_PER_CLOCK_PER_SM,
        }
        if instructions is not None:
            found["issue slots"] = float(instructions * self.consumers)
        return found

    def shared_per_tensor(self, tensor_flops_per_clock: int = HOPPER_TENSOR_FLOPS) -> float:
        """Clocks of shared memory for each clock of the tensor cores."""
        clocks = self.clocks(tensor_flops_per_clock=tensor_flops_per_clock)
        return clocks["shared memory"] / clocks["tensor cores"]

    def tensor_share(self, instructions: int | None = None) -> float:
        """Largest share of the time that the tensor cores can be busy, (0, 1]."""
        clocks = self.clocks(instructions)
        return clocks["tensor cores"] / max(clocks.values())


def forward_round(head_dim: int, block_m: int, block_n: int, *, optimistic: bool = False) -> Round:
    """S = Q Kᵀ, O += P V for block_m queries (64 a consumer) and block_n keys.

    P stays in registers. optimistic: no row maximum, so nothing is rescaled.
    """
    consumers, rest = divmod(block_m, WARPGROUP_ROWS)
    if rest or not consumers:
        raise ValueError(f"block_m={block_m} is no multiple of a warpgroup's {WARPGROUP_ROWS} rows")
    tile = block_n * head_dim * ITEMSIZE
    rescaling = 0 if optimistic else THREADS_A_ROW * block_m
    return Round(
        flops=4 * block_m * block_n * head_dim,
        exponentials=block_m * block_n + rescaling,
        shared_bytes=MappingProxyType(
            {
                "Q for S": block_m * head_dim * ITEMSIZE,
                "K for S": consumers * tile,
                "V for O": consumers * tile,
                "K and V arriving": 2 * tile,
            }
        ),
        repeated_bytes=0,
        consumers=consumers,
    )


def backward_round(head_dim: int, block_m: int, *, dq_from_registers: bool = False) -> Round:
    """Sᵀ = K Qᵀ, dPᵀ = V dOᵀ, dV += Pᵀ dO, dK += dSᵀ Q, dQ += dS K: block_m queries, 128 keys.

    Pᵀ and dSᵀ stay in registers for dV and dK; dS goes through shared memory for dQ, and dQ in
    fp32 on its way out. The two warpgroups split keys, except in dQ: of 128 queries each takes 64,
    of 64 queries each takes all and half of dQ's columns, and other numbers are the narrow side of
    the product, each warpgroup with half of the columns.

    dq_from_registers: dQ is added to memory from registers. That its bytes then pass the SM's load
    and store unit, which shares its way with shared memory, is not counted: nobody documents its
    price.
    """
    keys, queries = KEYS * head_dim * ITEMSIZE, block_m * head_dim * ITEMSIZE
    both, ds = CONSUMERS_BACKWARD, block_m * KEYS * ITEMSIZE
    if block_m == CONSUMERS_BACKWARD * WARPGROUP_ROWS:
        for_dq = {"dS for dQ": ds, "K for dQ": both * keys}
    elif head_dim == CONSUMERS_BACKWARD * WARPGROUP_ROWS:
        for_dq = {"dS for dQ": both * ds, "K for dQ": keys}
    else:
        raise ValueError(
            f"two warpgroups of {WARPGROUP_ROWS} rows divide neither block_m={block_m} nor head_dim={head_dim}"
        )
    # Every warp loads lse and delta of each group of 8 queries, 8 bytes a thread. Only 32 of the
    # 256 bytes are distinct, but a load takes a clock, as 128 would.
    loads = both * WARPS * 2 * (block_m // 8)
    statistics = loads * 32 * 8
    dq = block_m * head_dim * 4
    through_shared = {} if dq_from_registers else {"dQ stored": dq, "dQ leaving": dq}
    return Round(
        flops=10 * block_m * KEYS * head_dim,
        exponentials=block_m * KEYS,
        shared_bytes=MappingProxyType(
            {
                "K for S": keys,
                "Q for S": both * queries,
                "V for dP": keys,
                "dO for dP": both * queries,
                "dO for dV": both * queries,
                "Q for dK": both * queries,
                **for_dq,
                "dS stored": ds,
                **through_shared,
                "Q and dO arriving": 2 * queries,
                "lse and delta arriving": 2 * block_m * 4,
                "lse and delta": statistics,
            }
        ),
        repeated_bytes=statistics - loads * SHARED_BYTES_PER_CLOCK_PER_SM,
        consumers=both,
    )


def warp_forward_round(head_dim: int, block_m: int, block_n: int, warps: int) -> Round:
    """The forward of the sm_80 kernels, 16-bit: block_m / warps queries a warp, all keys.

    P stays in registers, and Q where a thread has room for it.
    """
    groups = _whole(block_m, 16 * warps)
    tile = block_n * head_dim * ITEMSIZE
    in_registers = groups * head_dim <= 128
    return Round(
        flops=4 * block_m * block_n * head_dim,
        exponentials=block_m * block_n + THREADS_A_ROW * block_m,
        shared_bytes=MappingProxyType(
            {
                "Q for S": 0 if in_registers else block_m * head_dim * ITEMSIZE,
                "K for S": warps * tile,
                "V for O": warps * tile,
                "K and V arriving": 2 * tile,
            }
        ),
        repeated_bytes=0,
        consumers=warps // WARPS,
    )


def warp_backward_round(head_dim: int, block_m: int, block_n: int, warps: int) -> Round:
    """The backward of the sm_80 kernels, 16-bit, head_dim up to 128: block_n / warps keys a warp.

    Queries are worked on 32 or 16 at a time, and for each of these chunks a warp reads its keys
    again. dS goes through shared memory for dQ, which is made in pieces of 16 x 32.
    """
    if head_dim > 128:
        raise ValueError(f"head_dim={head_dim}: beyond 128 warps share keys, which is not modelled")
    groups = _whole(block_n, 16 * warps)
    chunks = block_m // (32 if groups == 1 and block_m % 32 == 0 else 16)
    keys, queries = block_n * head_dim * ITEMSIZE, block_m * head_dim * ITEMSIZE
    ds = block_m * block_n * ITEMSIZE
    loads = warps * 2 * (block_m // 8)
    statistics = loads * 32 * 8
    return Round(
        flops=10 * block_m * block_n * head_dim,
        exponentials=block_m * block_n,
        shared_bytes=MappingProxyType(
            {
                "K for S": chunks * keys,
                "Q for S": warps * queries,
                "V for dP": chunks * keys,
                "dO for dP": warps * queries,
                "dO for dV": warps * queries,
                "Q for dK": warps * queries,
                "dS stored": ds,
                "dS for dQ": head_dim // 32 * ds,
                "K for dQ": block_m // 16 * keys,
                "Q and dO arriving": 2 * queries,
                "lse and delta arriving": 2 * block_m * 4,
                "lse and delta": statistics,
            }
        ),
        repeated_bytes=statistics - loads * SHARED_BYTES_PER_CLOCK_PER_SM,
        consumers=warps // WARPS,
    )


def _whole(rows: int, rows_at_once: int) -> int:
    groups, rest = divmod(rows, rows_at_once)
    if rest or not groups:
        raise ValueError(f"{rows} rows are no multiple of the {rows_at_once} that warps take at once")
    return groups
