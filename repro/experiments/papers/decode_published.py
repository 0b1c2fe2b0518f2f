"""Decoding as others timed it, beside the cache at the bandwidth of HBM.

Flash-Decoding's table (Dao, Haziza, Massa, Sizov 2023): one query a sequence, 16 query heads of 128
columns on 2 heads of K and V, fp16, "A100" without its memory; 64k tokens in all, from 256
sequences of 256 to one of 65536, and one of 131072. Predicted: the roofline of both A100s.
"""

from __future__ import annotations

from collections.abc import Iterator

from analysis import decode
from analysis.decode import DecodeShape
from analysis.hardware import A100_40GB, A100_80GB
from repro.experiments import Cell, Experiment
from repro.measuring.records import Record, record

NAME = "decode-published"
CARDS = (A100_40GB, A100_80GB)
HEADS, KV_HEADS, HEAD_DIM, DTYPE = 16, 2, 128, "fp16"
TOKENS = 65536
#: (sequences, keys of each), as in the table.
SHAPES = (*((TOKENS // n, n) for n in (256 << i for i in range(9))), (1, 131072))
FLASH_DECODING = "flash-decoding"


def cells() -> list[Cell]:
    """None is measured here."""
    return []


def predict(one: Cell) -> list[Record]:
    """Nothing without cells; the rows are in ``also``."""
    return []


def shape_of(batch: int, context: int) -> DecodeShape:
    """A row of the table."""
    return DecodeShape(HEADS, KV_HEADS, 1, (context,) * batch, HEAD_DIM, DTYPE)


def also() -> Iterator[Record]:
    """Microseconds of the roofline on each card, and the bytes behind them."""
    for batch, context in SHAPES:
        shape = shape_of(batch, context)
        given: dict[str, str | int | float | bool] = {
            "batch": batch,
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "seqlen_q": 1,
            "seqlen_k": context,
            "head_dim": HEAD_DIM,
            "dtype": DTYPE,
            "pass": "forward",
        }
        for gpu in CARDS:
            yield record(
                given,
                experiment=NAME,
                implementation="roofline",
                source="predicted",
                metric="time_us",
                unit="us",
                value=decode.seconds(shape, gpu) * 1e6,
                device=gpu.name,
                tool=f"cache once, datasheet of {gpu.name}",
            )
        yield record(
            given,
            experiment=NAME,
            implementation="roofline",
            source="predicted",
            metric="compulsory_bytes",
            unit="B",
            value=shape.compulsory_bytes,
            tool="each tensor once",
        )


EXPERIMENT = Experiment(name=NAME, title="decoding as others timed it", cells=cells, predict=predict, also=also)
