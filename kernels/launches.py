"""What a pass launches on a device that need not be at hand.

The drivers themselves are run, on a recorder instead of a backend (``kernels.launching.plan``). So
there is one rule for the algorithm, the tile and the scratch memory, whoever asks: the operator,
the command line or a figure.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from analysis.algorithms import Family, find
from analysis.arguments import check_fields, checked, names, one_of
from analysis.packed import Lengths
from analysis.shapes import AttentionShape, Tile, scale_blocks
from kernels import attention, dispatch
from kernels.flash_config import HEAD_DIMS, SHARED_LIMIT_BYTES
from kernels.launch import Array, Count, Pass, Size, contiguous_strides
from kernels.launching.plan import Launch, Recorder, record
from kernels.packed import Packed

AUTO = "auto"
"""The algorithm that ``kernels.dispatch`` picks."""
GRADIENTS = ("dq", "dk", "dv")
#: Endings of the kernels around the one that walks the tile loop.
_AROUND = (
    "_init", "_clear_counter", "_preprocess", "_postprocess", "_repair", "_dq", "_bias_zero",
    "_bias_sum",
)  # fmt: skip


@dataclass(frozen=True)
class Device:
    """What the choice of kernels depends on.

    compute_capability: as "80"; None for the host backend.
    shared_limit_bytes: shared memory that a block may have.
    """

    compute_capability: str | None = None
    shared_limit_bytes: Size = SHARED_LIMIT_BYTES
    multiprocessors: Count = 2

    def __post_init__(self) -> None:
        check_fields(self)
        if self.compute_capability is not None and not self.compute_capability.isdigit():
            raise ValueError(
                f"compute_capability={self.compute_capability!r} is no number such as '80'"
            )


HOST = Device()


@dataclass(frozen=True)
class Launched:
    """The launches of a pass. ``reason``: why dispatch picked this algorithm, if it was asked."""

    algorithm: str
    reason: str | None
    launches: tuple[Launch, ...]
    scratch: tuple[Array, ...]

    @property
    def main(self) -> Launch:
        """The launch that walks the tile loop; of standard attention the first of its products."""
        walking = (x for x in self.launches if not x.kernel.entry.endswith(_AROUND))
        found = next(walking, self.dq)
        assert found is not None  # every pass has one
        return found

    @property
    def dq(self) -> Launch | None:
        """The second pass of "flash-split"."""
        return next((x for x in self.launches if x.kernel.entry == "flash_backward_dq"), None)

    @property
    def columns(self) -> int:
        """Columns of a tile in shared memory and registers: products run over all of them."""
        return dict(self.main.kernel.macros)["HEAD_DIM"]


@checked
def tile_of(launch: Launch) -> Tile:
    """The tile that a main kernel is compiled for."""
    macros = dict(launch.kernel.macros)
    # The Hopper kernels: 64 query rows a consumer warpgroup (forward), 128 keys (backward).
    block_m = macros["BLOCK_M"] if "BLOCK_M" in macros else 64 * macros["CONSUMERS"]
    return Tile(block_m, macros.get("BLOCK_N", 128))


@checked
def launches_of(
    algorithm: str,
    shape: AttentionShape,
    pass_: Pass,
    device: Device = HOST,
    *,
    tile: Tile | None = None,
    key_mask: bool = False,
    dropout: bool = False,
    block_mask: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    bias: tuple[int, int] | None = None,
    bias_gradient: bool = False,
    lse_gradient: bool = False,
    deterministic: bool = False,
    order: str = "rows",
    gradients: Collection[str] = GRADIENTS,
    lengths: Lengths | None = None,
) -> Launched:
    """What ``kernels.attention`` launches for contiguous arrays of the shape.

    algorithm: one of ``kernels.attention.ALGORITHMS``, or :data:`AUTO` for dispatch's choice.
    shape: the caller's; arrays have its ``padded`` one, as the operator makes them.
    tile: asked for by the caller; with ``block_mask`` the size of a block.
    bias: (items, heads) of a bias, each 1 or as many as there are.
    bias_gradient: the backward makes its gradient too.
    gradients: those that a backward is asked for; dk and dv are made together, and with the
        gradient of a bias all three.
    lengths: of packed sequences; ``shape`` is that of the arrays, (1, H, total, D).

    Raises ValueError or TypeError as the drivers do for what they cannot run.
    """
    tensor_cores = algorithm == AUTO or find(algorithm).family in (Family.FLASH, Family.HOPPER)
    if tensor_cores and shape.head_dim > HEAD_DIMS[-1]:
        raise ValueError(f"head_dim={shape.head_dim} is outside 1…{HEAD_DIMS[-1]}")
    if shape.fp8 and pass_ == "backward":
        raise ValueError(f"{algorithm}: k and v of e4m3 have no gradient, so no backward")
    shape, asked = shape.padded, algorithm
    windowed = shape.windowed
    arrays = _arrays(shape, pass_, key_mask=key_mask, alibi=alibi, lse_gradient=lse_gradient)
    if lengths is not None:
        lengths.check(shape)
        windowed = any(each.windowed for each in lengths.shapes(shape))
        size = (lengths.sequences + 1,)
        arrays |= {name: _array(name, size, "int32") for name in ("cu_seqlens_q", "cu_seqlens_k")}
        if alibi:
            slopes = (lengths.sequences, shape.heads, 1)
            arrays["alibi_slopes"] = _array("alibi_slopes", slopes, "fp32")
    if bias is not None:
        pairs = (*bias, shape.seqlen_q, shape.seqlen_k)
        arrays |= {n: _array(n, pairs, shape.dtype) for n in ("bias", "dbias")}
    bias_gradient = bias_gradient and pass_ == "backward"
    if bias_gradient and bias is None:
        raise ValueError("bias_gradient=True without a bias")
    reason = None
    for each in names("gradients", gradients):
        one_of("gradients", each, GRADIENTS)
    made = set(gradients) | ({"dk", "dv"} if {"dk", "dv"} & set(gradients) else set())
    made |= set(GRADIENTS) if bias_gradient else set()
    if algorithm == AUTO and pass_ == "backward" and made != set(GRADIENTS):
        algorithm, reason = "flash-split", f"only {', '.join(sorted(made))} are asked for"
    elif algorithm == AUTO:
        rows = [a for a in arrays.values() if len(a.shape) == 4]
        operands = [a for a in rows if a.name not in ("bias", "dbias")]
        choice = dispatch.choose(
            device, operands, scale=1.0, pass_=pass_, tile=tile, key_mask=key_mask,
            dropout=dropout, block_mask=block_mask, window=windowed, softcap=softcap,
            alibi=alibi, bias=bias is not None, fp8=shape.fp8, packed=lengths is not None,
            deterministic=deterministic and pass_ == "backward", causal=shape.causal, order=order,
        )  # fmt: skip
        algorithm, reason = choice.algorithm, choice.reason
    options: dict[str, Any] = {
        "scale": 1.0, "causal": shape.causal, "window": shape.window, "sinks": shape.sinks,
        "dropout_p": 0.5 if dropout else 0.0,
        "softcap": 1.0 if softcap else None, "shared_limit_bytes": device.shared_limit_bytes,
        "order": order,
    }  # fmt: skip
    if shape.fp8:
        options["scale_block"] = shape.scale_block
    block_size = None
    if block_mask:
        if tile is None:
            raise ValueError("a block mask needs a tile: the size of its blocks")
        block_size = (tile.block_m, tile.block_n)
        blocks = (-(-shape.seqlen_q // tile.block_m), -(-shape.seqlen_k // tile.block_n))
        arrays["block_mask"] = _array("block_mask", (shape.batch, shape.heads, *blocks), "uint8")
        options["block_size"] = block_size
    if tile is not None and asked == AUTO:  # as the operator does
        options["tile"] = dispatch.kernel_tile(
            pass_, shape.dtype, shape.head_dim, tile, limit=device.shared_limit_bytes,
            block_size=block_size, causal=shape.causal, window=shape.window != (None, None),
            key_mask=key_mask, dropout=dropout, softcap=softcap, alibi=alibi,
            bias=bias is not None, fp8=shape.fp8, packed=lengths is not None,
        )  # fmt: skip
    else:
        options["tile"] = tile

    keeps_lse = find(algorithm).family in (Family.FLASH, Family.HOPPER)

    def driver(backend: Recorder, at: dict[str, Array]) -> None:
        optional = ("key_mask", "block_mask", "alibi_slopes", "bias", "k_scale", "v_scale")
        masks: dict[str, Any] = {n: at[n] for n in optional if n in at}
        if lengths is not None:
            masks["packed"] = Packed(at["cu_seqlens_q"], at["cu_seqlens_k"], lengths)
        if pass_ == "forward":
            attention.forward(
                backend, algorithm, at["q"], at["k"], at["v"], at["out"],
                {"lse": at["lse"]} if keeps_lse else {},
                **options, **masks,
            )  # fmt: skip
            return
        stats = {name: at[name] for name in ("lse", "m", "l", "p")}
        dq, dk, dv = (at[name] if name in made else None for name in GRADIENTS)
        attention.backward(
            backend, algorithm, at["q"], at["k"], at["v"], at["out"], at["dout"], stats,
            dq, dk, dv, dlse=at.get("dlse"),
            dbias=at["dbias"] if bias_gradient else None, **options, **masks,
        )  # fmt: skip

    plan = record(device, arrays, driver)
    return Launched(algorithm, reason, plan.launches, plan.scratch)


def _array(name: str, shape: tuple[int, ...], dtype: str) -> Array:
    return Array(name, 0, shape, contiguous_strides(shape), dtype, "rw")


def _arrays(
    shape: AttentionShape, pass_: str, *, key_mask: bool, alibi: bool, lse_gradient: bool
) -> dict[str, Array]:
    """Stand-ins for the caller's arrays, q first."""
    queries = (shape.batch, shape.heads, shape.seqlen_q, shape.head_dim)
    keys = (shape.batch, shape.kv_heads, shape.seqlen_k, shape.head_dim)
    scores = (shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k)
    sizes = {"q": queries, "k": keys, "v": keys, "out": queries}
    rows = ["lse"]
    if pass_ == "backward":
        sizes |= {"dout": queries, "dq": queries, "dk": keys, "dv": keys}
        rows += ["m", "l", *(["dlse"] if lse_gradient else [])]
    arrays = {name: _array(name, size, shape.dtype) for name, size in sizes.items()}
    arrays |= {name: _array(name, queries[:3], "fp32") for name in rows}
    if shape.fp8:
        blocks = scale_blocks(shape.seqlen_k, shape.scale_block)
        arrays |= {name: _array(name, keys, "uint8") for name in ("k", "v")}
        arrays |= {n: _array(n, (*keys[:2], blocks), "fp32") for n in ("k_scale", "v_scale")}
    if pass_ == "backward":
        p = _array("p", (*scores[:3], -(-scores[3] // 8) * 8), shape.dtype)
        arrays["p"] = replace(p, shape=scores)
    if key_mask:
        arrays["key_mask"] = _array("key_mask", (shape.batch, shape.seqlen_k), "uint8")
    if alibi:
        arrays["alibi_slopes"] = _array("alibi_slopes", (*queries[:2], 1), "fp32")
    return arrays
