"""docs/pages/coverage.md is what the drivers say, with every option of the operator."""

from __future__ import annotations

import inspect

import repro
from kernels import coverage


def test_the_table_is_what_the_drivers_say() -> None:
    page = coverage.BLOCK.path.read_text()
    assert page == coverage.BLOCK.put(coverage.table(), page)


def test_every_option_of_the_operator_has_a_line() -> None:
    """But for the numbers that every kernel takes."""
    options = set(inspect.signature(repro.flash_attention).parameters)
    options -= {"q", "k", "v", "scale", "seed"}
    named = " ".join(option.name for option in (*coverage.OPTIONS, coverage.DETERMINISTIC))
    assert not {name for name in options if f"`{name}" not in named}


def test_a_refused_option_is_seen() -> None:
    window = next(option for option in coverage.OPTIONS if option.name == "`window`")
    assert coverage.mark("flash", window) == "yes"
    assert coverage.mark("flash-sm90", window) == "yes"
    assert coverage.mark("flash-sm90-optimistic", window) == "backward only"
    bias = next(option for option in coverage.OPTIONS if "`bias`" in option.name)
    assert coverage.mark("flash-sm90", bias) == "–"
    assert coverage.takes(coverage.AUTO, bias, "backward") == "flash"
    sawtooth = next(option for option in coverage.OPTIONS if "sawtooth" in option.name)
    assert coverage.mark("flash-sm90-deterministic", sawtooth) == "forward only"


def test_every_option_runs_somewhere_and_the_operator_picks_what_takes_it() -> None:
    """So that a dash is a refusal, not a line of the table that asks wrongly."""
    for option in (*coverage.OPTIONS, coverage.DETERMINISTIC):
        for pass_ in option.passes:
            picked = coverage.takes(coverage.AUTO, option, pass_)
            assert picked is not None, option.name
            if option is not coverage.DETERMINISTIC:
                assert coverage.takes(picked, option, pass_) == picked
                assert coverage.takes("flash", option, pass_) == "flash"
