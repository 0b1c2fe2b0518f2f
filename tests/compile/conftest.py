"""Tests that take ``nvrtc`` run for every version at hand (``kernels.building.nvrtc``)."""

from __future__ import annotations

import pytest

from kernels.building.nvrtc import SECOND, versions


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "nvrtc" not in metafunc.fixturenames:
        return
    try:
        found = versions()
    except (ImportError, OSError, RuntimeError) as error:
        missing = pytest.param("missing", marks=pytest.mark.skip(reason=str(error)))
        metafunc.parametrize("nvrtc", [missing])
    else:
        params = [pytest.param(version, id=f"NVRTC {version}") for version in found]
        if len(found) == 1:
            reason = f"only NVRTC {found[0]} is at hand: {SECOND} names another one"
            params.append(pytest.param("", id="a second NVRTC", marks=pytest.mark.skip(reason)))
        metafunc.parametrize("nvrtc", params)
