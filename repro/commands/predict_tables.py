"""Predictions as tables: what is common, a line per point, and what one should know of them."""

from __future__ import annotations

from typing import Any

from repro.commands import output
from repro.prediction import NoTime, Prediction, Time

_FIELDS = (
    "gpu",
    "algorithm",
    "pass",
    "order",
    "causal",
    "window_left",
    "window_right",
    "sinks",
    "dtype",
    "kv_dtype",
    "scale_block",
    "batch",
    "sequences",
    "heads",
    "kv_heads",
    "seqlen_q",
    "seqlen_k",
    "head_dim",
    "form",
    "block_m",
    "block_n",
)
_BYTES = ("sm_read_bytes", "sm_write_bytes", "hbm_read_bytes", "hbm_write_bytes", "saved_bytes", "peak_bytes")
_HEADERS = ("FLOPs", "SM read", "SM write", "HBM read", "HBM write", "saved", "peak", "time ≥", "TFLOP/s ≤", "bound by")
_PREDICTED = ("time ≈", "TFLOP/s ≈")
"""Beside the bound, where a kernel's machine code has been followed."""
#: Up to so many points are also shown tensor by tensor.
_IN_FULL = 2


def tables(points: list[Prediction | dict[str, Any]], rows: list[dict[str, Any]], style: str) -> None:
    """What is common to all points on top, then a line per point; few points also by tensor."""
    varying = [f for f in _FIELDS if len({row.get(f) for row in rows}) > 1]
    for follower, leader in (("seqlen_k", "seqlen_q"), ("kv_heads", "heads"), ("kv_dtype", "dtype")):
        if follower in varying and all(row[follower] == row[leader] for row in rows):
            varying.remove(follower)
    common = {f: rows[0].get(f) for f in _FIELDS if len({row.get(f) for row in rows}) == 1}
    if common.get("form") is None:  # of kernels that come in one form
        common.pop("form", None)
    if common.get("order") == "rows":
        common.pop("order")
    if common.get("kv_dtype") in (None, common.get("dtype")):
        common.pop("kv_dtype", None)
    if common.get("scale_block", 0) is None:
        common.pop("scale_block")
    if common.get("sequences", 0) is None:
        common.pop("sequences")
    for bound in ("window_left", "window_right", "sinks"):
        if not common.get(bound, True) and not any(row.get(bound) for row in rows):
            common.pop(bound)
    output.print_text(", ".join(f"{name}={value}" for name, value in common.items()))
    good = [p for p in points if isinstance(p, Prediction)]
    output.print_text(f"ceilings: {'; '.join(sorted({p.ceilings.origin for p in good}))}")
    print(f"HBM: {'; '.join(sorted({p.hbm.method for p in good}))}\n")
    reasons = list(dict.fromkeys(row["error"] for row in rows if "error" in row))
    lines = []
    predicted = _PREDICTED if any(row.get("time_predicted_s") for row in rows) else ()
    for row in rows:
        line: list[object] = [row.get(f) for f in varying]
        if "error" in row:
            line += [None] * (len(_HEADERS) + len(predicted) - 1)
            line.append(f"cannot be ({reasons.index(row['error']) + 1})")
        else:
            line.append(output.of_flops(row["useful_flops"]))
            line += [output.of_bytes(row[name]) for name in _BYTES]
            over = "" if row["fits_memory"] else " (more than the GPU has)"
            line[-1] = f"{line[-1]}{over}"
            line += [output.of_seconds(row["time_bound_s"]), output.of_rate(row["tflops_bound"] * 1e12)]
            if predicted and row["time_predicted_s"]:
                ends = row["time_low_s"], row["time_high_s"]
                state = " untimed" if row["time_state"] == "untimed" else ""
                line.append(output.between(output.of_seconds, *ends) + state)
                rates = (row["useful_flops"] / seconds for seconds in reversed(ends))
                line.append(output.between(output.of_rate, *rates))
            elif predicted:
                line += [None, None]
            line.append(row["bound_by"])
        lines.append(line)
    headers = [*varying, *_HEADERS[:-1], *predicted, _HEADERS[-1]]
    output.print_table(headers, lines, style=style, keys=len(varying))
    for number, reason in enumerate(reasons, start=1):
        output.print_text(f"({number}) {reason}", "    ")
    _remarks(good)
    if len(rows) <= _IN_FULL:
        for point in good:
            _in_full(point, style)


def _remarks(points: list[Prediction]) -> None:
    """Each once: what was chosen and why, what is theory, what is padded, what is left out."""
    remarks = []
    for point in points:
        if point.reason is not None and point.theory is None:
            remarks.append(f"auto is {point.algorithm} in the {point.pass_}: {point.reason}")
        if point.theory is not None:
            remarks.append(f"theory, run by none of our kernels: {point.theory}")
        if point.padded != point.shape or point.columns > point.padded.head_dim:
            given, columns = point.shape.head_dim, point.columns
            copied = f"copied to rows of {point.padded.head_dim} and " if point.copy_bytes else ""
            remarks.append(f"head_dim {given} is {copied}multiplied as {columns} columns a tile")
        if point.warning is not None:
            remarks.append(f"warning: {point.warning}")
        if isinstance(point.predicted, NoTime):
            remarks.append(f"no time ≈ of {point.algorithm} in the {point.pass_}: {point.predicted.reason}")
        else:
            remarks += _of_time(point, point.predicted)
    if remarks:
        print()
    for remark in dict.fromkeys(remarks):
        output.print_text(f"- {remark}", "  ")


def _of_time(point: Prediction, time: Time) -> list[str]:
    """How a predicted time is known, and how well."""
    timed = "" if time.timed else "; untimed: no card has run it"
    said = [
        f"time ≈ follows from machine code at {time.clocks} ({time.clocks.origin}), give or take "
        f"{time.error:.0%}, in which nine of ten times of others' kernels are{timed} "
        "(docs/pages/time.md)"
    ]
    if time.seconds < point.time.seconds:
        said.append("time ≈ may be below time ≥: measured ceilings are what some kernel reached, not what the card can")
    return said


def _in_full(point: Prediction, style: str) -> None:
    form = f"form {point.form}, " if point.form else ""
    second = f" and {point.dq_tile.block_m} x {point.dq_tile.block_n}" if point.dq_tile else ""
    print(
        f"\n{point.algorithm} {point.pass_}, {form}tile {point.tile.block_m} x "
        f"{point.tile.block_n}{second}, {point.blocks_per_sm} "
        f"block{'s' if point.blocks_per_sm > 1 else ''} per SM"
    )
    output.print_table(
        ["kernel", "tensor", "direction", "SM boundary", "HBM read", "HBM write"],
        [
            [
                t["kernel"],
                t["tensor"],
                t["direction"],
                output.of_bytes(t["sm_bytes"]),
                output.of_bytes(t["hbm_read_bytes"]),
                output.of_bytes(t["hbm_write_bytes"]),
            ]
            for t in point.tensors()
        ],
        style=style,
        keys=2,
    )
    times = ", ".join(
        f"{resource} {output.of_seconds(seconds)}" for resource, seconds in point.time.by_resource.items() if seconds
    )
    output.print_text(f"time at each ceiling: {times}")
    output.print_text(point.why())
    if not point.saved:
        return
    saved = " + ".join(f"{t.name} {output.of_bytes(t.bytes)}" for t in point.saved)
    output.print_text(f"saved for backward: {saved}")
