"""Peak memory on a real device: two blocks, nested regions, both pools."""

from __future__ import annotations

import pytest

from repro.measuring import machine

pytestmark = pytest.mark.skipif(machine.gpu() is None, reason="needs an NVIDIA GPU, none found")

BLOCK = 256 << 20


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_two_blocks_of_which_one_is_freed(library: str) -> None:
    import torch

    from repro.checkpointing import memory_meter

    def block(nbytes: int = BLOCK) -> object:
        if library == "torch":
            return torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        cupy = pytest.importorskip("cupy", reason="needs CuPy")
        return cupy.empty(nbytes, dtype=cupy.uint8)

    earlier = block(4 * BLOCK)
    del earlier
    with memory_meter("cuda") as meter, meter.region("outer") as outer:
        first = block()
        with meter.region("inner") as inner:
            second = block()
        del first
    assert (outer.peak_bytes, outer.end_bytes) == (2 * BLOCK, BLOCK)
    assert (inner.peak_bytes, inner.end_bytes) == (BLOCK, BLOCK)
    assert outer.reserved_peak_bytes is not None
    assert outer.reserved_peak_bytes >= 4 * BLOCK
    del second
