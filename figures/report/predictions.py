"""The report's table of predictions: what ``python -m repro predict`` says, of models and cards.

The rows are what the command prints as CSV, so the page and a terminal cannot disagree; each row
has the command of its own, to be run again with other numbers.
"""

from __future__ import annotations

import html
import io
import shlex
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass

import pandas

from repro.__main__ import app
from repro.commands import output
from repro.commands.chains import PRESETS

MODELS = ("gpt2-small", "gpt2-xl", "gpt3-175b", "llama3-8b", "llama3-70b", "qwen2.5-7b")
"""Causal attention of one layer, as ``repro.commands.chains`` has the sizes."""
LENGTHS = (1024, 4096, 16384, 65536)
PASSES = ("forward", "backward")
GPUS = ("A100-SXM4-80GB", "H100-SXM5-80GB", "H200", "B200", "RTX 4090")
L2 = "waves"
"""HBM bytes from whole waves of blocks: as ``predict`` does by itself for a sweep of this size."""
FILTERS = ("model", "length", "pass", "GPU")
HEADERS = (*FILTERS, "kernel", "SM boundary", "HBM", "peak memory", "time ≥", "bound by", "time ≈", "command")


@dataclass(frozen=True)
class Cell:
    """A cell: what is shown, and what the column is sorted by."""

    text: str
    key: float | str


def command(model: str, lengths: Sequence[int], pass_: str, gpus: Sequence[str]) -> str:
    """The command that predicts one layer's attention of a model; one point, or all of a sweep."""
    sizes = PRESETS[model]
    words = [
        *("python", "-m", "repro", "predict"),
        *("-n", ",".join(str(length) for length in lengths)),
        *("--heads", str(sizes.heads)),
        *("--kv-heads", str(sizes.groups)),
        *("-d", str(sizes.head_width)),
        "--causal",
        *("--pass", pass_),
        *("--gpu", ",".join(gpus)),
        *("--l2", L2),
    ]
    return shlex.join(words)


def printed(text: str) -> pandas.DataFrame:
    """What a command of :func:`command` prints with ``--csv``."""
    words = shlex.split(text)[3:]
    with redirect_stdout(io.StringIO()) as caught:
        app([*words, "--csv"], standalone_mode=False)
    return pandas.read_csv(io.StringIO(caught.getvalue()))


def rows(models: Sequence[str] = MODELS) -> Iterator[list[Cell]]:
    """A row of cells for each model, length, pass and card."""
    for model in models:
        for _, row in printed(command(model, LENGTHS, "all", GPUS)).iterrows():
            length, pass_, gpu = int(row["seqlen_q"]), str(row["pass"]), str(row["gpu"])
            point = command(model, [length], pass_, [gpu])
            yield [
                Cell(model, model),
                Cell(str(length), length),
                Cell(pass_, pass_),
                Cell(gpu, gpu),
                *_numbers(row),
                Cell(point, point),
            ]


def _numbers(row: pandas.Series) -> list[Cell]:
    """The cells between what was asked for and the command; a point that cannot be has a reason."""
    if isinstance(row.get("error"), str):
        return [Cell(row["error"], row["error"]), *[Cell("", "")] * 6]
    kernel = row["algorithm"]
    if isinstance(row["form"], str):
        kernel = f"{kernel}, {row['form']}"
    sm = row["sm_read_bytes"] + row["sm_write_bytes"]
    hbm = row["hbm_read_bytes"] + row["hbm_write_bytes"]
    predicted = row["time_predicted_s"]
    shown = ""
    if not pandas.isna(predicted):
        ends = row["time_low_s"], row["time_high_s"]
        shown = f"{output.between(output.of_seconds, *ends)} {row['time_state']}"
    return [
        Cell(kernel, kernel),
        Cell(output.of_bytes(sm), sm),
        Cell(output.of_bytes(hbm), hbm),
        Cell(output.of_bytes(row["peak_bytes"]), row["peak_bytes"]),
        Cell(output.of_seconds(row["time_bound_s"]), row["time_bound_s"]),
        Cell(row["bound_by"], row["bound_by"]),
        Cell(shown, predicted if shown else ""),
    ]


def section(listed: Sequence[Sequence[Cell]] | None = None) -> str:
    """The table under a field for each of :data:`FILTERS`; without a script it shows all rows."""
    listed = list(rows()) if listed is None else listed
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in HEADERS)
    body = "".join(_line(row) for row in listed)
    fields = "".join(_filter(place, name, listed) for place, name in enumerate(FILTERS))
    return (
        "<p>Attention of one layer, batch 1, bf16, causal: the kernel that "
        "<code>repro.flash_attention</code> runs on each card, bytes, peak memory, a lower bound "
        "of its time from the datasheet and, where the kernel's machine code has been followed, "
        "the predicted time. A click on a heading sorts. Each row ends with the command that "
        "computes it; <code>python -m repro predict --help</code> has the options for other "
        "numbers.</p>"
        f'<p class="choices" hidden>{fields}<output></output></p>'
        '<div class="scroll tall" role="region" tabindex="0" aria-label="Predictions">'
        f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _line(row: Sequence[Cell]) -> str:
    cells = []
    for name, cell in zip(HEADERS, row, strict=True):
        text = html.escape(cell.text)
        shown = f"<code>{text}</code>" if name == "command" else text
        key = "" if str(cell.key) == cell.text else f' data-key="{html.escape(str(cell.key))}"'
        cells.append(f"<td{key}>{shown}</td>")
    return f"<tr>{''.join(cells)}</tr>\n"


def _filter(place: int, name: str, listed: Sequence[Sequence[Cell]]) -> str:
    values = dict.fromkeys(row[place].text for row in listed)
    options = "".join(f"<option>{html.escape(value)}</option>" for value in values)
    return f'<label>{name} <select data-column="{place}"><option value="">all</option>{options}</select></label>'
