"""``predict``: sweeps, agreement with the formulas, outputs, and every way to get it wrong."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.hardware import A100_40GB, GPUS, H200
from analysis.hbm import compulsory_hbm
from analysis.l2 import available
from analysis.packed import Lengths
from analysis.shapes import AttentionShape
from analysis.traffic import predict_traffic
from kernels.attention import HOPPER
from repro.commands import output, sweep
from repro.measuring import machine
from repro.prediction import ALGORITHMS, PASSES, predict
from tests.support.command_support import run


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("512", [512]),
        ("16k", [16384]),
        ("1,2,8", [1, 2, 8]),
        ("512:16384:*2", [512, 1024, 2048, 4096, 8192, 16384]),
        ("512:16000:*2", [512, 1024, 2048, 4096, 8192]),
        ("64:256:+64", [64, 128, 192, 256]),
        ("64:200:64", [64, 128, 192]),
        ("1k:4k:*2,100,1024", [1024, 2048, 4096, 100]),
    ],
)
def test_a_number_can_be_a_value_a_list_a_range_or_all_of_them(text, values):
    assert sweep.numbers(text, "--seqlen") == values


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1.5", "512:1024", "512:1024:*1", "512:1024:+0", "8:4:*2", "0:8:*2", "1:99999999:1", "1,,2"]
)
def test_what_is_no_number_is_refused_with_the_option_and_the_text(text):
    with pytest.raises(ValueError, match="--seqlen") as refusal:
        sweep.numbers(text, "--seqlen")
    assert len(str(refusal.value).splitlines()) == 1


@given(st.integers(1, 10**15))
def test_bytes_are_read_as_they_are_written(count):
    assert sweep.byte_count(str(count), "--budget") == count
    shown = output.of_bytes(count)
    assert sweep.byte_count(shown, "--budget") == pytest.approx(count, rel=1e-3)


def test_byte_units_and_their_refusal():
    assert sweep.byte_count("8GiB", "--budget") == 8 << 30
    assert sweep.byte_count("1.5 mb", "--budget") == 1_500_000
    for text in ("8 bananas", "-1", "", "GiB"):
        with pytest.raises(ValueError, match="--budget"):
            sweep.byte_count(text, "--budget")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("gpu", [H200, A100_40GB], ids=lambda g: g.name)
def test_a_prediction_holds_together(algorithm, pass_, gpu):
    shape = AttentionShape(2, 3, 1000, 1000, 64, dtype="bf16")
    if algorithm in HOPPER and gpu is not H200:
        with pytest.raises(ValueError, match=rf"^{algorithm} needs compute capability 9\.0, A"):
            predict(algorithm, shape, pass_, gpu)
        return
    p = predict(algorithm, shape, pass_, gpu)
    options = {"persistent": True} if (algorithm in HOPPER and pass_ == "forward") else {}
    if p.dq_tile is not None:
        options["dq_tile"] = p.dq_tile
    assert p.traffic == predict_traffic(algorithm, shape, p.tile, pass_, **options)
    tensors, row = p.tensors(), p.row()
    assert sum(t["sm_bytes"] for t in tensors) == p.traffic.total_bytes
    assert sum(t["hbm_read_bytes"] for t in tensors) == row["hbm_read_bytes"]
    assert sum(t["hbm_write_bytes"] for t in tensors) == row["hbm_write_bytes"]
    once = compulsory_hbm(p.traffic, shape)
    assert row["hbm_read_bytes"] >= once.read_bytes
    assert p.time.seconds >= max(p.time.by_resource.values())
    assert p.executed_flops >= p.useful_flops > 0
    assert p.peak_bytes >= p.saved_bytes > 0
    assert row["bound_by"] in p.time.by_resource


def test_csv_can_be_read_back(capsys):
    status, out, _ = run(capsys, "predict", "--dtype", "all", "--mask", "all", "--gpu", "all", "-d", "64", "--csv")
    assert status == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 3 * 2 * len(GPUS) * 2
    assert {(r["gpu"], r["dtype"]) for r in rows if r["error"]} == {("T4", "bf16")}
    assert {r["gpu"] for r in rows} == set(GPUS)


def test_points_that_cannot_be_are_rows_with_their_reason(capsys):
    status, out, _ = run(capsys, "predict", "--tile", "all", "--pass", "forward", "--dtype", "fp32", "--csv")
    assert status == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 25
    bad = [r for r in rows if r["error"]]
    assert 0 < len(bad) < 25
    assert all("block_m" in r and not r["time_bound_s"] for r in bad)
    status, out, _ = run(capsys, "predict", "--tile", "all", "--pass", "forward", "--dtype", "fp32")
    assert status == 0
    assert "cannot be" in out


def test_the_table_names_what_is_common_and_shows_what_varies(capsys):
    status, out, _ = run(capsys, "predict", "-n", "1k:4k:*2", "--pass", "forward", "--gpu", "A100")
    assert status == 0
    assert "gpu=A100-SXM4-40GB" in out
    header = next(line for line in out.splitlines() if "SM read" in line)
    assert header.split()[0] == "seqlen_q"
    assert "seqlen_k" not in header


@pytest.mark.skipif(not available(), reason="no C compiler here")
@pytest.mark.parametrize("algorithm", ["flash", "flash-sm90"])
def test_an_order_changes_what_comes_from_hbm_and_nothing_else(capsys, algorithm):
    status, out, _ = run(
        capsys, "predict", "-a", algorithm, "-n", "64k", "--heads", "1", "--gpu", "H200", "--order", "all", "--csv"
    )
    assert status == 0
    found = {(r["pass"], r["order"]): r for r in csv.DictReader(io.StringIO(out))}
    for pass_, saved in (("forward", 0.5), ("backward", 0.2)):
        rows, sawtooth = (found[pass_, order] for order in ("rows", "sawtooth"))
        assert float(sawtooth["hbm_read_bytes"]) < (1 - saved) * float(rows["hbm_read_bytes"])
        for name in ("sm_read_bytes", "sm_write_bytes", "executed_flops", "form", "saved_bytes"):
            assert sawtooth[name] == rows[name]


def test_packed_sequences_are_those_of_the_library(capsys, tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("1 17\n300, 0")
    for text in ("1,17,300,0", str(file)):
        arguments = ["predict", "--seqlens", text, "-d", "64", "--gpu", "A100", "--causal"]
        status, out, _ = run(capsys, *arguments, "--json")
        assert status == 0
        rows = json.loads(out)
        assert [(row["pass"], row["sequences"], row["seqlen_q"]) for row in rows] == [
            ("forward", 4, 318),
            ("backward", 4, 318),
        ]
        lengths = Lengths.equal((1, 17, 300, 0))
        shape = AttentionShape(1, 16, 318, 318, 64, dtype="bf16", causal=True)
        for row in rows:
            found = predict("auto", shape, row["pass"], "A100", lengths=lengths)
            assert row["sm_read_bytes"] == found.traffic.read_bytes
            assert row["time_bound_s"] == found.time.seconds
            assert row["time_predicted_s"] == found.predicted_s
            assert any(line["tensor"] == "cu_seqlens_q" for line in row["tensors"])
    assert "sequences=4" in run(capsys, *arguments)[1]


def test_windows_are_swept_and_are_those_of_the_library(capsys):
    line = "predict -n 2k -d 64 --causal --gpu H200 --pass forward --window none;1k,0;128,none --sinks 0,4 --csv"
    status, out, _ = run(capsys, *line.split())
    assert status == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(r["window_left"], r["window_right"], r["sinks"]) for r in rows] == [
        ("", "", "0"),
        ("", "", "4"),
        ("1024", "0", "0"),
        ("1024", "0", "4"),
        ("128", "", "0"),
        ("128", "", "4"),
    ]
    assert {r["algorithm"] for r in rows} == {"flash-sm90"}
    for row in rows[2:]:
        left, sinks = int(row["window_left"]), int(row["sinks"])
        shape = AttentionShape(1, 16, 2048, 2048, 64, dtype="bf16", causal=True, window=(left, 0), sinks=sinks)
        found = predict("auto", shape, "forward", "H200")
        assert int(row["sm_read_bytes"]) == found.traffic.read_bytes
        assert int(row["useful_flops"]) == 16 * 4 * 64 * shape.visible_pairs


def test_measured_ceilings_come_from_the_records_or_are_refused(capsys):
    status, out, _ = run(capsys, "predict", "--ceilings", "measured", "--gpu", "H200")
    assert status == 0
    assert "measured on NVIDIA H200" in out
    status, _, err = run(capsys, "predict", "--ceilings", "measured", "--gpu", "T4", "-d", "32")
    assert status == 1
    assert "no ceiling of T4 is on record" in err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("-n", "5x"), 1, "--seqlen '5x'"),
        (("-a", "flash9"), 1, "--algorithm 'flash9'"),
        (("--gpu", "B9000"), 1, "known are A100"),
        (("--gpu", "T4"), 1, "T4 does not compute in bf16: use fp16 or fp32 (--dtype fp16)"),
        (("-d", "257"), 1, "head_dim=257 is outside 1…256"),
        (("--deterministic", "-a", "flash"), 1, "--deterministic chooses with -a auto"),
        (("--markdown", "--latex"), 1, "--markdown and --latex exclude each other"),
        (("--tile", "64"), 1, "--tile '64'"),
        (("--seqlens", "1,x"), 1, "--seqlens 'x': expected a number"),
        (("--seqlens", "nope.txt"), 1, "--seqlens 'nope.txt': there is no such file"),
        (("--seqlens", "0,0"), 1, "--seqlens '0,0' has no tokens"),
        (("--seqlens", "1,5", "--batch", "2"), 1, "stands in the place of --batch 2"),
        (("--seqlens", "1,5", "-n", "512"), 1, "stands in the place of --seqlen 512"),
        (("--seqlens", "1,5", "--bias", "one"), 1, "--bias one does not go with --seqlens"),
        (("--seqlens", "1,5", "--l2", "simulated"), 1, "no L2 is simulated for packed sequences"),
        (("--seqlens", "1,5", "-a", "standard"), 1, "standard does not take packed"),
        (("--seqlens", "1,5", "--kv-dtype", "e4m3"), 1, "do not go with k_scale"),
        (("--window", "5"), 1, "--window '5': expected left,right as 1024,0"),
        (("--window", "5,-1"), 1, "--window '-1'"),
        (("--bias", "rows"), 1, "--bias 'rows': expected none, full, heads, items, one"),
        (("--window", "5,0", "-a", "standard"), 1, "standard does not take window"),
        (("--order", "up"), 1, "--order 'up': expected rows, sawtooth or all"),
        (("--order", "sawtooth", "-a", "flash1-literal"), 1, "has no order='sawtooth'"),
        (("--dtype", "fp8"), 1, "fp16, bf16, fp32"),
        (("--heads", "6", "--kv-heads", "4"), 1, "heads=6 is not a multiple of kv_heads=4"),
        (("-d", "0"), 1, "--head-dim '0': 0 is below 1"),
        (("--json", "--csv"), 1, "exclude each other"),
        (("-n", "1:20000:1", "--batch", "1,2"), 1, "points are more than"),
        (("--ceilings", "guessed"), 1, "datasheet or measured"),
        (("--sequence", "5"), 2, "No such option"),
    ],
)
def test_a_mistake_is_one_line_and_no_traceback(capsys, arguments, status, message):
    found, out, err = run(capsys, "predict", *arguments)
    assert found == status
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == (2 if status == 2 else 1)


def test_the_default_is_what_dispatch_picks_and_says_so(capsys):
    _, out, _ = run(capsys, "predict", "--gpu", "H200", "--pass", "forward")
    assert "algorithm=flash-sm90" in out
    assert "auto is flash-sm90 in the forward: the Hopper kernels cover it" in " ".join(out.split())
    _, out, _ = run(capsys, "predict", "--gpu", "A100", "--pass", "backward", "--deterministic")
    assert "algorithm=flash-split" in out
    assert "tile 64 x 128 and 128 x 32" in " ".join(out.split())
    _, out, _ = run(capsys, "predict", "--gpu", "MI300X", "--pass", "forward")
    assert "theory, run by none of our kernels" in " ".join(out.split())
    assert "auto is" not in out


def test_idle_multiprocessors_and_padding_are_named(capsys):
    _, out, _ = run(capsys, "predict", "--gpu", "H200", "--heads", "2", "-n", "300", "-d", "100", "--pass", "forward")
    out = " ".join(out.split())  # wherever lines end
    assert "6 blocks leave 126 of 132 SMs idle" in out
    assert "head_dim 100 is copied to rows of 104 and multiplied as 128 columns a tile" in out
    found = predict("flash", AttentionShape(1, 2, 300, 300, 100), "forward", H200)
    assert (found.blocks, found.idle_sms) == (6, 126)
    full = predict("flash", AttentionShape(1, 33, 512, 512, 128), "forward", H200)
    assert (full.blocks, full.idle_sms, full.busy) == (132, 0, 1.0)
    assert "idle" not in full.why()


def test_a_large_sweep_does_not_simulate_an_l2_unless_asked(capsys, monkeypatch):
    def simulate(*_, **__):
        raise AssertionError("an L2 was simulated")

    monkeypatch.setattr("analysis.hbm.simulated_once", simulate)
    large = ("predict", "-n", "16k:32k:+128", "--pass", "forward", "--gpu", "A100")
    status, out, _ = run(capsys, *large)
    assert status == 0
    assert "HBM: waves in step\n" in out
    status, _, err = run(capsys, *large, "--l2", "simulated")
    assert "an L2 was simulated" in err
    status, out, _ = run(capsys, "predict", "-n", "16k", "--gpu", "A100", "--l2", "waves")
    assert status == 0
    status, _, err = run(capsys, "predict", "--l2", "magic")
    assert "--l2 'magic': expected auto, simulated, waves, once" in err


def test_tables_for_markdown_and_latex(capsys):
    sweep = ("predict", "-n", "1k:4k:*2", "--pass", "forward", "--gpu", "H200")
    status, out, _ = run(capsys, *sweep, "--markdown")
    assert status == 0
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 3
    assert len({line.count("|") for line in rows}) == 1
    status, out, _ = run(capsys, *sweep, "--latex")
    assert status == 0
    assert out.count("\\\\") == 1 + 3
    assert "\\toprule" in out
    assert "time at least" in out
    assert not set("≥≤≈") & set("".join(out.split("toprule")[1].splitlines()[:3]))


def test_a_table_keeps_to_the_width_of_the_terminal(capsys, monkeypatch):
    sweep = ("predict", "-n", "1k:4k:*2", "--pass", "forward", "--gpu", "H200")
    _, wide, _ = run(capsys, *sweep)
    monkeypatch.setenv("COLUMNS", "80")
    _, narrow, _ = run(capsys, *sweep)
    rows = [line for line in narrow.splitlines() if line.split() and line.split()[0] == "1024"]
    assert len(rows) > 1  # each part repeats what tells the points apart
    assert max(map(len, narrow.splitlines())) <= 80
    assert {word for row in rows for word in row.split()} == {
        word for line in wide.splitlines() if line.split()[:1] == ["1024"] for word in line.split()
    }


def test_a_gpu_that_is_not_known_is_named_before_another_is_predicted(capsys, monkeypatch):
    card = machine.Gpu("NVIDIA A10G", "1", 24 << 30)
    monkeypatch.setattr(machine, "gpu", lambda: card)
    status, out, err = run(capsys, "predict", "--pass", "forward", "-n", "512")
    assert status == 0
    assert "gpu=H200" in out
    assert "NVIDIA A10G is none of the known GPUs: predicting for H200" in err
    monkeypatch.setattr(machine, "gpu", lambda: machine.Gpu("NVIDIA L4", "1", 24 << 30))
    status, out, err = run(capsys, "predict", "--pass", "forward", "-n", "512")
    assert (status, err) == (0, "")
    assert "gpu=L4" in out


def test_keys_and_values_of_e4m3_have_half_the_bytes_and_no_backward(capsys):
    arguments = ("predict", "-n", "1k", "--heads", "4", "--gpu", "A100", "--kv-dtype")
    status, out, _ = run(capsys, *arguments, "same,e4m3", "--pass", "forward", "--json")
    assert status == 0
    plain, half = json.loads(out)
    assert (plain["kv_dtype"], half["kv_dtype"], half["scale_block"]) == ("bf16", "e4m3", None)
    sizes = [{entry["tensor"]: entry["sm_bytes"] for entry in row["tensors"]} for row in (plain, half)]
    assert sizes[0]["k"] == 2 * sizes[1]["k"]
    assert "k_scale" not in sizes[0]
    assert half["saved"] == {}
    status, out, _ = run(capsys, *arguments, "e4m3", "--scale-block", "64,128")
    assert status == 0
    assert "pass=forward" in out  # there is no other
    assert "kv_dtype=e4m3" in out
    status, _, err = run(capsys, *arguments, "e4m3", "--pass", "backward")
    assert status == 1
    assert "k and v of e4m3 have no gradient" in err
    status, _, err = run(capsys, *arguments, "same", "--scale-block", "64")
    assert status == 1
    assert "--scale-block 64 with --kv-dtype same: it goes with e4m3" in err
    status, _, err = run(capsys, *arguments, "e4m3", "--scale-block", "24")
    assert status == 1
    assert "scale_block=24 is not a multiple of 16" in err


def test_recorded_times_of_other_kernels_stand_beside_the_prediction(capsys):
    """Those of the shape, pass and card, and of a plain problem alone."""
    asked = ("predict", "--batch", "4", "-n", "4096", "--pass", "forward", "--l2", "once")
    status, out, _ = run(capsys, *asked, "--gpu", "H200", "--json")
    assert status == 0
    (point,) = json.loads(out)
    peers = point["recorded"]
    fourth = next(peer for peer in peers if peer["kernel"].startswith("flash-attn-4"))
    flops = 4 * 4 * 16 * 4096**2 * 128  # the record is a rate, counted as FlashAttention-2 does
    assert fourth["time_s"] == pytest.approx(flops / (fourth["tflops"] * 1e12))
    assert {peer["source"] for peer in peers} == {"measured"}
    assert peers == sorted(peers, key=lambda peer: peer["time_s"])
    status, out, _ = run(capsys, *asked, "--gpu", "H200", "--compare")
    assert "untimed" in out
    assert "flash-attn-4" in out
    status, out, _ = run(capsys, *asked, "--gpu", "H200", "--compare", "--window", "256,0")
    assert "nothing of another kernel is on record" in out
