"""HBM traffic: what is left of the SM-boundary traffic after L2.

*Compulsory*: each kernel moves each of its tensors once. A target of atomic additions is fetched
into L2 and written back, so it counts both ways. Writes that are still dirty in L2 when the kernel
ends are not in a counter read at that moment, so a write prediction comes with a lower end,
``write_bytes`` minus the L2's size.

What is moved *again* is decided by who reads what, and when. Blocks of one head walk the same keys:
in step, they fetch them once per wave. Blocks of FlashAttention 2022 walk rows that nobody else
reads. :func:`predict_hbm` therefore runs the launch through a simulated L2 (``analysis.l2``), in
which nothing is fitted. Where all tensors fit into L2 with their copies nothing can be moved again,
and nothing is simulated. Without a C compiler the formulas of ``analysis.l2.closed_forms`` stand
in, and ``HbmTraffic.method`` says so.

Against the H200's counters (FlashAttention-2 forward as PyTorch ships it, head_dim 128, one head of
32k to 256k tokens and four of 128k): between -9 and +5 %, where waves in step are up to 17 % low.
The difference is the last wave, in which some SMs hold one block instead of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from analysis.algorithms import check_order, find
from analysis.features import FEATURES
from analysis.hardware import Gpu
from analysis.l2 import L2, PACES, Pace, UnavailableError, available
from analysis.l2.kernels import KERNELS, Times, by_waves, simulated, simulated_once
from analysis.packed import Lengths
from analysis.shapes import AttentionShape, BiasShape, Tile
from analysis.sums.flash_sm90 import COUNTER_BYTES
from analysis.sums.packed import TABLES, table_bytes
from analysis.traffic import Traffic, predict_traffic

KernelTensorBytes = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class HbmTraffic:
    """Predicted bytes per kernel and tensor that cross between L2 and HBM."""

    reads: KernelTensorBytes
    writes: KernelTensorBytes
    l2_bytes: int
    method: str = "each tensor once"

    @property
    def read_bytes(self) -> int:
        return sum(sum(tensors.values()) for tensors in self.reads.values())

    @property
    def write_bytes(self) -> int:
        """All of it, once it has left L2."""
        return sum(sum(tensors.values()) for tensors in self.writes.values())

    @property
    def write_bytes_at_kernel_end(self) -> int:
        """The least a counter can show if each kernel leaves a whole L2 of dirty lines behind."""
        return sum(max(0, sum(tensors.values()) - self.l2_bytes) for tensors in self.writes.values())


_MAIN_KERNELS = tuple(
    f"{name}_{pass_}{form}"
    for name, form in (
        ("flash", ""),
        ("flash", "_sm90"),
        ("flash", "_sm90_persistent"),
        ("flash", "_sm90_optimistic"),
        ("flash", "_sm90_persistent_optimistic"),
        ("flash1", ""),
    )
    for pass_ in ("forward", "backward")
)
#: Read or added to by every item and head that shares a bias.
SHARED_BY_HEADS = (("bias", "read"), ("dbias_accum", "atomic"))
_PER_QUERY = frozenset({"q", "out", "dout", "lse", "lse2", "delta", "m", "l", "dq", "dq_accum", "out_tmp", "dq_tmp"})


def main_kernel(traffic: Traffic) -> str:
    """The kernel of a pass that walks the tile loop; "" where every kernel is a plain product."""
    return next((kernel for kernel in traffic.kernels if kernel in _MAIN_KERNELS), "")


def tensor_bytes(shape: AttentionShape) -> dict[str, int]:
    """Size of every tensor the kernels name; dq_accum, dq_tmp and out_tmp are fp32 accumulators,
    tile_counter is the counter of the persistent forward."""
    accumulator = shape.query_bytes // shape.itemsize * 4
    sizes = dict.fromkeys(("q", "out", "dout", "dq"), shape.query_bytes)
    sizes |= dict.fromkeys(("k", "v", "dk", "dv"), shape.key_bytes)
    sizes |= dict.fromkeys(("s", "p", "dp", "ds"), shape.score_bytes)
    sizes |= dict.fromkeys(("lse", "lse2", "delta", "dlse", "m", "l"), shape.row_bytes)
    for each in FEATURES.values():
        sizes |= each.sizes(shape)
    sizes |= dict.fromkeys(("dq_accum", "out_tmp", "dq_tmp"), accumulator)
    return sizes | {"tile_counter": COUNTER_BYTES}


def compulsory_hbm(traffic: Traffic, shape: AttentionShape, bias: BiasShape | None = None) -> HbmTraffic:
    """Each kernel touches each of its tensors once: an L2 of unlimited size, empty at the start.

    Queries that see no key, and keys that no query sees, are not read by the main kernels. The
    partial tiles of the deterministic backward are distinct memory, so none is saved there.

    bias: (items, heads) of a stored bias; items and heads that share it read the same bytes.
    """
    sizes = tensor_bytes(shape)
    # As many as the preprocess sets to 0.
    preprocess = traffic.kernels.get("flash_backward_sm90_preprocess", {})
    sizes["turns"] = preprocess.get(("turns", "write"), 0)
    seeing, seen = shape.visible.rows_that_see, shape.visible.keys_seen
    reads: dict[str, dict[str, int]] = {}
    writes: dict[str, dict[str, int]] = {}
    for kernel, entries in traffic.kernels.items():
        reads[kernel], writes[kernel] = {}, {}
        plain_accumulator = ("dq_accum", "write") in entries
        for (tensor, direction), count in entries.items():
            once = min(count, sizes.get(tensor, count))
            if kernel in _MAIN_KERNELS and tensor in _PER_QUERY and direction != "write":
                once = min(once, sizes[tensor] // shape.seqlen_q * seeing)
            if bias is not None and (tensor, direction) in SHARED_BY_HEADS:
                once = count * bias[0] * bias[1] // (shape.batch * shape.heads)
            if tensor in ("k", "v") and direction == "read":
                once = min(once, sizes[tensor] // shape.seqlen_k * seen)
            if tensor == "dq_accum" and (plain_accumulator or direction == "read"):
                once = count
            if direction in ("read", "atomic"):
                reads[kernel][tensor] = once
            if direction in ("write", "atomic"):
                writes[kernel][tensor] = once
    return HbmTraffic(reads, writes, l2_bytes=0)


def compulsory_packed(
    algorithm: str, shape: AttentionShape, tile: Tile, pass_: str, traffic: Traffic, *, lengths: Lengths, **options: Any
) -> HbmTraffic:
    """Each kernel of ``traffic``, the pass over packed sequences, touches each tensor once.

    Of a sequence that is what :func:`compulsory_hbm` says. Sequences share what options have a
    number a head of (slopes), the tables and the counter, which are touched once; the rows of
    sequences without keys or queries are moved once.
    """
    shared = {"tile_counter": COUNTER_BYTES}
    for option in FEATURES.values():
        shared |= option.sizes(shape) if option.with_packed else {}
    shared |= dict.fromkeys(TABLES, table_bytes(lengths))
    seen = [(each, predict_traffic(algorithm, each, tile, pass_, **options)) for each in lengths.shapes(shape)]
    parts = [(part, compulsory_hbm(part, each)) for each, part in seen]
    sides: dict[str, dict[str, dict[str, int]]] = {"read": {}, "write": {}}
    for kernel, entries in traffic.kernels.items():
        for side, ways in (("read", ("read", "atomic")), ("write", ("write", "atomic"))):
            into = sides[side].setdefault(kernel, {})
            for (tensor, way), count in entries.items():
                if way not in ways:
                    continue
                unseen = count - sum(part.kernels[kernel].get((tensor, way), 0) for part, _ in parts)
                once = [getattr(found, f"{side}s")[kernel].get(tensor, 0) for _, found in parts]
                into[tensor] = min(unseen + sum(once), shared.get(tensor, count))
    return HbmTraffic(sides["read"], sides["write"], l2_bytes=0)


SIMULATED, BY_WAVES = "simulated L2", "waves in step (no C compiler to simulate L2)"
WAVES_ASKED = "waves in step"


def predict_hbm(
    algorithm: str,
    shape: AttentionShape,
    tile: Tile,
    pass_: str,
    gpu: Gpu,
    blocks_per_sm: int = 1,
    *,
    pace: Pace | None = None,
    order: str = "rows",
    heads_per_group: int | None = None,
    waves: bool = False,
    **options: Any,
) -> HbmTraffic:
    """HBM traffic of one pass, each kernel starting with a cold L2 as under a profiler.

    blocks_per_sm: thread blocks of the main kernel that an SM holds at once
    (``analysis.occupancy``). Blocks are launched head by head, the Hopper kernels' in groups of
    heads, and within a head those with the longest walk first: under the causal mask the last query
    tile (forward) or the first key tile (backward). Persistent blocks take their tiles in that
    order too.
    pace: how fast blocks walk; by default blocks of an SM share it equally. order: of the walk
    (``analysis.algorithms.ORDERS``). heads_per_group: heads that run side by side, by default as
    many as the kernels take. waves: blocks of a wave in step instead of a simulation, for sweeps of
    many points; a sawtooth, a window and a block mask are simulated even so. options: of
    :func:`~analysis.traffic.predict_traffic`; dq_tile is that of the second pass of "flash-split".

    Raises ValueError for an order that the algorithm does not have, UnavailableError where a pace,
    an order, a window or a block mask is asked for and there is no C compiler.
    """
    if blocks_per_sm < 1:
        raise ValueError(f"blocks_per_sm={blocks_per_sm} is below 1")
    check_order(algorithm, pass_, order)
    traffic = predict_traffic(algorithm, shape, tile, pass_, **options)
    found = replace(compulsory_hbm(traffic, shape, options.get("bias")), l2_bytes=gpu.l2_bytes)
    masks = {name: options[name] for name in ("block_mask", "mask_block") if name in options}
    l2, form = L2.of(gpu), find(algorithm).form
    plain = not masks and not shape.windowed and pace is None
    plain = plain and (order, heads_per_group) == ("rows", None)
    for kernel, entries in traffic.kernels.items():
        if kernel not in KERNELS or fits(found, kernel, l2):
            continue
        own = options.get("dq_tile") or tile if kernel == "flash_backward_dq" else tile
        asked = (kernel, tuple(entries), shape, own, l2, gpu.sms, blocks_per_sm)
        if waves and plain:
            found = _moved_again(found, kernel, entries, by_waves(*asked), WAVES_ASKED)
        elif available():
            ask = simulated if masks else simulated_once
            times = ask(*asked, pace or Pace(), order, heads_per_group, form, **masks)
            found = _moved_again(found, kernel, entries, times, SIMULATED)
        elif plain:
            found = _moved_again(found, kernel, entries, by_waves(*asked), BY_WAVES)
        else:
            raise UnavailableError(
                "no C compiler (cc or gcc), so no simulated L2, which a pace, an order of the "
                "keys, a window and a block mask need"
            )
    return _bias_again(found, traffic, shape, l2, options.get("bias"))


def _bias_again(
    found: HbmTraffic, traffic: Traffic, shape: AttentionShape, l2: L2, bias: BiasShape | None
) -> HbmTraffic:
    """A shared bias comes from HBM for every head, unless what lies between two heads that share it
    stays in L2: heads run one after another, so that is one head's bias, or all heads' where the
    items share. (A rule, not a part of the simulated L2, which knows nothing of the bias.)"""
    if bias is None or bias == (shape.batch, shape.heads):
        return found
    between = shape.seqlen_q * shape.seqlen_k * shape.itemsize * bias[1]
    if between <= l2.shared_bytes:
        return found
    reads = {kernel: dict(tensors) for kernel, tensors in found.reads.items()}
    writes = {kernel: dict(tensors) for kernel, tensors in found.writes.items()}
    for kernel, entries in traffic.kernels.items():
        for tensor, direction in SHARED_BY_HEADS:
            count = entries.get((tensor, direction), 0)
            if count:
                reads[kernel][tensor] = count
            if count and direction == "atomic":
                writes[kernel][tensor] = count
    return replace(found, reads=reads, writes=writes)


def read_spread(
    algorithm: str,
    shape: AttentionShape,
    tile: Tile,
    pass_: str,
    gpu: Gpu,
    blocks_per_sm: int = 1,
    *,
    kernel: str | None = None,
    **options: Any,
) -> tuple[int, int]:
    """Least and most bytes read over the paces of ``analysis.l2.PACES``: what the prediction would
    be if thread blocks proceeded otherwise. kernel: of one kernel; by default of the whole pass."""
    found = [
        predict_hbm(algorithm, shape, tile, pass_, gpu, blocks_per_sm, pace=pace, **options) for pace in PACES.values()
    ]
    reads = [f.read_bytes if kernel is None else sum(f.reads[kernel].values()) for f in found]
    return min(reads), max(reads)


def fits(compulsory: HbmTraffic, kernel: str, l2: L2) -> bool:
    """Whether all tensors of a kernel stay in L2, with the copies that both partitions keep: then
    nothing is moved twice, whatever the order."""
    reads, writes = compulsory.reads[kernel], compulsory.writes[kernel]
    sizes = (max(reads.get(t, 0), writes.get(t, 0)) for t in reads.keys() | writes.keys())
    return sum(-(-size // 512) * 512 for size in sizes) <= l2.shared_bytes


def _moved_again(
    found: HbmTraffic, kernel: str, entries: Mapping[tuple[str, str], int], times: Times, method: str
) -> HbmTraffic:
    """Compulsory bytes times how often they move; at most what crosses the SM boundary."""
    reads, writes = dict(found.reads[kernel]), dict(found.writes[kernel])
    for moved, ways, which in ((reads, ("read", "atomic"), 0), (writes, ("write", "atomic"), 1)):
        for tensor, once in moved.items():
            asked = sum(entries.get((tensor, way), 0) for way in ways)
            repeated = times.get(tensor, (1.0, 1.0))[which]
            moved[tensor] = round(min(max(once, once * repeated), max(once, asked)))
    return replace(found, reads={**found.reads, kernel: reads}, writes={**found.writes, kernel: writes}, method=method)
