"""Ring attention: exact against one rank, its traffic as predicted, its merge exact."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import FLASH_CASES, RING_CASES, TYPES, results, rows

from analysis.ring import causal_pairs, ring_bytes
from analysis.shapes import AttentionShape
from repro.distributed.measure import RING
from repro.distributed.ring_attention import DenseLocal, merge, parts, ring_attention, take_local


@given(cuts=st.lists(st.integers(1, 15), max_size=3), causal=st.booleans(), seed=st.integers(0, 99))
def test_merging_parts_gives_the_whole(cuts: list[int], causal: bool, seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (5, 16, 16))
    local, scale = DenseLocal(), 0.5
    if causal:  # hide a random part of the keys from everyone
        k[:, :, torch.randint(16, (3,))] = -1e4 * q.sum(2, keepdim=True).sign()
    whole = local.forward(q, k, v, False, scale)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    edges = [0, *sorted(set(cuts)), 16]
    for first, last in pairwise(edges):
        part = local.forward(q, k[:, :, first:last], v[:, :, first:last], False, scale)
        out, lse = merge(out, lse, *part)
    # Weights are exp(score - lse): the rounding of an exponent is the relative error of a weight.
    bound = 8 * torch.finfo(torch.float64).eps * max(1.0, float(whole[1].abs().max()))
    torch.testing.assert_close(out, whole[0], rtol=bound, atol=bound)
    torch.testing.assert_close(lse, whole[1], rtol=bound, atol=bound)


def test_merge_with_nothing_is_exact() -> None:
    out, lse = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3)
    empty = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for merged in (merge(out, lse, *empty), merge(*empty, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    nothing = merge(*empty, *empty)
    assert torch.equal(nothing[0], empty[0])
    assert torch.equal(nothing[1], empty[1])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_ring_equals_one_rank(ranks: int) -> None:
    """float64: out, lse, dq, dk, dv; causal or not, grouped heads, both placements."""
    for case, difference in zip(RING_CASES, results(ranks, "rings")["difference"], strict=True):
        assert difference < 1e-12, case


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_ring_sends_what_is_predicted(ranks: int) -> None:
    batch, heads, kv_heads, seqlen, head_dim = RING
    shape = AttentionShape(batch, heads, seqlen, seqlen, head_dim, kv_heads, "fp32")
    for row in rows(ranks, "rings", metric="sent_bytes"):
        assert row["value"] == ring_bytes(shape, ranks, row["pass"]) > 0


def test_ring_on_our_operator_errs_no_more_than_dense_attention() -> None:
    """At most twice the error of dense attention in the same type on one rank."""
    from repro.distributed.measure import one_rank

    batch, heads, kv_heads, seqlen, head_dim = RING
    for (causal, _, name), errors in zip(FLASH_CASES, results(2, "rings")["flash"], strict=True):
        generator = torch.Generator().manual_seed(1)
        whole = [
            torch.randn(batch, h, seqlen, head_dim, generator=generator).to(TYPES[name])
            for h in (heads, kv_heads, kv_heads, heads)
        ]
        exact = one_rank(causal, *(x.double() for x in whole))
        single = [float((a.double() - b).abs().max()) for a, b in zip(one_rank(causal, *whole), exact, strict=True)]
        assert 0 < errors["forward"] <= 2 * single[0], name
        assert 0 < errors["backward"] <= 2 * max(single[1:]), name


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_causal_balance(ranks: int) -> None:
    seqlen = 64
    total = seqlen * (seqlen + 1) // 2
    contiguous = causal_pairs(seqlen, ranks, "contiguous")
    zigzag = causal_pairs(seqlen, ranks, "zigzag")
    assert sum(contiguous) == sum(zigzag) == total
    assert len(set(zigzag)) == 1
    assert max(contiguous) / min(contiguous) <= 2 * ranks - 1
    # the placement's parts, counted one by one
    for rank in range(ranks):
        held = parts(rank, ranks, seqlen // ranks, "zigzag")
        positions = [p.start + i for p in held for i in range(p.length)]
        assert sum(p + 1 for p in positions) == zigzag[rank]


def test_bad_arguments() -> None:
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"q \(1, 1, 4, 8\), k \(1, 1, 5, 8\)"):
        ring_attention(q, torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 5, 8))
    with pytest.raises(ValueError, match="got 'spiral'"):
        ring_attention(q, q, q, placement="spiral")
    with pytest.raises(ValueError, match="even number of local rows, got 3"):
        parts(0, 2, 3, "zigzag")
    with pytest.raises(ValueError, match="seqlen 7 does not divide among 2 ranks"):
        take_local(torch.zeros(1, 1, 7, 8), 0, 2)
    with pytest.raises(ValueError, match="got 'sideways'"):
        ring_bytes(AttentionShape(1, 1, 8, 8, 8), 2, "sideways")
    with pytest.raises(ValueError, match="does not divide into zigzag chunks on 4 ranks"):
        causal_pairs(12, 4, "zigzag")
