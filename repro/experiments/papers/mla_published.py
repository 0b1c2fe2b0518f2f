"""Decoding on DeepSeek's latent as others timed it, beside the roofline of reading it once.

FlashMLA's own test (128 sequences of 4096 keys, one head of 576 columns, 512 values, bf16), run on
an H100 by a user in February 2025 and posted with its shapes; the authors' "up to 3000 GB/s" names
none. Rows are query heads times queries of a sequence: what shares the latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from analysis import decode
from analysis.decode import DecodeShape
from analysis.hardware import H100_SXM
from repro.experiments import Cell, Experiment, Row, row

CARD = H100_SXM
BATCH, KEYS, COLUMNS, VALUES, DTYPE = 128, 4096, 576, 512, "bf16"
#: (query heads, queries a sequence) of the rows posted, and more of them.
POSTED = ((16, 1), (16, 2), (32, 1), (32, 2), (64, 1))
SHAPES = (*POSTED, (64, 2), (128, 1), (128, 2))


def shape_of(heads: int, width: int) -> DecodeShape:
    """A row of the test."""
    return DecodeShape(
        heads, 1, width, (KEYS,) * BATCH, COLUMNS, DTYPE, latent=True, page_size=64, ragged=True, value_dim=VALUES
    )


def points() -> list[Cell]:
    """The rows of the test."""
    fields: dict[str, Any] = {"batch": BATCH, "kv_heads": 1, "seqlen_k": KEYS, "head_dim": COLUMNS, "dtype": DTYPE}
    return [Cell(pass_="forward", heads=heads, seqlen_q=width, **fields) for heads, width in SHAPES]


def predict(one: Cell) -> Iterator[Row]:
    """The time of HBM and of the tensor cores, and the bytes of the bound."""
    shape = shape_of(int(one["heads"]), int(one["seqlen_q"]))
    times = {"HBM": decode.hbm_seconds(shape, CARD), "tensor cores": decode.tensor_seconds(shape, CARD)}
    for name, seconds in times.items():
        tool = f"datasheet of {CARD.name}"
        yield row("time_us", seconds * 1e6, implementation=name, device=CARD.name, tool=tool)
    yield row("compulsory_bytes", shape.compulsory_bytes, implementation="HBM", tool="each tensor once")


EXPERIMENT = Experiment("mla-published", predict=predict, also=points)
