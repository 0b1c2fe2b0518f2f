"""Steps 1 and 2 of the kernel ladder: their drivers, tiles and kernels by algorithm.

========================  ===============  ====================================================
algorithm                 driver           FlashAttention 2022
========================  ===============  ====================================================
``"standard"``            ``standard.py``  Algorithms 0 and 3: S and P in memory
``"flash1-literal"``      ``flash1.py``    Algorithms 1, 2 and 4 as printed
``"flash1-skip-first"``   ``flash1.py``    the same without a read-back in the first pass
``"flash1-released"``     ``flash1.py``    the authors' code: an unfinished O and dQ in fp32
========================  ===============  ====================================================

They are for reading beside the paper and for counting bytes; products are plain multiply-adds.
``kernels.attention.forward`` and ``backward`` run any step of the ladder by its name.
``kernels/README.md`` is the ladder's table of contents.
"""

from __future__ import annotations

from analysis.algorithms import Family, find, of_family
from analysis.arguments import checked
from analysis.shapes import Tile
from kernels.flash1 import flash1_backward, flash1_forward, flash1_kernel, flash1_shared_bytes, flash1_tile
from kernels.flash_config import SHARED_LIMIT_BYTES
from kernels.launch import Count, IoType, Kernel, Pass, Size
from kernels.standard import (
    DEFAULT_TILE,
    FORM,
    ROWS,
    standard_backward,
    standard_forward,
    standard_kernel,
    standard_row_bytes,
    standard_shared_bytes,
)

__all__ = [
    "ALGORITHMS",
    "all_kernels",
    "default_tile",
    "flash1_backward",
    "flash1_forward",
    "flash1_shared_bytes",
    "standard_backward",
    "standard_forward",
    "standard_row_bytes",
    "standard_shared_bytes",
]

ALGORITHMS = of_family(Family.STANDARD, Family.FLASH1)


@checked
def default_tile(
    algorithm: str, head_dim: Count, dtype: IoType, pass_: Pass, shared_limit_bytes: Size = SHARED_LIMIT_BYTES
) -> Tile:
    """64 × 64 for standard; Br = 16 and the largest Bc ≤ 256 that fits for flash1."""
    _require_known(algorithm)
    if algorithm == "standard":
        return DEFAULT_TILE
    return flash1_tile(head_dim, dtype, pass_, shared_limit_bytes)


@checked
def all_kernels(algorithm: str, tile: Tile, head_dim: Count, dtype: IoType) -> list[Kernel]:
    """Every kernel of both passes at one tile, for compile tests and ahead-of-time builds."""
    _require_known(algorithm)
    if algorithm == "standard":
        return [standard_kernel(entry, tile, head_dim, dtype) for entry in (*FORM, *ROWS)]
    form = find(algorithm).form
    assert form
    entries = [("flash1_forward", "forward"), ("flash1_backward", "backward")]
    if form == "literal":
        entries += [("flash1_init", "forward"), ("flash1_backward_init", "backward")]
    return [flash1_kernel(entry, tile, head_dim, dtype, pass_, form=form) for entry, pass_ in entries]


def _require_known(algorithm: str) -> None:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r} is not one of {', '.join(ALGORITHMS)}")
