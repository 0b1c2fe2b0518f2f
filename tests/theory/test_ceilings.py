"""Whose ceilings a time prediction divides by: those measured on the card, else its datasheet's."""

from __future__ import annotations

from collections.abc import Iterator

import pandas
import pytest

from analysis.hardware import H200
from figures.time import throughput
from repro.experiments import tidy
from repro.experiments.papers import _roofline
from repro.measuring.records import Record, record


@pytest.fixture
def on_record(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Record]]:
    """The records that are found; the cache is left as it was met: empty."""
    rows: list[Record] = []
    monkeypatch.setattr(_roofline, "load", lambda names, local: rows)
    _roofline.ceilings_of.cache_clear()
    yield rows
    _roofline.ceilings_of.cache_clear()


def row(experiment: str, probe: str, value: float | None, device: str = "NVIDIA H200") -> Record:
    return record(
        {},
        experiment=experiment,
        implementation=probe,
        source="measured",
        metric="bandwidth",
        value=value,
        unit="TB/s",
        device=device,
        error=None if value else "no such probe",
    )


def test_without_records_the_datasheet(on_record: list[Record]) -> None:
    assert _roofline.ceilings_of("H200").hbm_bytes_per_s == H200.hbm_bandwidth_bytes_per_s
    assert _roofline.ceilings_of("H200").origin == "datasheet of H200"


def test_probes_come_before_the_framework_s_copy_and_failures_do_not_count(on_record: list[Record]) -> None:
    on_record += [
        row("ceiling", "copy", 4.0),
        row("gpu-ceilings", "hbm-copy", 4.5),
        row("gpu-ceilings", "exp2", None),
        row("gpu-ceilings", "sm-boundary-read", 9.0, device="NVIDIA H100 80GB HBM3"),
        row("ceiling", "matmul-bf16-8192", 700.0),
    ]
    found = _roofline.ceilings_of("H200")
    assert found.hbm_bytes_per_s == 4.5e12
    assert found.tensor_flops == 700e12
    assert found.exp_per_s == H200.exp_per_s
    assert found.sm_boundary_bytes_per_s == H200.l2_bandwidth_bytes_per_s
    assert found.origin == "measured: tensor cores, HBM; datasheet: exponentials, L2"
    assert _roofline.ceilings_of("H100-SXM5-80GB").sm_boundary_bytes_per_s == 9e12


def test_a_figure_of_one_card_leaves_the_others_out() -> None:
    """The card that ours ran on; the records' H200 while ours ran on none."""
    peer = {"source": "measured", "experiment": "throughput", "implementation": "sdpa-cudnn"}
    ours = {"source": "measured", "experiment": "gpu-throughput", "implementation": "flash"}
    rows = pandas.DataFrame(
        [
            peer | {"device": "NVIDIA H200", "tflops": 1.0},
            {"source": "published", "device": "NVIDIA H100 SXM5", "tflops": 2.0},
            {"source": "predicted", "device": "H200", "tflops": 3.0},
            {"source": "predicted", "device": "H100-SXM5-80GB", "tflops": 4.0},
            ours | {"device": "NVIDIA H100 80GB HBM3", "tflops": 5.0},
        ]
    )
    assert throughput.of_one_card(rows)["tflops"].tolist() == [2.0, 4.0, 5.0]
    assert throughput.of_one_card(rows[:4])["tflops"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("name", ["fig1-right", "fig3-runtime"])
def test_no_time_is_below_its_roofline(name: str) -> None:
    """Printed and measured times against the bound of the same kernels on the same card."""
    frame = tidy((name,), local=False).dropna(subset=["value"])
    frame = frame[frame["metric"] == "time_ms"].fillna({"seqlen_q": 1024})  # Fig. 1 names no length
    names = {"fused FlashAttention": "fused flash1", "fused sdpa-flash2": "fused flash"}
    frame["implementation"] = frame["implementation"].replace(names)
    frame["card"] = ["H200" if "H200" in str(d) else "A100" for d in frame["device"]]
    keys = ["implementation", "pass", "seqlen_q", "card"]
    floors = frame[frame["source"] == "predicted"].groupby(keys)["value"].min()
    times = frame[frame["source"] != "predicted"].groupby(keys)["value"].min()
    over = (times / floors).dropna()
    assert len(over) >= 10
    assert over.min() >= 1
