"""Traffic against N, d and M: FlashAttention's Theorem 2."""

from __future__ import annotations

import numpy as np
import pandas

from repro.claims.mutations import Mirror, Scale
from repro.claims.protocol import Evidence, exponent
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.values import pick
from repro.claims.works import FA1
from repro.experiments.bytes.traffic_scaling import LONG, SHORT

SWEEPS = {
    "seqlen": ("seqlen_q", "sequence length N"),
    "head_dim": ("head_dim", "head dimension d"),
    "on_chip": ("on_chip", "on-chip memory M (elements)"),
}


#: Key tiles from which the count, proportional to Tc + 1, is judged.
MANY = 16


#: Theorem 2's exponents of FlashAttention, per sweep.
EXPONENTS = {"seqlen": 2, "head_dim": 2, "on_chip": -1}


def totals(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Bytes per point: one row per source, algorithm, sweep and value."""
    rows = pick(frame, metric="traffic_bytes").dropna(subset=["value"])
    keys = ["source", "implementation", "sweep", "seqlen_q", "head_dim", "on_chip"]
    return rows.groupby(keys, as_index=False)["value"].sum()


def slope(rows: pandas.DataFrame, x: str) -> float:
    """Least-squares slope of log value against log x; NaN with fewer than two points."""
    if len(rows) < 2:
        return float("nan")
    return float(np.polyfit(np.log(rows[x]), np.log(rows["value"]), 1)[0])


def asymptotic(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Points with MANY key tiles or more, where the theorem's exponents are to be seen."""
    tiles = 4 * rows["seqlen_q"] * rows["head_dim"] / rows["on_chip"]
    return rows[tiles >= MANY]


def fitted(table: pandas.DataFrame, algorithm: str, sweep: str) -> float:
    """Slope of the exact sums where the theorem's asymptotics apply."""
    x = SWEEPS[sweep][0]
    rows = pick(table, source="predicted", implementation=algorithm, sweep=sweep)
    far = rows[rows["seqlen_q"] >= 4096] if sweep == "seqlen" else pick(rows, seqlen_q=LONG)
    return slope(far, x)


@claim(
    "FA-1 Theorem 2",
    "accesses grow as N² d² / M: exponents 2, 2, -1 in N, d, M",
    FA1,
    "Theorem 2",
    experiments=("traffic-scaling",),
    shown="traffic_scaling",
    conditions="our kernels of its Algorithm 1, executed and counted on the host up to "
    "N = 1024: what the algorithm moves, not the lower bound of Proposition 3",
    overturn=(
        Scale({"sweep": "seqlen", "seqlen_q": 1024}),
        Mirror("seqlen_q", {"sweep": "seqlen"}),
        Mirror("head_dim", {"sweep": "head_dim"}),
        Mirror("on_chip", {"sweep": "on_chip"}),
    ),
    compared=False,
)
def fa_1_theorem_2(frame: pandas.DataFrame) -> Finding:
    """The theorem's three exponents, of what was counted; the sums' far out beside them."""
    table = totals(frame)
    algorithm = "flash1-literal"
    sums = {sweep: fitted(table, algorithm, sweep) for sweep in EXPONENTS}
    executed = {
        sweep: slope(
            asymptotic(pick(table, source="measured", implementation=algorithm, sweep=sweep)), SWEEPS[sweep][0]
        )
        for sweep in EXPONENTS
    }
    counted = [f"{v:.2f}" for v in executed.values() if np.isfinite(v)]
    return Finding(
        predicted=", ".join(f"{v:.2f}" for v in sums.values()) + " (sums, far out)",
        measured=f"{', '.join(counted)} (counted up to N = {SHORT})" if counted else NOT_MEASURED,
        published=", ".join(str(p) for p in EXPONENTS.values()),
        parts=[
            exponent(
                f"exponent counted over the theorem's, {SWEEPS[sweep][1]}",
                executed[sweep],
                EXPONENTS[sweep],
                Evidence.COUNTED,
            )
            for sweep in EXPONENTS
        ],
    )
