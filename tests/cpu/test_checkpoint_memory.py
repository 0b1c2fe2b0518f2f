"""Peak-memory regions: nested, re-based, exact (EC-25)."""

import pytest
import torch

from repro.checkpointing.memory import CounterMeter, memory_meter, peak_bytes

MIB = 2**20


def block() -> torch.Tensor:
    return torch.empty(MIB // 4, dtype=torch.float32)


def test_two_blocks_of_which_one_is_freed() -> None:
    """Also when earlier code peaked higher, and when a region is nested inside."""
    with memory_meter("cpu") as meter:
        big = [block() for _ in range(16)]
        del big
        with meter.region("outer") as outer:
            first = block()
            with meter.region("inner") as inner:
                second = block()
            del first
        with meter.region("after") as after:
            pass
        del second
    assert (outer.peak_bytes, outer.end_bytes) == (2 * MIB, MIB)
    assert (inner.peak_bytes, inner.end_bytes) == (MIB, MIB)
    assert (after.peak_bytes, after.end_bytes) == (0, 0)


def test_memory_from_before_a_region_can_be_freed_inside() -> None:
    with memory_meter("cpu") as meter:
        held = block()
        with meter.region("free") as region:
            del held
            held = block()
        del held
    assert (region.peak_bytes, region.end_bytes) == (0, 0)


def test_temporaries_inside_an_operation_are_seen() -> None:
    """A dispatch-level count would see the result only: the product below first makes a copy."""
    a = torch.randn(512, 512)
    index = torch.arange(512)
    peak = peak_bytes(lambda: a[index][index].sum())
    assert peak >= 2 * a.nbytes


def test_a_region_cannot_be_read_while_it_is_measured() -> None:
    with (
        memory_meter("cpu") as meter,
        meter.region("open") as region,
        pytest.raises(RuntimeError, match="'open' is still being measured"),
    ):
        _ = region.peak_bytes
    assert region.peak_bytes == 0
    with pytest.raises(ValueError, match="meta"):
        memory_meter("meta")


class FakeCounters:
    """An allocator with one peak, like a GPU's."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def allocate(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)

    def live(self) -> int:
        return self.now

    def peak(self) -> int:
        return self.most

    def rounded_peak(self) -> int:
        return -(-self.most // 512) * 512

    def reset_peak(self) -> None:
        self.most = self.now


def test_regions_on_one_counter_do_not_hide_peaks_from_each_other() -> None:
    counters = FakeCounters()
    counters.allocate(1024)
    counters.allocate(-1024)  # an earlier peak
    with CounterMeter(counters) as meter:
        with meter.region("outer") as outer:
            counters.allocate(256)
            counters.allocate(500)
            counters.allocate(-500)
            with meter.region("first") as first:
                counters.allocate(100)
                counters.allocate(-100)
            with meter.region("second") as second:
                counters.allocate(10)
        counters.allocate(-266)
    assert (outer.peak_bytes, outer.end_bytes) == (756, 266)
    assert (first.peak_bytes, first.end_bytes) == (100, 0)
    assert (second.peak_bytes, second.end_bytes) == (10, 10)
    assert outer.rounded_peak_bytes == 1024  # two slabs of 512
