"""Cache misses of naive and tiled products: the LRU model, closed forms, and cachegrind."""

from __future__ import annotations

from functools import cache

import pandas
import pytest

from analysis.cache_model import Cache, CachePair, Misses, closed_form, predict_misses, references
from repro.claims import Verdict, rows
from repro.experiments import tidy
from repro.instruments import cachegrind, perf_misses

FIRST, LAST = Cache(4096, 8), Cache(16384, 16)
N, BLOCK = 80, 16
MISSES = rows()["matrix product misses"]


@cache
def predicted() -> dict[str, Misses]:
    return predict_misses(N, BLOCK, FIRST, LAST)


def test_lru_by_hand() -> None:
    one = Cache(128, 2)  # one set of two lines
    lines = [0, 16, 0, 32, 16, 0]  # floats, 16 a line: lines 0 1 0 2 1 0
    got = CachePair(one, Cache(256, 4)).replay(lines)
    assert (got.references, got.first, got.last) == (6, 5, 3)  # only the third hits


def test_reference_counts() -> None:
    n, block = 20, 6
    assert sum(1 for _ in references(n, None)) == 2 * n**3 + 2 * n**2
    assert sum(1 for _ in references(n, block)) == 2 * n**3 + 2 * n**2 * -(-n // block)


def test_closed_forms_match_a_fully_associative_cache() -> None:
    one_set = Cache(4096, 64)
    exact = predict_misses(N, BLOCK, one_set, LAST)
    for name, block in (("naive_gemm", None), ("tiled_gemm", BLOCK)):
        assert closed_form(N, block, one_set) == pytest.approx(exact[name].first, rel=0.1)


def test_tiling_pays() -> None:
    found = predicted()
    assert found["naive_gemm"].first > 10 * found["tiled_gemm"].first
    assert found["naive_gemm"].last > 2 * found["tiled_gemm"].last


@pytest.mark.skipif(cachegrind.missing() is not None, reason=cachegrind.missing() or "cachegrind is there")
def test_cachegrind_counts_what_the_model_predicts() -> None:
    counted = cachegrind.count_misses(N, BLOCK, FIRST, LAST)
    for name, want in predicted().items():
        # loop bounds on the stack come on top, more of them in the six loops of the tiled form
        assert counted[name].references == pytest.approx(want.references, rel=0.05)
        slack = 0.001 if name == "naive_gemm" else 0.05
        assert counted[name].first == pytest.approx(want.first, rel=slack)
        assert counted[name].last == pytest.approx(want.last, rel=0.01)


def test_parse_and_errors() -> None:
    report = "events: Ir Dr D1mr DLmr Dw D1mw DLmw\nfn=main\n1 9 9 9 9 9 9 9\n"
    report += "fn=naive_gemm\n0 100 10 2 1 5 1 1\n0 1 1 0 0 0 0 0\nfn=other\n3 4 4 4 4 4 4 4\n"
    got = cachegrind.parse(report)
    assert {k: (v.references, v.first, v.last) for k, v in got.items()} == {"naive_gemm": (16, 3, 2)}
    with pytest.raises(RuntimeError, match=r"names no \*_gemm function"):
        cachegrind.parse("events: Ir\nfn=main\n0 1\n")
    with pytest.raises(ValueError, match="1000 bytes are not whole sets of 8 lines of 64 bytes"):
        Cache(1000, 8)
    with pytest.raises(ValueError, match="three blocks of 64 do not fit into 64 lines"):
        closed_form(128, 64, Cache(4096, 8))


def test_a_hidden_hardware_counter_is_said_and_a_shown_one_is_read() -> None:
    shown = "1234,,L1-dcache-load-misses:u,1000,100.00,,\n"
    assert perf_misses.parse(shown) == 1234
    hidden = "<not supported>,,L1-dcache-load-misses,0,100.00,,\n"
    with pytest.raises(RuntimeError, match="L1-dcache-load-misses is not supported on this"):
        perf_misses.parse(hidden)
    with pytest.raises(RuntimeError, match="perf reports no L1-dcache-load-misses: no message"):
        perf_misses.parse("")


@pytest.mark.skipif(perf_misses.missing() is not None, reason=perf_misses.missing() or "")
def test_one_form_alone_runs_under_the_counter() -> None:
    try:
        naive, tiled = (perf_misses.count_misses(480, 16, form) for form in ("naive", "tiled"))
    except RuntimeError as reason:
        pytest.skip(str(reason))
    assert naive > 2 * tiled


def test_the_model_s_own_count_is_no_measurement_of_misses() -> None:
    frame = tidy(MISSES.experiments, local=False)
    before = MISSES.judged(frame)
    assert before.verdict is Verdict.WITHIN_LIMITS
    frame.loc[frame["tool"] == "cachegrind", "tool"] = "LRU model: valgrind is not installed"
    after = MISSES.judged(frame)
    assert after.verdict is Verdict.NOT_TESTED


def test_a_hardware_counter_decides_where_there_is_one() -> None:
    frame = tidy(MISSES.experiments, local=False)
    row = frame[frame["experiment"] == "gemm-cache"].iloc[:1]

    def counted(naive: float) -> Verdict:
        added = [
            row.assign(metric="hardware_first_level_misses", source="measured", value=value, implementation=form)
            for form, value in (("naive", naive), ("tiled", 1.0))
        ]
        return MISSES.judged(pandas.concat([frame, *added], ignore_index=True)).verdict

    assert counted(20.0) is Verdict.WITHIN_LIMITS
    assert counted(0.9) is Verdict.REFUTED
