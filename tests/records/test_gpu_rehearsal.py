"""The GPU experiments' measuring code runs, to the driver, before a card is at hand, and with no
more packages than a rented machine has."""

from __future__ import annotations

from typing import Any

import pytest

from kernels import attention, hopper
from repro.experiments.gpu import gpu_decode, gpu_features, gpu_throughput
from tests.support.bare_image import LACKING
from tests.support.command_support import program

TORCH_S = {"sdpa-flash", "sdpa-cudnn"}  # a CPU has them or not


@pytest.fixture(scope="module")
def report() -> Any:
    return program("rehearsal.py", OMP_NUM_THREADS="1", WITHOUT=",".join((*LACKING, "cuda.bindings")))


def test_a_kernel_that_writes_nothing_has_no_time(report: Any) -> None:
    (found,) = (found for found in report["measured"] if found["experiment"] == "wrong")
    ours = set(found["refused"]) - TORCH_S
    assert {"flash", "flash-sm90", "flash-sm90-optimistic"} <= ours
    assert all(found["refused"][name].startswith("wrong: out is off by") for name in ours)


def test_a_decoding_kernel_that_writes_nothing_has_no_time(report: Any) -> None:
    (found,) = (each for each in report["measured"] if each["experiment"] == "wrong decoding")
    assert not found["timed"]
    assert set(found["refused"]) == {gpu_decode.RULE, *map(str, gpu_decode.SPLITS)}
    assert all(why.startswith("wrong: out is off by nan") for why in found["refused"].values())


def test_a_feature_that_is_not_computed_has_no_time(report: Any) -> None:
    (found,) = (each for each in report["measured"] if each["experiment"] == "wrong features")
    assert not found["timed"]
    assert set(found["refused"]) == set(gpu_features.IMPLEMENTATIONS)
    assert all(why.startswith("wrong: out is off by nan") for why in found["refused"].values())


def test_every_kind_of_cell_is_timed(report: Any) -> None:
    measured = [f for f in report["measured"] if not f["experiment"].startswith("wrong")]
    assert {found["experiment"] for found in measured} == {
        "gpu-throughput",
        "gpu-forms",
        "gpu-optimistic",
        "gpu-ladder",
        "gpu-ceilings",
        "gpu-decode",
        "gpu-features",
    }
    for found in measured:
        assert found["timed"], found["cell"]
        assert set(found["refused"]) <= TORCH_S, found["refused"]


def test_every_implementation_has_its_turn(report: Any) -> None:
    timed = {name for found in report["measured"] for name in found["timed"]}
    assert set(attention.HOPPER) <= timed
    assert set(hopper.FORMS) <= timed
    assert set(gpu_throughput.IMPLEMENTATIONS) <= timed | TORCH_S


def test_every_counted_cell_runs(report: Any) -> None:
    assert report["counted"] == ""


def test_the_order_of_blocks_is_asked_for(report: Any) -> None:
    """A query tile of 128 rows a head, two key tiles of 64: SM, start, end, no note between."""
    assert report["noted"] == [[2, 3]] * 3
