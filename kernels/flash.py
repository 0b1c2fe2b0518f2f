"""The sm_80 flash kernels: which launches make a forward and a backward (step 3 of the ladder).

``kernels.attention`` checks what all algorithms have in common and calls these. Arrays as there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from analysis.arguments import check_fields, checked
from analysis.features import FEATURES
from analysis.shapes import Tile
from analysis.window import Sides, Window
from kernels.bias_gradient import BiasGradient
from kernels.checks import check_shapes, finite
from kernels.flash_config import SHARED_LIMIT_BYTES, FlashConfig, configure, default_tile
from kernels.fp8 import KeyScales, key_scales
from kernels.launch import Argument, Array, Backend, Count, Order, Size, Word
from kernels.packed import Packed, rows_of_all
from kernels.philox import drop_threshold, keep_scale
from kernels.scores import ScoreChanges, check_bias
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
        return configure(
            kernel,
            q.dtype,
            q.shape[3],
            tile=self.tile,
            limit=self.shared_limit_bytes,
            block_size=self._block_size(kernel, q, k),
            features=self.features(q, k),
            **more,
        )

    def check(self, q: Array, k: Array, **refused: Any) -> None:
        """What the options' own arrays may not be; ``refused``: not with packed sequences."""
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
        expected = (*q.shape[:2], _tiles(q.shape[2], size[0]), _tiles(k.shape[2], size[1]))
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


#: Options that are no arrays, under the names that a problem and its shape have for them.
VALUES = tuple(each.name for each in fields(Options) if "Array" not in str(each.type) and each.name != "scale")


def forward(
    backend: Backend,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    options: Options,
    progress: Array | None = None,
    progress_tiles: int = 0,
) -> None:
    """out and lse. Raises TypeError or ValueError before anything is launched."""
    scales = options.key_scales
    kv_dtype = None if scales is None else "uint8"
    check_shapes(q, k, v, {"out": out}, {}, {"lse": lse}, options.key_mask, kv_dtype)
    if scales is not None:
        scales.check(q, k)
    options.check(q, k, progress=progress)
    scale = finite(options.scale)
    config = options.config(
        "forward", q, k, any_scale=scale <= 0.0, progress=progress_tiles if progress is not None else 0
    )
    heads, head_dim = q.shape[1], q.shape[3]
    items, seqlen_q, seqlen_k = options.sizes(q, k)
    blocks = items * heads * _tiles(seqlen_q, config.tile.block_m)
    if progress is not None:
        _check_progress(progress, blocks, config, seqlen_k)
    if blocks == 0:
        return
    args: list[Argument] = [
        options.rows(q, "r", "q"),
        options.rows(k, "r", "k"),
        options.rows(v, "r", "v"),
        options.rows(out, "w", "out"),
        options.rows(lse, "w", "lse"),
        np.int32(heads),
        np.int32(heads // k.shape[1]),
        np.int32(seqlen_q),
        np.int32(seqlen_k),
        np.int32(head_dim),
        np.float32(scale),
        *([] if scales is None else scales.arguments(k)),
        *options.changes.arguments(scale),
        *options.masks(),
        *options.walk(backend, config, q, k),
    ]
    if progress is not None:
        args += [progress.with_access("rw", "progress"), np.int32(progress.shape[1])]
    backend.launch(config.kernel(), (blocks, 1, 1), config.shared_bytes, args, options.stream)


@checked
def progress_notes(seqlen_k: Size, block_n: Count, progress_tiles: Size) -> int:
    """Columns of ``progress``: SM, start, a note for every ``progress_tiles`` key tiles, end."""
    if progress_tiles < 1:
        raise ValueError(f"progress_tiles={progress_tiles} is below 1")
    return 3 + _tiles(seqlen_k, block_n) // progress_tiles


def _check_progress(progress: Array, blocks: int, config: FlashConfig, seqlen_k: int) -> None:
    wanted = (blocks, progress_notes(seqlen_k, config.tile.block_n, config.progress))
    if progress.dtype != "int64" or progress.shape != wanted:
        raise ValueError(f"progress is {progress.dtype} {progress.shape}, not int64 {wanted} (blocks, notes)")


def backward(
    backend: Backend,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    lse: Array,
    dq: Array | None,
    dk: Array | None,
    dv: Array | None,
    options: Options,
    *,
    dlse: Array | None = None,
    dbias: Array | None = None,
    workspace: bool = False,
    split: bool = False,
) -> None:
    """The gradients, P recomputed from lse. Raises before anything is launched.

    workspace: partial dQ of every key tile, added up in their order, instead of atomic additions.
    split: dQ in a pass of its own; then dq, or both dk and dv, may be None.
    """
    rows = {"lse": lse} | ({} if dlse is None else {"dlse": dlse})
    like_q = {"out": out, "dout": dout} | ({} if dq is None else {"dq": dq})
    if (dk is None) != (dv is None):
        raise ValueError("dk and dv are made together, one of them is None")
    like_k = {} if dk is None or dv is None else {"dk": dk, "dv": dv}
    check_shapes(q, k, v, like_q, like_k, rows, options.key_mask)
    options.check(q, k, workspace=workspace)
    scale, stream = finite(options.scale), options.stream
    config = options.config("backward", q, k, deterministic=workspace, dlse=dlse is not None, query_gradient=not split)
    gradient = None
    if dbias is not None:
        partial = not options.features(q, k).isdisjoint(("causal", "window", "block_mask"))
        gradient = _bias_gradient(
            backend, options.changes, q, k, dk, dbias, deterministic=workspace or split, partial=partial
        )
        config = replace(config, bias_gradient=gradient.form)
    batch, heads, all_rows, head_dim = q.shape  # packed sequences are rows like others to some
    kv_heads = k.shape[1]
    items, seqlen_q, seqlen_k = options.sizes(q, k)
    query_blocks = batch * heads * _tiles(all_rows, config.row_block_m)
    key_tiles = _tiles(seqlen_k, config.tile.block_n)
    key_blocks = items * kv_heads * key_tiles
    preprocess, postprocess = config.row_kernels()

    slabs = 0 if split else key_tiles if workspace else 1
    delta = backend.empty("delta", (batch, heads, all_rows), "fp32")
    dq_accum = backend.empty("dq_accum", (slabs * batch, heads, all_rows, head_dim), "fp32")
    if query_blocks:
        args: list[Argument] = [
            out.with_access("r", "out"),
            dout.with_access("r", "dout"),
            delta.with_access("w"),
            np.int32(heads),
            np.int32(all_rows),
            np.int32(head_dim),
        ]
        if dlse is not None:
            args.append(dlse.with_access("r", "dlse"))
        if not workspace and not split:
            args.append(dq_accum.with_access("w"))
        backend.launch(preprocess, (query_blocks, 1, 1), 0, args, stream)
    operands: list[Argument] = [
        options.rows(q, "r", "q"),
        options.rows(k, "r", "k"),
        options.rows(v, "r", "v"),
        options.rows(dout, "r", "dout"),
        options.rows(lse, "r", "lse"),
        options.rows(delta, "r"),
    ]
    # The workspace is written in part: a causal or sparse pass skips tiles of it.
    sums = [] if split else [options.rows(dq_accum, "rw" if workspace else "atomic")]
    if key_blocks and dk is not None and dv is not None:
        if gradient is not None:
            gradient.zero(backend, stream)
        args = [
            *operands,
            *sums,
            options.rows(dk, "w", "dk"),
            options.rows(dv, "w", "dv"),
            np.int32(items),
            np.int32(kv_heads),
            np.int32(heads // kv_heads),
            np.int32(seqlen_q),
            np.int32(seqlen_k),
            np.int32(head_dim),
            np.float32(scale),
            *options.changes.arguments(scale),
            *([] if gradient is None else [gradient.argument()]),
            *options.masks(),
            *options.walk(backend, config, q, k),
        ]
        backend.launch(config.kernel(), (key_blocks, 1, 1), config.shared_bytes, args, stream)
        if gradient is not None:
            gradient.finish(backend, stream)
    if dq is None or not query_blocks:
        return
    if split:
        config = options.config("backward-dq", q, k)
        args = [
            *operands,
            options.rows(dq, "w", "dq"),
            np.int32(heads),
            np.int32(heads // kv_heads),
            np.int32(seqlen_q),
            np.int32(seqlen_k),
            np.int32(head_dim),
            np.float32(scale),
            *options.changes.arguments(scale),
            *options.masks(),
            *options.walk(backend, config, q, k),
        ]
        blocks = items * heads * _tiles(seqlen_q, config.tile.block_m)
        backend.launch(config.kernel(), (blocks, 1, 1), config.shared_bytes, args, stream)
    else:
        args = [
            dq_accum.with_access("r"),
            dq.with_access("w", "dq"),
            np.int32(batch),
            np.int32(heads),
            np.int32(all_rows),
            np.int32(seqlen_k),
            np.int32(head_dim),
            np.float32(scale),
        ]
        flags_bytes = 0
        if workspace and options.block_mask is not None:
            args.append(options.block_mask.with_access("r", "block_mask"))
            flags_bytes = 4 * postprocess.threads
        if workspace:
            args += window_arguments(options.hidden(q, k))
        backend.launch(postprocess, (query_blocks, 1, 1), flags_bytes, args, stream)


def _bias_gradient(
    backend: Backend,
    changes: ScoreChanges,
    q: Array,
    k: Array,
    dk: Array | None,
    dbias: Array,
    *,
    deterministic: bool,
    partial: bool,
) -> BiasGradient:
    """ValueError or TypeError for a gradient that has no bias, or does not fit it."""
    if changes.bias is None:
        raise ValueError("dbias without a bias")
    if dk is None:
        raise ValueError("dbias is made together with dk and dv, which are None")
    check_bias("dbias", dbias, q, k)
    if dbias.shape != changes.bias.shape:
        raise ValueError(f"dbias has shape {dbias.shape}, bias {changes.bias.shape}")
    return BiasGradient.start(backend, dbias, q, deterministic=deterministic, partial=partial)


def _tiles(rows: int, block: int) -> int:
    return -(-rows // block)
