"""Closed forms against the simulator, exactly, and their growth."""

import math
from pathlib import Path

import pytest
import sympy as sp

from analysis.checkpointing import (
    chen_recursive,
    chen_search,
    exponential,
    exponential_recursive,
    recompute_all,
    simulate,
    sqrt,
    store_all,
    uniform,
    uniform_chain,
)
from analysis.checkpointing import closed_forms as forms


@pytest.mark.parametrize("interior", [0, 1, 5])
@pytest.mark.parametrize("length", [2, 4, 16, 64, 256])
def test_closed_forms_are_what_the_simulator_counts(length: int, interior: int) -> None:
    chain = uniform_chain(length, 1, interior)
    plans = [
        (forms.STORE_ALL, store_all(chain), {}),
        (forms.RECOMPUTE_ALL, recompute_all(chain), {}),
        (forms.EXPONENTIAL, exponential(chain), {}),
        (forms.EXPONENTIAL_RECURSIVE, exponential_recursive(chain), {}),
        (forms.CHEN_RECURSIVE, chen_recursive(chain), {"k": 1}),
        (forms.UNIFORM, uniform(chain, 2), {"k": 2}),
    ]
    for form, plan, extra in plans:
        replay = simulate(chain, plan.schedule)
        values = {"L": length, "s": interior, **extra}
        assert form.peak_at(**values) == pytest.approx(replay.peak_bytes), form.name
        assert form.forwards_at(**values) == pytest.approx(replay.forwards), form.name


@pytest.mark.parametrize(("length", "k"), [(27, 2), (81, 2), (64, 3), (125, 4)])
def test_recursion_with_k_states_a_level(length: int, k: int) -> None:
    """Chen Eq. 3: k log_{k+1} n states."""
    replay = simulate(uniform_chain(length), chen_recursive(uniform_chain(length), k).schedule)
    assert forms.CHEN_RECURSIVE.peak_at(L=length, k=k, s=0) == pytest.approx(replay.peak_bytes)
    assert forms.CHEN_RECURSIVE.forwards_at(L=length, k=k) == pytest.approx(replay.forwards)


def test_best_number_of_segments_is_derived() -> None:
    L, s = forms.L, forms.s
    assert sp.simplify(forms.best_segments() - sp.sqrt(L * (1 + s))) == 0
    assert sp.simplify(forms.best_uniform_peak() - 2 * sp.sqrt(L * (1 + s)) - 2) == 0
    chain = uniform_chain(144, 1, 3)
    peaks = {count: uniform(chain, count).peak_bytes for count in range(1, 145) if 144 % count == 0}
    assert min(peaks, key=peaks.__getitem__) == 24  # sqrt(144 * 4)
    assert peaks[24] == 2 * 24 + 2


def test_orders_of_growth() -> None:
    assert forms.slope(forms.STORE_ALL.peak) == 1
    assert forms.slope(forms.best_uniform_peak()) == sp.Rational(1, 2)
    assert forms.slope(forms.EXPONENTIAL.peak) == 1  # F4
    assert forms.slope(forms.CHEN_RECURSIVE.peak) == 0
    assert forms.slope(forms.RECOMPUTE_ALL.forwards) == 2
    k = forms.k
    assert sp.simplify(forms.uniform_overhead() - (k - 1) / k) == 0  # F5


@pytest.mark.parametrize("saved", [1, 2, 12])
@pytest.mark.parametrize("length", [256, 1024])
def test_the_peaks_that_the_page_of_strategies_states(length: int, saved: int) -> None:
    """docs/pages/checkpointing.md, in outputs; the gradient and the last stage's output beside."""
    page = (Path(__file__).resolve().parents[2] / "docs/pages/checkpointing.md").read_text()
    chain = uniform_chain(length, 1, saved)
    assert '`"sqrt"` | √L (2 + s) |' in page
    assert 0 <= sqrt(chain).peak_bytes - math.sqrt(length) * (2 + saved) <= 2
    assert '`"chen-search"` | 2 √(L (1 + s)) |' in page
    assert abs(chen_search(chain).peak_bytes - 2 * math.sqrt(length * (1 + saved))) <= 3
    assert "| about log₂ L + s;" in page
    assert 0 <= chen_recursive(chain).peak_bytes - (math.log2(length) + saved) <= 4
