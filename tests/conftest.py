"""Fixtures shared by all tests."""

from __future__ import annotations

import pytest

try:
    from hypothesis import settings
except ImportError:  # a rented GPU machine
    pass
else:
    settings.register_profile("no clock", deadline=None)  # a busy machine is no fault of the code
    settings.load_profile("no clock")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test of the operator runs: on the host backend, and on a GPU where there is one."""
    if request.param == "cuda":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
    return str(request.param)
