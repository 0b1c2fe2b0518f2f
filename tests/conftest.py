"""Fixtures shared by all tests."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test of the operator runs: on the host backend, and on a GPU where there is one."""
    if request.param == "cuda":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
    return str(request.param)
