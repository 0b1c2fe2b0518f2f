"""Predicted times of the Hopper forms: what is recorded, what follows from it for a shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from analysis.clocks import ceilings_of
from analysis.hardware import gpu_named
from analysis.loop_model import card
from analysis.shapes import AttentionShape
from kernels import hopper
from kernels.building.compile import nvrtc_version
from kernels.sass.code import find_nvdisasm
from kernels.timing import followed_blocks, hopper_time, records
from repro.experiments import Cell
from repro.measuring.records import record
from repro.prediction import PASSES, NoTime, Time, predict
from repro.prediction.time import ERRORS, timed_on
from repro.timing import ampere_validation, peers, round_clocks, tables

AGAIN = "the source is not the recorded one: run `python -m kernels.timing hopper`"


def shape_of(seqlen: int, head_dim: int, causal: bool, **options: int) -> AttentionShape:
    values = {"batch": 2, "heads": 4, "seqlen_q": seqlen, "seqlen_k": seqlen, **options}
    return AttentionShape(head_dim=head_dim, dtype="bf16", causal=causal, **values)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sinks", [0, 300])
def test_rounds_are_the_tiles_that_a_window_leaves(causal: bool, sinks: int) -> None:
    shape = replace(shape_of(700, 128, causal, seqlen_k=900), window=(200, 50), sinks=sinks)
    form = hopper.ForwardForm(128, 2, 128)
    walked = sorted(hopper_time._key_tiles(form, shape))
    diagonal, key = np.arange(700)[:, None] + 200, np.arange(900)
    seen = (key >= diagonal - 200) & (key <= diagonal + 50) | (key < sinks)
    seen = seen & (key <= diagonal) if causal else seen
    met = [sum(seen[m : m + 128, n : n + 128].any() for n in range(0, 900, 128)) for m in range(0, 700, 128)]
    assert walked == sorted(met * 8)


@pytest.mark.parametrize("causal", [False, True])
def test_rounds_of_the_backward_are_those_of_each_head_of_a_group(causal: bool) -> None:
    shape = replace(shape_of(300, 128, causal, seqlen_k=500), kv_heads=2, window=(70, 20), sinks=9)
    form = hopper.BackwardForm(128, 64)
    diagonal, key = np.arange(300)[:, None] + 200, np.arange(500)
    seen = (key >= diagonal - 70) & (key <= diagonal + 20) | (key < 9)
    seen = seen & (key <= diagonal) if causal else seen
    met = [sum(seen[m : m + 64, n : n + 128].any() for m in range(0, 300, 64)) for n in range(0, 500, 128)]
    walked = sorted(hopper_time._query_tiles(form, shape))
    assert walked == sorted(2 * n for n in met * 2 * shape.batch)


def test_every_clock_on_record_is_of_the_source_as_it_is() -> None:
    """A form with a record of an older source has no predicted time: `predict` would say less."""
    for causal in (False, True):
        for form, optimistic in hopper_time.kinds():
            hopper_time.recorded(form, causal, optimistic)
        for form, features in hopper_time.featured():
            hopper_time.recorded(form, causal, features=features)
    assert len(records.rows(hopper_time.LINES)) == 2 * len([*hopper_time.kinds(), *hopper_time.featured()])


def test_a_window_is_predicted_by_its_own_clocks() -> None:
    shape = shape_of(16384, 128, True)
    narrow = replace(shape, window=(1024, 0))
    whole, found, capped = (
        predict("flash-sm90", *asked, "forward", "H200", waves=True, softcap=cap)
        for asked, cap in (((shape,), False), ((narrow,), False), ((narrow,), True))
    )
    assert whole.predicted_s is not None, AGAIN
    assert found.predicted_s is not None, AGAIN
    assert capped.predicted_s is not None, AGAIN
    assert found.time.seconds < found.predicted_s < 0.2 * whole.predicted_s
    assert found.predicted_s < capped.predicted_s
    form = hopper.forward_form(128, True, 16384, featured=True)
    line = hopper_time.recorded(form, True, features=("window",)).line
    rounds = 2 * 4 * [*hopper_time._key_tiles(form, replace(narrow, batch=1, heads=1, kv_heads=1))]
    main = card.fill((line(n) for n in rounds), 132) / card.H200_SUSTAINED.hz
    assert found.predicted_s == pytest.approx(main + card.LAUNCH_S, rel=0.01)


def test_a_form_without_a_record_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    form = hopper.FORWARD_FORMS[0]
    monkeypatch.setattr(records, "find", lambda *_, **__: None)
    with pytest.raises(LookupError, match="no clocks on record for the forward d64 192x128"):
        hopper_time.recorded(form, False)
    point = predict("flash-sm90", shape_of(1024, 64, False), "forward", "H200", waves=True)
    assert point.predicted_s is None
    assert point.row()["tflops_predicted"] is None


def test_kernels_that_differ_are_not_predicted_by_their_form() -> None:
    shape = shape_of(1024, 64, False)
    fixed = predict("flash-sm90-deterministic", shape, "backward", "H200", waves=True)
    assert isinstance(fixed.predicted, NoTime)
    assert "blocks wait for the additions of other blocks" in fixed.predicted.reason
    older, newer = (predict(name, shape, "forward", "H200", waves=True).predicted_s for name in ("flash", "flash-sm90"))
    assert newer is not None
    assert older is not None, "it has the sm_80 kernels' own clocks"
    assert older > newer


@pytest.mark.parametrize("causal", [False, True])
def test_the_optimistic_time_has_the_repair_s_in_it(causal: bool) -> None:
    """A launch more, and a look at the flags of as many tiles as an SM has."""
    form = hopper.forward_form(128, causal, 16384)
    shape = shape_of(16384, 128, causal)
    options = {"sms": 132, "hbm_bytes_per_s": 4.8e12, "clock": card.H200_SUSTAINED}
    took = hopper_time.seconds(form, shape, optimistic=True, **options)
    found = hopper_time.recorded(form, causal, optimistic=True)
    main = card.fill((found.line(n) for n in hopper_time._key_tiles(form, shape)), 132)
    rest = took - 2 * card.LAUNCH_S - (main + found.beside) / card.H200_SUSTAINED.hz
    tiles = -(-2 * 4 * 16384 // form.tile.block_m // 132)
    clocks = found.repair + (tiles - 1) * found.repair_tile
    assert rest * card.H200_SUSTAINED.hz == pytest.approx(clocks, rel=1e-6)
    assert 0 < clocks < 0.02 * main


def test_clock_is_that_under_load_where_it_is_known() -> None:
    shape = shape_of(1024, 64, False)
    known, other = (predict("flash-sm90", shape, "forward", gpu, waves=True) for gpu in ("H200", "H100"))
    assert known.clock.hz == card.H200_SUSTAINED.hz
    assert other.clock.hz == gpu_named("H100").boost_clock_hz
    assert isinstance(known.predicted, Time)
    assert isinstance(other.predicted, Time)
    assert known.predicted.seconds == known.predicted.slowest
    assert other.predicted.slowest > 1.2 * other.predicted.seconds


@pytest.mark.parametrize("gpu", ["H100", "H200", "H100-PCIe", "H100-NVL"])
@pytest.mark.parametrize("seqlen", [1024, 65536])
def test_no_hopper_card_is_refused_a_time_or_promised_its_peak(gpu: str, seqlen: int) -> None:
    """Bound and prediction are of one clock, and the range reaches down to what is known to be
    held under load."""
    shape = shape_of(seqlen, 128, False)
    point = predict("flash-sm90", shape, "forward", gpu, waves=True)
    assert isinstance(point.predicted, Time), gpu
    assert point.time.seconds <= point.predicted.low < point.predicted.seconds
    assert point.predicted.high > 1.15 * point.predicted.seconds
    assert not point.predicted.timed
    assert point.row()["time_state"] == "untimed"


def test_measured_ceilings_refuse_no_time() -> None:
    """A library's product reached less than our kernels are predicted to."""
    shape = shape_of(4096, 128, False)
    slow = replace(ceilings_of(gpu_named("H200")), tensor_flops=400e12, origin="measured")
    point = predict("flash-sm90", shape, "forward", "H200", ceilings=slow, waves=True)
    assert isinstance(point.predicted, Time)
    assert point.predicted.seconds < point.time.seconds


def test_a_card_that_has_run_the_kernel_is_no_longer_untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    row = record(
        Cell(pass_="forward"),
        experiment="gpu-throughput",
        implementation="flash-sm90",
        source="measured",
        metric="throughput_tflops",
        unit="TFLOP/s",
        device="NVIDIA H200",
        value=600.0,
    )
    monkeypatch.setattr("repro.prediction.time.load", lambda _: [row])
    timed_on.cache_clear()
    try:
        shape = shape_of(1024, 128, False)
        states = [
            predict("flash-sm90", shape, pass_, gpu, waves=True).row()["time_state"]
            for gpu in ("H200", "H100")
            for pass_ in PASSES
        ]
    finally:
        timed_on.cache_clear()
    assert states == ["timed", "untimed", "untimed", "untimed"]


def test_nine_of_ten_times_of_others_are_within_the_error() -> None:
    judged = [abs(one.ratio - 1) for one in peers.judged(peers.comparisons())]
    assert float(np.quantile(judged, 0.9)) == pytest.approx(ERRORS[9, 0], abs=0.005)
    rates = [abs(one.published / one.theirs - 1) for one in ampere_validation.points()]
    assert float(np.quantile(rates, 0.9)) == pytest.approx(ERRORS[8, 0], abs=0.005)


def test_recorded_clocks_are_what_the_model_says() -> None:
    """One form from compiler to clocks. Another compiler orders instructions otherwise."""
    if find_nvdisasm() is None:
        pytest.skip("needs nvdisasm")
    form = next(f for f in hopper_time.predictable() if isinstance(f, hopper.BackwardForm))
    hopper_time.recorded(form, False)  # it is recorded for the source as it is
    row = records.find(hopper_time.LINES, **{"pass": "backward", "form": form.name, "causal": False})
    assert row is not None
    if row["nvrtc"] != nvrtc_version():
        pytest.skip(f"recorded with NVRTC {row['nvrtc']}, here is {nvrtc_version()}")
    points, beside = followed_blocks.points_of(form, causal=False)
    assert [round(value) for _, value in points] == [int(row[f"clocks_{n}"]) for n in hopper_time.ROUNDS]
    assert beside == 0


def test_forms_that_add_to_memory_directly_are_refused_by_name() -> None:
    direct = next(form for form in hopper.BACKWARD_FORMS if form.dq_from_registers)
    if find_nvdisasm() is None:
        pytest.skip("needs nvdisasm")
    with pytest.raises(ValueError, match=r"no unit is known for instruction REDG"):
        followed_blocks.points_of(direct, causal=False)
    with pytest.raises(LookupError, match=r"64x128, direct: what additions to memory from regis"):
        hopper_time.recorded(direct, False)


def test_the_page_has_the_clocks_of_a_round() -> None:
    """All of ours, from the recorded clocks; of the prototype's one forward and one backward."""
    block = tables.block("rounds")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in block.shown(block.path.read_text(encoding="utf-8")).splitlines()
        if line.startswith("| d")
    ]
    forms = {form.name: form for form in hopper_time.predictable()}
    assert [row[0] for row in rows] == list(forms)
    for name, mine, theirs, beside, ratio in rows:
        found = round_clocks.ours(forms[name])
        assert mine == f"{found:.0f}"
        assert theirs == round_clocks.VARIANTS.get(name, "")
        if name in ("d128 128x128, pingpong", "d128 64x128"):
            again = round_clocks.of_prototype(theirs)
            assert (beside, ratio) == (f"{again:.0f}", f"{found / again:.2f}")


def test_a_comment_changes_no_digest() -> None:
    code = "int x;  // why\n\n/* a long\n   one */\nint y;\n"
    assert records._code(code) == records._code("int x;\nint y;") != records._code("int x;int z;")
