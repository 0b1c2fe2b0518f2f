"""Timing protocol on a fake device whose clock only its own work advances."""

from __future__ import annotations

import pytest

from repro.instruments.timing import Timing, TimingError, time_interleaved, time_work


class FakeDevice:
    """A stream with a clock in ms; events read the clock; the log shows the order of things."""

    def __init__(self) -> None:
        self.clock_ms = 0.0
        self.log: list[str] = []
        self.synchronised_with_open_window = False
        self._open = 0

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def flush_cache(self) -> None:
        self.log.append("flush")
        self.clock_ms += 7.0  # must never show up in a result

    def synchronize(self) -> None:
        self.log.append("sync")
        self.synchronised_with_open_window |= self._open % 2 == 1

    def work(self, name: str, cost_ms: float):
        def run() -> None:
            self.log.append(name)
            self.clock_ms += cost_ms

        return run


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at_ms: float | None = None

    def record(self) -> None:
        self.device._open += 1
        self.at_ms = self.device.clock_ms

    def elapsed_ms(self, end: FakeEvent) -> float:
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


def test_flush_is_outside_the_window_and_nothing_synchronises_inside_it() -> None:
    device = FakeDevice()
    timing = time_work(device.work("a", 2.0), device, budget_ms=20.0)
    assert timing == Timing(2.0, 2.0, 2.0, 10)
    assert not device.synchronised_with_open_window


def test_warm_up_is_not_timed() -> None:
    device = FakeDevice()
    calls = 0

    def compiles_first() -> None:
        nonlocal calls
        calls += 1
        device.clock_ms += 1000.0 if calls == 1 else 1.0

    timing = time_work(compiles_first, device)
    assert timing.max_ms == 1.0


def test_pieces_of_work_take_turns() -> None:
    device = FakeDevice()
    works = {"a": device.work("a", 1.0), "b": device.work("b", 3.0)}
    times = time_interleaved(works, device, budget_ms=9.0, min_repeats=1)
    assert {name: t.median_ms for name, t in times.items()} == {"a": 1.0, "b": 3.0}
    timed = [entry for entry in device.log[device.log.index("sync") :] if entry in "ab"]
    assert timed == ["a", "b"] * (1 + times["a"].repeats)
    assert times["a"].repeats == times["b"].repeats == 3  # set by the slowest


def test_repeats_stay_within_their_limits() -> None:
    device = FakeDevice()
    assert time_work(device.work("slow", 500.0), device, min_repeats=5).repeats == 5
    assert time_work(device.work("fast", 0.01), device, max_repeats=50).repeats == 50


def test_median_and_extremes_of_uneven_samples() -> None:
    assert Timing.of([3.0, 1.0, 2.0]) == Timing(2.0, 1.0, 3.0, 3)


def test_a_clock_that_stands_still_is_an_error_not_a_zero() -> None:
    device = FakeDevice()
    with pytest.raises(TimingError, match="not positive"):
        time_work(device.work("nothing", 0.0), device)


def test_contradicting_limits_are_named() -> None:
    device = FakeDevice()
    with pytest.raises(ValueError, match="min_repeats=9 and max_repeats=3"):
        time_work(device.work("a", 1.0), device, min_repeats=9, max_repeats=3)
