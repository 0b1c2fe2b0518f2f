"""Traffic against N, d and M: FlashAttention's Theorems 2 and 5."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas

from repro.claims.mutations import Mirror, Scale
from repro.claims.protocol import Evidence, exponent
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.values import known, pick
from repro.claims.works import FA1
from repro.experiments.bytes.traffic_scaling import LONG, PRINTED, SHORT

SWEEPS = {
    "seqlen": ("seqlen_q", "sequence length N"),
    "head_dim": ("head_dim", "head dimension d"),
    "on_chip": ("on_chip", "on-chip memory M (elements)"),
}
#: Key tiles from which the count, proportional to Tc + 1, is judged.
MANY = 16
SEEN: dict[str, Any] = {"experiments": ("traffic-scaling",), "shown": "traffic_scaling", "compared": False}


def totals(frame: pandas.DataFrame, pass_: str = "forward", **wanted: Any) -> pandas.DataFrame:
    """Bytes per point: one row per source, algorithm, sweep and value."""
    rows = known(frame, metric="traffic_bytes", pass_=pass_, **wanted)
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


def _exponents(table: pandas.DataFrame, algorithm: str, expected: dict[str, int], predicted: str) -> Finding:
    """What was counted against the exponents of a theorem, sweep by sweep."""
    rows = pick(table, source="measured", implementation=algorithm)
    found = {sweep: slope(asymptotic(pick(rows, sweep=sweep)), SWEEPS[sweep][0]) for sweep in expected}
    counted = ", ".join(f"{round(v, 2) + 0.0:.2f}" for v in found.values() if np.isfinite(v))
    return Finding(
        predicted=predicted,
        measured=f"{counted} (counted up to N = {SHORT})" if counted else NOT_MEASURED,
        published=", ".join(str(p) for p in expected.values()),
        parts=[
            exponent(f"exponent counted, {SWEEPS[sweep][1]}", found[sweep], told, Evidence.COUNTED)
            for sweep, told in expected.items()
        ],
    )


#: Exponents of FlashAttention in N, d and M.
FLASH = {"seqlen": 2, "head_dim": 2, "on_chip": -1}


def _steeper(pass_: str) -> tuple[Scale | Mirror, ...]:
    """Changes of the algorithm as printed, each of which must bend a slope."""
    mine = {"implementation": PRINTED, "pass": pass_}
    return (
        Scale({"sweep": "seqlen", "seqlen_q": 1024, **mine}),
        *(Mirror(x, {"sweep": sweep, **mine}) for sweep, (x, _) in SWEEPS.items()),
    )


@claim(
    "FA-1 Theorem 2",
    "accesses grow as N² d² / M: exponents 2, 2, -1 in N, d, M",
    FA1,
    "Theorem 2",
    **SEEN,
    conditions="our kernels of its Algorithm 1, executed and counted on the host up to "
    "N = 1024: what the algorithm moves, not the lower bound of Proposition 3",
    overturn=_steeper("forward"),
)
def fa_1_theorem_2(frame: pandas.DataFrame) -> Finding:
    """The theorem's three exponents, of what was counted; the sums' far out beside them."""
    table = totals(frame)
    sums = ", ".join(f"{fitted(table, PRINTED, sweep):.2f}" for sweep in FLASH)
    return _exponents(table, PRINTED, FLASH, f"{sums} (sums, far out)")


@claim(
    "FA-1 Theorem 2, standard",
    "standard attention writes and reads S and P whatever d and M are: accesses Θ(Nd + N²)",
    FA1,
    "Theorem 2",
    **SEEN,
    conditions="the bytes of S and P of our three kernels, executed and counted on the host up to N = 1024",
    partial="S and P alone: our products read the tiles of Q, K and V again, N² d / T elements for tiles "
    "of side T, where the theorem's standard attention reads them once",
    overturn=(
        Scale({"sweep": "seqlen", "seqlen_q": 1024, "implementation": "standard"}),
        *(Scale({"sweep": s, s: 128, "implementation": "standard", "tensor": ("s", "p")}, 2) for s in ("head_dim",)),
        Mirror("seqlen_q", {"sweep": "seqlen", "implementation": "standard"}),
    ),
)
def fa_1_theorem_2_standard(frame: pandas.DataFrame) -> Finding:
    maps = totals(frame, tensor=["s", "p"])
    return _exponents(maps, "standard", {"seqlen": 2, "head_dim": 0, "on_chip": 0}, "2, 0, 0 (S and P)")


@claim(
    "FA-1 Theorem 5",
    "accesses of the backward grow as N² d² / M",
    FA1,
    "section B.4",
    **SEEN,
    conditions="our kernels of its Algorithm 4, executed and counted on the host up to N = 1024",
    overturn=_steeper("backward"),
)
def fa_1_theorem_5(frame: pandas.DataFrame) -> Finding:
    return _exponents(totals(frame, "backward"), PRINTED, FLASH, "2, 2, -1: 5 Tc + 4 passes over N d")
