"""GPUs by name, from a file, from a module; and how a refusal names the way out."""

from __future__ import annotations

import csv
import io
import tomllib
from pathlib import Path

import pytest

from analysis import gpu_file
from analysis.gpu_file import CARDS
from analysis.hardware import A100_40GB, GPUS, H100_SXM, SHORT_NAMES, Gpu, find_gpu, gpu_named
from analysis.shapes import AttentionShape
from repro.commands import gpus, sweep
from repro.prediction import PASSES, predict
from tests.support.command_support import run


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100", "H100-SXM5-80GB"),
        ("a100", "A100-SXM4-40GB"),
        ("A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("RTX 4090", "GeForce RTX 4090"),
        ("rtx3090", "GeForce RTX 3090"),
        ("L4", "L4"),
        ("H100 NVL", "H100-NVL-94GB"),
        ("dgx-spark", "GB10"),
    ],
)
def test_short_names_in_any_case(text: str, name: str) -> None:
    assert gpu_named(text).name == name
    assert sweep.gpus(text) == [GPUS[name]]


@pytest.mark.parametrize(
    ("reported", "card"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA A100-SXM-64GB", "A100-SXM-64GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("AMD Instinct MI300X", "MI300X"),
        # another chip or another memory, whatever their names contain
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H20", None),
        ("NVIDIA A100-SXM-96GB", None),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA T400", None),
        ("", None),
    ],
)
def test_cards_are_known_by_whole_words(reported: str, card: str | None) -> None:
    assert find_gpu(reported) == (GPUS[card] if card else None)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_every_card_is_predicted_and_every_figure_has_a_source(gpu: Gpu) -> None:
    shape = AttentionShape(1, 8, 2048, 2048, 128)
    for pass_ in PASSES:
        found = predict("auto", shape, pass_, gpu)
        assert found.time.seconds > 0
        capability = gpu.compute_capability
        assert (found.theory is None) == (capability is not None and capability >= (8, 0))
        assert (found.algorithm == "flash-sm90") == (capability == (9, 0))
    names = {"name", "short_names", "driver_names", "compute_capability", "sources"}
    fields = set(gpu.__dataclass_fields__) - names
    assert {name for name in fields if not gpu.sources.get(name)} == set()
    assert SHORT_NAMES.keys().isdisjoint(GPUS)


def test_a_file_describes_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "H100"\nname = "mine"\nsms = 66\nhbm_bandwidth_bytes_per_s = 2.0e12\n')
    found = gpus.find(str(path))
    assert (found.name, found.sms, found.l2_bytes) == ("mine", 66, H100_SXM.l2_bytes)
    assert found.sources["sms"] == str(path)
    assert found.sources["l2_bytes"] == H100_SXM.sources["l2_bytes"]
    status, out, _ = run(capsys, "predict", "--gpu", f"{path},H100", "--pass", "forward", "--csv")
    assert status == 0
    assert [row["gpu"] for row in csv.DictReader(io.StringIO(out))] == ["mine", "H100-SXM5-80GB"]


def test_rates_of_a_card_follow_its_sms_and_clock(tmp_path: Path) -> None:
    """Half the SMs at half the clock do a quarter; L2 follows the clock; what is given stays."""
    path = tmp_path / "half.toml"
    path.write_text('base = "H100"\nsms = 66\nboost_clock_hz = "915 MHz"\n')
    found = gpus.find(str(path))
    assert found.fp16_tensor_flops == pytest.approx(H100_SXM.fp16_tensor_flops / 4)
    assert found.fp32_flops == pytest.approx(H100_SXM.fp32_flops / 4)
    assert found.exp_per_s == pytest.approx(H100_SXM.exp_per_s / 4)
    assert H100_SXM.l2_bandwidth_bytes_per_s is not None
    assert found.l2_bandwidth_bytes_per_s == pytest.approx(H100_SXM.l2_bandwidth_bytes_per_s / 2)
    assert found.hbm_bandwidth_bytes_per_s == H100_SXM.hbm_bandwidth_bytes_per_s
    assert found.sources["fp16_tensor_flops"] == ("as H100-SXM5-80GB, in proportion to SMs and clock")
    path.write_text('base = "A100"\nsms = 54\nfp16_tensor_flops = "200 TFLOP/s"\n')
    said = gpus.find(str(path))
    assert said.fp16_tensor_flops == 200e12
    assert (A100_40GB.load_clocks_hz, said.load_clocks_hz) == ((1.41e9, 1.41e9), None)


def test_a_table_is_all_that_a_new_card_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, driver's words, limits of its SMs and sources included."""
    table = """
["H20"]
short_names = ["H20-96"]
driver_names = ["H20"]
base = "H100-SXM5-80GB"
sms = 78
boost_clock_hz = "1.98 GHz"
memory_bytes = "96 GiB"
hbm_bandwidth_bytes_per_s = "4.0 TB/s"
source = "a datasheet"
"""
    more = tomllib.loads(CARDS.read_text(encoding="utf-8") + table)
    monkeypatch.setattr(gpu_file, "_TABLES", more)
    card = gpu_file.house_cards()["H20"]
    assert (card.short_names, card.driver_names) == (("H20-96",), ("H20",))
    assert card.shared_bytes_per_block == H100_SXM.shared_bytes_per_block
    assert card.fp16_tensor_flops == pytest.approx(78 * 4096 * 1.98e9, rel=1e-3)
    assert card.sources["sms"] == "a datasheet"
    assert len(gpu_file.house_cards()) == len(GPUS) + 1


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_the_sheet_s_rates_are_those_of_its_units(gpu: Gpu) -> None:
    """At the boost clock, or at the one that the entry names; sheets print two or three digits."""
    at = {"H100-PCIe-80GB": 1.62e9, "H100-NVL-94GB": 1.544e9, "L40S": 2.49e9, "B200": 1.856e9}
    if gpu.tensor_flops_per_clock is not None:
        clock = at.get(gpu.name, gpu.boost_clock_hz)
        assert gpu.fp16_tensor_flops == pytest.approx(gpu.sms * gpu.tensor_flops_per_clock * clock, rel=0.005)
    if gpu.fma_flops_per_clock is not None:
        clock = {"H100-SXM5-80GB": 1.98e9, "H200": 1.98e9}.get(gpu.name, gpu.boost_clock_hz)
        assert gpu.fp32_flops == pytest.approx(gpu.sms * gpu.fma_flops_per_clock * clock, rel=0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "H100"\nload_clocks_hz = ["2 GHz", "1 GHz"]', "is no clock, nor lowest and high"),
        ('base = "H100"\nl2_bytes = "3 apples"', "l2_bytes = '3 apples' is not a whole number"),
        ('base = "H100"\nsms = -1', "sms = -1 is not a whole number from 1 on"),
        ('base = "H100"\nsms = 1.5', "sms = 1.5 is not a whole number"),
        ('base = "H100"\nboost_clock_hz = "fast"', "boost_clock_hz = 'fast' is not a positive"),
        ('base = "H100"\ncompute_capability = 9', "compute_capability = 9 is not as"),
        ('base = "H100"\ncores = 7', "no field cores; there are base, source, name"),
        ('base = "B9000"', "no GPU 'B9000'; known are A100.*MI300X"),
        ("sms = 5", "name|missing, and no base"),
        ("sms = ", "Invalid value"),
    ],
)
def test_a_wrong_file_is_refused_by_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        gpus.find(str(path))
    with pytest.raises(ValueError, match="No such file"):
        gpus.find(str(tmp_path / "absent.toml"))


def test_a_module_has_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_cards.py").write_text(
        "from dataclasses import replace\nfrom analysis.hardware import H200\n"
        "MINE = replace(H200, name='mine', sms=10)\nOTHER = 5\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert gpus.find("my_cards:MINE").sms == 10
    for text, message in (
        ("my_cards:OTHER", "is a int, not a"),
        ("my_cards:NONE", "has no attribute 'NONE'"),
        ("no_such_module:X", "No module named"),
    ):
        with pytest.raises(ValueError, match=message):
            gpus.find(text)
