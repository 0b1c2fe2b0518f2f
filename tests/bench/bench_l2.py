"""Seconds to simulate a launch through L2, and to read what was kept of it.

pytest tests/bench/bench_l2.py
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from analysis.hardware import H200
from analysis.l2 import L2, available, simulate
from analysis.l2.attention import query_tiles_outside
from analysis.shapes import AttentionShape, Tile

pytestmark = pytest.mark.skipif(not available(), reason="no C compiler here")


@pytest.mark.parametrize("seqlen", [4096, 16384])
def test_a_kept_launch_is_read(
    seqlen: int, benchmark: BenchmarkFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark reads; ``simulated_over_read`` is the first call's time over the median."""
    monkeypatch.setenv("REPRO_CACHE_DIR", str(tmp_path))
    shape = AttentionShape(1, 16, seqlen, seqlen, 128)
    launch = query_tiles_outside(shape, Tile(128, 64))

    def ask() -> float:
        return simulate(launch, L2.of(H200), H200.sms, 2)["k"].fetches

    start = time.perf_counter()
    fetches = ask()
    simulated = time.perf_counter() - start
    assert benchmark(ask) == fetches
    if benchmark.stats is not None:
        benchmark.extra_info["simulated_over_read"] = simulated / benchmark.stats["median"]
