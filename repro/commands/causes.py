"""Why a prediction, a measurement and a publication of one quantity differ, where it is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


def reasons(rows: pandas.DataFrame, lines: Sequence[dict[str, Any]], point: dict[str, Any]) -> Iterator[str]:
    """Where measured and predicted differ, and what is known about such differences."""
    measured = [line for line in lines if line["measured"] is not None]
    judged = [line for line in measured if line["ratio"] is not None]
    traffic = [line for line in judged if line["quantity"].startswith("traffic_bytes")]
    exact = [line for line in traffic if line["measured"] == line["predicted"]]
    if traffic and len(exact) == len(traffic):
        yield f"all {len(exact)} byte counts equal the sum over the tile loop, to the byte"
    off = [line for line in judged if line["measured"] != line["predicted"]]
    largest = sorted(off, key=lambda x: -abs(x["measured"] - x["predicted"]))
    for line in largest[:5]:
        difference = line["measured"] - line["predicted"]
        yield (
            f"{line['quantity']} ({line['machine']}): {difference:+.4g} {line['unit']}, "
            f"{line['ratio'] - 1:+.2%}; {_known_cause(line, point)}"
        )
    for line in lines:
        if line["published"] is None:
            continue
        if line["predicted"]:
            cause = ""
            if line["published"] != line["predicted"]:
                cause = f"; {_published_cause(line, point)}"
            yield (f"{line['quantity']}, {line['origin']}: {line['ratio'] - 1:+.2%} of the prediction{cause}")
    counted_once = rows["scale_factor"].dropna()
    if len(counted_once):
        yield (
            f"counted on one head and multiplied by {counted_once.iloc[0]:g} = batch x heads "
            "(no block works on more than one)"
        )
    for _, row in rows[rows["error"].notna()].drop_duplicates("error").iterrows():
        yield f"not measured on {row.get('machine')}: {row['error']}"
    published = rows[rows["source"] == "published"]
    for _, row in published.drop_duplicates(["origin", "confidence"]).iterrows():
        note = row.get("note")
        yield f"published: {row['origin']}, read as {row['confidence']}" + (
            f"; {note}" if isinstance(note, str) else ""
        )


def _published_cause(line: dict[str, Any], point: dict[str, Any]) -> str:
    """What is known about a printed number that is not the prediction."""
    if "flop" in line["quantity"].lower():
        return _flops_cause(line["published"], line["predicted"], point)
    if "time" in line["quantity"]:
        return "measured there, with another kernel or clock; the prediction is a bound"
    if "hbm" in line["quantity"]:
        return "another implementation's kernels; see the variants above"
    return "no known cause"


def _flops_cause(value: float, predicted: float, point: dict[str, Any]) -> str:
    """FLOPs are products × 2 · pairs · head_dim × heads: which of these explains the difference."""
    heads = int(point.get("batch") or 1) * int(point.get("heads") or 1)
    ratio = value / predicted
    rows = point.get("seqlen_q")
    if point.get("causal") and rows and abs(ratio - rows / (rows + 1)) < 1e-6:
        return "the papers count N²/2 visible pairs, here they are N(N+1)/2"
    if point.get("causal") and rows and abs(ratio - 2 * rows / (rows + 1)) < 1e-3:
        return "counted without the causal mask: N² pairs"
    for made, counted in ((6, 7), (7, 6), (4, 5), (5, 4)):
        if abs(ratio - made / counted) < 1e-3:
            return f"{made} matrix products counted, not {counted}: with or without recomputation"
    return (
        f"it is the work of {ratio * heads:.4g} heads, the cell has {heads} (batch x heads), with "
        "the same products, pairs and head dimension"
    )


def _known_cause(line: dict[str, Any], point: dict[str, Any]) -> str:
    quantity, ratio = line["quantity"], line["ratio"]
    if "hbm" in quantity and "write" in quantity:
        return "lines still dirty in L2 when the kernel ends are not counted: reported, not judged"
    if "hbm" in quantity:
        return (
            "which blocks run ahead of which decides what is fetched again; the simulated L2 lets "
            "the blocks of an SM share it equally and SMs keep step (spread_min, spread_max: "
            "other paces)"
        )
    if quantity.startswith(("traffic_bytes", "sram")):
        return (
            "within the 2 % that counters may be off"
            if abs(ratio - 1) <= 0.02
            else "beyond the 2 % that counters may be off; spilled registers show here as writes"
        )
    if "time" in quantity:
        return (
            "the prediction is a bound, no ceiling overlaps perfectly with the others"
            if ratio >= 1
            else "below the bound, so a ceiling or the work is taken wrongly"
        )
    if "memory" in quantity or "peak" in quantity:
        return "the matrix library's workspace and allocator rounding are not in the prediction"
    return "no known cause"
