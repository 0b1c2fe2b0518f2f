"""FlashAttention 2022, Fig. 1 right: five kernels beside one."""

from __future__ import annotations

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, agreement
from repro.claims.register import Finding, claim
from repro.claims.tolerances import HEADLINE
from repro.claims.values import NAN, pick
from repro.claims.works import FA1

OPERATIONS = ("matmul QK^T", "mask", "softmax", "dropout", "matmul PV")


def times(frame: pandas.DataFrame, source: str, card: str) -> pandas.Series:
    """Milliseconds by operation."""
    rows = pick(frame, source=source, metric="time_ms")
    rows = rows[rows["device"].str.contains(card, na=False)]
    found: pandas.Series = rows.set_index("implementation")["value"]
    return found


@claim(
    "FA-1 Fig. 1 right",
    "one fused kernel is 7.6x faster than five",
    FA1,
    "Fig. 1 right",
    experiments=("fig1-right",),
    shown="fa1_fig1_right",
    conditions="H200, PyTorch 2.11, another card and other kernels; the caption names neither batch, "
    "heads nor card. The predicted ratio is of the kernel as released",
    overturn=(Scale({"implementation": "fused sdpa-flash2 (dropout 0.1)"}, 2),),
    compared=False,
)
def fa_1_fig_1_right(frame: pandas.DataFrame) -> Finding:
    """The ratio of unfused to fused, and how far the operations are above their rooflines."""

    def ratio(source: str, card: str, fused: str) -> float:
        ms = times(frame, source, card)
        return float(ms.reindex(list(OPERATIONS)).sum(skipna=False) / ms.get(fused, NAN))

    printed = ratio("published", "A100", "fused FlashAttention")
    model = ratio("predicted", "A100", "fused flash1")
    now = ratio("measured", "H200", "fused sdpa-flash2 (dropout 0.1)")
    above = (times(frame, "measured", "H200") / times(frame, "predicted", "H200")).reindex(list(OPERATIONS)).dropna()
    most = f"; {above.idxmax()} takes {above.max():.1f}x its roofline" if len(above) else ""
    return Finding(
        predicted=f"{model:.1f}x (rooflines, A100)",
        measured=f"{now:.1f}x (H200, FlashAttention-2 with dropout){most}",
        published=f"{printed:.2f}x",
        parts=[agreement("measured ratio over 7.6", now, 7.6, HEADLINE, Evidence.HARDWARE)],
    )
