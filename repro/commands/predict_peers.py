"""Times of other kernels that are on record for a shape and card, beside a prediction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from analysis.features import features_of
from analysis.flops import paper_flops
from analysis.hardware import find_gpu
from repro.commands import output
from repro.measuring.records import Record, load
from repro.prediction import Prediction
from repro.prediction.time import Time

#: Records of whole passes of other kernels, measured and published.
EXPERIMENTS = ("throughput", "throughput-peers", "fig3-runtime")


@cache
def _rows() -> tuple[Record, ...]:
    return tuple(row for row in load(EXPERIMENTS) if row.value and row.source != "predicted")


def recorded(point: Prediction) -> list[dict[str, Any]]:
    """Other kernels' times of the same shape, pass and card, the fastest first.

    A row without mask and dropout counts for a plain shape alone: nothing is on record of windows,
    caps, biases or packed sequences.
    """
    shape = point.shape
    if features_of(point.problem) - {"causal"}:
        return []
    asked = (
        point.pass_,
        shape.batch,
        shape.heads,
        shape.seqlen_q,
        shape.seqlen_k,
        shape.head_dim,
        shape.dtype,
        shape.causal,
    )
    found = []
    for row in _rows():
        given = (row.pass_, row.batch, row.heads, row.seqlen_q, row.seqlen_k, row.head_dim, row.dtype, row.causal)
        bare = not row.dropout and not row.extra.get("key_mask")
        if given == asked and bare and row.device and find_gpu(row.device) == point.gpu:
            found.append(_peer(row, paper_flops(shape, point.pass_)))
    return sorted(found, key=lambda peer: float(peer["time_s"]))


def _peer(row: Record, flops: float) -> dict[str, Any]:
    assert row.value is not None
    seconds = row.value / 1e3 if row.metric == "time_ms" else flops / (row.value * 1e12)
    versions = [f"{name} {row.extra[name]}" for name in ("cuda", "cudnn") if name in row.extra]
    if row.torch:
        versions.insert(0, f"torch {row.torch}")
    return {
        "kernel": row.implementation,
        "time_s": seconds,
        "tflops": flops / seconds / 1e12,
        "source": row.source,
        "origin": str(row.extra.get("origin", "")) or ", ".join([row.date or "", *versions]),
    }


def table(points: Sequence[Prediction | dict[str, Any]], style: str) -> None:
    """A line for each recorded kernel, after a line for ours as predicted."""
    lines: list[list[Any]] = []
    without = []
    for point in points:
        if isinstance(point, dict):
            continue
        shape = point.shape
        name = (
            f"{point.pass_}, batch {shape.batch}, {shape.heads} heads, n {shape.seqlen_q}, d "
            f"{shape.head_dim}{', causal' * shape.causal}"
        )
        peers = recorded(point)
        if not peers:
            without.append(f"{name} on {point.gpu.name}")
            continue
        if isinstance(point.predicted, Time):
            low, high = point.predicted.low, point.predicted.high
            flops = paper_flops(shape, point.pass_) / 1e12
            lines.append(
                [
                    name,
                    f"{point.algorithm} (ours)",
                    output.between(output.of_seconds, low, high),
                    f"{flops / high:.0f} to {flops / low:.0f}",
                    "predicted" + ", untimed" * (not point.predicted.timed),
                    "",
                ]
            )
        lines += [
            [
                name,
                peer["kernel"],
                output.of_seconds(peer["time_s"]),
                f"{peer['tflops']:.0f}",
                peer["source"],
                peer["origin"],
            ]
            for peer in peers
        ]
    if lines:
        headers = ["pass", "kernel", "time", "TFLOP/s", "from", "where and when"]
        output.print_text("")
        output.print_table(headers, lines, style=style, keys=2)
    for shape_asked in without:
        output.print_text(f"nothing of another kernel is on record for {shape_asked}")
