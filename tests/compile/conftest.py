"""Tests that take ``nvrtc`` run for every version at hand (``kernels.building.nvrtc``)."""

from __future__ import annotations

import pytest

from kernels.building.nvrtc import versions


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "nvrtc" not in metafunc.fixturenames:
        return
    try:
        found = versions()
    except (ImportError, OSError, RuntimeError) as error:
        missing = pytest.param("missing", marks=pytest.mark.skip(reason=str(error)))
        metafunc.parametrize("nvrtc", [missing])
    else:
        metafunc.parametrize("nvrtc", found, ids=lambda version: f"NVRTC {version}")
