"""Property tests: identities of attention, on drawn lengths."""

from __future__ import annotations

import torch
from attention_support import inputs, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import repro

SETTINGS = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@settings(SETTINGS, max_examples=10)
@given(st.integers(1, 90), st.integers(0, 2**31 - 1))
def test_keys_may_be_permuted(seqlen: int, seed: int) -> None:
    """Softmax does not know the order of the keys: out stays, dk and dv move with them."""
    q, k, v, dout = inputs(1, 2, 33, seqlen, 16, seed=seed)
    order = torch.randperm(seqlen, generator=torch.Generator().manual_seed(seed))
    first = run(q, k, v, dout)
    second = run(q, k[:, :, order], v[:, :, order], dout)
    close = {"rtol": 1e-5, "atol": 2e-6}
    torch.testing.assert_close(second.out, first.out, **close)
    torch.testing.assert_close(second.lse, first.lse, **close)
    torch.testing.assert_close(second.dk, first.dk[:, :, order], **close)
    torch.testing.assert_close(second.dv, first.dv[:, :, order], **close)


@settings(SETTINGS, max_examples=10)
@given(st.integers(2, 90), st.data())
def test_two_halves_combine_by_their_row_sums(seqlen: int, data: st.DataObject) -> None:
    """(out, lse) of two sets of keys give those of the union: what lse is returned for."""
    cut = data.draw(st.integers(1, seqlen - 1))
    q, k, v, _ = inputs(1, 2, 33, seqlen, 16, seed=seqlen)
    whole, whole_lse = repro.flash_attention(q, k, v, return_lse=True)
    parts = [
        repro.flash_attention(q, k[:, :, span], v[:, :, span], return_lse=True)
        for span in (slice(0, cut), slice(cut, None))
    ]
    lse = torch.logsumexp(torch.stack([stats for _, stats in parts]), 0)
    out = sum(torch.exp(stats - lse)[..., None] * rows for rows, stats in parts)
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=2e-6)


@settings(SETTINGS, max_examples=10)
@given(st.integers(1, 80), st.booleans())
def test_gradients_are_orthogonal_to_what_changes_nothing(seqlen: int, causal: bool) -> None:
    """Adding one vector to every key shifts all scores of a row alike, so Σ_j dk_j = 0."""
    q, k, v, dout = inputs(1, 1, seqlen, seqlen, 16, seed=seqlen)
    dk = run(q, k, v, dout, causal=causal).dk
    assert float(dk.double().sum(2).abs().max()) <= 1e-5 * max(1.0, float(dk.abs().sum(2).max()))
