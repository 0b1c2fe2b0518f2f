"""The decoding experiment: its cells move what is predicted and compute what is right."""

from __future__ import annotations

from dataclasses import replace

import pandas
import pytest

from analysis.decode import DecodeShape
from kernels import prebuild
from kernels.launching.plan import Recorder
from repro.claims import Verdict, rows
from repro.experiments import Cell
from repro.experiments.bytes import decode_bytes as experiment
from repro.experiments.gpu import gpu_decode
from repro.instruments.decode_work import DecodeOperands
from repro.measuring import records


def test_what_sharing_saves() -> None:
    """Bytes of a token's cache, over those of MHA: 1/4, 1/8, 1/32, 1/32, 9/128."""
    sizes = {}
    for sharing in experiment.SHARING:
        cell = next(c for c in experiment.cells() if c["sharing"] == sharing)
        one = experiment.shape_of(cell)
        assert isinstance(one, DecodeShape)
        sizes[sharing] = one.token_bytes
    assert sizes["mha"] == 2 * 32 * 128 * 2
    ratios = {sharing: sizes["mha"] / size for sharing, size in sizes.items()}
    assert ratios == {"mha": 1, "gqa": 4, "gqa-fp8": 8, "mqa": 32, "latent-256": 32, "latent-576": 128 / 9}


def timed(factor: float) -> pandas.DataFrame:
    """Datasheet times, and measured ones that are ``factor`` times as long, on a card with nine
    tenths of its datasheet's bandwidth."""
    rows = [row for cell in gpu_decode.cells() for row in gpu_decode.EXPERIMENT.predicted(cell)]
    rows = [row for row in rows if row.device == "H200"]
    slower = [replace(row, source="measured", device="NVIDIA H200", value=(row.value or 0) * factor) for row in rows]
    bandwidth = records.record(
        {},
        experiment="gpu-ceilings",
        implementation="hbm-read",
        metric="bandwidth",
        unit="TB/s",
        source="measured",
        value=0.9 * 4.8,
        device="NVIDIA H200",
    )
    return records.frame([*rows, *slower, bandwidth])


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.05, Verdict.REPRODUCED), (1.2, Verdict.REPRODUCED), (2.0, Verdict.REFUTED)]
)
def test_a_measured_decode_time_is_judged_by_the_roofline(factor: float, verdict: Verdict) -> None:
    claim = rows()["decode time"].judged(timed(factor))
    assert claim.verdict is verdict
    assert f"median {0.9 * factor:.2f}" in claim.measured


def test_without_a_card_the_decode_time_is_not_tested() -> None:
    frame = timed(1.0)
    claim = rows()["decode time"].judged(frame[frame["source"] == "predicted"])
    assert claim.verdict is Verdict.NOT_TESTED


def test_what_a_card_is_to_time_is_compiled_ahead() -> None:
    """Every kernel that a cell launches, with any of its numbers of splits."""
    ready = {(kernel.source, kernel.macros) for kernel in prebuild.kernels()}

    class Card:
        multiprocessors = 132

    for sharing, kv_heads in {(str(c["sharing"]), c["kv_heads"]) for c in gpu_decode.cells()}:
        cell = next(c for c in gpu_decode.cells() if c["sharing"] == sharing)
        for width in (1, *gpu_decode.WIDTHS) if sharing == "gqa" else (1,):
            few = {("pass_" if k == "pass" else k): v for k, v in cell.items()}
            few |= {"batch": 1, "seqlen_k": 640, "seqlen_q": width}
            operands = DecodeOperands(gpu_decode.shape_of(Cell(**few)), "cpu")
            for splits in (None, *gpu_decode.SPLITS):
                recorder = Recorder(Card())
                operands.launch(recorder, splits)
                launched = {(x.kernel.source, x.kernel.macros) for x in recorder.launches}
                assert launched <= ready, (sharing, kv_heads, width, splits)


def test_operands_need_pages_and_lengths() -> None:
    with pytest.raises(ValueError, match="page_size=None, ragged=True: pages and lengths"):
        DecodeOperands(DecodeShape(4, 2, 1, (8,), 64, ragged=True), "cpu")
