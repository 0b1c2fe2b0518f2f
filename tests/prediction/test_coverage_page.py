"""docs/pages/coverage.md is what the drivers say, with every option of the operator."""

from __future__ import annotations

import inspect

import repro
from analysis.features import FEATURES, PASSES
from kernels import coverage


def test_the_table_is_what_the_drivers_say() -> None:
    page = coverage.BLOCK.path.read_text()
    assert page == coverage.BLOCK.put(coverage.table(), page)


def test_every_option_of_the_operator_has_a_line() -> None:
    """But for the numbers that every kernel takes."""
    options = set(inspect.signature(repro.flash_attention).parameters)
    options -= {"q", "k", "v", "scale", "seed"}
    named = " ".join(name for name, _, _ in coverage.lines())
    assert not {name for name in options if f"`{name}" not in named}


def test_a_refused_option_is_seen() -> None:
    lines = {name: problem for name, problem, _ in coverage.lines()}
    window = lines["`window`"]
    assert coverage.mark("flash", window) == "yes"
    assert coverage.mark("flash-sm90", window) == "yes"
    assert coverage.mark("flash-sm90-optimistic", window) == "backward only"
    bias = lines["`bias`, and its gradient"]
    assert coverage.mark("flash-sm90", bias) == "–"
    assert coverage.takes(coverage.AUTO, bias, "backward") == "flash"
    sawtooth = lines['`order="sawtooth"`']
    assert coverage.mark("flash-sm90-deterministic", sawtooth) == "forward only"


def test_every_option_runs_somewhere_and_the_operator_picks_what_takes_it() -> None:
    """So that a dash is a refusal, not a line of the table that asks wrongly."""
    for name, problem, option in coverage.lines():
        for pass_ in PASSES if option is None else option.passes:
            picked = coverage.takes(coverage.AUTO, problem, pass_)
            assert picked is not None, name
            if option is not FEATURES["deterministic"]:
                assert coverage.takes(picked, problem, pass_) == picked
                assert coverage.takes("flash", problem, pass_) == "flash"
