"""The attention kernels as launches: which block reads what, in which order.

Forward, and the dQ loop of the split backward: one block per query head and query tile, walking the
keys of its group's head. Backward: one block per key/value head and key tile, walking all query
rows of its group. FlashAttention 2022: one block per head, walking its own query rows once for
every key tile, which nobody else reads.

In a sawtooth every second wave of blocks makes its walk the other way round, and so begins with
what the wave before it touched last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from analysis.algorithms import ORDERS
from analysis.l2.launch import ALWAYS, ATOMIC, FIRST_BIT, LAST_BIT, READ, STREAM, WRITE, Launch, Table
from analysis.shapes import STAT_BYTES, AttentionShape, Tile
from analysis.tile_loop import BlockMask, TileLoop, tile_loop, tiles_met

#: Walks and single tiles of each kernel that has query tiles outside.
QUERY_OUTSIDE: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "forward": (("q",), ("out", "lse")),
    "dq": (("q", "dout", "lse", "delta"), ("dq",)),
}
STATISTICS = frozenset({"lse", "lse2", "delta", "l", "m"})
#: Accumulators in fp32, whatever the type of the tensors.
FP32 = frozenset({"dq_accum", "out_tmp", "dq_tmp"})
#: Half of an H100's L2: what a group of heads may fill with the tensors that its blocks share.
L2_BYTES_FOR_HEADS = 25 << 20


def heads_per_group(heads: int, bytes_a_head: int) -> int:
    """How many of ``heads`` run side by side: a power of two that fits in L2, at least one."""
    fitting = max(1, L2_BYTES_FOR_HEADS // max(bytes_a_head, 1))
    return int(min(heads, 2 ** (fitting.bit_length() - 1)))


def hopper_heads_per_group(shape: AttentionShape, pass_: str) -> int:
    """Of the Hopper kernels: in the forward the heads whose K and V, in the backward the key/value
    heads whose group's Q, dO and fp32 dQ, fit in L2 together."""
    if pass_ == "forward":
        bytes_a_head = 2 * shape.seqlen_k * shape.head_dim * shape.itemsize
        return heads_per_group(shape.batch * shape.heads, bytes_a_head)
    row = shape.head_dim * (2 * shape.itemsize + STAT_BYTES)
    return heads_per_group(shape.batch * shape.kv_heads, shape.group * shape.seqlen_q * row)


def launch_order(heads: int, tiles: int, heads_per_group: int) -> tuple[Table, Table]:
    """Head and place of every block: heads in groups, inside a group the heads of a place side by
    side, places in order. heads_per_group=1: head after head."""
    if heads_per_group < 1:
        raise ValueError(f"heads_per_group={heads_per_group} is below 1")
    block = np.arange(heads * tiles, dtype=np.int64)
    first = block // (tiles * heads_per_group) * heads_per_group
    here = np.minimum(heads_per_group, heads - first)
    rest = block - first * tiles
    return first + rest % here, rest // here


def query_tiles_outside(
    shape: AttentionShape,
    tile: Tile,
    kind: str = "forward",
    *,
    order: str = "rows",
    wave: int = 0,
    downwards: bool = False,
    heads_per_group: int = 1,
    block_mask: BlockMask | None = None,
    mask_block: Tile | None = None,
) -> Launch:
    """One block per (batch, head, query tile). Under the causal mask the last tile starts first.

    order: "rows" walks the keys upwards, or ``downwards``; "sawtooth" the other way in every second
    wave, wave: blocks of one. heads_per_group: of :func:`launch_order`.
    """
    turned = _turned(order, wave)
    before, after = QUERY_OUTSIDE[kind]
    loop = tile_loop(shape, tile, block_mask, mask_block)
    heads, tr = shape.batch * shape.heads, loop.query_tiles
    head, place = launch_order(heads, tr, heads_per_group)
    i = tr - 1 - place if shape.causal else place
    launch = Launch()
    queries = _Rows(shape.seqlen_q, tile.block_m)
    ranges = [queries.ranges(launch, shape, name, heads, head, i, READ) for name in before]
    ranges += [queries.ranges(launch, shape, name, heads, head, i, WRITE) for name in after]
    keys = _Rows(shape.seqlen_k, tile.block_n)
    pairs = [keys.streams(launch, shape, name, shape.batch * shape.kv_heads) for name in "kv"]
    launch.streams = np.stack(pairs, axis=1).reshape(-1, pairs[0].shape[1])
    launch.ranges = np.stack(ranges, axis=1).reshape(-1, ranges[0].shape[1])
    down = turned(len(i)) ^ downwards
    if block_mask is None and not shape.windowed:
        steps = loop.visits_of_query_tile[i]
        start, direction = np.where(down, steps - 1, 0), np.where(down, -1, 1)
        listed = np.full(len(i), -1)
    else:
        rows = _walked(shape, tile, block_mask, mask_block, head, i)
        rows = [r[::-1] if d else r for r, d in zip(rows, down, strict=True)]
        steps, listed, launch.tiles = _lists(rows)
        start, direction = np.zeros(1, np.int64), np.ones(1, np.int64)
    kv_head = head // shape.heads * shape.kv_heads + head % shape.heads // shape.group
    first = np.arange(len(i)) * len(ranges)
    launch.blocks = _blocks(
        start,
        steps,
        direction,
        listed,
        2 * kv_head,
        2,
        first,
        np.where(steps > 0, len(before), 0),
        first + len(before),
        len(after),
    )
    return launch


def key_tiles_outside(
    shape: AttentionShape,
    tile: Tile,
    *,
    accumulate: str | None = "atomic",
    lse: str = "lse",
    order: str = "rows",
    wave: int = 0,
    last_first: bool = False,
    heads_per_group: int = 1,
    block_mask: BlockMask | None = None,
    mask_block: Tile | None = None,
) -> Launch:
    """The backward: one block per (batch, key/value head, key tile), which walks its group's rows.

    accumulate: how dQ leaves: "atomic" additions to fp32 rows, "partial" tiles of its own for every
    visit, or None where another kernel makes it. lse: name of the log-sum-exp. order, wave: as in
    :func:`query_tiles_outside`, of the query rows of a group. last_first: the last key tile of a
    head starts first.
    """
    turned = _turned(order, wave)
    if accumulate not in ("atomic", "partial", None):
        raise ValueError(f"accumulate={accumulate!r} is neither 'atomic' nor 'partial' nor None")
    loop = tile_loop(shape, tile, block_mask, mask_block)
    groups, tr, tc = shape.batch * shape.kv_heads, loop.query_tiles, loop.key_tiles
    head, place = launch_order(groups, tc, heads_per_group)
    j = tc - 1 - place if last_first else place
    launch = Launch()
    keys = _Rows(shape.seqlen_k, tile.block_n)
    ranges = [keys.ranges(launch, shape, name, groups, head, j, READ) for name in "kv"]
    ranges += [keys.ranges(launch, shape, name, groups, head, j, WRITE) for name in ("dk", "dv")]
    rows = _Rows(shape.seqlen_q, tile.block_m)
    heads = shape.batch * shape.heads
    walked = [rows.streams(launch, shape, n, heads) for n in ("q", "dout", lse, "delta")]
    if accumulate == "atomic":
        walked.append(rows.streams(launch, shape, "dq_accum", heads, ATOMIC))
    of_group = [stream[:: shape.group] for stream in walked]
    if accumulate == "partial":
        size = tile.block_m * shape.head_dim * STAT_BYTES
        a_block = shape.group * tr * size
        number, base = launch.tensor("dq_accum", len(j) * a_block)
        own = base + np.arange(len(j)) * a_block
        partial = _columns(own, size, tr * size, tr, WRITE, number, ALWAYS)
        of_group = [stream[head] for stream in of_group] + [partial]
    launch.streams = np.stack(of_group, axis=1).reshape(-1, of_group[0].shape[1])
    launch.ranges = np.stack(ranges, axis=1).reshape(-1, ranges[0].shape[1])
    down = turned(len(j))
    start, direction = np.zeros(1, np.int64), np.ones(1, np.int64)
    if block_mask is None and not shape.causal and not shape.windowed:
        steps, listed = np.full(len(j), shape.group * tr), np.full(len(j), -1)
        start, direction = np.where(down, steps - 1, 0), np.where(down, -1, 1)
    else:
        visits = _visited(shape, tile, loop, block_mask, mask_block, head, j)
        visits = [v[::-1] if d else v for v, d in zip(visits, down, strict=True)]
        steps, listed, launch.tiles = _lists(visits)
    stream = (np.arange(len(j)) if accumulate == "partial" else head) * len(of_group)
    first = 4 * np.arange(len(j))
    launch.blocks = _blocks(
        start, steps, direction, listed, stream, len(of_group), first, np.where(steps > 0, 2, 0), first + 2, 2
    )
    return launch


def one_block_a_head(
    shape: AttentionShape,
    tile: Tile,
    walked: Mapping[str, Mapping[str, int]],
    after: tuple[str, ...] = (),
    block_mask: BlockMask | None = None,
) -> Launch:
    """FlashAttention 2022: every head's query rows are walked once for each of its key tiles.

    walked: the tensors of a step, how they are moved ("read", "write") and when
    (``analysis.l2.launch``: ALWAYS, or by the first and last visit of the tile). K and V come
    first, as a whole, and ``after`` (dK, dV) leaves at the end.
    """
    loop = tile_loop(shape, tile, block_mask)
    heads, tr, tc = shape.batch * shape.heads, loop.query_tiles, loop.key_tiles
    launch = Launch()
    every = np.arange(heads)
    whole = _Rows(shape.seqlen_k, shape.seqlen_k)
    ranges = [whole.ranges(launch, shape, n, heads, every, 0 * every, READ) for n in "kv"]
    ranges += [whole.ranges(launch, shape, n, heads, every, 0 * every, WRITE) for n in after]
    rows = _Rows(shape.seqlen_q, tile.block_m)
    streams = []
    for name, ways in walked.items():
        first = rows.streams(launch, shape, name, heads)
        for kind, way in ((READ, "read"), (WRITE, "write")):
            if way in ways:
                stream = first.copy()
                stream[:, STREAM.index("kind")] = kind
                stream[:, STREAM.index("when")] = ways[way]
                streams.append(stream)
    launch.streams = np.stack(streams, axis=1).reshape(-1, streams[0].shape[1])
    launch.ranges = np.stack(ranges, axis=1).reshape(-1, ranges[0].shape[1])
    if block_mask is None:
        visits = loop.visits_of_key_tile
        once = np.concatenate([np.arange(tr - int(visits[j]), tr) for j in range(tc)])
        steps, listed = np.full(heads, len(once)), np.zeros(heads, np.int64)
        launch.tiles = _with_visits(once)
    else:
        met = tiles_met(shape, tile, block_mask).reshape(heads, tr, tc)
        lists = [_with_visits(np.nonzero(met[h].T)[1]) for h in range(heads)]
        steps, listed, launch.tiles = _lists(lists)
    launch.blocks = _blocks(
        np.zeros(1),
        steps,
        np.ones(1),
        listed,
        every * len(streams),
        len(streams),
        len(ranges) * every,
        2,
        len(ranges) * every + 2,
        len(after),
    )
    return launch


def _turned(order: str, wave: int) -> Callable[[int], npt.NDArray[np.bool_]]:
    """How many blocks -> which of them make their walk the other way round."""
    if order not in ORDERS:
        raise ValueError(f"order={order!r} is not one of {', '.join(ORDERS)}")
    if order == "rows":
        return lambda blocks: np.zeros(blocks, bool)
    if wave < 1:
        raise ValueError(f"sawtooth needs the blocks of a wave, got wave={wave}")
    return lambda blocks: np.arange(blocks) // wave % 2 == 1


class _Rows:
    """The rows of a head in tiles: as ranges of single tiles, and as streams of all of them."""

    def __init__(self, rows: int, block: int) -> None:
        self.rows, self.block = rows, block

    def _place(self, launch: Launch, shape: AttentionShape, name: str, heads: int) -> tuple[int, int, int]:
        itemsize = shape.key_itemsize if name in ("k", "v") else shape.itemsize
        row = STAT_BYTES if name in STATISTICS else shape.head_dim * itemsize
        if name in FP32:
            row = shape.head_dim * STAT_BYTES
        return row, *launch.tensor(name, heads * self.rows * row)

    def ranges(
        self, launch: Launch, shape: AttentionShape, name: str, heads: int, head: Table, tile: Table, kind: int
    ) -> Table:
        """(blocks, 4): tile ``tile`` of head ``head``."""
        row, number, base = self._place(launch, shape, name, heads)
        first = tile * self.block
        end = np.minimum(first + self.block, self.rows)
        start = base + head * self.rows * row
        return _columns(start + first * row, start + end * row, kind, number)

    def streams(self, launch: Launch, shape: AttentionShape, name: str, heads: int, kind: int = READ) -> Table:
        """(heads, 7)"""
        row, number, base = self._place(launch, shape, name, heads)
        first = base + np.arange(heads) * self.rows * row
        tiles = -(-self.rows // self.block)
        return _columns(first, self.block * row, self.rows * row, tiles, kind, number, ALWAYS)


def _walked(
    shape: AttentionShape, tile: Tile, block_mask: BlockMask | None, mask_block: Tile | None, head: Table, i: Table
) -> list[Table]:
    """Key tiles that each query tile meets."""
    if block_mask is not None:
        met = tiles_met(shape, tile, block_mask, mask_block)
        met = met.reshape(shape.batch * shape.heads, *met.shape[2:])
        return [np.flatnonzero(met[h, t]) for h, t in zip(head, i, strict=True)]
    sinks, first, end = shape.visible.key_tiles(tile.block_m, tile.block_n)
    each = [np.concatenate([np.arange(s), np.arange(f, e)]) for s, f, e in zip(sinks, first, end, strict=True)]
    return [each[t] for t in i]


def _visited(
    shape: AttentionShape,
    tile: Tile,
    loop: TileLoop,
    block_mask: BlockMask | None,
    mask_block: Tile | None,
    head: Table,
    j: Table,
) -> list[Table]:
    """Tiles of the group's rows, head after head, that each key tile meets."""
    tr, group = loop.query_tiles, shape.group
    if block_mask is None:
        first, end = shape.visible.query_tiles(tile.block_m, tile.block_n)
        upper = [np.arange(f, e) for f, e in zip(first, end, strict=True)]
        each = [np.concatenate([g * tr + t for g in range(group)]) for t in upper]
        return [each[tile_] for tile_ in j]
    met = tiles_met(shape, tile, block_mask, mask_block)
    met = met.reshape(shape.batch * shape.kv_heads, group * tr, loop.key_tiles)
    return [np.flatnonzero(met[h, :, t]) for h, t in zip(head, j, strict=True)]


def _lists(rows: list[Table]) -> tuple[Table, Table, Table]:
    """Lengths, starts and all entries of lists put one after another."""
    steps = np.array([len(r) for r in rows], np.int64)
    starts = np.cumsum(steps) - steps
    tiles = np.concatenate(rows) if rows else np.zeros(0)
    return steps, starts, tiles.astype(np.int64)


def _columns(*columns: npt.ArrayLike) -> Table:
    spread = np.broadcast_arrays(*columns)
    return np.stack([np.atleast_1d(column) for column in spread], axis=1).astype(np.int64)


def _blocks(*columns: npt.ArrayLike) -> Table:
    return _columns(*columns)


def _with_visits(tiles: Table) -> Table:
    """A list of tiles with the bits of their first and last places in it."""
    found = tiles.astype(np.int64)
    found[np.unique(tiles, return_index=True)[1]] += FIRST_BIT
    found[len(tiles) - 1 - np.unique(tiles[::-1], return_index=True)[1]] += LAST_BIT
    return found
