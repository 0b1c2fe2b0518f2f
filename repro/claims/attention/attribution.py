"""Where the bytes of attention go, by tensor and reason: K5."""

from __future__ import annotations

from collections.abc import Iterator

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, exact, more
from repro.claims.register import Finding, claim
from repro.claims.values import NAN, known, pick
from repro.claims.works import FLASH
from repro.experiments.bytes.traffic_attribution import SEQLEN
from repro.experiments.shared.attention import STATISTICS

INPUTS = {"forward": ("q", "k", "v"), "backward": ("q", "k", "v", "out", "dout")}
OUTPUTS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}


def attribute(rows: pandas.DataFrame, pass_: str, operand_bytes: int) -> Iterator[dict]:
    """Split the traffic of one algorithm and pass by reason and tensor.

    operand_bytes: size of one (N, d) operand; all operands have it here. A causal pass may leave
    some rows unread, so what counts as compulsory is at most what moved.
    """
    moved = rows.groupby(["tensor", "direction"])["value"].sum()
    for (tensor, direction), count in moved.items():
        once = 0.0
        if tensor in STATISTICS:
            yield {"reason": "statistics", "tensor": tensor, "value": count}
            continue
        rest = "intermediates"
        if tensor in INPUTS[pass_] and direction == "read":
            once, rest = min(count, operand_bytes), "read again"
        elif tensor in OUTPUTS[pass_] and direction == "write":
            once = min(count, operand_bytes)
        if once:
            yield {"reason": "compulsory", "tensor": tensor, "value": once}
        if count > once:
            yield {"reason": rest, "tensor": tensor, "value": count - once}


def split(frame: pandas.DataFrame, source: str) -> pandas.DataFrame:
    """Long table: implementation, causal, pass, reason, tensor, value (bytes)."""
    rows = known(frame, source=source, metric="traffic_bytes")
    padded = rows["padded_from"].notna() if "padded_from" in rows else rows["value"].isna()
    parts = []
    keys = ["implementation", "causal", "pass"]
    for (name, causal, pass_), some in rows[~padded].groupby(keys):
        operand = SEQLEN * 64 * 2
        parts += [
            {"implementation": name, "causal": causal, "pass": pass_, **part}
            for part in attribute(some, str(pass_), operand)
        ]
    columns = [*keys, "reason", "tensor", "value"]
    table = pandas.DataFrame(parts, columns=columns)
    if source == "predicted":
        whole = rows[padded].groupby(keys)["value"].sum() - rows[~padded].groupby(keys)["value"].sum()
        more = whole.rename("value").reset_index().assign(reason="padding avoided", tensor="all")
        table = pandas.concat([table, more[columns]])
    return table.assign(source=source)


@claim(
    "K5",
    "tiling reduces accesses although each tile is loaded many times",
    FLASH,
    "the reader's question",
    experiments=("traffic-attribution",),
    shown="traffic_attribution",
    conditions="N = 1000, d = 64; standard attention is ours, in three and five kernels",
    overturn=(Scale({"implementation": "flash"}), Scale({"implementation": "flash"}, source="predicted")),
)
def k5(frame: pandas.DataFrame) -> Finding:
    """Tiles are loaded many times, and yet fewer bytes move."""
    ratio = {}
    for source in ("predicted", "measured"):
        rows = known(frame, source=source, metric="traffic_bytes", causal=False)
        rows = rows[rows["padded_from"].isna()] if "padded_from" in rows else rows
        total = rows.groupby("implementation")["value"].sum()
        ratio[source] = float(total.get("standard", NAN) / total.get("flash", NAN))
    again = pick(split(frame, "predicted"), implementation="flash", causal=False, pass_="forward", tensor="k")
    loads = again["value"].sum() / (SEQLEN * 64 * 2)
    return Finding(
        predicted=f"{ratio['predicted']:.2f}x fewer, forward + backward, N = {SEQLEN}, each K "
        f"and V tile loaded {loads:.0f} times",
        measured=f"{ratio['measured']:.2f}x fewer (host backend)",
        parts=[
            more("bytes of standard attention over flash's, counted", ratio["measured"], Evidence.COUNTED),
            exact("the counted ratio over the sums'", ratio["measured"], ratio["predicted"]),
        ],
    )
