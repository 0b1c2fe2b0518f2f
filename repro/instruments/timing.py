"""How long a piece of GPU work takes, by device events.

Protocol: warm up (compilation and first-touch allocation are not timed); before every repetition
write over a buffer larger than L2, outside the timed window, so that no repetition finds its inputs
cached by the one before; record one event before and one after the work, with no host
synchronisation between the two; synchronise once at the end; report the median with the extremes
and the number of repetitions.

Several pieces of work are timed in turn (A B C, A B C, ...), because a card under load changes its
clock within a second: only figures of the same round can be compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from repro.measuring.row import Row, row

#: How the times of :func:`time_interleaved` are made, as records say it.
IN_TURN = "CUDA events, median, in turn, L2 flushed"
Work = Callable[[], object]


class TimingError(RuntimeError):
    """The work could not be timed; the message is one line with the cause."""


class Event(Protocol):
    """A point in a device's stream of work."""

    def record(self) -> None: ...

    def elapsed_ms(self, end: Any) -> float:
        """Milliseconds from this event to ``end``; both must have completed."""
        ...


class Device(Protocol):
    """What timing needs of a device; a fake one is enough to test the protocol."""

    def event(self) -> Event: ...

    def flush_cache(self) -> None:
        """Queue a write over a buffer larger than the last-level cache."""
        ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one piece of work: median, extremes and number of repetitions."""

    median_ms: float
    min_ms: float
    max_ms: float
    repeats: int

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Timing:
        """ValueError when there is no sample; TimingError when one cannot be a duration."""
        if not samples_ms:
            raise ValueError("no sample to summarise")
        bad = [s for s in samples_ms if not s > 0]
        if bad:
            raise TimingError(f"{len(bad)} of {len(samples_ms)} samples are not positive: {bad[0]}")
        return cls(statistics.median(samples_ms), min(samples_ms), max(samples_ms), len(samples_ms))

    def row(self, tool: str, **more: Any) -> Row:
        """The median, with the extremes, as a row of a record."""
        extremes = {"spread_min": self.min_ms, "spread_max": self.max_ms, "spread_n": self.repeats}
        return row("time_ms", self.median_ms, tool=tool, **extremes, **more)


class TorchDevice:
    """The current CUDA device, by torch's events on the current stream."""

    #: Four times the largest L2 of a card in ``analysis.hardware`` (60 MB), so nothing survives.
    FLUSH_BYTES = 256 << 20

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise TimingError("no CUDA device: device events need one")
        self._torch = torch
        self._buffer = torch.empty(self.FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def event(self) -> _TorchEvent:
        return _TorchEvent(self._torch.cuda.Event(enable_timing=True))

    def flush_cache(self) -> None:
        self._buffer.zero_()

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()


@dataclass(frozen=True)
class _TorchEvent:
    inner: Any

    def record(self) -> None:
        self.inner.record()

    def elapsed_ms(self, end: _TorchEvent) -> float:
        return float(self.inner.elapsed_time(end.inner))


def time_interleaved(
    works: Mapping[str, Work],
    device: Device,
    *,
    budget_ms: float = 100.0,
    min_repeats: int = 5,
    max_repeats: int = 200,
    warmup: int = 2,
) -> dict[str, Timing]:
    """Time each piece of work, all of them in turn in every round.

    The number of rounds is chosen from one trial round so that the whole takes about ``budget_ms``
    for each piece of work, within ``min_repeats`` and ``max_repeats``.

    Raises ValueError for limits that contradict each other; what the work itself raises passes
    through.
    """
    if not 1 <= min_repeats <= max_repeats:
        raise ValueError(f"min_repeats={min_repeats} and max_repeats={max_repeats} do not fit")
    if budget_ms <= 0:
        raise ValueError(f"budget_ms={budget_ms} must be positive")
    for work in works.values():
        for _ in range(max(1, warmup)):
            work()
    device.synchronize()
    if not works:
        return {}

    trial = _round(works, device)
    device.synchronize()
    slowest = max(start.elapsed_ms(end) for start, end in trial.values())
    repeats = max(min_repeats, min(max_repeats, int(budget_ms / max(slowest, 1e-3))))

    rounds = [_round(works, device) for _ in range(repeats)]
    device.synchronize()
    return {name: Timing.of([start.elapsed_ms(end) for start, end in (r[name] for r in rounds)]) for name in works}


def time_work(work: Work, device: Device, **options: Any) -> Timing:
    """Time one piece of work; options as for ``time_interleaved``."""
    return time_interleaved({"work": work}, device, **options)["work"]


def _round(works: Mapping[str, Work], device: Device) -> dict[str, tuple[Event, Event]]:
    events = {}
    for name, work in works.items():
        device.flush_cache()
        start, end = device.event(), device.event()
        start.record()
        work()
        end.record()
        events[name] = (start, end)
    return events
