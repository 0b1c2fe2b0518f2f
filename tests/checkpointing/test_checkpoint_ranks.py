"""Planned models on several ranks: DistributedDataParallel and FSDP2 see an ordinary graph."""

from __future__ import annotations

import pytest
from ranks import PLANNED_WRAPS, results


@pytest.mark.parametrize("wrap", PLANNED_WRAPS)
def test_planned_models_train_as_plain_ones_do(wrap: str) -> None:
    """Also called twice before one backward, and with parameters that are not used."""
    assert results(2)["planned"][wrap] == {
        "store-all": True,
        "recompute-all": True,
        "sqrt": True,
    }
