"""FlexAttention's functions: which option they become, and results as torch's own has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_support import normal
from torch import Tensor
from torch.nn.attention import flex_attention as module_of_torch
from torch.nn.attention.flex_attention import create_block_mask

import repro

N = 96
DOCUMENTS = torch.tensor([0] * 20 + [1] * 33 + [2] * (N - 53))
KEPT = torch.arange(N) % 7 != 3
SLOPES = torch.exp2(-torch.arange(1.0, 3.0))
TABLE = torch.linspace(-2, 2, 2 * N)
KEPT_BLOCKS = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0]], dtype=torch.bool)

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
MASKS: dict[str, tuple[Mask, set[str]]] = {
    "all": (lambda b, h, q, k: q >= 0, set()),
    "causal": (lambda b, h, q, k: q >= k, {"causal"}),
    "window": (lambda b, h, q, k: (q - k <= 9) & (k - q <= 4), {"window"}),
    "causal window": (lambda b, h, q, k: (q >= k) & (q - k <= 20), {"causal", "window"}),
    "sinks": (lambda b, h, q, k: (q >= k) & ((q - k <= 20) | (k < 4)), {"causal", "window", "sinks"}),
    "keys": (lambda b, h, q, k: KEPT[k], {"key_mask"}),
    "keys, causal": (lambda b, h, q, k: KEPT[k] & (q >= k), {"key_mask", "causal"}),
    "documents": (lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k], {"cu_seqlens_q", "cu_seqlens_k"}),
    "documents, causal": (
        lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k),
        {"cu_seqlens_q", "cu_seqlens_k", "causal"},
    ),
    "blocks": (lambda b, h, q, k: KEPT_BLOCKS[q // 32, k // 32], {"block_mask", "tile"}),
    "blocks, causal": (lambda b, h, q, k: KEPT_BLOCKS[q // 32, k // 32] & (q >= k), {"block_mask", "tile", "causal"}),
}
Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
SCORES: dict[str, tuple[Score, set[str]]] = {
    "nothing": (lambda s, b, h, q, k: s, set()),
    "factor": (lambda s, b, h, q, k: s * 0.5, {"scale"}),
    "softcap": (lambda s, b, h, q, k: 20 * torch.tanh(s / 20), {"softcap"}),
    "alibi": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(), {"alibi_slopes"}),
    "softcap, alibi": (
        lambda s, b, h, q, k: 5.5 * torch.tanh(s / 5.5) - SLOPES[h] * (q - k).abs(),
        {"softcap", "alibi_slopes"},
    ),
    "relative": (lambda s, b, h, q, k: s + TABLE[q - k + N], {"bias"}),
}


def dense(q: Tensor, k: Tensor, v: Tensor, score: Score | None, mask: Mask | None) -> tuple[Tensor, Tensor]:
    """All scores at once; torch's own FlexAttention has no backward on a CPU."""
    b, h, rows, keys = torch.meshgrid(*(torch.arange(n) for n in (*q.shape[:3], k.shape[2])), indexing="ij")
    scores = q @ k.mT * q.shape[3] ** -0.5
    if score is not None:
        scores = score(scores, b, h, rows, keys)
    if mask is not None:
        scores = scores.masked_fill(~mask(b, h, rows, keys), -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def both(score: Score | None, mask: Mask | None, *learned: Tensor) -> None:
    """Results and gradients within twice the error of a dense fp32; torch's own forward is the same."""
    q, k, v, dout = (normal(1, 2, N, 32, seed=i) for i in range(4))
    block_mask = None if mask is None else create_block_mask(mask, None, None, N, N, device="cpu", BLOCK_SIZE=32)
    found = []
    for call, dtype in ((dense, torch.float64), (dense, torch.float32), (repro.flex_attention, torch.float32)):
        own = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        if call is dense:
            out, lse = dense(*own, score, mask)
        else:
            out, lse = repro.flex_attention(*own, score, block_mask, return_lse=True)
        gradients = torch.autograd.grad(out, [*own, *learned], dout.to(dtype))
        found.append([x.detach().double() for x in (out, lse, *gradients)])
    for want, dense32, ours in zip(*found, strict=True):
        bound = 2 * float((dense32 - want).abs().max()) + 4 * torch.finfo(torch.float32).eps * float(want.abs().max())
        assert float((ours - want).abs().max()) <= bound


def test_results_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its FlexAttention too, in fp32 of numbers around 1; the dense one alone has gradients here."""
    score, mask = SCORES["softcap, alibi"][0], MASKS["sinks"][0]
    both(score, mask)
    monkeypatch.setattr(module_of_torch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # without its compiler
    q, k, v = (normal(1, 2, N, 32, seed=i) for i in range(3))
    block_mask = create_block_mask(mask, None, None, N, N, device="cpu", BLOCK_SIZE=32)
    theirs = module_of_torch.flex_attention(q, k, v, score_mod=score, block_mask=block_mask)
    assert float((repro.flex_attention(q, k, v, score, block_mask) - theirs).abs().max()) <= 1e-5


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_becomes_an_option(name: str) -> None:
    mask, expected = MASKS[name]
    x = normal(1, 2, N, 32)
    block_mask = create_block_mask(mask, None, None, N, N, device="cpu", BLOCK_SIZE=32)
    assert repro.flex_options(x, x, None, block_mask).keys() == expected


@pytest.mark.parametrize("name", ["keys", "documents, causal", "blocks, causal"])
def test_results_under_a_mask(name: str) -> None:
    both(SCORES["factor"][0], MASKS[name][0])


@pytest.mark.parametrize("name", SCORES)
def test_a_change_of_scores_becomes_an_option(name: str) -> None:
    score, expected = SCORES[name]
    x = normal(1, 2, N, 32)
    for mask in (None, MASKS["causal"][0]):
        block_mask = mask and create_block_mask(mask, None, None, N, N, device="cpu", BLOCK_SIZE=32)
        assert repro.flex_options(x, x, score, block_mask).keys() == expected | ({"causal"} if mask else set())


def test_a_table_that_is_learned_gets_its_gradient() -> None:
    table = TABLE.clone().requires_grad_()
    both(lambda s, b, h, q, k: s + table[q - k + N], MASKS["causal"][0], table)


def test_heads_and_items_may_differ() -> None:
    x = normal(2, 2, 64, 32)
    lengths, slopes = torch.tensor([40, 64]), torch.tensor([[0.5, 0.25], [0.125, 1.0]])
    block_mask = create_block_mask(lambda b, h, q, k: k < lengths[b], 2, None, 64, 64, device="cpu")
    found = repro.flex_options(x, x, lambda s, b, h, q, k: s - slopes[b, h] * (q - k).abs(), block_mask)
    assert found.keys() == {"key_mask", "alibi_slopes"}
    assert torch.equal(found["key_mask"].sum(1), lengths)
    assert torch.equal(found["alibi_slopes"], slopes)


def test_fewer_queries_than_keys() -> None:
    """A causal mask of FlexAttention starts at the first key; shifted by the keys in front it is ours."""
    q, k = normal(1, 2, 16, 32), normal(1, 2, 64, 32)

    def options(mask: Mask) -> dict[str, Any]:
        return repro.flex_options(q, k, None, create_block_mask(mask, None, None, 16, 64, device="cpu"))

    assert options(lambda b, h, i, j: j <= i + 48) == {"causal": True}
    with pytest.raises(ValueError, match="mask_mod hides pairs as no option"):
        options(lambda b, h, i, j: j <= i)


PREFIX: Mask = lambda b, h, q, k: (q >= k) | (k < 30)  # noqa: E731


def test_what_no_option_describes_is_refused_or_stored() -> None:
    x = normal(1, 2, N, 32)
    block_mask = create_block_mask(PREFIX, None, None, N, N, device="cpu")
    with pytest.raises(ValueError, match="stored=True reads it as a bias"):
        repro.flex_options(x, x, None, block_mask)
    out = repro.flex_attention(x, x, x, None, block_mask, stored=True)
    want, _ = dense(x.double(), x.double(), x.double(), None, PREFIX)
    assert float((out - want).abs().max()) <= 1e-5  # fp32 of numbers around 1
    factors, learned = torch.rand(2), torch.ones((), requires_grad=True)
    for score, message in (
        (lambda s, b, h, q, k: s * factors[h], "as no option of the kernels does"),
        (lambda s, b, h, q, k: s * s, "as no option of the kernels does"),
        (lambda s, b, h, q, k: torch.relu(s), "as no option of the kernels does"),
        (lambda s, b, h, q, k: s * learned, "wants a gradient"),
    ):
        with pytest.raises(ValueError, match=message):
            repro.flex_options(x, x, score)
    half = x.half()
    with pytest.raises(ValueError, match=r"torch\.float16 does not hold"):
        repro.flex_options(half, half, SCORES["relative"][0])
    with pytest.raises(ValueError, match=r"block_mask is of \(96, 96\) tokens, query and key of \(95, 95\)"):
        repro.flex_options(x[:, :, 1:], x[:, :, 1:], None, block_mask)
    with pytest.raises(ValueError, match="the kernels take one of the two"):
        repro.flex_options(
            x, x, SCORES["relative"][0], create_block_mask(MASKS["documents"][0], None, None, N, N, device="cpu")
        )
