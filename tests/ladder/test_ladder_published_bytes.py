"""FlashAttention 2022, Fig. 2: the bytes its kernels moved, counted by executing ours.

N = 1024, d = 64, fp16, Br = 16 as released. One head is executed; the paper's run had 64 x 16.
"""

from __future__ import annotations

import pytest
from flash_support import Problem, check
from ladder_support import Counted, execute

from analysis.shapes import Tile

N, D, ITEMSIZE = 1024, 64, 2
ND_BYTES = N * D * ITEMSIZE
HEADS = 64 * 16
ROW_STATISTICS = ("l", "m", "lse", "delta")


def moved(counted: Counted, *, statistics: bool) -> int:
    """Bytes of all kernels, of row statistics or of everything else."""
    return sum(
        count
        for entries in counted.values()
        for (tensor, _), count in entries.items()
        if (tensor in ROW_STATISTICS) == statistics
    )


@pytest.mark.parametrize(("block_n", "published_gb"), [(64, 6.56), (128, 3.37), (256, 1.75), (512, 0.95)])
def test_middle_panel(block_n: int, published_gb: float) -> None:
    """(3 Tc + 1) N d elements; the published points are read off the plot to 0.03 GB."""
    p = Problem(seqlen_q=N, seqlen_k=N)
    run = execute(p, "flash1-skip-first", Tile(16, block_n), backward=False, checks=False)
    check(p, {"out": run.values["out"], "lse": run.values["lse"]})
    tc = N // block_n
    counted = moved(run.forward, statistics=False)
    assert counted == (3 * tc + 1) * ND_BYTES
    assert moved(run.forward, statistics=True) == (2 * tc - 1) * 2 * 4 * N
    assert counted * HEADS / 1e9 == pytest.approx(published_gb, rel=0.015)


def test_left_table() -> None:
    """Forward and backward at Bc = 256 move 13 + 20 = 33 N d elements: the table's 4.4 GB."""
    run = execute(Problem(seqlen_q=N, seqlen_k=N), "flash1-skip-first", Tile(16, 256), checks=False)
    forward, backward = (moved(c, statistics=False) for c in (run.forward, run.backward))
    assert (forward, backward) == (13 * ND_BYTES, 20 * ND_BYTES)
    assert round((forward + backward) * HEADS / 1e9, 1) == 4.4


def test_the_released_form_moves_more_than_the_paper_prints() -> None:
    """An unfinished O and dQ in fp32: 5 Tc - 1 and 6 Tc + 2, 45 N d at Bc = 256, 6.04 GB."""
    p = Problem(seqlen_q=N, seqlen_k=N)
    run = execute(p, "flash1-released", Tile(16, 256), checks=False)
    check(p, {name: run.values[name] for name in ("out", "dq", "dk", "dv")})
    forward, backward = (moved(c, statistics=False) for c in (run.forward, run.backward))
    assert (forward, backward) == (19 * ND_BYTES, 26 * ND_BYTES)
    assert round((forward + backward) * HEADS / 1e9, 2) == 6.04
    assert moved(run.forward, statistics=True) == (4 + 3) * 4 * N  # one statistic a row
    assert moved(run.backward, statistics=True) == (4 + 1 + 3) * 4 * N


def test_the_printed_algorithms_move_more() -> None:
    """Read literally: 3 Tc + 2 and 5 Tc + 4, and the initialisation of O and of dQ."""
    p = Problem(seqlen_q=256, seqlen_k=256)
    run = execute(p, "flash1-literal", Tile(16, 64), checks=False)
    unit, tc = 256 * D * ITEMSIZE, 4
    init, main = run.forward["flash1_init"], run.forward["flash1_forward"]
    assert moved({"": main}, statistics=False) == (3 * tc + 2) * unit
    assert moved({"": init}, statistics=False) == unit
    init, main = run.backward["flash1_backward_init"], run.backward["flash1_backward"]
    assert moved({"": main}, statistics=False) == (5 * tc + 4) * unit
    assert moved({"": init}, statistics=False) == unit


def test_standard_attention_passes() -> None:
    """Four passes over N x N forward, seven backward; one tile a side leaves 4 + 8 of N x d."""
    p = Problem(seqlen_q=64, seqlen_k=64)
    run = execute(p, "standard", Tile(64, 64))
    square, unit = 64 * 64 * ITEMSIZE, 64 * D * ITEMSIZE
    assert moved(run.forward, statistics=False) == 4 * square + 4 * unit
    assert moved(run.backward, statistics=False) == 7 * square + 8 * unit
