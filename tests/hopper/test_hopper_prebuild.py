"""What is compiled ahead of a GPU run covers what the run launches."""

from __future__ import annotations

from typing import Any

import pytest

from kernels import attention, hopper, prebuild
from kernels.launch import Array, Kernel
from kernels.launching.plan import Recorder
from repro import experiments
from repro.experiments import Cell
from repro.experiments.gpu import gpu_l2_order
from repro.experiments.shared.attention import shape_of, tile_of
from repro.instruments.gpu_work import FORMS


def key(kernel: Kernel) -> tuple[str, tuple[tuple[str, int], ...]]:
    return kernel.source, kernel.macros


@pytest.mark.parametrize("name", ["gpu-throughput", "gpu-forms", "gpu-traffic", "gpu-ladder", "gpu-sm-units"])
def test_every_cell_of_the_gpu_experiments_is_compiled_ahead(name: str) -> None:
    from repro.experiments.gpu import gpu_forms, gpu_throughput

    ready = {key(kernel) for kernel in prebuild.plain()}
    checked = 0
    for cell in experiments.experiment(name).cells():
        ours = [cell["implementation"]] if "implementation" in cell else gpu_throughput.OURS
        named = gpu_forms.implementations(cell) if name == gpu_forms.EXPERIMENT.name else ours
        for form in (FORMS[implementation] for implementation in named if implementation in FORMS):
            checked += 1
            if isinstance(form, hopper.BackwardForm):
                for part in ("preprocess", "", "postprocess"):
                    assert key(form.kernel(part, cell["dtype"], cell["causal"])) in ready
                continue
            for part in ("", "clear_counter") if form.persistent else ("",):
                assert key(form.kernel(cell["dtype"], cell["causal"], part)) in ready
        if name == gpu_forms.EXPERIMENT.name:
            ours = [hopper.ALGORITHM]
        ours = [algorithm for algorithm in ours if algorithm not in FORMS]
        for algorithm in ours:
            assert algorithm in attention.ALGORITHMS
            problem = prebuild.shipped(
                algorithm,
                cell["head_dim"],
                cell["dtype"],
                cell["causal"],
                (cell["pass"],),
                cell["seqlen_q"],
                tile=tile_of(cell) if "block_m" in cell else None,
            )
            for kernel in problem.kernels():
                checked += 1
                assert key(kernel) in ready, (cell.id, prebuild.describe(kernel))
    assert checked


@pytest.mark.parametrize("name", ["gpu-l2-order", "gpu-l2-registered"])
def test_what_the_experiments_on_l2_launch_is_compiled_ahead(name: str) -> None:
    """With the orders of their walks, and with notes of progress, which are other kernels."""
    ready = {key(kernel) for kernel in prebuild.plain()}
    cells = experiments.experiment(name).cells()
    ours = [cell for cell in cells if cell["implementation"] in attention.ALGORITHMS]
    assert len(ours) > 2
    for cell in ours:
        for kernel in noting(cell) if name == gpu_l2_order.EXPERIMENT.name else launched(cell):
            assert key(kernel) in ready, (cell.id, prebuild.describe(kernel))


def arrays_of(cell: Cell, recorder: Recorder) -> dict[str, Array]:
    shape, found = shape_of(cell), {}
    for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
        keys = name in ("k", "v", "dk", "dv")
        size = (
            shape.batch,
            shape.kv_heads if keys else shape.heads,
            shape.seqlen_k if keys else shape.seqlen_q,
            shape.head_dim,
        )
        found[name] = recorder.empty(name, size, shape.dtype)
    return found


def noting(cell: Cell) -> list[Kernel]:
    """What the forward that notes its progress launches."""
    recorder = Recorder()
    arrays = arrays_of(cell, recorder)
    arrays["lse"] = recorder.empty("lse", arrays["q"].shape[:3], "fp32")
    notes = recorder.empty("progress", gpu_l2_order.notes_shape(cell), "int64")
    gpu_l2_order.run(recorder, cell, arrays, notes)
    return [launch.kernel for launch in recorder.launches]


def launched(cell: Cell) -> list[Kernel]:
    """What a cell launches: the walk that it asks for is that of its own pass."""
    recorder, stats = Recorder(), dict[str, Array]()
    at = arrays_of(cell, recorder)
    options: dict[str, Any] = {"scale": 1.0, "causal": bool(cell["causal"])}
    own = {name: cell[name] for name in ("order", "wave") if name in cell}
    own["tile"] = tile_of(cell)
    first = [at[name] for name in ("q", "k", "v", "out")]
    algorithm, backward = str(cell["implementation"]), cell["pass"] == "backward"
    attention.forward(recorder, algorithm, *first, stats, **options, **({} if backward else own))
    if backward:
        gradients = [at[name] for name in ("dq", "dk", "dv")]
        attention.backward(recorder, algorithm, *first, at["dout"], stats, *gradients, **options, **own)
    return [launch.kernel for launch in recorder.launches]


def test_modules_are_compiled_once() -> None:
    listed = prebuild.modules(prebuild.kernels())
    assert len({key(kernel) for kernel in listed}) == len(listed) > 50
    assert prebuild.is_hopper(listed[0])  # the headline comes first


def build(kernel: Kernel) -> None:
    """Runs in another process."""
    if kernel.entry == "bad":
        raise RuntimeError("line one of the log\nline two")


def test_failures_are_lines_and_the_rest_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    listed = [Kernel(f"{name}.cu", name, (("CAUSAL", 0),), 32) for name in ("good", "bad", "fine")]
    assert prebuild.build_all(listed, build, workers=2) == 1
    captured = capsys.readouterr()
    assert captured.err == "error: bad.cu CAUSAL=0: line one of the log\n"
    assert len(captured.out.splitlines()) == 2
    assert "good.cu" in captured.out
