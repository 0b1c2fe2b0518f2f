"""HBM traffic: what is left of the SM-boundary traffic after L2.

The model has one rule. Thread blocks start in launch order, as many at a time as the GPU holds (a
*wave*), and the blocks of a wave walk the same tensors in step. What a wave shares therefore
crosses HBM once per wave, however many blocks ask for it. If everything a wave walks over fits
in the usable L2 (``Gpu.usable_l2_bytes``, half of a two-partition L2), the next wave finds it
there and it crosses once in all; if it does not fit, a least-recently-used cache has dropped the
beginning by the time the next wave starts, and every wave reads all of it again. Nothing is
fitted.

Everything else is *compulsory*: each tensor once. A target of atomic additions is fetched into
L2 and written back, so it counts both ways. Writes that are still dirty in L2 when the kernel
ends are not in a counter read at that moment, so a write prediction comes with a lower end,
``write_bytes`` minus the L2's size.

Against the H200's counters (FlashAttention-2 forward as PyTorch ships it, head_dim 128): at 32k to
256k tokens 4 to 275 GB cross the SM boundary and 25 MB to 1.6 GB cross to HBM. The rule is within
0.4 % where K and V fit and at two waves of 34 MB, and 9 to 17 % too low beyond. What is missing
grows with the length of the walk (0.12 reads per wave at 67 MB, 0.21 at 134 MB) and hardly with
the number of waves (0.12 at 4 waves, 0.13 at 16). Drift between blocks alone does not produce that:
in ``analysis.l2_simulation`` an LRU cache shows the rule exactly until stragglers trail by more
than it holds, and then far more reads than were measured. The same runs write more to HBM than
their output (41 MB where out and lse are 34), which can only be register spills that were evicted
although they are rewritten every few microseconds: the real L2 does not evict strictly the least
recently used line. Which of the two dominates cannot be told from these counters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from analysis.hardware import Gpu
from analysis.shapes import AttentionShape, Tile
from analysis.sums.flash_sm90 import COUNTER_BYTES
from analysis.tile_loop import TileLoop, tile_loop
from analysis.traffic import Traffic, predict_traffic

KernelTensorBytes = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class HbmTraffic:
    """Predicted bytes per kernel and tensor that cross between L2 and HBM."""

    reads: KernelTensorBytes
    writes: KernelTensorBytes
    l2_bytes: int

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
        return sum(
            max(0, sum(tensors.values()) - self.l2_bytes) for tensors in self.writes.values()
        )


_MAIN_KERNELS = tuple(
    f"{name}_{pass_}{form}"
    for name, form in (
        ("flash", ""), ("flash", "_sm90"), ("flash", "_sm90_persistent"),
        ("flash", "_sm90_optimistic"), ("flash", "_sm90_persistent_optimistic"), ("flash1", ""),
    )
    for pass_ in ("forward", "backward")
)  # fmt: skip
_PER_QUERY = frozenset({"q", "out", "dout", "lse", "lse2", "delta", "m", "l", "dq", "dq_accum"})


def main_kernel(traffic: Traffic) -> str:
    """The kernel of a pass that walks the tile loop; "" where every kernel is a plain product."""
    return next((kernel for kernel in traffic.kernels if kernel in _MAIN_KERNELS), "")


def tensor_bytes(shape: AttentionShape) -> dict[str, int]:
    """Size of every tensor the kernels name; dq_accum is the fp32 accumulator of dq, taken the
    counter of the persistent forward."""
    accumulator = shape.query_bytes // shape.itemsize * 4
    sizes = dict.fromkeys(("q", "out", "dout", "dq"), shape.query_bytes)
    sizes |= dict.fromkeys(("k", "v", "dk", "dv"), shape.key_bytes)
    sizes |= dict.fromkeys(("s", "p", "dp", "ds"), shape.score_bytes)
    sizes |= dict.fromkeys(("lse", "lse2", "delta", "dlse", "m", "l"), shape.row_bytes)
    sizes["key_mask"] = shape.batch * shape.seqlen_k
    return sizes | {"dq_accum": accumulator, "taken": COUNTER_BYTES}


def compulsory_hbm(traffic: Traffic, shape: AttentionShape) -> HbmTraffic:
    """Each kernel touches each of its tensors once: an L2 of unlimited size, empty at the start.

    Queries that see no key are not read by the main kernels. The partial tiles of the
    deterministic backward are distinct memory, so none is saved there.
    """
    sizes = tensor_bytes(shape)
    # As many as the preprocess sets to 0.
    preprocess = traffic.kernels.get("flash_backward_sm90_preprocess", {})
    sizes["turns"] = preprocess.get(("turns", "write"), 0)
    seeing = min(shape.seqlen_q, shape.seqlen_k) if shape.causal else shape.seqlen_q
    reads: dict[str, dict[str, int]] = {}
    writes: dict[str, dict[str, int]] = {}
    for kernel, entries in traffic.kernels.items():
        reads[kernel], writes[kernel] = {}, {}
        plain_accumulator = ("dq_accum", "write") in entries
        for (tensor, direction), count in entries.items():
            once = min(count, sizes.get(tensor, count))
            if kernel in _MAIN_KERNELS and tensor in _PER_QUERY and direction != "write":
                once = min(once, sizes[tensor] // shape.seqlen_q * seeing)
            if tensor == "dq_accum" and (plain_accumulator or direction == "read"):
                once = count
            if direction in ("read", "atomic"):
                reads[kernel][tensor] = once
            if direction in ("write", "atomic"):
                writes[kernel][tensor] = once
    return HbmTraffic(reads, writes, l2_bytes=0)


def predict_hbm(
    algorithm: str,
    shape: AttentionShape,
    tile: Tile,
    pass_: str,
    gpu: Gpu,
    blocks_per_sm: int = 1,
    **options: Any,
) -> HbmTraffic:
    """HBM traffic of one pass, each kernel starting with a cold L2 as under a profiler.

    blocks_per_sm: thread blocks of the main kernel that an SM holds at once
    (``analysis.occupancy``). Blocks are launched head by head, and within a head those with the
    longest walk first: under the causal mask the last query tile (forward) or the first key tile
    (backward). Persistent blocks take their tiles in that order too. options: of
    :func:`~analysis.traffic.predict_traffic`.
    """
    if blocks_per_sm < 1:
        raise ValueError(f"blocks_per_sm={blocks_per_sm} is below 1")
    traffic = predict_traffic(algorithm, shape, tile, pass_, **options)
    base = compulsory_hbm(traffic, shape)
    reads = {kernel: dict(tensors) for kernel, tensors in base.reads.items()}
    writes = {kernel: dict(tensors) for kernel, tensors in base.writes.items()}
    concurrent = gpu.sms * blocks_per_sm
    loop = tile_loop(shape, tile)

    flash1 = algorithm.startswith("flash1")
    main = "" if flash1 else main_kernel(traffic)
    if main and pass_ == "forward":
        rows, row_bytes = _keys_from_hbm(shape, tile, loop, concurrent, gpu.usable_l2_bytes)
        for tensor in ("k", "v"):
            reads[main][tensor] = rows * row_bytes
    elif main:
        rows, per_row = _queries_from_hbm(shape, tile, loop, concurrent, gpu.usable_l2_bytes)
        for tensor, row_bytes in per_row.items():
            if tensor in reads[main]:
                reads[main][tensor] = rows * row_bytes
        if "dq_accum" in reads[main]:  # atomics: what is fetched is written back
            writes[main]["dq_accum"] = reads[main]["dq_accum"]
    elif flash1:
        # One block per head walks that head's rows again for every key tile, with no one to
        # share them: they stay only if those of all resident heads fit together. At the shape of
        # the paper's Fig. 2 an A100's 108 resident heads walk 29 MB, more than half its L2, so
        # every pass reaches HBM, as the figure shows.
        kernel = "flash1_forward" if pass_ == "forward" else "flash1_backward"
        entries = traffic.kernels[kernel]
        walked = {t for (t, _) in entries if t not in ("k", "v", "dk", "dv")}
        sizes = tensor_bytes(shape)
        heads = shape.batch * shape.heads
        resident = min(concurrent, heads) * sum(sizes[t] for t in walked) // heads
        if resident > gpu.usable_l2_bytes:
            for tensor in walked:
                for direction, into in (("read", reads), ("write", writes)):
                    if (tensor, direction) in entries:
                        into[kernel][tensor] = entries[tensor, direction]
    return HbmTraffic(reads, writes, gpu.l2_bytes)


def _keys_from_hbm(
    shape: AttentionShape, tile: Tile, loop: TileLoop, concurrent: int, usable_l2: int
) -> tuple[int, int]:
    """Forward: the query tiles of a group of heads walk that group's keys and values.

    Returns the rows of K (and as many of V) that come from HBM, and the bytes of one.
    """
    row = shape.head_dim * shape.itemsize
    tr = loop.query_tiles
    rows_seen = (loop.visits_of_query_tile * tile.block_n).clip(max=shape.seqlen_k)

    def rows_walked(first: int, last: int) -> int:
        # Causal heads start with their longest row of tiles, so the first block walks furthest;
        # where a second head begins, that one starts with the whole walk.
        return int(rows_seen[tr - 1 - first % tr if first // tr == last // tr else tr - 1])

    waves = _Waves(shape.batch * shape.kv_heads, shape.group * tr, concurrent)
    walk_bytes = shape.seqlen_k * 2 * row
    return waves.rows_from_hbm(rows_walked, walk_bytes, usable_l2), row


def _queries_from_hbm(
    shape: AttentionShape, tile: Tile, loop: TileLoop, concurrent: int, usable_l2: int
) -> tuple[int, dict[str, int]]:
    """Backward: the key tiles of a group of heads walk all that group's query-side rows.

    Returns the query rows that come from HBM, and the bytes of one per tensor. The partial tiles
    of the deterministic backward are written, not walked, so they are not in the working set.
    """
    row = shape.head_dim * shape.itemsize
    per_row = {"q": row, "dout": row, "lse": 4, "delta": 4, "dq_accum": shape.head_dim * 4}
    first_tile = loop.query_tiles - loop.visits_of_key_tile
    rows_seen = (shape.seqlen_q - first_tile * tile.block_m).clip(min=0)

    def rows_walked(first: int, last: int) -> int:
        return shape.group * int(rows_seen[first])  # the earlier a key tile, the more it sees

    waves = _Waves(shape.batch * shape.kv_heads, loop.key_tiles, concurrent)
    walk_bytes = shape.group * shape.seqlen_q * sum(per_row.values())
    return waves.rows_from_hbm(rows_walked, walk_bytes, usable_l2), per_row


@dataclass(frozen=True)
class _Waves:
    """``groups`` × ``per_group`` blocks, group after group, ``concurrent`` at a time."""

    groups: int
    per_group: int
    concurrent: int

    def rows_from_hbm(
        self, rows_walked: Callable[[int, int], int], walk_bytes: int, usable_l2: int
    ) -> int:
        """Rows fetched when each group's blocks walk that group's rows.

        rows_walked(first, last): rows that the group's blocks first..last walk together.
        walk_bytes: bytes of one group's whole walk.
        """
        fetched = 0
        for group in range(self.groups):
            start, end = group * self.per_group, (group + 1) * self.per_group
            known = 0  # rows this group has touched in earlier waves
            for wave in range(start // self.concurrent, (end - 1) // self.concurrent + 1):
                first = max(start, wave * self.concurrent) - start
                last = min(end, (wave + 1) * self.concurrent) - 1 - start
                rows = rows_walked(first, last)
                again = min(rows, known)
                lost = self._lost_fraction(wave, walk_bytes, usable_l2) if known else 0.0
                fetched += rows - again + round(again * lost)
                known = max(known, rows)
        return fetched

    def _groups_in(self, wave: int) -> int:
        last_block = min((wave + 1) * self.concurrent, self.groups * self.per_group) - 1
        return last_block // self.per_group - wave * self.concurrent // self.per_group + 1

    def _lost_fraction(self, wave: int, walk_bytes: int, usable_l2: int) -> float:
        """Share of a walk that L2 has dropped when this wave repeats the previous wave's.

        Between the two touches of the row at fraction x of the walk, the group itself touches one
        whole walk, every other group of the previous wave the last 1 - x of its walk, and every
        other group of this wave the first x. The row is lost where that exceeds the L2.
        """
        others_before = self._groups_in(wave - 1) - 1
        others_now = self._groups_in(wave) - 1
        at_start = (1 + others_before) * walk_bytes
        at_end = (1 + others_now) * walk_bytes
        low, high = min(at_start, at_end), max(at_start, at_end)
        if low > usable_l2:
            return 1.0
        if high <= usable_l2:
            return 0.0
        return (high - usable_l2) / (high - low)
