"""Drawn tests: a few examples each in ``make test``, as many as time allows in ``make fuzz``.

hypothesis draws, makes a failing example as small as it still fails, prints it, and tries it first
in the next run. ``make fuzz FOR_S=60`` shares the seconds among the drawn tests of this folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
"""For all tests that are collected; 0: a fixed number of examples."""
BATCH = 10
"""Examples between two looks at the clock."""
share = SECONDS
"""Of one test; set when the tests are counted (conftest.py)."""


def fuzzed(drawn: st.SearchStrategy[Any], *, examples: int) -> Callable[..., Callable[[], None]]:
    """Makes a function of one drawn value a test of ``examples`` of them, the same ones each time,
    or of new ones until its share of the time is up."""

    def test_of(body: Callable[[Any], None]) -> Callable[[], None]:
        @settings(
            max_examples=BATCH if SECONDS else examples,
            derandomize=not SECONDS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        )
        @given(drawn)
        def try_some(value: Any) -> None:
            body(value)

        def test() -> None:
            until = time.monotonic() + share
            try_some()
            while time.monotonic() < until:
                try_some()

        test.__doc__ = body.__doc__
        test.drawn = True
        test.__name__ = test.__qualname__ = body.__name__
        return test

    return test_of
