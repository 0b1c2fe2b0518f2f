"""Peak-memory regions: nested, re-based, exact."""

import contextlib
import gc
import threading

import pytest
import torch

from repro.checkpointing import allocation_trace, plan
from repro.checkpointing.memory import PoolMeter, memory_meter, peak_bytes
from repro.instruments.pools import CupyPool, Held

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


def test_releases_of_what_an_earlier_meter_saw_do_not_count() -> None:
    """The profiler reports them, because its table of sizes outlives a trace."""
    with memory_meter("cpu"):
        older = block()
    with memory_meter("cpu") as meter, meter.region("two blocks") as region:
        del older
        mine = [block(), block()]
        del mine
    assert (region.peak_bytes, region.end_bytes) == (2 * MIB, 0)


class Cycle:
    """Garbage that waits for the collector, as a model's leftovers do."""

    def __init__(self) -> None:
        self.me, self.block = self, block()


def python_objects() -> None:
    """So many that the collector would run, several times in its youngest generation."""
    _ = [[index] for index in range(10 * gc.get_threshold()[0])]


def test_bytes_do_not_depend_on_when_garbage_is_collected() -> None:
    """Not on what earlier code left for the collector; what a region leaves goes with its end."""
    with memory_meter("cpu"):
        Cycle()
    with memory_meter("cpu") as meter:
        with meter.region("cycles") as region:
            Cycle()
            python_objects()
            Cycle()
            python_objects()
        Cycle()
        with meter.region("after") as after:
            python_objects()
            mine = block()
        del mine
    assert (region.peak_bytes, region.end_bytes) == (2 * MIB, 0)
    assert (after.peak_bytes, after.end_bytes) == (MIB, MIB)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_the_pools_of_a_gpu_are_read_without_older_garbage() -> None:
    """Their counters, unlike a trace, show every release.  Meters nest."""
    pool = FakePool()

    class Garbage:
        def __init__(self) -> None:
            self.me = self
            pool.allocate(1000)

        def __del__(self) -> None:
            pool.allocate(-1000)

    Garbage()
    with PoolMeter(pool) as meter, meter.region("step") as region:
        Garbage()
        with PoolMeter(pool) as another, another.region("inside") as inside:
            python_objects()
            pool.allocate(3000)
        python_objects()
    assert (inside.peak_bytes, inside.end_bytes) == (3000, 3000)
    assert (region.peak_bytes, region.end_bytes) == (3000, 3000)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_temporaries_inside_an_operation_are_seen() -> None:
    """A dispatch-level count would see the result only: the product below first makes a copy."""
    a = torch.randn(512, 512)
    index = torch.arange(512)
    peak = peak_bytes(lambda: a[index][index].sum())
    assert peak >= 2 * a.nbytes


def test_a_region_needs_an_open_meter() -> None:
    meter = memory_meter("cpu")
    message = "'early' of a memory meter that is not open"
    with pytest.raises(RuntimeError, match=message), meter.region("early"):
        pass
    with meter:
        late = meter.region("late")
    with pytest.raises(RuntimeError, match="'late' of a memory meter that is not open"), late:
        pass
    assert gc.get_freeze_count() == 0


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


def held(requested: int, segment: int) -> Held:
    rounded = -(-requested // 512) * 512
    return Held(requested, rounded, -(-rounded // segment) * segment)


class FakePool:
    """An allocator with one peak, like torch's; what it takes from the driver it keeps."""

    def __init__(self) -> None:
        self.now = self.most = self.high = 0

    def allocate(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)
        self.high = max(self.high, self.now)

    def live(self) -> Held:
        return Held(held(self.now, 2048).requested, held(self.now, 2048).rounded, self.reserved())

    def peak(self) -> Held:
        return Held(held(self.most, 2048).requested, held(self.most, 2048).rounded, self.reserved())

    def reserved(self) -> int:
        return held(self.high, 2048).reserved

    def reset_peak(self) -> None:
        self.most = self.now


class FakeCupy:
    """The parts of CuPy's module that the meter uses: a pool of 512-byte blocks without a peak."""

    def __init__(self) -> None:
        self.used = self.total = 0
        self.cuda = self
        self.allocator = self._grow

    def _grow(self, size: int) -> int:
        self.used += -(-size // 512) * 512
        self.total = max(self.total, self.used)
        return size

    def malloc(self, size: int) -> None:
        self.allocator(size)

    def free(self, size: int) -> None:
        self.used -= -(-size // 512) * 512

    def get_allocator(self):
        return self.allocator

    def set_allocator(self, allocator) -> None:
        self.allocator = allocator

    def get_default_memory_pool(self):
        return self

    def used_bytes(self) -> int:
        return self.used

    def total_bytes(self) -> int:
        return self.total

    def Device(self, index: int):
        return contextlib.nullcontext()


def test_regions_on_one_pool_do_not_hide_peaks_from_each_other() -> None:
    pool = FakePool()
    pool.allocate(1024)
    pool.allocate(-1024)  # an earlier peak
    with PoolMeter(pool) as meter:
        with meter.region("outer") as outer:
            pool.allocate(256)
            pool.allocate(500)
            pool.allocate(-500)
            with meter.region("first") as first:
                pool.allocate(100)
                pool.allocate(-100)
            with meter.region("second") as second:
                pool.allocate(10)
        pool.allocate(-266)
    assert (outer.peak_bytes, outer.end_bytes) == (756, 266)
    assert (first.peak_bytes, first.end_bytes) == (100, 0)
    assert (second.peak_bytes, second.end_bytes) == (10, 10)
    assert outer.rounded_peak_bytes == 1024  # two slabs of 512
    assert outer.reserved_peak_bytes == 2048  # one segment, taken before the meter opened


def test_the_peak_is_that_of_the_sum_not_the_sum_of_peaks() -> None:
    mine, theirs = FakePool(), FakeCupy()
    with PoolMeter(mine, CupyPool(theirs)) as meter, meter.region("in turn") as region:
        mine.allocate(4096)
        mine.allocate(-4096)
        theirs.malloc(2048)
        theirs.free(2048)
        with meter.region("together") as together:
            theirs.malloc(1024)
            mine.allocate(1000)
            mine.allocate(-1000)
            theirs.free(1024)
    assert region.peak_bytes == 4096
    assert (together.peak_bytes, together.rounded_peak_bytes) == (2024, 2048)
    assert theirs.allocator == theirs._grow, "the allocator is as it was"


def test_a_torch_without_the_private_profiler_is_one_clear_line(monkeypatch) -> None:
    monkeypatch.setattr(allocation_trace, "_PROFILER", object())
    with pytest.raises(RuntimeError, match=r"_enable_profiler, .*_disable_profiler") as caught:
        peak_bytes(lambda: None)
    assert "\n" not in str(caught.value)


def test_meters_nest() -> None:
    """Also a whole meter inside a region of another one, as plan() inside a measured region."""
    with memory_meter("cpu") as outer:
        with outer.region("all") as whole:
            first = block()
            with memory_meter("cpu") as inner, inner.region("part") as part:
                second = [block(), block()]
                del first
            assert (part.peak_bytes, part.end_bytes) == (2 * MIB, MIB)
            del second
        with outer.region("next") as later:
            third = block()
        del third
    assert (whole.peak_bytes, whole.end_bytes) == (3 * MIB, 0)
    assert (later.peak_bytes, later.end_bytes) == (MIB, MIB)


def test_a_region_left_by_an_error_is_closed() -> None:
    with memory_meter("cpu") as meter:
        with contextlib.suppress(ValueError), meter.region("broken") as region:
            held = block()
            raise ValueError
        del held
    assert (region.peak_bytes, region.end_bytes) == (MIB, MIB)


def test_threads_take_turns() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    found: list[int] = []

    def work() -> None:
        planned = plan(model, torch.randn(32, 64), strategy="sqrt", repeats=0)
        found.append(planned.predicted_peak_bytes)

    automatic = gc.isenabled()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert gc.isenabled() == automatic


def test_another_threads_meter_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation_trace.TRACE, "WAIT_S", 0.05)
    errors: list[str] = []

    def work() -> None:
        try:
            peak_bytes(block)
        except RuntimeError as error:
            errors.append(str(error))

    with memory_meter("cpu"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(errors) == 1
    assert "open in another thread" in errors[0]
    assert peak_bytes(block) == MIB


@pytest.mark.parametrize("which", ["torch.profiler", "torch.autograd.profiler"])
def test_a_profiler_of_the_users_is_left_alone(which: str) -> None:
    profiler = torch.profiler if which == "torch.profiler" else torch.autograd.profiler
    with profiler.profile() as prof:
        with pytest.raises(RuntimeError, match=r"a profiler .* is active"):
            peak_bytes(block)
        torch.randn(8).exp()
    assert any("exp" in event.key for event in prof.key_averages())
    assert peak_bytes(block) == MIB  # and nothing is left locked
