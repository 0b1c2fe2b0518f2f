"""Clocks of an SM's units in a round of the Hopper kernels: by hand, and counted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from analysis.sm_ceilings import backward_round, forward_round, warp_backward_round, warp_forward_round
from repro.experiments import Cell, Context
from repro.experiments.bytes.sm_ceilings import cells, round_of, shared_bytes
from repro.measuring import records

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pages" / "hopper.md"


def test_forward_by_hand() -> None:
    """128 x 128 at d = 128: two warpgroups, 64 wgmma of 64 x 128 x 16 in all, 64 clocks each.

    Scores: 8 steps of 2 KiB of Q and 4 KiB of K for each warpgroup; P V: 8 steps of 4 KiB of V; K
    and V arrive, 32 KiB each.
    """
    found = forward_round(128, 128, 128)
    clocks = found.clocks(instructions=461)
    assert clocks["tensor cores"] == 2 * 16 * 64
    assert found.all_shared_bytes == 1024 * (2 * 8 * 6 + 2 * 8 * 4 + 64)
    assert clocks["shared memory"] == 1792
    # A MUFU takes a scheduler 8 clocks: 64 scores and 2 factors a thread, a warp of each group.
    assert clocks["exponentials"] == 2 * 66 * 8
    assert clocks["issue slots"] == 922
    assert found.tensor_share(461) == 1
    lean = forward_round(128, 128, 128, optimistic=True)
    assert lean.clocks()["exponentials"] == 2 * 64 * 8
    assert lean.shared_bytes == found.shared_bytes


def test_backward_by_hand() -> None:
    """64 queries x 128 keys at d = 128: by products of a warpgroup, twice, and the rest.

    S and dP: 8 steps of 2 KiB of K or V and 2 KiB of Q or dO; dV and dK: 4 steps of 4 KiB of dO or
    Q; dQ: 8 steps of 2 KiB of dS and 2 KiB of K. Then dS 16 KiB in; dQ 32 KiB in and out; Q and dO
    16 KiB each and 512 bytes of statistics arrive; 16 loads of statistics a warp, a clock each.
    """
    found = backward_round(128, 64)
    clocks = found.clocks()
    assert clocks["tensor cores"] == 2 * (8 * 32 + 8 * 32 + 4 * 64 + 4 * 64 + 8 * 32)
    products = 2 * 1024 * (8 * 4 + 8 * 4 + 4 * 4 + 4 * 4 + 8 * 4)
    rest = 1024 * (16 + 2 * 32 + 2 * 16) + 512
    loads = 8 * 16
    assert found.all_shared_bytes == products + rest + loads * 256
    assert clocks["shared memory"] == (products + rest) / 128 + loads
    assert clocks["shared memory"] > clocks["tensor cores"]


def test_warps_that_load_their_own_operands_by_hand() -> None:
    """sm_80, d = 128. Forward, 128 x 64 with 8 warps of 16 queries: each reads the 16 KiB of K and
    of V. Backward, 64 x 128 with 8 warps of 16 keys: two chunks of 32 queries read K and V (32 KiB)
    again, each warp reads Q and dO (16 KiB) twice; dS in, and out for four columns of 32; K for
    four rows of 16."""
    found = warp_forward_round(128, 128, 64, warps=8)
    assert found.all_shared_bytes == 1024 * (8 * 16 + 8 * 16 + 2 * 16)
    assert found.clocks()["shared memory"] == 2304
    assert found.clocks()["tensor cores"] == 1024
    assert found.clocks(tensor_flops_per_clock=2048)["tensor cores"] == 2048  # an A100's
    assert found.tensor_share() == 1024 / 2304
    # With room for Q in no register, it is read in every round: 64 queries of 128 a warp.
    assert warp_forward_round(128, 128, 64, warps=2).shared_bytes["Q for S"] == 32 * 1024
    back = warp_backward_round(128, 64, 128, warps=8)
    products = 2 * 2 * 32 + 4 * 8 * 16 + 4 * 16 + 4 * 32
    assert back.all_shared_bytes == 1024 * (products + 16 + 2 * 16) + 512 + 8 * 16 * 256
    assert back.clocks()["tensor cores"] == 2560
    with pytest.raises(ValueError, match="head_dim=256: beyond 128"):
        warp_backward_round(256, 64, 128, warps=8)
    with pytest.raises(ValueError, match="100 rows are no multiple of the 64"):
        warp_forward_round(64, 100, 64, warps=4)


@pytest.mark.parametrize("cell", cells(), ids=str)
def test_counted_bytes_are_the_predicted_ones(cell: Cell) -> None:
    assert shared_bytes(cell, Context("host")) == round_of(cell).all_shared_bytes


def test_the_page_s_table_and_sentences() -> None:
    """``docs/pages/hopper.md``: clocks by the formulas, issue slots by the committed record."""
    text = PAGE.read_text()
    rows = re.findall(r"^\| (forward|backward), d = (\d+), (\d+) × (\d+) \|(.*)\|$", text, re.M)
    assert len(rows) == 5
    recorded = records.load(["sm-ceilings"], local=False)
    for pass_, *sizes, numbers in rows:
        head_dim, block_m, block_n = (int(size) for size in sizes)
        found = forward_round(head_dim, block_m, block_n) if pass_ == "forward" else backward_round(head_dim, block_m)
        (instructions,) = {
            r.value
            for r in recorded
            if r.metric == "warp_instructions"
            and r.implementation == "flash-sm90"
            and (r.pass_, r.head_dim, r.block_m, r.block_n) == (pass_, head_dim, block_m, block_n)
        }
        clocks = list(found.clocks(int(instructions)).values())
        shown = [cell.strip() for cell in numbers.split("|")]
        assert [float(cell.strip("*")) for cell in shown] == clocks
        most = max(clocks)
        assert [cell.startswith("**") for cell in shown] == [clock == most for clock in clocks]
    direct = [
        backward_round(d, m, dq_from_registers=True).clocks()["shared memory"]
        for d, m in ((64, 128), (128, 64), (128, 80))
    ]
    assert "{:g}, {:g} and {:g} clocks".format(*direct) in text


def test_tiles_that_no_warpgroups_divide() -> None:
    with pytest.raises(ValueError, match="block_m=100 is no multiple of a warpgroup's 64 rows"):
        forward_round(64, 100, 128)
    with pytest.raises(ValueError, match="neither block_m=80 nor head_dim=64"):
        backward_round(64, 80)
