"""What drivers are asked for beside their arrays: the options of ``kernels.attention`` by name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from analysis.arguments import check_fields
from analysis.features import FEATURES
from analysis.shapes import Tile
from analysis.window import Sides, Window
from kernels.flash_config import SHARED_LIMIT_BYTES, FlashConfig, configure, default_tile
from kernels.fp8 import KeyScales, key_scales
from kernels.launch import Argument, Array, Backend, Order, Size, Word
from kernels.packed import Packed, rows_of_all
from kernels.philox import drop_threshold, keep_scale
from kernels.scores import ScoreChanges
from kernels.window import window_arguments, window_of


@dataclass(frozen=True)
class Options:
    """What a pass is asked for beside its arrays; ``kernels.attention`` takes these by name.

    Args:
        scale: that scores are multiplied with.
        causal: query i sees key j when j <= i + Nk - Nq.
        window, sinks: (left, right) keys around its diagonal i + Nk - Nq, None: unlimited; and the
            first keys, whatever the window.
        tile: rows of q and of k, v a tile; default ``kernels.flash_config.default_tile``.
        dropout_p, seed: :func:`kernels.philox.kept_weights` is the mask.
        block_size: (rows, keys) of a block of ``block_mask``, multiples of the tile; default: the
            tile.
        softcap, alibi_slopes, bias: :class:`kernels.scores.ScoreChanges`; "flash…"; without a
            bias Hopper's but the optimistic forward and, at head_dim 64, a softcap's backward.
        sink_logits: (H,) fp32, dense: joins each row's denominator as the score of a key of value 0;
            dsink_logits receives their gradient. The sm_80 kernels, no packed sequences.
        k_scale, v_scale, scale_block: of k and v in e4m3, :class:`kernels.fp8.KeyScales`; of the
            sm_80 forward.
        packed: :class:`kernels.packed.Packed`; refused with what ``analysis.features`` says does
            not go with it, progress, the backward of "flash-deterministic", and by Hopper's
            kernels with a window, softcap or alibi_slopes, and in their optimistic forward.
        order: of the walk, of the flash kernels of either family. "rows": as each does by itself.
            "sawtooth": the other way round in every second wave of blocks, for the same bytes at
            the SM boundary and fewer from HBM where what blocks share outgrows L2
            (``analysis.l2``). Sums are then added in another order in those waves.
        wave: blocks that run at a time, of "sawtooth" alone; by default SMs times the blocks that
            an SM holds.
        shared_limit_bytes: shared memory a block may have.
        stream: where a GPU backend queues the work.
    """

    scale: float
    causal: bool = False
    window: Sides = (None, None)
    sinks: Size = 0
    tile: Tile | None = None
    key_mask: Array | None = None
    dropout_p: float = 0.0
    seed: Word = 0
    block_mask: Array | None = None
    block_size: tuple[int, int] | None = None
    softcap: float | None = None
    alibi_slopes: Array | None = None
    bias: Array | None = None
    sink_logits: Array | None = None
    dsink_logits: Array | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None
    scale_block: int | None = None
    packed: Packed | None = None
    order: Order = "rows"
    wave: Size | None = None
    shared_limit_bytes: Size = SHARED_LIMIT_BYTES
    stream: Word | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        key_scales(self.k_scale, self.v_scale, self.scale_block)  # refuses one without the other
        wave = self.wave
        if wave is not None and (self.order != "sawtooth" or wave < 1):
            raise ValueError(
                f"wave={wave} with order={self.order!r}: it is the number of blocks that run at a time, of a sawtooth"
            )

    @property
    def changes(self) -> ScoreChanges:
        """Of the scores."""
        return ScoreChanges(self.softcap, self.alibi_slopes, self.bias)

    @property
    def key_scales(self) -> KeyScales | None:
        """Of K and V in e4m3; None where they have the type of q."""
        return key_scales(self.k_scale, self.v_scale, self.scale_block)

    def hidden(self, q: Array, k: Array) -> Window | None:
        """The window as the kernels see it (``kernels.window``), None where it hides nothing."""
        lengths = None if self.packed is None else self.packed.lengths
        return window_of(q, k, self.causal, self.window, self.sinks, lengths)

    def features(self, q: Array, k: Array) -> frozenset[str]:
        """Names of the options that are used, as in ``analysis.features``."""
        named = {name: getattr(self, each.argument, None) for name, each in FEATURES.items()}
        named |= {"window": self.hidden(q, k), "sawtooth": self.order == "sawtooth" or None}
        return frozenset(name for name, value in named.items() if value not in (None, False, 0.0))

    def config(self, kernel: str, q: Array, k: Array, **more: Any) -> FlashConfig:
        """The compiled form of "forward", "backward" or "backward-dq"."""
        used = [FEATURES[name] for name in self.features(q, k)]
        return configure(
            kernel,
            q.dtype,
            q.shape[3],
            tile=self.tile,
            limit=self.shared_limit_bytes,
            block_size=self._block_size(kernel, q, k),
            features=[each.name for each in used if each.macro and kernel in each.kernels],
            **more,
        )

    def check(self, q: Array, k: Array, **refused: Any) -> None:
        """What the options' own arrays may not be; ``refused``: not with packed sequences."""
        for name in ("sink_logits", "dsink_logits"):
            logits = getattr(self, name)
            if logits is not None and (logits.dtype != "fp32" or logits.shape != q.shape[1:2]):
                raise ValueError(f"{name} is {logits.dtype} {logits.shape}, not fp32 (H,) = {q.shape[1:2]}")
        if self.dsink_logits is not None and self.sink_logits is None:
            raise ValueError("dsink_logits without sink_logits")
        if self.packed is None:
            self.changes.check(q, k)
            return
        alone = [each.argument for each in FEATURES.values() if not each.with_packed]
        asked = {name: getattr(self, name) for name in alone if hasattr(self, name)}
        self.packed.refuse(**asked, **refused)
        self.packed.check(q, k)
        self.changes.check(q, k, self.packed.lengths.sequences)

    def sizes(self, q: Array, k: Array) -> tuple[int, int, int]:
        """Items, and the queries and keys of one, that the blocks of a grid share out: of packed
        sequences as many of the longest."""
        if self.packed is None:
            return q.shape[0], q.shape[2], k.shape[2]
        lengths = self.packed.lengths
        return lengths.sequences, lengths.longest_q, lengths.longest_k

    def rows(self, array: Array, access: str, name: str | None = None) -> Array:
        """An array of rows as the kernels that work on tiles get it."""
        seen = array.with_access(access, name)
        return seen if self.packed is None else rows_of_all(seen)

    def _block_size(self, kernel: str, q: Array, k: Array) -> tuple[int, int] | None:
        if self.block_mask is None:
            if self.block_size is not None:
                raise ValueError(f"block_size={self.block_size} without a block_mask")
            return None
        size = self.block_size
        if size is None:
            limit = self.shared_limit_bytes
            fp8 = self.key_scales is not None
            tile = self.tile or default_tile(q.shape[3], q.dtype, kernel, limit, fp8=fp8)
            size = (tile.block_m, tile.block_n)
        if self.block_mask.dtype != "uint8":
            raise TypeError(f"block_mask has dtype {self.block_mask.dtype}, not uint8")
        expected = (*q.shape[:2], tiles(q.shape[2], size[0]), tiles(k.shape[2], size[1]))
        if self.block_mask.shape != expected:
            raise ValueError(f"block_mask has shape {self.block_mask.shape}, blocks of {size} make it {expected}")
        return size

    def masks(self) -> list[Argument]:
        """Key mask, dropout and block mask, in the order of the kernels' arguments."""
        args: list[Argument] = []
        if self.key_mask is not None:
            args.append(self.key_mask.with_access("r", "key_mask"))
        if self.dropout_p != 0.0:
            args += [
                np.uint64(self.seed),
                np.uint32(drop_threshold(self.dropout_p)),
                np.float32(keep_scale(self.dropout_p)),
            ]
        if self.block_mask is not None:
            args.append(self.block_mask.with_access("r", "block_mask"))
        return args

    def walk(self, backend: Backend, config: FlashConfig, q: Array, k: Array) -> list[Argument]:
        """The blocks of a wave, of a kernel that walks in a sawtooth, the window, and the tables of
        packed sequences."""
        wave: list[Argument] = []
        if "sawtooth" in config.features:
            blocks = backend.multiprocessors * config.blocks_per_sm(self.shared_limit_bytes)
            wave = [np.int32(self.wave or blocks)]
        tables = [] if self.packed is None else self.packed.arguments()
        return [*wave, *window_arguments(self.hidden(q, k)), *tables]


#: Options that are arrays, but for the tables of packed sequences.
ARRAYS = tuple(each.name for each in fields(Options) if "Array" in str(each.type))
#: Options that are no arrays, under the names that a problem and its shape have for them.
VALUES = tuple(each.name for each in fields(Options) if "Array" not in str(each.type) and each.name != "scale")


def tiles(rows: int, block: int) -> int:
    """Tiles that rows are cut into, the last one ragged."""
    return -(-rows // block)
