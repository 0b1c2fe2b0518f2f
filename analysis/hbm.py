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

Against the H200's counters (FlashAttention-2 forward as PyTorch ships it, head_dim 128): 32k to
256k tokens, HBM reads from 25 MB to 1.6 GB while 4 to 275 GB cross the SM boundary. Predicted
within 0.1 % where L2 holds everything and in the first two waves, then 9 to 17 % too low. The
reads above one per wave grow with the length of the walk, not with the number of waves: blocks
of one wave drift apart, and once stragglers trail by more than the L2 holds they fetch again.
``analysis.l2_simulation`` shows the effect for a given drift.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from analysis.hardware import Gpu
from analysis.shapes import AttentionShape, Tile
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


def tensor_bytes(shape: AttentionShape) -> dict[str, int]:
    """Size of every tensor the kernels name; dq_accum is the fp32 accumulator of dq."""
    accumulator = shape.query_bytes // shape.itemsize * 4
    sizes = dict.fromkeys(("q", "out", "dout", "dq"), shape.query_bytes)
    sizes |= dict.fromkeys(("k", "v", "dk", "dv"), shape.key_bytes)
    sizes |= dict.fromkeys(("s", "p", "dp", "ds"), shape.score_bytes)
    sizes |= dict.fromkeys(("lse", "delta", "m", "l"), shape.row_bytes)
    return sizes | {"dq_accum": accumulator}


def compulsory_hbm(traffic: Traffic, shape: AttentionShape) -> HbmTraffic:
    """Each kernel touches each of its tensors once: an L2 of unlimited size, empty at the start.

    The partial tiles of the deterministic backward are distinct memory, so none is saved there.
    """
    sizes = tensor_bytes(shape)
    reads: dict[str, dict[str, int]] = {}
    writes: dict[str, dict[str, int]] = {}
    for kernel, entries in traffic.kernels.items():
        reads[kernel], writes[kernel] = {}, {}
        plain_accumulator = ("dq_accum", "write") in entries
        for (tensor, direction), count in entries.items():
            once = min(count, sizes[tensor])
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
) -> HbmTraffic:
    """HBM traffic of one pass, each kernel starting with a cold L2 as under a profiler.

    blocks_per_sm: thread blocks of the main kernel that an SM holds at once
    (``analysis.occupancy``). Blocks are launched head by head, query tiles (forward) or key
    tiles (backward) in ascending order.
    """
    if blocks_per_sm < 1:
        raise ValueError(f"blocks_per_sm={blocks_per_sm} is below 1")
    traffic = predict_traffic(algorithm, shape, tile, pass_)
    base = compulsory_hbm(traffic, shape)
    reads = {kernel: dict(tensors) for kernel, tensors in base.reads.items()}
    writes = {kernel: dict(tensors) for kernel, tensors in base.writes.items()}
    concurrent = gpu.sms * blocks_per_sm
    loop = tile_loop(shape, tile)

    if "flash_forward" in traffic.kernels:
        shared = _walk_of_keys(shape, tile, loop, concurrent)
        if shared.working_set_bytes > gpu.usable_l2_bytes:
            for tensor in ("k", "v"):
                reads["flash_forward"][tensor] = shared.rows_walked * shared.row_bytes[tensor]
    elif "flash_backward" in traffic.kernels:
        shared = _walk_of_queries(shape, tile, loop, concurrent)
        if shared.working_set_bytes > gpu.usable_l2_bytes:
            for tensor, row in shared.row_bytes.items():
                if tensor in reads["flash_backward"]:
                    reads["flash_backward"][tensor] = shared.rows_walked * row
            if "dq_accum" in reads["flash_backward"]:
                writes["flash_backward"]["dq_accum"] = reads["flash_backward"]["dq_accum"]
    elif algorithm.startswith("flash1"):
        # One block per head walks that head's rows again for every key tile, with no one to
        # share them: they stay only if those of all resident heads fit together.
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


@dataclass(frozen=True)
class _Walk:
    """What the waves of one kernel walk: rows of all (wave, group) meetings, and bytes a row."""

    rows_walked: int
    row_bytes: Mapping[str, int]
    working_set_bytes: int


def _walk_of_keys(shape: AttentionShape, tile: Tile, loop: TileLoop, concurrent: int) -> _Walk:
    """Forward: the query tiles of a group of heads walk that group's keys and values."""
    row = shape.head_dim * shape.itemsize
    tr = loop.query_tiles
    rows_seen = (loop.visits_of_query_tile * tile.block_n).clip(max=shape.seqlen_k)
    groups = shape.batch * shape.kv_heads
    per_group = shape.group * tr
    rows = 0
    for first, last in _meetings(groups, per_group, concurrent):
        # The later a query tile, the more keys it sees; a whole head ends with its last tile.
        same_head = first // tr == last // tr
        rows += int(rows_seen[last % tr if same_head else tr - 1])
    met = _groups_per_wave(groups, per_group, concurrent)
    return _Walk(rows, {"k": row, "v": row}, met * shape.seqlen_k * 2 * row)


def _walk_of_queries(shape: AttentionShape, tile: Tile, loop: TileLoop, concurrent: int) -> _Walk:
    """Backward: the key tiles of a group of heads walk all that group's query-side rows."""
    row = shape.head_dim * shape.itemsize
    row_bytes = {
        "q": row,
        "dout": row,
        "lse": 4,
        "delta": 4,
        "dq_accum": shape.head_dim * 4,
    }
    first_tile = loop.query_tiles - loop.visits_of_key_tile
    rows_seen = (shape.seqlen_q - first_tile * tile.block_m).clip(min=0)
    groups = shape.batch * shape.kv_heads
    rows = 0
    for first, _ in _meetings(groups, loop.key_tiles, concurrent):
        # The earlier a key tile, the more queries see it.
        rows += shape.group * int(rows_seen[first])
    met = _groups_per_wave(groups, loop.key_tiles, concurrent)
    return _Walk(rows, row_bytes, met * shape.group * shape.seqlen_q * sum(row_bytes.values()))


def _meetings(groups: int, per_group: int, concurrent: int) -> Iterator[tuple[int, int]]:
    """For every wave and every group with a block in it: the group's first and last such block."""
    for group in range(groups):
        start, end = group * per_group, (group + 1) * per_group
        for wave in range(start // concurrent, (end - 1) // concurrent + 1):
            first = max(start, wave * concurrent) - start
            last = min(end, (wave + 1) * concurrent) - 1 - start
            yield first, last


def _groups_per_wave(groups: int, per_group: int, concurrent: int) -> int:
    """The most groups that have a block in one wave."""
    blocks = groups * per_group
    waves = -(-blocks // concurrent)
    return max(
        (min((wave + 1) * concurrent, blocks) - 1) // per_group - wave * concurrent // per_group + 1
        for wave in range(waves)
    )
