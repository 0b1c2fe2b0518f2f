"""K and V in fp8 in the forward: bytes against the number of queries, and what rounding costs.

Three ways to have one head's keys and values, for the same kernels of step 3: 16 bits, e4m3 with a
scale a head, e4m3 with a scale for 64 keys. Few queries read K and V and little else, so that half
the bytes of those are half of all; with ever more queries q and out come to weigh, once, and K and
V are read once per query tile, so that they do again.

The error is another cell: keys and values of N(0, 1) but for the last token's, ``outlier`` times as
large, which a causal mask hides from all queries but the last. What the others lose is what the
scale costs them: with a scale a head the outlier sets it for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from analysis.lower_bounds import compulsory_read_bytes, compulsory_write_bytes
from analysis.shapes import AttentionShape
from analysis.traffic import predict_traffic
from kernels.attention import default_tile
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.attention import cell, traffic_rows
from repro.experiments.shared.attention import shape_of as plain_shape
from repro.instruments.run_pass import run_pass

HEAD_DIM, DTYPE, KEYS, LONGER, BLOCK = 64, "fp16", 1024, 65536, 64
#: Way -> (e4m3, keys that share a scale)
WAYS: dict[str, tuple[bool, int | None]] = {
    "16 bits": (False, None),
    "scale a head": (True, None),
    "scale a block": (True, BLOCK),
}
QUERIES = (16, 32, 64, 128, 256, 512, 1024)
MORE_QUERIES = (*QUERIES, 2048, 4096, 8192, 16384, 32768, 65536)
OUTLIERS = tuple(4**power for power in range(11))
#: Of an error cell: tokens, and the queries whose keys all lie in other blocks than the outlier's.
TOKENS, JUDGED = 256, 192
#: What scores have for a standard deviation there: small enough for weights to stay even.
SCORE = 0.1


def _cell(way: str, queries: int, keys: int, **more: Any) -> Cell:
    tile = default_tile(HEAD_DIM, DTYPE, "forward", fp8=WAYS[way][0])
    return cell(
        "flash", "forward", tile, seqlen=queries, seqlen_k=keys, head_dim=HEAD_DIM, dtype=DTYPE, way=way, **more
    )


def cells() -> list[Cell]:
    """Every way over the queries, and over the size of an outlier."""
    found = [_cell(way, n, KEYS) for way in WAYS for n in QUERIES]
    return found + [
        _cell(way, TOKENS, TOKENS, causal=True, outlier=size) for way in WAYS if WAYS[way][0] for size in OUTLIERS
    ]


def shape_of(one: Cell) -> AttentionShape:
    """The shape that a cell names."""
    fp8, block = WAYS[str(one["way"])]
    return replace(plain_shape(one), fp8=fp8, scale_block=block)


def predict(one: Cell) -> Iterator[Row]:
    """The exact sums and the lower bound; of an error there is no prediction."""
    if "outlier" in one:
        return
    shape = shape_of(one)
    tile = default_tile(HEAD_DIM, DTYPE, "forward", fp8=shape.fp8)
    traffic = predict_traffic("flash", shape, tile, "forward")
    yield from traffic_rows(traffic.kernels)
    yield row("compulsory_bytes", compulsory_read_bytes(shape) + compulsory_write_bytes(shape), tool="each tensor once")


def also() -> Iterator[Cell]:
    """Keys and queries too many to execute."""
    for way in WAYS:
        for queries in MORE_QUERIES:
            yield _cell(way, queries, LONGER)


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """Execute the kernel: bytes by tensor, or the error that rounding leaves."""
    import torch

    from repro.attention.quantize import quantize_e4m3
    from repro.attention.reference import attention_reference

    shape, size = shape_of(one), float(one.get("outlier") or 1.0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 1, rows, HEAD_DIM, generator=generator)
        for rows in (shape.seqlen_q, shape.seqlen_k, shape.seqlen_k)
    )
    q = (q * SCORE).half() if "outlier" in one else q.half()
    k[:, :, -1] *= size
    v[:, :, -1] *= size
    scales: dict[str, Any] = {}
    given = [k, v] if shape.fp8 else [k.half(), v.half()]
    if shape.fp8:
        pairs = [quantize_e4m3(x, block=shape.scale_block) for x in given]
        given = [codes.view(torch.uint8) for codes, _ in pairs]
        wide = [scale.view(1, 1, -1) for _, scale in pairs]
        scales = dict(zip(("k_scale", "v_scale"), wide, strict=True))
        scales["scale_block"] = shape.scale_block
    tensors = {"q": q, "k": given[0], "v": given[1]}
    ran = run_pass("flash", "forward", tensors, context.host(), causal=shape.causal, **scales)
    if "outlier" not in one:
        yield from traffic_rows(ran.traffic.kernels, tool="host backend: one head executed, bytes counted")
    rows = slice(0, JUDGED if "outlier" in one else None)
    exact = attention_reference(q, k, v, causal=shape.causal).out
    error = (ran.tensors["out"].double() - exact)[:, :, rows]
    yield row(
        "rounding_error",
        float(error.square().mean().sqrt()),
        tensor="out",
        tool="root mean square, against float64 on the numbers before they were rounded",
    )


EXPERIMENT = Experiment("fp8-bytes", cells, predict, measure, device="host", also=also, seconds=30, on_demand=True)
