"""The GPU experiments as far as they go without a GPU: cells, predictions, work on the host."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pandas
import pytest
import torch

from analysis.shapes import AttentionShape, Tile
from figures.bytes import sm_ceilings as figure
from kernels.beside import probes
from kernels.hopper import ForwardForm
from kernels.host import HostBackend
from kernels.launch import from_numpy
from repro import experiments
from repro.experiments import Cell, Context, UnavailableError
from repro.experiments.gpu import gpu_forms, gpu_ladder, gpu_sm_units, gpu_throughput, gpu_traffic
from repro.instruments import hopper_cases
from repro.instruments.counters import METRICS, CounterError, CounterTimeoutError, KernelBusy, KernelCount
from repro.instruments.gpu_work import FORMS, Operands, cell_work, form_work, kernel_results, work


@pytest.mark.parametrize("implementation", ["flash", "flash1-skip-first", "standard", "sdpa-math"])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_work_runs_the_pass_that_was_asked_for(implementation: str, pass_: str) -> None:
    shape = AttentionShape(1, 2, 40, 40, 32, dtype="fp32", causal=True)
    operands = Operands(shape, "cpu")
    result = work(implementation, pass_, operands)()
    if implementation == "sdpa-math":  # torch's variants hand their results back
        shapes = [t.shape for t in (result if isinstance(result, tuple) else (result,))]
        assert shapes == [operands.q.shape] * (3 if pass_ == "backward" else 1)


def test_work_takes_the_tile_of_the_cell() -> None:
    cell = gpu_traffic.cell("flash", "forward", Tile(64, 64), seqlen=64, head_dim=32)
    with pytest.raises(ValueError, match="block_m=40"):
        cell_work(Cell(**{**cell, "block_m": 40}), "cpu")()


def test_the_hopper_kernels_are_work_of_their_own_name() -> None:
    """Both forms are timed and counted side by side, whatever the operator would choose."""
    operands = Operands(AttentionShape(1, 1, 70, 70, 64, dtype="bf16", causal=True), "cpu")
    for ours, theirs in zip(kernel_results("flash-sm90", operands), kernel_results("flash", operands), strict=True):
        assert (ours.float() - theirs.float()).abs().max() < 4e-2
    listed = {str(c["implementation"]) for c in gpu_traffic.cells()}
    assert {"flash", "flash-sm90"} <= listed & set(gpu_throughput.IMPLEMENTATIONS)
    # Of the forward, the form that the rule picks and, in turn, one block a tile.
    pairs = [FORMS[name] for c in gpu_traffic.cells() if (name := str(c["implementation"])) in FORMS]
    assert [form.persistent for form in pairs] == [True, False] * 4
    assert {form.head_dim for form in pairs} == {64, 128}
    bounds = {r.implementation: r.value for r in gpu_throughput.EXPERIMENT.predicted(gpu_throughput.cells()[0])}
    assert set(bounds) == {"flash", "flash-sm90"}
    # Longer tiles move fewer bytes, so the Hopper form's bound is no lower.
    assert bounds["flash-sm90"] >= bounds["flash"] > 0


def test_forms_run_as_they_are_named() -> None:
    cells = gpu_forms.cells()
    assert {name for cell in cells for name in gpu_forms.implementations(cell)} == set(FORMS)
    operands = Operands(AttentionShape(1, 1, 70, 70, 128, dtype="bf16", causal=True), "cpu")
    out, *gradients = (result.float() for result in kernel_results("flash", operands))
    for name, form in FORMS.items():
        if form.head_dim != 128:
            continue
        run, got = form_work(form, operands)
        run()
        forward = isinstance(form, ForwardForm)
        for ours, want in zip(got, [out] if forward else gradients, strict=True):
            assert (ours.float() - want).abs().max() < hopper_cases.BOUNDS[not forward], name
        this, other = ("forward", "backward") if forward else ("backward", "forward")
        with pytest.raises(ValueError, match=f"a form of the {this}, not of the {other}"):
            work(name, other, operands)


def test_a_tile_that_does_not_fit_is_left_out_with_its_reason() -> None:
    assert len(gpu_ladder.cells()) < len(gpu_ladder.listed())
    left_out = [r for c in gpu_ladder.also() for r in gpu_ladder.EXPERIMENT.predicted(c)]
    assert [(r.pass_, r.block_n) for r in left_out] == [("backward", 512)]
    assert re.fullmatch(r"needs \d+ bytes .* a block has 232448", str(left_out[0].error))
    cell = next(c for c in gpu_ladder.listed() if gpu_ladder.unsupported_reason(c))
    with pytest.raises(ValueError, match="232448"):  # the kernels' own check agrees
        cell_work(Cell(**{**cell, "batch": 1, "heads": 1, "kv_heads": 1}), "cpu")()


class TestCountedTraffic:
    """gpu-traffic with counters that a fake profiler gives."""

    @pytest.fixture
    def profiled(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
        """The first cell of each batch that was profiled. The first batch takes too long once
        ``slow`` is in the list; of the others only the first cell launched something."""
        asked: list[str] = []

        def count(listed: list[dict[str, object]], **_: object) -> list[list[KernelCount]]:
            slow = "slow" in asked
            asked.append(next(c.id for c in gpu_traffic.cells() if c == listed[0]))
            if slow and len(asked) == 2:
                raise CounterTimeoutError("ncu did not finish within 60 s")
            if "refuse" in asked:
                raise CounterError("no permission")
            counts = dict(zip(METRICS, (10, 20, 30, 4), strict=True))
            return [[KernelCount("flash_forward", (1, 1, 1), counts)]] + [[] for _ in listed[1:]]

        monkeypatch.setattr("repro.instruments.counted.count_cells", count)
        gpu_traffic.counted.cache_clear()
        yield asked
        gpu_traffic.counted.cache_clear()

    def test_rows_carry_kernel_level_and_direction(self, profiled: list[str]) -> None:
        rows = gpu_traffic.EXPERIMENT.measured(gpu_traffic.cells()[0], Context("cuda"))
        values = {(r.kernel, r.level, r.direction): r.value for r in rows}
        assert values == {
            ("flash_forward", "hbm", "read"): 10,
            ("flash_forward", "hbm", "write"): 20,
            ("flash_forward", "sm", "read"): 30,
            ("flash_forward", "sm", "write"): 4,
            ("all", "hbm", "read"): 10,
        }
        predicted = {(r.kernel, r.level, r.direction) for r in gpu_traffic.EXPERIMENT.predicted(gpu_traffic.cells()[0])}
        assert predicted & set(values) == predicted

    def test_a_cell_without_kernels_is_an_error(self, profiled: list[str]) -> None:
        with pytest.raises(RuntimeError, match="launched no kernel"):
            gpu_traffic.EXPERIMENT.measured(gpu_traffic.cells()[1], Context("cuda"))

    def test_ncu_is_asked_once_even_if_it_refuses(self, profiled: list[str]) -> None:
        profiled.append("refuse")
        for cell in gpu_traffic.cells()[:3]:
            with pytest.raises(UnavailableError, match="no permission"):
                gpu_traffic.EXPERIMENT.measured(cell, Context("cuda"))
        assert len(profiled) == 2

    def test_a_batch_that_takes_too_long_leaves_the_next_one_its_turn(self, profiled: list[str]) -> None:
        profiled.append("slow")
        cells = gpu_traffic.cells()
        for cell in cells[:2]:
            with pytest.raises(RuntimeError, match="did not finish"):
                gpu_traffic.EXPERIMENT.measured(cell, Context("cuda"))
        rows = gpu_traffic.EXPERIMENT.measured(cells[gpu_traffic.BATCH], Context("cuda"))
        assert {r.value for r in rows} == {10, 20, 30, 4}
        assert profiled == ["slow", cells[0].id, cells[gpu_traffic.BATCH].id]


def test_unit_percentages_are_recorded_under_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = gpu_sm_units.cells()
    tensor = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
    kernels = [
        KernelBusy("flash_backward_sm90_preprocess", (1, 1, 1), {tensor: 0.0}),
        KernelBusy("flash_backward_sm90", (1, 1, 1), {tensor: 71.0, "l1tex__data_bank_reads": 85.0}),
    ]
    monkeypatch.setattr(
        "repro.instruments.counted.watch_cells", lambda listed, **_: [kernels] + [[] for _ in listed[1:]]
    )
    gpu_sm_units.watched.cache_clear()
    rows = gpu_sm_units.EXPERIMENT.measured(cells[0], Context("cuda"))
    assert [(r.kernel, r.extra["counter"], r.value) for r in rows] == [
        ("flash_backward_sm90_preprocess", tensor, 0.0),
        ("flash_backward_sm90", tensor, 71.0),
        ("flash_backward_sm90", "l1tex__data_bank_reads", 85.0),
    ]
    with pytest.raises(RuntimeError, match="launched no kernel"):
        gpu_sm_units.EXPERIMENT.measured(cells[1], Context("cuda"))
    gpu_sm_units.watched.cache_clear()
    # And drawn as the time that this share of the tensor cores means.
    counted = experiments.tidy(["sm-ceilings"], local=False)
    frame = pandas.concat([counted, pandas.DataFrame([r.to_json() for r in rows])])
    table = figure.forms(frame).set_index(["implementation", "pass", "head_dim", "block_m"])
    assert table["counted time"].dropna().to_dict() == {("flash-sm90", "backward", 64, 128): pytest.approx(100 / 71)}
    figure.draw(frame)


class TestProbes:
    """The probes move what they say, counted on the host."""

    BYTES = probes.THREADS * probes.STEPS * probes.VECTOR_BYTES * 3

    def source(self) -> np.ndarray:
        return np.random.default_rng(0).random(self.BYTES // 4, dtype=np.float32)

    def test_read_streams_once(self) -> None:
        backend = HostBackend()
        values = self.source()
        assert probes.read(backend, from_numpy("source", values, "r"), 2) == self.BYTES
        assert backend.traffic["probe_read"]["source", "read"] == self.BYTES

    def test_copy_copies(self) -> None:
        backend = HostBackend()
        values = self.source()
        target = np.zeros_like(values)
        moved = probes.copy(backend, from_numpy("source", values, "r"), from_numpy("target", target, "w"), 2)
        np.testing.assert_array_equal(target, values)
        assert moved == 2 * self.BYTES
        traffic = backend.traffic["probe_copy"]
        assert traffic["source", "read"] + traffic["target", "write"] == moved

    def test_tile_read_crosses_the_boundary_once_a_block(self) -> None:
        backend = HostBackend()
        values = self.source()
        moved = probes.tile_read(backend, from_numpy("source", values, "r"), 3)
        assert moved == 3 * self.BYTES
        assert backend.traffic["probe_tile_read"]["source", "read"] == moved

    def test_the_arithmetic_probes_touch_no_input(self) -> None:
        backend = HostBackend()
        assert probes.mma(backend, 1, 2) == 8 * 8 * 4096 * 2
        assert probes.exp2(backend, 1, 3) == 256 * 8 * 3
        assert probes.shared(backend, 1, 2) == 256 * 8 * 16 * 2
        for entries in backend.traffic.values():
            assert set(entries) == {("out", "write")}

    def test_a_chain_visits_every_place_once(self) -> None:
        links = probes.chain(1 << 12, 32)
        at, seen = 0, set()
        for _ in range((1 << 12) // 32):
            seen.add(at)
            at = int(links[at])
        assert at == 0
        assert seen == set(range(0, 1 << 12, 32))

    def test_chase_takes_the_steps_it_is_told(self) -> None:
        backend = HostBackend()
        links = probes.chain(1 << 12, 32)
        assert probes.chase(backend, from_numpy("links", links, "r"), 50) == 50
        assert backend.traffic["probe_chase"]["links", "read"] == 4 * 50

    def test_a_buffer_that_does_not_fill_the_blocks_is_refused(self) -> None:
        with pytest.raises(ValueError, match="100 bytes is not a multiple"):
            probes.read(HostBackend(), from_numpy("source", np.zeros(25, np.float32), "r"), 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_without_a_gpu_nothing_is_measured_and_the_reason_is_told() -> None:
    from repro.experiments.run import measure

    outcome = measure(experiments.experiment("gpu-throughput"))
    assert outcome.measured == 0
    assert outcome.reason is not None
    assert "GPU" in outcome.reason
