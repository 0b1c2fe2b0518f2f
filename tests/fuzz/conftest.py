"""Fuzz tests run with the host's checks on, and share the time that ``make fuzz`` gives them."""

from __future__ import annotations

import fuzzing
import pytest

from repro.attention.launcher import CHECKS_VARIABLE


@pytest.fixture(autouse=True)
def with_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECKS_VARIABLE, "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    drawn = [item for item in items if getattr(getattr(item, "obj", None), "drawn", False)]
    fuzzing.share = fuzzing.SECONDS / max(1, len(drawn))
