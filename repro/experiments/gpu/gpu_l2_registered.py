"""HBM reads that decide between models of L2, predicted before any card has run them.

``results/registered/gpu-l2-registered.jsonl`` holds the predictions with date and commit: agreement
or disagreement is a result either way, and neither is changed afterwards. Each has a spread over
what nobody has published about the pace of thread blocks (``analysis.l2.PACES``).

- K and V of 17 to 31 MB in two waves and more: where the least recently used line decides;
- several heads: which heads meet in L2;
- grids of exactly 264 k blocks, whose last wave is full, and of one block more: the tail of lone
  blocks must vanish;
- our kernel at the same lengths, keys upwards and in a sawtooth; groups of heads; the backward;
- what a sawtooth saves most and least: groups of heads on Hopper's kernels, and the backward. A
  causal backward of groups, whose blocks start at other places of their walks: thirteen times the
  bytes of the same without a mask.

The kernels are PyTorch's FlashAttention-2 (d = 128: tiles of 128 x 64, two blocks on an SM) and
ours (one block on an SM), counted by Nsight Compute on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from analysis.hardware import H200
from analysis.hbm import predict_hbm, read_spread
from analysis.l2 import PACES
from analysis.shapes import Tile
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.attention import cell, shape_of, tile_of
from repro.experiments.shared.profiled import Profiled, seconds_of
from repro.instruments.counters import KernelCount

BATCH, LIMIT_S = 10, 60.0
PEER, OURS, HOPPER = "sdpa-flash", "flash", "flash-sm90"
TILES = {
    (PEER, "forward"): Tile(128, 64),
    (OURS, "forward"): Tile(128, 64),
    (OURS, "backward"): Tile(64, 128),
    (HOPPER, "forward"): Tile(128, 176),
}
#: Blocks that an SM holds: of PyTorch's forward as l2-absorption shows, of ours by registers.
BLOCKS_PER_SM = dict.fromkeys(TILES, 1) | {(PEER, "forward"): 2}
#: Blocks of a wave of PyTorch's forward, and query rows of a block.
WAVE, ROWS = 2 * H200.sms, 128
#: The main kernel's part of a name as the profiler gives it.
MAIN = {PEER: "flash_fwd", OURS: "flash_", HOPPER: "flash_"}


def cells() -> list[Cell]:
    """The most telling first; those registered later behind."""
    whole = [n * WAVE * ROWS for n in (2, 3, 4)]
    peer = [(1, n) for length in whole for n in (length, length + ROWS)]
    peer += [(1, n) for n in (34816, 40960, 45056, 49152, 53248, 57344, 61440)]
    peer += [(2, 49152), (8, 32768), (16, 16384), (2, 98304)]
    listed = [_cell(PEER, "forward", heads, n) for heads, n in peer]
    for order in ("rows", "sawtooth"):
        listed += [_cell(OURS, "forward", 1, n, order) for n in (65536, 131072, whole[2])]
    listed += [_cell(OURS, "forward", 8, 65536, kv_heads=2)]
    listed += [_cell(OURS, "backward", h, n) for h, n in ((1, 32768), (1, 65536), (16, 8192))]
    for order in ("rows", "sawtooth"):
        listed += [_cell(HOPPER, "forward", 8, 65536, order, kv_heads=2)]
        listed += [_cell(OURS, "backward", 8, 32768, order)]
    listed += [_cell(OURS, "backward", 1, 65536, "sawtooth")]
    listed += [_cell(OURS, "backward", 8, 65536, kv_heads=2, causal=True)]
    return listed


def _cell(implementation: str, pass_: str, heads: int, seqlen: int, order: str = "rows", **more: Any) -> Cell:
    if order != "rows":
        more |= {"order": order, "wave": H200.sms * BLOCKS_PER_SM[OURS, pass_]}
    tile = TILES[implementation, pass_]
    return cell(implementation, pass_, tile, seqlen=seqlen, head_dim=128, heads=heads, dtype="bf16", **more)


def registered(one: Cell) -> Iterator[Row]:
    """The prediction, to be written once (``repro.gpu.register``); what counts is what was. Needs a
    C compiler."""
    shape, tile, pass_ = shape_of(one), tile_of(one), str(one["pass"])
    blocks = BLOCKS_PER_SM[str(one["implementation"]), pass_]
    order = str(one.get("order", "rows"))
    hopper = one["implementation"] == HOPPER
    asked = (HOPPER if hopper else OURS, shape, tile, pass_, H200, blocks)
    main = f"flash_{pass_}{'_sm90' if hopper else ''}"
    low, high = read_spread(*asked, kernel=main, order=order)
    value = sum(predict_hbm(*asked, order=order).reads[main].values())
    spread = {"spread_min": min(low, value), "spread_max": max(high, value), "spread_n": len(PACES)}
    yield row("hbm_read_bytes", value, level="hbm", tool="simulated L2, registered", **spread)


@cache
def counted() -> Profiled[KernelCount]:
    """The counters of this process' run."""
    from repro.instruments.counted import count_cells

    return Profiled(cells(), count_cells, batch=BATCH, limit_s=LIMIT_S)


def measure(one: Cell, context: Context) -> list[Row]:
    """HBM reads of the pass's main kernel, which is the one that reads most."""
    kernels = [k for k in counted().kernels(one) if MAIN[str(one["implementation"])] in k.name]
    if not kernels:
        raise RuntimeError("no kernel of the pass is among those that were counted")
    main = max(kernels, key=lambda kernel: kernel.bytes["sm", "read"])
    return [row("hbm_read_bytes", main.bytes["hbm", "read"], level="hbm", kernel_name=main.name, tool="ncu")]


EXPERIMENT = Experiment(
    "gpu-l2-registered", cells, measure=measure, device="cuda", seconds=seconds_of(len(cells()), BATCH)
)
