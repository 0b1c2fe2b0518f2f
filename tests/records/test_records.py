"""Records: what a row may say, how rows survive a crash, and the frame they make."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.experiments import names
from repro.measuring import records
from repro.measuring.records import Record
from repro.measuring.row import row as number_row
from repro.measuring.row import unit_of


def row(**values):
    base = {"experiment": "x", "implementation": "flash", "metric": "bytes", "source": "measured"}
    return Record.from_json({**base, "value": 1.0, "unit": "B", **values})


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"source": "guessed"}, "guessed"),
        ({"value": float("nan")}, "nan"),
        ({"value": float("inf")}, "inf"),
        ({"value": True}, "True"),
        ({"unit": None}, "bytes"),
        ({"error": "out of memory"}, "out of memory"),
        ({"value": None}, "value=None"),
        ({"seqlen_q": -1}, "-1"),
        ({"seqlen_q": 1.5}, "1.5"),
        ({"batch": True}, "batch"),
        ({"level": "l3"}, "l3"),
        ({"experiment": ""}, "experiment"),
    ],
)
def test_a_row_that_cannot_be_right_is_refused_by_name(values, names):
    with pytest.raises((ValueError, TypeError), match=names):
        row(**values)


@pytest.mark.parametrize(
    ("metric", "unit"),
    [
        ("peak_bytes", "B"),
        ("bytes_out", "B"),
        ("saved_bytes_per_layer", "B"),
        ("flops", "FLOP"),
        ("throughput_tflops", "TFLOP/s"),
        ("time_ms", "ms"),
        ("backward_s", "s"),
        ("round_clocks", "clocks"),
        ("imbalance", "1"),
        ("passes", "1"),
    ],
)
def test_the_unit_follows_from_the_metric_unless_a_row_says_its_own(metric, unit):
    assert number_row(metric, 0, tool="x") == {"metric": metric, "value": 0, "unit": unit, "tool": "x"}
    assert number_row(metric, 1, unit="x")["unit"] == "x"
    assert number_row(metric, error="out of memory") == {"metric": metric, "error": "out of memory"}


def test_units_of_measured_rows_are_those_of_their_metrics_or_said():
    """So that what an experiment measures anew has the unit of what it has on record."""
    others = {"loss", "stream_bytes_per_s", "parameter_bytes_after_forward"}
    for path in records.files():
        for found in records.read(path):
            measured = found.experiment in names() and found.source == "measured"
            if measured and found.unit is not None and found.metric not in others:
                assert found.unit == unit_of(found.metric), (path.name, found.metric)


def test_a_row_without_its_required_fields_is_refused():
    with pytest.raises(ValueError, match="metric"):
        Record.from_json({"experiment": "x", "implementation": "y", "source": "measured"})


scalars = st.one_of(st.integers(0, 2**40), st.floats(allow_nan=False, allow_infinity=False))


@settings(deadline=None, max_examples=50)  # each example syncs a file to disk
@given(
    value=scalars,
    pass_=st.sampled_from(records.PASSES),
    extra=st.dictionaries(st.text("abcxyz_", min_size=4), st.one_of(scalars, st.text())),
)
def test_rows_come_back_as_they_were_unknown_fields_included(tmp_path_factory, value, pass_, extra):
    path = tmp_path_factory.mktemp("r") / "x.jsonl"
    written = row(value=value, **{"pass": pass_}, **extra)
    records.append(path, [written])
    (back,) = records.read(path)
    assert back.to_json() == written.to_json()
    assert back.extra == extra


def test_a_broken_line_is_an_error_with_file_and_line(tmp_path):
    path = tmp_path / "x.jsonl"
    good = json.dumps(row().to_json())
    path.write_text(f"{good}\n{{oops\n{good}\n")
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2"):
        list(records.read(path))
    path.write_text(f"{good}\n" + good.replace("measured", "guessed") + "\n")
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2.*guessed"):
        list(records.read(path))


def test_replacing_a_file_keeps_the_old_one_when_the_rows_fail(tmp_path):
    path = tmp_path / "x.jsonl"
    records.write(path, [row(value=1)])

    def broken():
        yield row(value=2)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        records.write(path, broken())
    assert [r.value for r in records.read(path)] == [1]
    assert list(tmp_path.iterdir()) == [path]


def test_missing_and_empty_files_have_no_rows(tmp_path):
    assert list(records.read(tmp_path / "none.jsonl")) == []
    (tmp_path / "empty.jsonl").touch()
    assert list(records.read(tmp_path / "empty.jsonl")) == []


def test_local_cells_replace_the_authors_and_failed_ones_do_not(tmp_path):
    def put(folder, *rows):
        records.write(tmp_path / folder / "x.jsonl", rows)

    put("host", row(value=1, cell="a"), row(value=2, cell="b"))
    put("local", row(value=10, cell="a"), row(value=None, unit=None, error="no", cell="b"))
    put("published", row(value=5, source="published"))
    found = {(r.extra["machine"], r.value) for r in records.load(["x"], tmp_path)}
    assert found == {("local", 10), ("host", 2), ("published", 5)}
    committed = {r.extra["machine"] for r in records.load(["x"], tmp_path, local=False)}
    assert committed == {"host", "published"}


def test_every_committed_row_is_valid_and_says_where_it_comes_from():
    files = sorted(p for p in records.RESULTS.glob("*/*.jsonl") if p.parent.name != "local")
    assert files
    for file in files:
        rows = list(records.read(file))
        assert rows, file
        for r in rows:
            assert r.experiment == file.stem, file
            if file.parent.name == "published":
                assert r.source == "published"
                assert r.origin, r
                assert r.confidence, r
            elif file.parent.name == "registered":  # predicted before any card ran it
                assert r.source == "predicted"
                assert r.date, r
                assert r.commit, r
            else:
                assert r.source == "measured"
                assert r.device, r
                assert r.date, r


def test_published_tables_agree_with_themselves():
    """Typing errors show up where a table can be checked against another one."""
    table = records.frame(records.load(["fig3-runtime"]))
    table = table[(table["source"] == "published") & table["value"].notna()]
    keys = ["implementation", "seqlen_q", "dropout", "key_mask"]
    wide = table.pivot_table(index=keys, columns="pass", values="value").dropna()
    # the paper's three tables are separate runs: the sum is near, never far
    ratio = (wide["forward"] + wide["backward"]) / wide["forward+backward"]
    long = ratio[ratio.index.get_level_values("seqlen_q") >= 2048]
    assert len(long) > 50
    assert long.between(0.8, 1.5).all(), long[~long.between(0.8, 1.5)]
    flash = long.xs("flash1", level="implementation")
    assert flash.between(0.97, 1.03).all(), flash


def test_paths_of_the_machine_are_not_in_the_records():
    for file in records.RESULTS.glob("*/*.jsonl"):
        content = Path(file).read_text()
        assert "/home/" not in content, file
        assert "/root/" not in content, file
