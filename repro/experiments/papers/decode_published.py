"""Decoding as others timed it, beside the cache at the bandwidth of HBM.

Flash-Decoding's table (Dao, Haziza, Massa, Sizov 2023): one query a sequence, 16 query heads of 128
columns on 2 heads of K and V, fp16, "A100" without its memory; 64k tokens in all, from 256
sequences of 256 to one of 65536, and one of 131072. Predicted: the roofline of both A100s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from analysis import decode
from analysis.decode import DecodeShape
from analysis.hardware import A100_40GB, A100_80GB
from repro.experiments import Cell, Experiment, Row, row

CARDS = (A100_40GB, A100_80GB)
HEADS, KV_HEADS, HEAD_DIM, DTYPE = 16, 2, 128, "fp16"
TOKENS = 65536
#: (sequences, keys of each), as in the table.
SHAPES = (*((TOKENS // n, n) for n in (256 << i for i in range(9))), (1, 131072))
FLASH_DECODING = "flash-decoding"


def points() -> list[Cell]:
    """The rows of the table."""
    fields: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "seqlen_q": 1, "head_dim": HEAD_DIM, "dtype": DTYPE}
    return [
        Cell(implementation="roofline", pass_="forward", batch=batch, seqlen_k=context, **fields)
        for batch, context in SHAPES
    ]


def predict(one: Cell) -> Iterator[Row]:
    """Microseconds of the roofline on each card, and the bytes behind them."""
    shape = DecodeShape(HEADS, KV_HEADS, 1, (int(one["seqlen_k"]),) * int(one["batch"]), HEAD_DIM, DTYPE)
    for gpu in CARDS:
        tool = f"cache once, datasheet of {gpu.name}"
        yield row("time_us", decode.seconds(shape, gpu) * 1e6, device=gpu.name, tool=tool)
    yield row("compulsory_bytes", shape.compulsory_bytes, tool="each tensor once")


EXPERIMENT = Experiment("decode-published", predict=predict, also=points)
