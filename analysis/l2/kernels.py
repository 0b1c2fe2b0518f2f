"""How often each kernel of a pass moves its tensors between L2 and HBM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from analysis.l2.attention import hopper_heads_per_group, key_tiles_outside, one_block_a_head, query_tiles_outside
from analysis.l2.closed_forms import Waves
from analysis.l2.launch import ALWAYS, FIRST, LAST, NOT_FIRST, NOT_LAST, Launch, simulate
from analysis.l2.machine import L2, Pace
from analysis.shapes import STAT_BYTES, AttentionShape, Tile
from analysis.tile_loop import tile_loop

Entries = tuple[tuple[str, str], ...]
#: Tensor -> how often its bytes come from HBM, and how often they go there.
Times = Mapping[str, tuple[float, float]]

_FORWARD = frozenset(
    f"flash_forward{form}"
    for form in ("", "_sm90", "_sm90_persistent", "_sm90_optimistic", "_sm90_persistent_optimistic")
)
_BACKWARD = frozenset({"flash_backward", "flash_backward_sm90"})
_DQ = "flash_backward_dq"
_FLASH1 = frozenset({"flash1_forward", "flash1_backward"})
KERNELS = _FORWARD | _BACKWARD | _FLASH1 | {_DQ}
#: Beyond as many waves the first ones stand for all: what repeats is then settled.
MOST_WAVES = 48


def launch_of(
    kernel: str,
    entries: Entries,
    shape: AttentionShape,
    tile: Tile,
    *,
    wave: int,
    order: str = "rows",
    heads_per_group: int | None = None,
    form: str = "",
    **masks: Any,
) -> Launch:
    """The launch of a kernel of KERNELS; entries: its tensors and directions; wave: blocks of one;
    heads_per_group: by default the kernel's own; form: of FlashAttention 2022.

    Raises ValueError where the kernel has no such order.
    """
    if heads_per_group is None:
        heads_per_group = own_heads_per_group(kernel, shape)
    if kernel in _FORWARD or kernel == _DQ:
        kind = "dq" if kernel == _DQ else "forward"
        return query_tiles_outside(
            shape,
            tile,
            kind,
            order=order,
            wave=wave,
            downwards="_sm90" in kernel,
            heads_per_group=heads_per_group,
            **masks,
        )
    if kernel in _BACKWARD:
        ways = {way for tensor, way in entries if tensor == "dq_accum"}
        accumulate = "atomic" if "atomic" in ways else "partial" if "write" in ways else None
        lse = "lse2" if ("lse2", "read") in entries else "lse"
        return key_tiles_outside(
            shape,
            tile,
            accumulate=accumulate,
            lse=lse,
            order=order,
            wave=wave,
            last_first=any(tensor == "turns" for tensor, _ in entries),
            heads_per_group=heads_per_group,
            **masks,
        )
    if order != "rows":
        raise ValueError(f"{kernel} walks in the order of rows alone, not {order!r}")
    if heads_per_group != 1:
        raise ValueError(f"{kernel} has one block a head: heads_per_group={heads_per_group}")
    once = ("k", "v", "dk", "dv")
    walked: dict[str, dict[str, int]] = {}
    for tensor, way in entries:
        if tensor not in once and tensor != "block_mask":
            when = ALWAYS if form == "literal" else _when(kernel, entries, tensor, way)
            walked.setdefault(tensor, {})[way] = when
    after = tuple(t for t in ("dk", "dv") if (t, "write") in entries)
    return one_block_a_head(shape, tile, walked, after, masks.get("block_mask"))


def _when(kernel: str, entries: Entries, tensor: str, way: str) -> int:
    """In which visits of a query tile the forms without a read-back in the first pass move a tensor
    (``analysis.sums.flash1``): the running state is read back in all but the first, an fp32 one is
    kept in all but the last, which writes the result, and D is made in the first."""
    if way == "read":
        if (tensor, "write") in entries:
            return NOT_FIRST
        return FIRST if (kernel, tensor) == ("flash1_backward", "out") else ALWAYS
    if tensor in ("out_tmp", "dq_tmp"):
        return NOT_LAST
    if tensor == "delta":
        return FIRST
    return LAST if (f"{tensor}_tmp", "write") in entries else ALWAYS


def own_heads_per_group(kernel: str, shape: AttentionShape) -> int:
    """Heads that a kernel walks side by side."""
    if "_sm90" not in kernel:
        return 1
    return hopper_heads_per_group(shape, "backward" if kernel in _BACKWARD else "forward")


def simulated(
    kernel: str,
    entries: Entries,
    shape: AttentionShape,
    tile: Tile,
    l2: L2,
    sms: int,
    blocks_per_sm: int,
    pace: Pace,
    order: str = "rows",
    heads_per_group: int | None = None,
    form: str = "",
    **masks: Any,
) -> Times:
    """From the simulated L2."""
    wave = sms * blocks_per_sm
    if heads_per_group is None:  # of the whole launch, of which not all may be simulated
        heads_per_group = own_heads_per_group(kernel, shape)
    if not masks:
        shape = _first_waves(kernel, shape, tile, wave, heads_per_group)
    launch = launch_of(
        kernel, entries, shape, tile, wave=wave, order=order, heads_per_group=heads_per_group, form=form, **masks
    )
    counts = simulate(launch, l2, sms, blocks_per_sm, pace)
    return {name: (count.fetches, count.writes) for name, count in counts.items()}


#: The same for arguments that were asked for before.
simulated_once = lru_cache(maxsize=4096)(simulated)


def _first_waves(kernel: str, shape: AttentionShape, tile: Tile, wave: int, heads_per_group: int) -> AttentionShape:
    """The shape with as many heads as fill MOST_WAVES waves, if it has more."""
    group = shape.group if kernel in _BACKWARD else 1
    blocks_a_head = 1
    if kernel not in _FLASH1:
        rows, block = (shape.seqlen_k, tile.block_n) if kernel in _BACKWARD else (shape.seqlen_q, tile.block_m)
        blocks_a_head = -(-rows // block)
    units = -(-MOST_WAVES * wave // blocks_a_head)  # heads, or groups of them
    units = -(-units // heads_per_group) * heads_per_group
    heads = -(-units * group // shape.group) * shape.group
    if heads >= shape.batch * shape.heads:
        return shape
    return replace(shape, batch=1, heads=heads, kv_heads=heads // shape.group)


def by_waves(
    kernel: str, entries: Entries, shape: AttentionShape, tile: Tile, l2: L2, sms: int, blocks_per_sm: int
) -> Times:
    """From closed forms: waves in step, and for FlashAttention 2022 all or nothing."""
    concurrent, shared = sms * blocks_per_sm, l2.shared_bytes
    loop = tile_loop(shape, tile)
    tr = loop.query_tiles
    row = shape.head_dim * shape.itemsize
    groups = shape.batch * shape.kv_heads
    if kernel in _FLASH1:
        # Nobody shares a head's rows: they stay only if those of all resident heads fit.
        walked = {t for t, _ in entries if t not in ("k", "v", "dk", "dv")}
        rows = sum(STAT_BYTES if t in ("l", "m", "delta") else row for t in walked)
        resident = min(concurrent, shape.batch * shape.heads) * shape.seqlen_q * rows
        return {} if resident <= l2.partitions * shared else dict.fromkeys(walked, (float("inf"), float("inf")))
    if kernel in _BACKWARD:
        first_tile = tr - loop.visits_of_key_tile
        seen = (shape.seqlen_q - first_tile * tile.block_m).clip(min=0)
        per_row = 2 * row + 2 * STAT_BYTES + shape.head_dim * STAT_BYTES
        rows_once = groups * shape.group * shape.seqlen_q
        fetched = Waves(groups, loop.key_tiles, concurrent).rows_from_hbm(
            lambda first, last: shape.group * int(seen[first]),  # an earlier key tile sees more
            shape.group * shape.seqlen_q * per_row,
            shared,
        )
        times = max(1.0, fetched / rows_once)
        return dict.fromkeys(("q", "dout", "lse", "lse2", "delta", "dq_accum"), (times, times))
    seen = (loop.visits_of_query_tile * tile.block_n).clip(max=shape.seqlen_k)

    def rows_walked(first: int, last: int) -> int:
        # Causal heads start with their longest row of tiles, so the first block walks furthest;
        # where a second head begins, that one starts with the whole walk.
        return int(seen[tr - 1 - first % tr if first // tr == last // tr else tr - 1])

    waves = Waves(groups, shape.group * tr, concurrent)
    key_row = shape.head_dim * shape.key_itemsize
    fetched = waves.rows_from_hbm(rows_walked, shape.seqlen_k * 2 * key_row, shared)
    times = max(1.0, fetched / (groups * shape.seqlen_k))
    return {"k": (times, 1.0), "v": (times, 1.0)}
