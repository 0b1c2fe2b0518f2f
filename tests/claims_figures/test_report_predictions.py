"""The report's table of predictions: each row is what its own command prints."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from figures.report import page, predictions
from repro.commands import output

CHROMIUM = next((name for name in ("chromium", "chromium-browser", "google-chrome") if shutil.which(name)), None)


@pytest.fixture(scope="module")
def listed() -> list[list[predictions.Cell]]:
    return list(predictions.rows(["llama3-8b", "gpt2-small"]))


def test_there_is_a_row_for_every_model_length_pass_and_card(listed: list[list[predictions.Cell]]) -> None:
    points = {tuple(cell.text for cell in row[:4]) for row in listed}
    a_model = len(predictions.LENGTHS) * len(predictions.PASSES) * len(predictions.GPUS)
    assert len(points) == len(listed) == 2 * a_model
    assert a_model * len(predictions.MODELS) >= 200


def test_the_command_of_a_row_prints_the_numbers_of_the_row(listed: list[list[predictions.Cell]]) -> None:
    for row in listed[::9]:
        cells = dict(zip(predictions.HEADERS, row, strict=True))
        (found,) = predictions.printed(cells["command"].text).to_dict("records")
        assert found["gpu"] == cells["GPU"].text
        assert found["seqlen_q"] == cells["length"].key
        assert found["pass"] == cells["pass"].text
        assert found["hbm_read_bytes"] + found["hbm_write_bytes"] == cells["HBM"].key
        assert found["sm_read_bytes"] + found["sm_write_bytes"] == cells["SM boundary"].key
        assert found["peak_bytes"] == cells["peak memory"].key
        assert output.of_seconds(found["time_bound_s"]) == cells["time ≥"].text
        known = found["time_predicted_s"] == found["time_predicted_s"]
        ends = output.between(output.of_seconds, found["time_low_s"], found["time_high_s"])
        assert cells["time ≈"].text == (f"{ends} untimed" if known else "")


def test_a_point_that_cannot_be_has_its_reason_in_the_row() -> None:
    row = predictions.printed(predictions.command("gpt2-small", [1024], "all", ["T4", "H200"]))
    refused = row[row["gpu"] == "T4"].iloc[0]
    cells = predictions._numbers(refused)
    assert "bf16" in cells[0].text
    assert len(cells) == len(predictions._numbers(row[row["gpu"] == "H200"].iloc[0]))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_headings_sort_and_fields_choose(listed: list[list[predictions.Cell]], tmp_path: Path) -> None:
    """A script after the page's own clicks as a reader would."""
    sections = [
        ("overview", "Overview", page.overview_section({}, {})),
        ("verdicts", "Verdicts", page.verdict_section([])),
        ("predictions", "Predictions", predictions.section(listed)),
    ]
    place = predictions.HEADERS.index("time ≈")
    clicks = f"""<script>
      const table = document.querySelector("#predictions table");
      const button = table.tHead.rows[0].cells[{place}].querySelector("button");
      button.click(); button.click();
      const field = document.querySelector('#predictions select[data-column="3"]');
      field.value = "H200"; field.dispatchEvent(new Event("change"));
    </script>"""
    report = tmp_path / "report.html"
    report.write_text(page.page(sections).replace("</body>", clicks + "</body>"), encoding="utf-8")
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--dump-dom",
            "--disable-background-networking",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=3000",
            report.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    shown = done.stdout[done.stdout.index('<table class="sortable"') :]
    shown = shown[shown.index("<tbody>") : shown.index("</tbody>")]
    lines = re.findall(r"<tr( hidden=\"\")?>(.*?)</tr>", shown, re.DOTALL)
    times = [re.findall(r"<td[^>]*>(.*?)</td>", line)[place] for hidden, line in lines if not hidden]
    column = [row for row in listed if row[3].text == "H200"]
    known = [row[place] for row in column if row[place].text]
    wanted = sorted(known, key=lambda cell: -float(cell.key))
    assert times[: len(known)] == [cell.text for cell in wanted]
    assert len(times) == len(column)
    assert f"{len(column)} of {len(listed)} rows" in done.stdout
    assert 'id="theme">Theme: auto' in done.stdout.replace(' hidden=""', "")
