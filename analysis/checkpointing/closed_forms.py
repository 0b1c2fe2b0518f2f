"""Peak memory and forward runs of the textbook strategies, in closed form with their constants.

For a chain of L equal stages whose outputs take 1 unit and whose interiors take s units, gradients
as large as outputs, no temporaries.  Peak counts a_0, the two gradients that a backward touches,
and everything else the simulator counts; tests hold each formula to it.  Chen's own formulas count
stored states only, which is the leading term here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy as sp

L = sp.Symbol("L", positive=True, integer=True)
s = sp.Symbol("s", nonnegative=True)
k = sp.Symbol("k", positive=True)
GRADIENTS = sp.Integer(2)


@dataclass(frozen=True)
class ClosedForm:
    """peak (in outputs) and forwards (runs of stages), exact where `exact_for` says so."""

    name: str
    peak: Any
    forwards: Any
    exact_for: str

    def peak_at(self, **values: float) -> float:
        return float(self.peak.subs(_symbols(values)))

    def forwards_at(self, **values: float) -> float:
        return float(self.forwards.subs(_symbols(values)))


def _symbols(values: dict[str, float]) -> dict[Any, float]:
    known = {"L": L, "s": s, "k": k}
    return {known[name]: value for name, value in values.items()}


STORE_ALL = ClosedForm("store all", 1 + L * (1 + s) + GRADIENTS, L, "every L")
#: a_0, a_{l-1}, stage l whole and its two gradients: no L in it.
RECOMPUTE_ALL = ClosedForm("recompute all", 2 + (1 + s) + GRADIENTS, L * (L + 1) / 2, "L >= 2")
#: k segment inputs and one segment whole; the last segment is not run twice.
UNIFORM = ClosedForm("k segments", k + (L / k) * (1 + s) + GRADIENTS, 2 * L - L / k, "k divides L")
#: The note's spacing: log2(L) + 1 states and a last part of L/2 stages, whole.
EXPONENTIAL = ClosedForm(
    "exponential", 1 + sp.log(L, 2) + (L / 2) * (1 + s) + GRADIENTS, 3 * L / 2, "L a power of two, L >= 2"
)
#: Every part split the same way again.
EXPONENTIAL_RECURSIVE = ClosedForm(
    "exponential, recursive",
    sp.log(L, 2) * (sp.log(L, 2) + 1) / 2 + 1 + (1 + s) + GRADIENTS,
    L + L * (sp.log(L, 2) + 1) / 4,
    "L a power of two, L >= 2",
)
#: Chen Eq. 2 and 3: g(L) = k + g(L/(k+1)) = k log_{k+1} L; every level runs k/(k+1) of it again.
CHEN_RECURSIVE = ClosedForm(
    "recursive",
    1 + k * sp.log(L) / sp.log(k + 1) + (1 + s) + GRADIENTS,
    L + L * k / (k + 1) * sp.log(L) / sp.log(k + 1),
    "L a power of k + 1",
)

ALL = (STORE_ALL, RECOMPUTE_ALL, UNIFORM, EXPONENTIAL, EXPONENTIAL_RECURSIVE, CHEN_RECURSIVE)


def best_segments() -> Any:
    """The k that minimises UNIFORM's peak: sqrt(L (1 + s)), from dpeak/dk = 0."""
    (best,) = sp.solve(sp.diff(UNIFORM.peak, k), k)
    return sp.simplify(best)


def best_uniform_peak() -> Any:
    """UNIFORM's peak there: 2 sqrt(L (1 + s)) + 2, Chen's O(2 sqrt n)."""
    return sp.simplify(UNIFORM.peak.subs(k, best_segments()))


def uniform_overhead() -> Any:
    """Extra forward work of k segments over one forward pass: (k - 1)/k, not the notes' 1/k."""
    return sp.simplify(UNIFORM.forwards / L - 1)


def slope(form: Any, symbol: Any = L) -> Any:
    """The log-log slope d ln(form) / d ln(L) as L grows: 1 linear, 1/2 square root, 0 logarithm."""
    return sp.limit(sp.simplify(sp.diff(form, symbol) * symbol / form), symbol, sp.oo)
