"""A DRAM counter's parts add up to it, for recorded kernels and for records yet to come."""

from __future__ import annotations

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.hardware import H200
from analysis.hbm_residual import PARTS, Residual, padding_bytes, split
from figures.bytes import residual_attribution
from repro.experiments import record, tidy
from repro.experiments.bytes import _residual
from repro.experiments.gpu import gpu_traffic
from repro.measuring.records import frame

BYTES = st.integers(0, 2**40)


@given(counter=BYTES, once=BYTES, again=BYTES, l2=st.integers(0, 2**26))
def test_parts_add_up_whatever_the_counter_says(counter, once, again, l2) -> None:
    for direction in ("read", "write"):
        parts = split(direction, counter, {"k": once}, {"k": once + again}, l2, counter + 7)
        assert sum(getattr(parts, name) for name in PARTS) == counter
        assert parts.absorbed == 7
        assert -l2 <= parts.late <= 0
        if direction == "read" or counter >= once + again + parts.padding:
            assert parts.late == 0


def test_only_what_l2_can_hold_counts_as_late() -> None:
    parts = split("write", 100, {"out": 1024}, {"out": 1024}, l2_bytes=500)
    assert (parts.late, parts.unexplained) == (-500, -424)
    with pytest.raises(ValueError, match="'sideways'"):
        split("sideways", 1, {}, {}, 0)
    with pytest.raises(AssertionError, match="add up to 3, the counter says 4"):
        Residual(4, 1, 1, 1, 0, 0, None)


def test_whole_tensors_of_ragged_size_end_in_a_part_of_a_sector() -> None:
    assert padding_bytes({"q": 64, "lse": 4 * 1000, "mask": 65}) == 31
    parts = split("read", 96, {"mask": 65}, {"mask": 65}, 0)
    assert (parts.padding, parts.unexplained) == (31, 0)


def test_every_recorded_counter_is_split_and_little_is_left() -> None:
    rows = _residual.residuals(tidy(_residual.EXPERIMENTS[:3], local=False))
    assert len(rows) == 2 * (5 + 6 + 12 + 15)
    for row in rows:
        assert sum(row[name] for name in PARTS) == row["counter"]
        if row["experiment"] != "l2-absorption":
            assert abs(row["unexplained"]) <= 0.002 * row["counter"], row["kernel"]
        assert -row["late"] <= H200.usable_l2_bytes  # half of L2: no write-back cache holds more
    long = [r for r in rows if r["seqlen_q"] == 262144 and r["direction"] == "read"]
    assert [0.07 < r["unexplained"] / r["counter"] < 0.10 for r in long] == [True]


@pytest.fixture
def ours() -> pandas.DataFrame:
    """Counters of our kernels that say exactly what formulas say, plus 1000 bytes of reads."""
    rows = []
    for cell in gpu_traffic.cells():
        for kernel in {r.kernel for r in gpu_traffic.EXPERIMENT.predicted(cell)} - {"all"}:
            values = {"batch": "-", **cell, "kernel": kernel, "experiment": gpu_traffic.EXPERIMENT.name}
            once, waved = _residual.expected(values, H200)
            for direction in ("read", "write"):
                exact = sum(waved[direction].values()) + padding_bytes(once[direction])
                exact += 1000 if direction == "read" else 0
                for level, extra in (("hbm", 0), ("sm", 5)):
                    rows.append(
                        record(
                            cell,
                            experiment=gpu_traffic.EXPERIMENT.name,
                            source="measured",
                            tool="ncu",
                            kernel=kernel,
                            level=level,
                            direction=direction,
                            device="NVIDIA H200",
                            metric="traffic_bytes",
                            value=exact + extra,
                            unit="B",
                        )
                    )
    return frame(rows)


def test_our_kernels_are_picked_up_when_they_are_measured(ours: pandas.DataFrame) -> None:
    rows = _residual.residuals(ours)
    cells = gpu_traffic.cells()
    assert len(list(_residual.cells(rows))) == 2 * len(cells)
    for row in rows:
        assert row["unexplained"] == (1000 if row["direction"] == "read" else 0), row
        assert (row["late"], row["absorbed"]) == (0, 5)
        if not row["kernel"].endswith(("_init", "_clear_counter")):  # these read nothing
            assert row["compulsory"] > 0
    drawing = residual_attribution.draw(ours)
    assert len(drawing.table) == 2 * len(cells)
    assert len(set(residual_attribution.table(ours)["label"])) == len(cells)


def test_a_kernel_or_a_card_that_nothing_is_known_of(ours: pandas.DataFrame, caplog) -> None:
    unknown = ours[ours["kernel"] == "flash_forward"].assign(kernel="mystery")
    (read, *_) = _residual.residuals(unknown)
    assert (read["compulsory"], read["unexplained"]) == (0, read["counter"])
    residual_attribution.draw(unknown)
    assert _residual.residuals(ours.assign(device="NVIDIA X1")) == []
    assert "NVIDIA X1: not in analysis/gpus.toml" in caplog.text
    only_reads = ours[ours["direction"] == "read"]
    assert _residual.residuals(only_reads) == []
