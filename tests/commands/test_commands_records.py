"""``explain``, ``compare`` and ``doctor`` on records made for the purpose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from repro import doctor, experiments
from repro import measure as measuring
from repro.commands import causes, compare, explain
from repro.experiments import record
from repro.measuring import records
from repro.measuring.records import Record
from tests.support.command_support import run


def timing(seqlen: int, ms: float, low: float | None = None, high: float | None = None, **more):
    return record(
        {
            "seqlen_q": seqlen,
            "seqlen_k": seqlen,
            "batch": 1,
            "heads": 2,
            "head_dim": 64,
            "dtype": "bf16",
            "causal": False,
            "pass": "forward",
        },
        **{
            "experiment": "toy",
            "implementation": "flash",
            "source": "measured",
            "metric": "time_ms",
            "unit": "ms",
            "value": ms,
            "spread_min": low,
            "spread_max": high,
            "spread_n": 9,
            "device": "X",
            "date": "2026-01-01",
            **more,
        },
    )


@pytest.fixture
def two_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    slow = [timing(512, 2.0, 1.9, 2.2), timing(1024, 8.0, 7.9, 8.1), timing(2048, 30.0)]
    failed = timing(8192, 1.0, metric="run", error="out of memory", value=None, unit=None)
    fast = [timing(512, 2.1, 2.0, 2.3), timing(1024, 4.0, 3.9, 4.1), timing(4096, 60.0), failed]
    records.write(tmp_path / "slow" / "toy.jsonl", slow)
    records.write(tmp_path / "fast" / "toy.jsonl", fast)
    return tmp_path


@pytest.mark.usefixtures("two_machines")
def test_compare_matches_cells_and_gives_ratios_with_the_range_of_their_spreads(capsys):
    status, out, _ = run(capsys, "compare", "slow", "fast", "--json")
    assert status == 0
    same, faster = json.loads(out)
    assert (same["seqlen_q"], same["ratio"]) == (512, pytest.approx(1.05))
    assert (same["ratio_min"], same["ratio_max"]) == pytest.approx((2.0 / 2.2, 2.3 / 1.9))
    assert compare.same(same)
    assert faster["ratio"] == 0.5
    assert not compare.same(faster)
    status, out, _ = run(capsys, "compare", "slow", "fast")
    assert "2 cells in common of 3 and 3" in out
    assert f"{(1.05 * 0.5) ** 0.5:.3f}" in out


def test_compare_reads_folders_anywhere_and_names_what_is_on_record(two_machines, capsys):
    outside = two_machines / "slow"
    assert run(capsys, "compare", str(outside), "fast", "--csv")[0] == 0
    status, _, err = run(capsys, "compare", "slow", "nowhere")
    assert status == 1
    assert "fast, slow" in err
    status, _, err = run(capsys, "compare", "slow", "fast", "-m", "joules")
    assert status == 1
    assert "metric 'joules'" in err


def test_compare_refuses_units_that_differ(two_machines):
    a = compare.measured(compare.files("slow"))
    records.write(two_machines / "other" / "toy.jsonl", [timing(512, 2000.0, unit="us")])
    with pytest.raises(ValueError, match="'ms' against 'us'"):
        compare.pairs(a, compare.measured(compare.files("other")))


def test_a_cell_in_common_with_nobody_is_an_error_that_says_who_has_what(two_machines, capsys):
    records.write(two_machines / "lone" / "other.jsonl", [timing(1, 1.0, experiment="other")])
    status, _, err = run(capsys, "compare", "slow", "lone")
    assert status == 1
    assert "slow has toy; lone has other" in err


@pytest.mark.usefixtures("two_machines")
def test_explain_lists_the_cells_and_takes_the_number_of_one(capsys):
    status, out, _ = run(capsys, "explain", "toy")
    assert status == 0
    assert "5 cells; choose one by its number: explain toy 1" in out
    for chosen in (("1",), ("seqlen_q=512",), ("--where", "seqlen_q=512")):
        status, out, _ = run(capsys, "explain", "toy", *chosen)
        assert status == 0
        assert "seqlen_q=512" in out
        assert "fast" in out
        assert "slow" in out
    assert "2.1 ms" in out
    assert "2 ms" in out
    for wrong, message in (("0", "cell 0 is not one of 1 to 5"), ("6", "1 to 5")):
        status, _, err = run(capsys, "explain", "toy", wrong)
        assert status == 1
        assert message in err
    status, _, err = run(capsys, "explain", "toy", "1", "2")
    assert "one at a time" in err


def published(value: float, origin: str, **more: object) -> Record:
    return timing(
        64,
        value,
        source="published",
        origin=origin,
        confidence="table",
        device=None,
        date=None,
        spread_min=None,
        spread_max=None,
        spread_n=None,
        **more,
    )


def test_publications_are_never_one_number(tmp_path, monkeypatch, capsys):
    """Two versions of a paper print 40.3 and 35.3: a median, 37.8, is in neither."""
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    papers = [published(40.3, "A paper (2022), v2"), published(35.3, "A paper (2022), v1")]
    records.write(tmp_path / "published" / "toy.jsonl", papers)
    status, out, _ = run(capsys, "explain", "toy", "--json")
    assert status == 0
    lines = json.loads(out)["quantities"]
    assert {(line["origin"], line["published"]) for line in lines} == {
        ("A paper (2022), v2", 40.3),
        ("A paper (2022), v1", 35.3),
    }
    _, out, _ = run(capsys, "explain", "toy")
    assert "37.8" not in out
    assert "A paper, v2" in out


def test_predictions_that_differ_are_never_one_number():
    """Each device's own stands beside its measurement; others are lines of their own."""
    predictions = [
        timing(
            64,
            value,
            source="predicted",
            device=device,
            tool=tool,
            date=None,
            spread_min=None,
            spread_max=None,
            spread_n=None,
        )
        for value, device, tool in ((1.0, "X", "bound"), (3.0, "Y", "bound"))
    ]
    frame = records.frame([*predictions, timing(64, 2.0)])
    frame.loc[frame["source"] == "measured", "machine"] = "m"
    lines = explain.side_by_side(frame)
    assert [(line["predicted"], line["measured"]) for line in lines] == [(1.0, 2.0), (3.0, None)]
    assert lines[1]["origin"] == "Y, bound"


@pytest.mark.parametrize(
    ("published", "point", "cause"),
    [
        (66.6, {"batch": 64, "heads": 16}, "the work of 82.7 heads, the cell has 1024"),
        (824.6 * 1024 / 1025, {"causal": True, "seqlen_q": 1024}, "N²/2 visible pairs"),
        (824.6 * 7 / 6, {}, "7 matrix products counted, not 6"),
        (824.6 * 2048 / 1025, {"causal": True, "seqlen_q": 1024}, "without the causal mask"),
    ],
)
def test_differences_of_flops_have_causes(published, point, cause):
    line = {"quantity": "flops", "published": published, "predicted": 824.6}
    assert cause in causes._published_cause(line, point)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "no experiment 'nothing'; known: "),
        (("fig2-left", "-w", "seqlen"), "expected field=value"),
        (("fig2-left", "-w", "colour=red"), "no field 'colour'"),
        (("fig2-left", "-w", "seqlen_q=7"), "no cell with seqlen_q=7"),
    ],
)
def test_explain_refuses_in_one_line(capsys, arguments, message):
    status, _, err = run(capsys, "explain", *arguments)
    assert status == 1
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("experiment", ["fusion", "training-memory", "fig2-middle", "packed-sequences"])
def test_explain_s_rows_of_one_name_are_told_apart(experiment: str) -> None:
    frame = experiments.tidy([experiment], local=False)
    keys = explain._keys(frame, explain.POINT)
    for point in explain.find_points(frame)[:3]:
        lines = explain.side_by_side(frame[[explain.compatible(point, key) for key in keys]])
        told = [(line["quantity"], line["machine"], line["origin"], line["device"]) for line in lines]
        assert len(set(told)) == len(told) > 1


def test_explain_sets_prediction_measurement_and_paper_side_by_side(capsys):
    """The committed records of an H200: both traffic levels at 128k tokens, and why HBM differs."""
    status, out, _ = run(
        capsys,
        "explain",
        "l2-absorption",
        "--json",
        "-w",
        "seqlen_q=131072",
        "-w",
        "heads=1",
        "-w",
        "implementation=flash,sdpa-flash2",
    )
    assert status == 0
    found = json.loads(out)
    lines = {line["quantity"]: line for line in found["quantities"]}
    assert lines["sram_read_bytes sm"]["ratio"] == pytest.approx(1, abs=1e-4)
    hbm = lines["hbm_read_bytes hbm"]
    assert hbm["measured"] != hbm["predicted"]
    assert any("fetched again" in reason for reason in found["reasons"])
    status, out, _ = run(capsys, "explain", "fig3-memory", "-w", "implementation=standard", "-w", "seqlen_q=1024")
    assert "Table 21" in out


def test_a_row_without_a_tile_belongs_to_the_cell_that_has_one():
    tiled = timing(512, 1.0, block_m=64, block_n=32)
    plain = timing(512, 1.0, dropout=0.0)
    frame = records.frame([tiled, plain])
    (point,) = explain.find_points(frame)
    assert dict(point)["block_m"] == 64
    assert dict(point)["dropout"] == 0
    two = records.frame([tiled, plain, timing(512, 1.0, block_m=32, block_n=32)])
    assert len(explain.find_points(two)) == 3, "a row that fits two cells joins neither"


def test_doctor_says_what_is_needed_and_gives_a_cure_for_every_no(capsys):
    status, out, err = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert {"Python", "C++ compiler", "NVIDIA GPU", "CuPy", "Nsight Compute", "peers"} <= {f["what"] for f in found}
    for f in found:
        assert f["ok"] or f["cure"], f
    missing = [f for f in found if f["needed"] and not f["ok"]]
    assert (status, bool(err)) == ((1, True) if missing else (0, False))


def test_doctor_finds_a_distribution_in_the_place_of_one_of_our_packages(monkeypatch):
    from importlib import metadata

    monkeypatch.setattr(
        metadata,
        "packages_distributions",
        lambda: {"kernels": ["kernels", "recompute-repro"], "repro": ["recompute-repro"]},
    )
    (finding,) = doctor.shadows()
    assert finding.what == "package kernels"
    assert not finding.ok
    assert "the distribution kernels also installs 'kernels'" in finding.detail
    assert "pip uninstall kernels" in finding.cure


@pytest.mark.parametrize(
    ("parameters", "user", "ok", "says"),
    [
        ("RmProfilingAdminOnly: 1\n", 1000, False, "ERR_NVGPUCTRPERM"),
        ("RmProfilingAdminOnly: 1\n", 0, True, "root"),
        ("ResmanDebugLevel: 0\nRmProfilingAdminOnly: 0\n", 1000, True, "all users"),
        ("ResmanDebugLevel: 0\n", 1000, False, "does not say"),
    ],
)
def test_doctor_reads_who_may_count(tmp_path, parameters, user, ok, says):
    file = tmp_path / "params"
    file.write_text(parameters)
    finding = doctor.counters_permission(file, user)
    assert finding.ok is ok
    assert says in finding.detail
    absent = doctor.counters_permission(tmp_path / "none")
    assert not absent.ok
    assert absent.cure


def test_a_check_that_raises_is_a_finding():
    def broken() -> str:
        raise RuntimeError("no such library\nsecond line")

    finding = doctor.check("X", broken, "x", "install it")
    assert (finding.ok, finding.detail, finding.cure) == (False, "no such library: no x", "install it")


def test_measure_a_second_time_says_what_is_on_record(monkeypatch, capsys) -> None:
    outcome = measuring.run.Outcome(skipped=7)
    monkeypatch.setattr(measuring.run, "measure", lambda *a, **k: outcome)
    measuring.measure(["fusion"])
    assert "fusion: nothing to measure: 7 cells are on record (--again" in capsys.readouterr().err
    measuring.measure(["fusion"], quick=True)
    assert capsys.readouterr().err == ""
