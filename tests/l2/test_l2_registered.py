"""Predictions registered before a card ran them, and the programs that will judge them."""

from __future__ import annotations

import dataclasses
from itertools import product

import numpy as np
import pytest

from analysis.hardware import H200
from analysis.l2 import L2, available
from kernels.host import HostBackend
from kernels.launch import Array
from repro.experiments import Cell, row, tidy
from repro.experiments.bytes import gb10_misses, l2_orders
from repro.experiments.gpu import gpu_l2_order, gpu_l2_registered
from repro.gpu.register import FOLDER, predictions, register
from repro.measuring import machine, records
from tests.support.flash_support import aligned, view

simulates = pytest.mark.skipif(not available(), reason="no C compiler here")
PATH = records.RESULTS / FOLDER / f"{gpu_l2_registered.EXPERIMENT.name}.jsonl"


def test_every_cell_is_registered_once_with_date_commit_and_spread() -> None:
    rows = list(records.read(PATH))
    cells = [one.id for one in gpu_l2_registered.cells()]
    assert [row.cell for row in rows] == cells
    assert len(set(cells)) >= 20
    for one in rows:
        assert one.source == "predicted"
        assert None not in (one.date, one.commit, one.value, one.spread_min, one.spread_max)
        assert one.spread_min <= one.value <= one.spread_max


@simulates
def test_the_registered_numbers_are_those_of_the_model() -> None:
    """Of every seventh cell. A model that changes registers new cells beside these."""
    rows = {row.cell: row for row in records.read(PATH)}
    for one in gpu_l2_registered.cells()[::7]:
        (now,) = predictions("gpu-l2-registered", one)
        assert now.value == pytest.approx(rows[one.id].value, rel=0.01), one


@simulates
def test_a_registered_prediction_stays(tmp_path, monkeypatch) -> None:
    cells = gpu_l2_registered.cells()[:3]
    values = {cell.id: value for cell, value in zip(cells, (1.0, 2.0, 50.0), strict=True)}
    count = 2
    monkeypatch.setattr(
        gpu_l2_registered,
        "registered",
        lambda cell: [row("hbm_read_bytes", values[cell.id])] if cell in cells[:count] else [],
    )
    assert register(gpu_l2_registered.EXPERIMENT.name, tmp_path) == 2
    count, values = 3, values | dict.fromkeys([cell.id for cell in cells[:2]], 30.0)
    assert register(gpu_l2_registered.EXPERIMENT.name, tmp_path) == 1
    kept = list(records.read(tmp_path / FOLDER / PATH.name))
    assert [r.value for r in kept] == [1.0, 2.0, 50.0]
    measured = dataclasses.replace(kept[0], source="measured")
    records.append(tmp_path / "nvidia-h200" / PATH.name, [measured])
    (tmp_path / FOLDER / PATH.name).unlink()
    with pytest.raises(ValueError, match="it is too late"):
        register(gpu_l2_registered.EXPERIMENT.name, tmp_path)
    with pytest.raises(ValueError, match="gb10-misses registers nothing"):
        register("gb10-misses", tmp_path)


@simulates
def test_gb10_as_published_within_ten_percent() -> None:
    frame = tidy((gb10_misses.EXPERIMENT.name,), local=False)
    keys = ["implementation", "metric"]
    by_source = {s: rows.set_index(keys)["value"] for s, rows in frame.groupby("source")}
    assert len(by_source["published"]) == 4
    ratio = by_source["predicted"] / by_source["published"]
    assert ratio.between(0.9, 1.1).all(), ratio
    assert ratio["rows", "l2_requests"] == pytest.approx(1, abs=2e-4)
    published = frame[frame["source"] == "published"]
    assert published["origin"].str.contains("2601.16032").all()
    assert published["confidence"].str.contains("second hand").all()


@simulates
def test_a_sawtooth_costs_next_to_nothing_and_saves_up_to_half() -> None:
    predicted = [r for cell in l2_orders.points() for r in l2_orders.EXPERIMENT.predicted(cell)]
    rows = {(r.pass_, r.heads, r.kv_heads, r.seqlen_q, r.implementation): r.value for r in predicted}
    for shape in product(("forward", "backward"), l2_orders.SHAPES):
        case = (shape[0], *shape[1])
        assert rows[*case, "sawtooth"] <= 1.02 * rows[*case, "rows"]
        # Sized to L2, heads side by side neither save nor cost.
        assert 1 <= rows[*case, l2_orders.SIZED] / rows[*case, "rows"] < 1.1
    page = (machine.ROOT / "docs" / "pages" / "l2.md").read_text(encoding="utf-8")
    for pass_, heads, kv_heads, seqlen in (
        (p, *shape) for p, shape in product(("forward", "backward"), l2_orders.SHAPES)
    ):
        group = f" on {kv_heads}" if kv_heads != heads else ""
        (line,) = (x for x in page.splitlines() if x.startswith(f"| {heads}{group} x {seqlen // 1024}k | {pass_} |"))
        one, other = (rows[pass_, heads, kv_heads, seqlen, n] for n in ("rows", "sawtooth"))
        shown = f"| {one / 1e6:.0f} MB | {other / 1e6:.0f} MB | {other / one - 1:+.0%} |"
        assert line.endswith(shown), (line, shown)
    base = rows["forward", 8, 8, 32768, "rows"]
    two, four, eight = (rows["forward", 8, 8, 32768, f"{n} heads side by side"] / base for n in l2_orders.SIDE_BY_SIDE)
    assert f"read {two:.2f}, {four:.1f} and {eight:.1f} times as much" in " ".join(page.split())


def test_the_page_says_what_is_registered() -> None:
    """How many cells, what one block more than whole waves costs, and the causal backward."""
    page = " ".join((machine.ROOT / "docs/pages/l2.md").read_text(encoding="utf-8").split())
    rows = [row.to_json() for row in records.read(PATH)]
    assert f"counts {len(rows)} launches" in page
    forward = {r["seqlen_q"]: r["value"] for r in rows if r["implementation"] == "sdpa-flash"}
    whole = [waves * 264 * 128 for waves in (2, 3, 4)]
    more = [f"{100 * (forward[n + 128] / forward[n] - 1):.0f}" for n in whole]
    assert f"reads {more[0]}, {more[1]} and {more[2]} % more" in page
    (causal,) = (r for r in rows if r["causal"])
    low, high = (f"{causal[end] / 1e9:.0f}" for end in ("spread_min", "value"))
    assert f"read {high} GB, and {low} at other paces" in page


def array_of(name: str, dtype: str, shape: tuple[int, ...]) -> Array:
    memory = aligned(shape, dtype)
    memory[...] = 0
    return view(name, memory, dtype)


@simulates
@pytest.mark.parametrize("order", [{}, {"order": "sawtooth", "wave": 2}])
def test_the_recording_runs_on_the_host(order: dict[str, object]) -> None:
    """The function that the GPU run calls, on the host backend: its notes replay, and the bytes
    fetched lie between each tensor once and what the blocks ask for."""
    values = {**gpu_l2_order.cells()[0], "seqlen_q": 384, "seqlen_k": 2048, "heads": 1, **order}
    one = Cell(**{("pass_" if k == "pass" else k): v for k, v in values.items()})
    arrays = {n: array_of(n, "bf16", (1, 1, 384, 128)) for n in ("q", "out")}
    arrays |= {n: array_of(n, "bf16", (1, 1, 2048, 128)) for n in ("k", "v")}
    arrays["lse"] = array_of("lse", "fp32", (1, 1, 384))
    shape = gpu_l2_order.notes_shape(one)
    notes = np.zeros(shape, np.int64)
    progress = Array("progress", notes.ctypes.data, shape, (shape[1], 1), "int64", "rw", notes)
    gpu_l2_order.run(HostBackend(checks=True), one, arrays, progress)
    fetched, spread = gpu_l2_order.replayed(one, notes, 2, L2(2, 64, 4))
    assert spread["value"] >= 0
    once = (384 + 2 * 2048) * 256
    assert once <= fetched["value"] <= once + 2 * 2 * 2048 * 256
    (all_held, _) = gpu_l2_order.replayed(one, notes, 2, L2.of(H200))
    assert all_held["value"] == once
