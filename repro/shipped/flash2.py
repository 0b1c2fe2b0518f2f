"""FlashAttention-2's kernels as torch ships them: what they are called, take and are launched with.

Forms and grids are those of its ``flash_fwd_launch_template.h`` and ``flash_bwd_launch_template.h``
on an A100 and an H200, the struct of arguments that of its ``flash.h``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.shapes import AttentionShape, Tile
from kernels.machine import Counts, Struct
from repro.shipped.library import find

KERNELS = ("forward", "dot_do_o", "backward", "convert_dq")
"""In order of launch; ``dot_do_o`` sums the rows of dO ∘ O and clears the fp32 sum of dQ."""

#: Rows are padded to this in ``delta`` and in the fp32 sum of dQ.
ROUNDED = 128


@dataclass(frozen=True)
class Form:
    """Tile, warps, the template arguments of the name, and the blocks an SM holds: a forward's
    4 warps of up to 255 registers twice, a backward's 8 once."""

    tile: Tile
    warps: int
    traits: str
    blocks_per_sm: int


FORMS = {
    ("forward", 64): Form(Tile(128, 128), 4, "ILi64ELi128ELi128ELi4ELb0ELb0E", 2),
    ("forward", 128): Form(Tile(128, 64), 4, "ILi128ELi128ELi64ELi4ELb0ELb0E", 2),
    ("backward", 64): Form(Tile(128, 128), 8, "ILi64ELi128ELi128ELi8ELi4ELi4ELi4ELb0ELb0E", 1),
    ("backward", 128): Form(Tile(64, 128), 8, "ILi128ELi64ELi128ELi8ELi2ELi4ELi2ELb0ELb0E", 1),
}
_TYPES = {"fp16": "6half_t", "bf16": "10bfloat16_t"}
#: Beginning of a name. Switches follow: dropout, causal, local, ALiBi, whole tiles, whole rows of
#: head_dim, a softcap, and of the forward whether it returns the softmax.
_NAMES = {
    "forward": ("flash_fwd_kernelI23Flash_fwd_kernel_traits", "0c00w100"),
    "dot_do_o": ("flash_bwd_dot_do_o_kernelILb1E23Flash_bwd_kernel_traits", ""),
    "backward": ("flash_bwd_dq_dk_dv_loop_seqk_parallel_kernelI23Flash_bwd_kernel_traits", "0c00w10"),
    "convert_dq": ("flash_bwd_convert_dq_kernelI23Flash_bwd_kernel_traits", ""),
}


def form_of(kernel: str, head_dim: int) -> Form:
    """KeyError for a head dimension other than 64 and 128."""
    return FORMS["forward" if kernel == "forward" else "backward", head_dim]


def pattern(kernel: str, head_dim: int, dtype: str, causal: bool = False, whole: bool = True) -> str:
    """A regular expression of the mangled name. whole: lengths are multiples of the tile."""
    begin, flags = _NAMES[kernel]
    switches = "".join(f"ELb{flag}" for flag in flags.replace("c", str(int(causal))).replace("w", str(int(whole))))
    traits = form_of(kernel, head_dim).traits
    return (
        rf"{begin}{traits}N7cutlass{_TYPES[dtype]}\w*{switches}EEEvNS_"
        if flags
        else f"{begin}{traits}N7cutlass{_TYPES[dtype]}"
    )


def parameters(shape: AttentionShape, given: Mapping[str, Any], nbytes: int) -> Struct:
    """The struct of arguments, for tensors that lie (B, N, H, D).

    Args:
        given: arrays, or addresses, by the names of :func:`arrays`; the backward's where they are.
        nbytes: of the struct, which says whether torch keeps 24 or 32 bytes of a random state in it.
    """
    wide, word, real, byte = np.int64, np.int32, np.float32, np.uint8
    row, key_row = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    scale = 1 / math.sqrt(shape.head_dim)
    rounded = [-(-n // ROUNDED) * ROUNDED for n in (shape.seqlen_q, shape.seqlen_k)]
    queries = {"batch": shape.seqlen_q * row, "row": row, "head": shape.head_dim}
    keys = {"batch": shape.seqlen_k * key_row, "row": key_row, "head": shape.head_dim}
    fields: dict[str, Any] = {name: given[name] for name in ("q", "k", "v")}
    for stride in queries:
        fields |= {f"q {stride}": wide(queries[stride])}
        fields |= {f"{name} {stride}": wide(keys[stride]) for name in ("k", "v")}
    fields |= {
        "heads": word(shape.heads),
        "key heads": word(shape.kv_heads),
        "group": word(shape.heads // shape.kv_heads),
    }
    fields |= {"out": given["out"], "out of splits": None}
    fields |= {f"out {stride}": wide(queries[stride]) for stride in queries}
    fields |= {"softmax": None, "lse": given["lse"], "lse of splits": None}
    fields |= {"batch": word(shape.batch), "queries": word(shape.seqlen_q), "keys": word(shape.seqlen_k)}
    fields |= {"new keys": word(0), "head_dim": word(shape.head_dim)}
    fields |= {"rounded queries": word(rounded[0]), "rounded keys": word(rounded[1])}
    fields |= {"rounded head_dim": word(shape.head_dim), "rotary": word(0), "all queries": word(0)}
    fields |= {"scale": real(scale), "scale of exp2": real(scale * math.log2(math.e))}
    fields |= dict.fromkeys(("packed q", "packed k", "left padding", "used", "block mask", "new k", "new v"))
    fields |= {f"new stride {n}": wide(0) for n in range(6)}
    fields |= dict.fromkeys(("cosines", "sines", "cache indices", "pages"))
    fields |= {"pages stride": wide(0), "page": word(0)}
    fields |= {"kept": real(1), "kept of 255": byte(255), "1 / kept": real(1), "scale / kept": real(scale)}
    fields |= {"left": word(-1), "right": word(0 if shape.causal else -1), "softcap": real(0)}
    backward = nbytes >= 640
    random_bytes = nbytes - (616 if backward else 440)
    fields |= {f"random {n}": wide(0) for n in range(random_bytes // 8)}
    fields |= {"random state": None, "bf16": byte(shape.dtype == "bf16"), "causal": byte(shape.causal)}
    fields |= {"lengths add up": byte(1), "rotary in pairs": byte(0), "splits": word(0)}
    fields |= {"slopes": None, "slopes stride": wide(0), "packed lse": byte(0), "groups swapped": byte(0)}
    if backward:
        fields |= {name: given[name] for name in ("dout", "dq", "dk", "dv", "dq_sum")}
        fields |= dict.fromkeys(("sum of dk", "sum of dv"))
        fields |= {f"dout {stride}": wide(queries[stride]) for stride in queries}
        for stride in queries:
            fields |= {f"{name} {stride}": wide(queries[stride]) for name in ("dq", "dk", "dv")}
        for name in ("dk", "dv"):  # one of each query head
            fields[f"{name} batch"] = wide(shape.seqlen_k * row)
        fields |= {"delta": given["delta"], "deterministic": byte(0), "split stride": wide(0)}
    return Struct(fields)


def arrays(shape: AttentionShape, operands: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All that the kernels read and write, from q, k, v and dout (B, N, H, D), bf16 as uint16.

    dk and dv have a head of each query head, as torch asks for; the fp32 sum of dQ holds NaN.
    """
    q, k = operands["q"], operands["k"]
    rows = -(-shape.seqlen_q // ROUNDED) * ROUNDED
    wide_keys = (shape.batch, shape.seqlen_k, shape.heads, shape.head_dim)
    return {
        **operands,
        "out": np.zeros_like(q),
        "lse": np.zeros((shape.batch, shape.heads, shape.seqlen_q), np.float32),
        "dq": np.zeros_like(q),
        "dk": np.zeros(wide_keys, k.dtype),
        "dv": np.zeros(wide_keys, k.dtype),
        "delta": np.zeros((shape.batch, shape.heads, rows), np.float32),
        "dq_sum": np.full((shape.batch, rows, shape.heads, shape.head_dim), np.nan, np.float32),
    }


def shared_bytes(kernel: str, head_dim: int) -> int:
    """Dynamic shared memory of a block."""
    form = form_of(kernel, head_dim)
    rows, keys = form.tile.block_m, form.tile.block_n
    elements = {
        "forward": rows * head_dim + 2 * keys * head_dim,
        "dot_do_o": 0,
        "backward": 3 * rows * head_dim + 2 * keys * head_dim + 2 * rows * keys,
        "convert_dq": rows * head_dim,
    }
    return 2 * elements[kernel]


def launch(
    kernel: str,
    architecture: int,
    shape: AttentionShape,
    given: Mapping[str, np.ndarray],
    blocks: Sequence[int] | None = None,
    **options: Any,
) -> Counts:
    """Run one of :data:`KERNELS` on :func:`arrays`; they are changed in place.

    Args: as :meth:`kernels.machine.Program.launch`. Errors as it and :func:`repro.shipped.library.find`.
    """
    form = form_of(kernel, shape.head_dim)
    whole = shape.seqlen_q % form.tile.block_m == 0 and shape.seqlen_k % form.tile.block_n == 0
    wanted = pattern(kernel, shape.head_dim, shape.dtype, shape.causal, whole)
    everything = [pattern(k, shape.head_dim, shape.dtype, shape.causal, whole) for k in KERNELS]
    program, entry = find(architecture, everything)[wanted]
    rows, tile_rows = shape.seqlen_q, form.tile.block_m
    if kernel == "backward":
        rows, tile_rows = shape.seqlen_k, form.tile.block_n
    nbytes = program.cubin.entry(entry).parameters[0].nbytes
    args: list[Any] = [parameters(shape, given, nbytes)]
    if kernel == "convert_dq":
        args.append(np.int32(1))
    grid = (-(-rows // tile_rows), shape.batch, shape.heads)
    shared = shared_bytes(kernel, shape.head_dim)
    return program.launch(entry, grid, 32 * form.warps, shared, args, blocks=blocks, **options)
