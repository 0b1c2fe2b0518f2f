"""Decoding on DeepSeek's latent as others timed it, beside the roofline of reading it once.

FlashMLA's own test (128 sequences of 4096 keys, one head of 576 columns, 512 values, bf16), run on
an H100 by a user in February 2025 and posted with its shapes; the authors' "up to 3000 GB/s" names
none. Rows are query heads times queries of a sequence: what shares the latent.
"""

from __future__ import annotations

from collections.abc import Iterator

from analysis import decode
from analysis.decode import DecodeShape
from analysis.hardware import H100_SXM
from repro.experiments import Cell, Experiment
from repro.measuring.records import Record, record

NAME = "mla-published"
CARD = H100_SXM
BATCH, KEYS, COLUMNS, VALUES, DTYPE = 128, 4096, 576, 512, "bf16"
#: (query heads, queries a sequence) of the rows posted, and more of them.
POSTED = ((16, 1), (16, 2), (32, 1), (32, 2), (64, 1))
SHAPES = (*POSTED, (64, 2), (128, 1), (128, 2))


def cells() -> list[Cell]:
    """None is measured here."""
    return []


def predict(one: Cell) -> list[Record]:
    """Nothing without cells; the rows are in ``also``."""
    return []


def shape_of(heads: int, width: int) -> DecodeShape:
    """A row of the test."""
    return DecodeShape(
        heads, 1, width, (KEYS,) * BATCH, COLUMNS, DTYPE, latent=True, page_size=64, ragged=True, value_dim=VALUES
    )


def also() -> Iterator[Record]:
    """Of each row: the time of HBM and of the tensor cores, and the bytes of the bound."""
    for heads, width in SHAPES:
        shape = shape_of(heads, width)
        given: dict[str, str | int | float | bool] = {
            "batch": BATCH,
            "heads": heads,
            "kv_heads": 1,
            "seqlen_q": width,
            "seqlen_k": KEYS,
            "head_dim": COLUMNS,
            "dtype": DTYPE,
            "pass": "forward",
        }
        for name, seconds in (
            ("HBM", decode.hbm_seconds(shape, CARD)),
            ("tensor cores", decode.tensor_seconds(shape, CARD)),
        ):
            yield record(
                given,
                experiment=NAME,
                implementation=name,
                source="predicted",
                metric="time_us",
                unit="us",
                value=seconds * 1e6,
                device=CARD.name,
                tool=f"datasheet of {CARD.name}",
            )
        yield record(
            given,
            experiment=NAME,
            implementation="HBM",
            source="predicted",
            unit="B",
            metric="compulsory_bytes",
            value=shape.compulsory_bytes,
            tool="each tensor once",
        )


EXPERIMENT = Experiment(
    name=NAME, title="decoding on a latent as others timed it", cells=cells, predict=predict, also=also
)
