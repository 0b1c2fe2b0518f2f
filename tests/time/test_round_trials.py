"""The table of what was tried: the page's is the command's, its gains are those of the records."""

from __future__ import annotations

import csv
import re

import pytest

from kernels.hopper_forms import BACKWARD_FORMS, FORWARD_FORMS
from repro.measuring.records import load
from repro.timing import round_trials
from repro.timing.round_trials import TRIALS, Trial


def test_the_page_has_the_command_s_table() -> None:
    page = round_trials.BLOCK.path.read_text(encoding="utf-8")
    assert round_trials.BLOCK.put(round_trials.table(), page) == page, (
        "run `python -m repro.timing.round_trials`"
    )


def test_every_number_has_both_sides_and_one_origin() -> None:
    with round_trials.CSV.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["change"] for row in rows} == {trial.change for trial in TRIALS}
    assert {row["nvrtc"] for row in rows} == {"13.0", "13.5"}
    date, commit = round_trials.commit()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    assert re.fullmatch(r"[0-9a-f]{10}", commit)
    names = {form.name for form in (*FORWARD_FORMS, *BACKWARD_FORMS)}
    assert {form for trial in TRIALS for form in trial.forms} - names == {"d256 128x80, pingpong"}


def test_a_gain_is_that_of_the_recorded_times() -> None:
    rates = {
        row.implementation: row.value for row in load(("prototype-time",), local=False)
        if row.seqlen_q == 16384 and row.extra["call"] == 3
    }  # fmt: skip
    want = rates["no_rescale"] / rates["C3_persistent"] - 1
    assert round_trials.gain("C3_persistent", "no_rescale", 16384, 3) == pytest.approx(want)
    lazy = next(trial for trial in TRIALS if trial.change == "lazy rescale")
    assert f"{100 * want:+.1f} % (C3_persistent to no_rescale" in round_trials.measured(lazy)


def test_what_is_not_recorded_is_named() -> None:
    nothing = Trial("polynomial", "exponentials on the FMA pipe", (round_trials.OURS,), "")
    with pytest.raises(LookupError, match="nothing is recorded of polynomial, d128 128x128, pin"):
        round_trials.numbers(nothing, round_trials.OURS, round_trials.ROUND)
    assert round_trials.measured(nothing) == "not measured"
