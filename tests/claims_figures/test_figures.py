"""Figures: the same bytes every time, whatever is missing from the records."""

import itertools
import logging
import re
import shutil
import subprocess
import zlib
from functools import cache

import numpy as np
import pandas
import pytest
from matplotlib.text import Text

from figures import _paper, common, verdict_table
from figures.common import Drawing
from repro.experiments import tidy

NAMES = common.names()
#: Two renderers hint letters differently: this share of the ink of one may lie beside the other's.
LOST = 0.02


@pytest.fixture(autouse=True)
def _style(monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    common.style()
    yield
    common.plt.close("all")


@cache
def frame_of(name):
    return tidy(common.module(name).EXPERIMENTS, local=False)


GAPS = ("nothing recorded", "all failed")


def without(frame, gap):
    """Predictions only (all record files empty), or what was measured and published failed."""
    if gap == "nothing recorded":
        return frame[frame["source"] == "predicted"].copy()
    frame = frame.copy()
    chosen = frame["source"] != "predicted"
    frame.loc[chosen, "value"] = np.nan
    frame.loc[chosen, "error"] = "CUDA out of memory"
    return frame


@pytest.mark.parametrize("name", NAMES)
def test_drawn_twice_the_files_are_identical_and_no_text_is_cut_off(name, tmp_path):
    """PNG is left out, which takes longest to write: the pixels follow from the same positions, and
    test_figures_make.py compares them for one figure."""
    written = []
    for run in ("first", "second"):
        drawing = common.module(name).draw(frame_of(name))
        figure = drawing.figure
        paths = common.save(name, drawing, tmp_path / run, images=("svg",))
        assert paths == sorted((tmp_path / run).iterdir())
        written.append({path.suffix: path.read_bytes() for path in paths})
    assert sorted(written[0]) == [".csv", ".svg"]
    assert written[0] == written[1]
    assert len(written[0][".svg"]) > 1000
    check_that_no_text_is_cut_off(figure)


def tick_labels(figure):
    """Ids of all of them: those off the axis have places too."""
    return {
        id(label)
        for ax in figure.axes
        for axis in (ax.xaxis, ax.yaxis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label in (tick.label1, tick.label2)
    }


def check_that_no_text_is_cut_off(figure):
    """What axes lay out for themselves leaves room for the rest, but not always enough."""
    figure.canvas.draw()  # at the resolution in which places are asked for
    ticks = tick_labels(figure)
    said = [text for text in figure.findobj(Text) if text.get_text() and id(text) not in ticks]
    assert said
    whole = figure.bbox.padded(1)  # a pixel
    for text in said:
        box = text.get_window_extent()
        inside = whole.x0 <= box.x0 and box.x1 <= whole.x1
        inside = inside and whole.y0 <= box.y0 and box.y1 <= whole.y1
        assert inside or not text.get_visible(), f"{text} at {box.extents} of {whole.extents}"


def printed(name, folder, images=()):
    """A figure in the paper's style, after its files were written."""
    drawing = common.module(name).draw(frame_of(name))
    paths = common.save(name, drawing, folder, images, style="paper")
    drawing.figure.dpi = _paper.DPI * _paper.SCALE  # closing it has set it back
    return drawing.figure, paths


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "two_levels" else pytest.mark.thorough) for n in NAMES]
)
def test_for_a_paper_a_figure_has_its_width_no_small_text_none_cut_and_none_overlapping(name, tmp_path):
    figure, _ = printed(name, tmp_path)
    width, height = figure.get_size_inches() * _paper.SCALE
    turned = name in _paper.TURNED
    allowed = [_paper.SIDEWAYS] if turned else [_paper.COLUMN, _paper.TEXT]
    assert min(abs(width - w) for w in allowed) < 1e-6
    assert height < (_paper.TEXT if turned else _paper.TALLEST) + 1e-6
    check_that_no_text_is_cut_off(figure)
    ticks = tick_labels(figure)
    texts = {id(t): t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible()}
    for text in texts.values():
        assert text.get_fontsize() * _paper.SCALE > _paper.SMALLEST - 1e-6, text
    said = [(t, t.get_window_extent()) for key, t in texts.items() if key not in ticks]
    point = figure.dpi / 72  # boxes have room for accents and descenders that are not there
    for (one, a), (other, b) in itertools.combinations(said, 2):
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across < point or down < 3 * point, (one, other, across, down)


@pytest.mark.skipif(shutil.which("pdftoppm") is None, reason="needs pdftoppm (poppler-utils)")
@pytest.mark.parametrize(
    "name", ["two_levels", *(pytest.param(name, marks=pytest.mark.thorough) for name in NAMES[::6])]
)
def test_for_a_paper_the_pdf_shows_what_the_png_shows(name, tmp_path):
    """Whatever is drawn in one is within three pixels of something drawn in the other."""
    from PIL import Image

    _, paths = printed(name, tmp_path, ("png", "pdf"))
    files = {path.suffix: path for path in paths}
    subprocess.run(
        ["pdftoppm", "-r", str(_paper.DPI), "-png", "-singlefile", files[".pdf"], tmp_path / "page"], check=True
    )
    with Image.open(files[".png"]) as image:
        size = image.size
        drawn, around_drawn = ink(image)
    with Image.open(tmp_path / "page.png") as image:
        rendered, around_rendered = ink(image.resize(size))
    lost = (drawn & ~around_rendered).sum() / drawn.sum()
    added = (rendered & ~around_drawn).sum() / rendered.sum()
    assert max(lost, added) < LOST, (lost, added)


def test_for_a_paper_every_format_has_the_printed_size_and_pdf_its_fonts(tmp_path):
    from PIL import Image

    figure, paths = printed("two_levels", tmp_path, ("png", "svg", "pdf"))
    width, height = figure.get_size_inches() * _paper.SCALE
    files = {path.suffix: path for path in paths}
    with Image.open(files[".png"]) as image:
        assert image.size == pytest.approx((width * _paper.DPI, height * _paper.DPI), abs=1.5)
        assert image.info["dpi"] == pytest.approx((_paper.DPI, _paper.DPI), rel=1e-3)
    svg = files[".svg"].read_text()
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt" viewBox="0 0 ([\d.]+) ', svg)
    assert [float(v) / 72 for v in size.groups()] == pytest.approx([width, height, width / _paper.SCALE], rel=1e-4)
    content = files[".pdf"].read_bytes()
    box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", content)
    assert [float(v) / 72 for v in box.groups()] == pytest.approx([width, height], rel=1e-4)
    page = zlib.decompressobj().decompress(content.split(b"stream\n", 1)[1])
    assert b"%g 0 0 %g 0 0 cm" % (_paper.SCALE, _paper.SCALE) in page.split(b"BT")[0]
    assert b"/FontFile2" in content
    assert b"/Type3" not in content
    again = printed("two_levels", tmp_path / "again", ("png", "svg", "pdf"))[1]
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in paths]


def ink(image):
    """(rows, columns) of booleans: where a page is not white, and so within three pixels."""
    from PIL import Image, ImageFilter

    grey = image.convert("L").point(lambda level: 255 if level < 224 else 0)
    wide = grey.filter(ImageFilter.MaxFilter(7))
    assert isinstance(wide, Image.Image)
    return np.asarray(grey) > 0, np.asarray(wide) > 0


def test_folded_panels_keep_their_own_labels_and_the_small_print_finds_them():
    figure, axes = common.plt.subplots(1, 4, figsize=(16, 4), layout="constrained", sharey=False)
    axes[0].sharey(axes[1])
    axes[0].set_ylabel("bytes")
    axes[2].set_ylabel("")  # its axis is another one
    common.note(figure, "Left: a. Middle: b. Right: c.")
    _paper.fit("any", figure)
    assert [ax.get_subplotspec().get_gridspec().get_geometry() for ax in axes] == [(2, 2)] * 4
    assert [ax.get_ylabel() for ax in axes] == ["bytes", "", "", ""]
    assert figure.texts[0].get_text() == "First panel: a. Second panel: b. Last panel: c."


def test_a_caption_says_what_is_shown_the_axes_with_units_and_the_machine(tmp_path, monkeypatch):
    from figures import __main__ as command

    monkeypatch.setattr(common, "STYLE", "paper")
    command._draw("two_levels", tmp_path, local=True)
    assert {p.suffix for p in tmp_path.iterdir()} == {".csv", ".png", ".svg", ".txt"}
    text = (tmp_path / "two_levels.txt").read_text()
    assert text.count("\n") == 1
    first = common.module("two_levels").__doc__.splitlines()[0]
    assert text.startswith(first)
    assert "bytes read by the forward pass (GB) against sequence length N" in text
    assert "on an NVIDIA H200" in text


def test_a_style_that_is_not_known_is_refused(tmp_path):
    with pytest.raises(ValueError, match="STYLE='poster' is not paper"):
        common.save("two_levels", Drawing(common.plt.figure(), pandas.DataFrame()), tmp_path, style="poster")
    assert list(tmp_path.iterdir()) == []


def test_formats_adds_pdf_the_same_on_every_run(tmp_path, monkeypatch):
    monkeypatch.setenv("FORMATS", "pdf")
    written = []
    for run in ("first", "second"):
        drawing = common.module("two_levels").draw(frame_of("two_levels"))
        paths = common.save("two_levels", drawing, tmp_path / run)
        assert [path.suffix for path in paths] == [".csv", ".png", ".svg", ".pdf"]
        written.append(paths[-1].read_bytes())
    assert written[0] == written[1]
    assert written[0].startswith(b"%PDF")
    monkeypatch.setenv("FORMATS", "pdf,tiff")
    with pytest.raises(ValueError, match="FORMATS='tiff' is not one of png, svg, pdf"):
        common.formats()


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("name", NAMES)
def test_gaps_leave_a_figure(name, gap):
    figure = common.module(name)
    frame = without(frame_of(name), gap)
    drawing = figure.draw(frame)
    assert isinstance(drawing, Drawing)
    assert drawing.figure.axes
    common.plt.close(drawing.figure)


def test_a_gap_is_named_in_the_log_and_the_rest_is_drawn(caplog):
    rows = pandas.DataFrame(
        {"n": [1, 2, 4], "value": [1.0, np.nan, 4.0], "source": "measured", "error": [None, "CUDA out of memory", None]}
    )
    ax = common.plt.subplots()[1]
    with caplog.at_level(logging.WARNING):
        drawn = common.series(ax, rows, "n", "eager")
        common.series(ax, rows.assign(value=np.nan), "n", "all missing")
        common.series(ax, rows.iloc[:0], "n", "empty")
    assert drawn["n"].tolist() == [1, 4]
    assert "eager: no point at n = 2 (CUDA out of memory)" in caplog.text
    assert "all missing: nothing to draw" in caplog.text
    assert "empty: nothing to draw" in caplog.text
    assert len(ax.lines) == 1


def test_one_series_does_not_mix_sources():
    rows = pandas.DataFrame({"n": [1, 2], "value": [1.0, 2.0], "source": ["measured", "published"]})
    with pytest.raises(ValueError, match="mixes sources"):
        common.series(common.plt.subplots()[1], rows, "n", "both")


def test_published_points_are_hollow_measured_filled_predicted_lines():
    ax = common.plt.subplots()[1]
    for source in ("predicted", "measured", "published"):
        rows = pandas.DataFrame({"n": [1, 2], "value": [1.0, 2.0], "source": source})
        common.series(ax, rows, "n", source, color="red")
    line, filled, hollow = ax.lines
    assert (line.get_linestyle(), line.get_marker()) == ("-", "None")
    assert filled.get_linestyle() == hollow.get_linestyle() == "None"
    assert filled.get_markerfacecolor() == "red"
    assert hollow.get_markerfacecolor() == "none"


def test_a_curve_is_labelled_where_its_line_ends(caplog):
    ax = common.plt.subplots()[1]
    line = pandas.DataFrame({"n": [4, 1], "value": [40.0, 10.0], "source": "predicted"})
    points = pandas.DataFrame({"n": [1, 2], "value": [11.0, 21.0], "source": "measured"})
    assert common.curve(ax, pandas.concat([line, points]), "n", "ours", "red") == [(4.0, 40.0, "ours", "red")]
    assert [list(drawn.get_xdata()) for drawn in ax.lines] == [[1, 4], [1, 2]]
    assert common.curve(ax, points, "n", "counted", "red", sources=("measured",)) == [(2.0, 21.0, "counted", "red")]
    assert common.curve(ax, points.iloc[:0], "n", "missing", "red") == []
    assert "predicted missing: nothing to draw" in caplog.text
    assert "measured missing: nothing to draw" in caplog.text


def test_a_generator_that_dies_leaves_nothing_behind(tmp_path, monkeypatch):
    figure = common.plt.figure()
    table = pandas.DataFrame({"a": [1]})

    def die(*arguments, **options):
        raise RuntimeError("disk full")

    monkeypatch.setattr(figure, "savefig", die)
    with pytest.raises(RuntimeError, match="disk full"):
        common.save("broken", Drawing(figure, table), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_labels_that_would_overlap_are_moved_apart():
    figure, ax = common.plt.subplots(layout="constrained")
    ax.set(xlim=(0, 2), ylim=(0, 100))
    ends = [(1, 50, "one", "red"), (1, 50.1, "two", "red"), (1, 50.2, "three", "red")]
    common.label_ends(ax, ends, gap=12)
    places = [
        t.get_position()[1] + ax.transData.transform((1, y))[1] * 72 / figure.dpi
        for t, (_, y, _, _) in zip(ax.texts, ends, strict=True)
    ]
    assert np.diff(places).min() > 10.5
    assert np.mean(places) == pytest.approx(
        np.mean([ax.transData.transform((1, y))[1] for _, y, _, _ in ends]) * 72 / figure.dpi, abs=1
    )


def test_one_figure_that_fails_is_named_and_the_others_are_drawn(tmp_path, monkeypatch, capsys):
    from figures import __main__ as command

    def draw(name, out, *, local):
        if name == "two_levels":
            raise OSError("disk full")
        (tmp_path / name).touch()

    monkeypatch.setattr(command, "_draw", draw)  # the workers are forked: they have it too
    chosen = ["fa1_fig2_middle", "two_levels", "gemm_levels"]
    with pytest.raises(RuntimeError, match=r"^two_levels: OSError: disk full$"):
        command.draw(chosen, jobs=2)
    assert {p.name for p in tmp_path.iterdir()} == {"fa1_fig2_middle", "gemm_levels"}
    assert "two_levels" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="no figure 'nonsense'"):
        command.draw(["gemm_levels", "nonsense"], jobs=2)


def test_claims_judged_while_drawing_are_those_judged_alone(tmp_path, monkeypatch, capsys):
    """Of figures that are not drawn, too; a figure is drawn from what it is judged by."""
    from figures import __main__ as command

    monkeypatch.setattr(common, "OUT", tmp_path / "both")
    some = (verdict_table.APART, "two_levels", "fa1_fig2_middle", "time_ampere")
    monkeypatch.setattr(verdict_table, "judges", lambda: some)
    alone = [row for name in some for row in verdict_table.judge(name)]
    monkeypatch.setattr(verdict_table, "collect", lambda: verdict_table.ordered(alone))
    command.draw(["two_levels"], jobs=2, verdicts=True)
    together = capsys.readouterr().out
    drawn = {p.name: p.read_bytes() for p in (tmp_path / "both").iterdir()}
    assert {name for name in drawn if name.startswith("two_levels")} == {
        "two_levels.csv",
        "two_levels.png",
        "two_levels.svg",
    }
    assert len(drawn) == 8, "and the table of claims with its picture"

    monkeypatch.setattr(common, "OUT", tmp_path / "alone")
    command.draw(["two_levels"])
    command.verdicts()
    assert {p.name: p.read_bytes() for p in (tmp_path / "alone").iterdir()} == drawn
    assert together.replace("both", "alone") == capsys.readouterr().out
