"""How far attention is from its bound, and what is said of ours beside the best peer."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest

from analysis.hardware import H200
from repro.claims import Claim, Verdict, rows
from repro.claims.machine import peers
from repro.experiments import Cell, tidy
from repro.experiments.gpu.gpu_throughput import cells, time_bound

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recorded() -> pandas.DataFrame:
    frame = tidy(rows()["Hopper forward"].experiments, local=False)
    return frame[~((frame["experiment"] == "gpu-throughput") & (frame["source"] == "measured"))]


def judged(frame: pandas.DataFrame) -> list[Claim]:
    return [rows()[f"Hopper {pass_}"].judged(frame) for pass_ in ("forward", "backward")]


def as_fast_as(recorded: pandas.DataFrame, factor: float) -> pandas.DataFrame:
    """The records and ours, so many times the best peer at every shape that peers have."""
    table = peers.distances(recorded)
    best = table[table["implementation"].isin(peers.PEERS)].groupby(peers.SHAPE)["tflops"].max()
    ours = best.mul(factor).rename("value").reset_index()
    ours = ours.assign(
        experiment="gpu-throughput",
        implementation=peers.OURS,
        source="measured",
        dtype="bf16",
        metric="throughput_tflops",
        unit="TFLOP/s",
        device="NVIDIA H200",
    )
    return pandas.concat([recorded, ours], ignore_index=True)


def test_the_bound_is_that_of_the_time_model(recorded: pandas.DataFrame) -> None:
    """At 16k the backward's main kernel takes 3653 clocks for the tensor cores' 3200."""
    cell = next(
        c for c in cells() if (c["pass"], c["head_dim"], c["causal"], c["seqlen_q"]) == ("backward", 128, False, 16384)
    )
    bound, tile = time_bound(Cell(**{("pass_" if k == "pass" else k): v for k, v in cell.items()}), peers.OURS, H200)
    assert (tile.block_m, tile.block_n) == (80, 128)
    shared, tensor = bound.by_resource["shared memory"], bound.by_resource["tensor cores"]
    assert shared / tensor == pytest.approx(3653 / 3200)
    assert bound.binding == "shared memory"
    row = peers.distances(recorded).query(
        "`pass` == 'backward' and head_dim == 128 and causal == False and seqlen_q == 16384"
        " and implementation == 'sdpa-cudnn'"
    )
    assert row["distance"].item() == row["bound_tflops"].item() / row["tflops"].item()


def test_what_shared_memory_does_to_the_backward_s_bound(recorded: pandas.DataFrame) -> None:
    """The two ranges that the page on Hopper gives, of the best peer from 2k on."""
    table = peers.distances(recorded)
    rows = table[table["implementation"].isin(peers.PEERS) & (table["seqlen_q"] >= 2048)]
    best = rows[rows["pass"] == "backward"].groupby(peers.SHAPE)
    distance, without = best["distance"].min(), best["distance_without_shared"].min()
    assert len(distance) == 16
    said = [f"{column.min():.2f} to {column.max():.2f}" for column in (distance, without)]
    assert said == ["1.34 to 1.59", "1.55 to 1.87"]
    text = (ROOT / "docs/pages/hopper.md").read_text()
    assert all(numbers in text for numbers in said)
    one = rows.query("`pass` == 'forward' and head_dim == 128")  # tensor cores bind all of it
    assert (one["distance"] == one["distance_without_shared"]).all()


def test_nothing_measured_is_faster_than_its_bound(recorded: pandas.DataFrame) -> None:
    table = peers.distances(recorded)
    assert len(table) > 50
    assert table["distance"].min() > 1


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, Verdict.REPRODUCED), (0.9, Verdict.REFUTED)])
def test_ours_beside_the_best_peer(recorded: pandas.DataFrame, factor: float, verdict: Verdict) -> None:
    found = judged(as_fast_as(recorded, factor))
    assert {v.verdict for v in found} == {verdict}
    assert all("over 24 shapes" in v.measured for v in found)


def test_without_our_times_the_question_is_open(recorded: pandas.DataFrame) -> None:
    assert {v.verdict for v in judged(recorded)} == {Verdict.NOT_TESTED}
