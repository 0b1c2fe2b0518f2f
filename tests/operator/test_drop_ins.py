"""The operator by the names of torch, FlashAttention and transformers, held to what they mean."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_support import BOUNDS, normal
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as reference_of_torch

import repro
from repro.integrations import flash_attn


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    scale = max(1.0, float(expected.detach().abs().max()))
    assert (found.double() - expected.double()).abs().max() <= BOUNDS[torch.float32][1] * scale


LEAD = {"items and heads": (2, 3), "heads alone": (3,), "neither": (), "three": (2, 2, 3)}
MASKS = ("none", "causal", "boolean", "keys", "float")
#: Rows, keys and columns of v.
SIZES = [(9, 9, 16), (5, 21, 8), (21, 5, 24)]


@pytest.mark.parametrize("lead", LEAD)
@pytest.mark.parametrize("mask", MASKS)
def test_sdpa_means_what_torch_means(lead: str, mask: str) -> None:
    """Results and gradients, the mask's included; rows that see nothing are 0 in both."""
    shape = LEAD[lead]
    rows, keys, width = SIZES[(list(LEAD).index(lead) + MASKS.index(mask)) % len(SIZES)]
    q, k, v = normal(*shape, rows, 16), normal(*shape, keys, 16), normal(*shape, keys, width)
    options: dict[str, Any] = {"is_causal": mask == "causal"}
    leaves = [q, k, v]
    if mask == "boolean":
        options["attn_mask"] = normal(rows, keys, seed=1) > 0
        options["attn_mask"][0] = False
    if mask == "keys":
        options["attn_mask"] = normal(*shape[:-1], *(1,) * bool(shape), 1, keys, seed=2) > 0
    if mask == "float":
        options["attn_mask"] = normal(*shape, rows, keys, seed=3)
        leaves.append(options["attn_mask"])
    found, expected = [], []
    for call, into in ((repro.scaled_dot_product_attention, found), (reference_of_torch, expected)):
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        given = options | ({"attn_mask": own[3]} if len(own) > 3 else {})
        out = call(*own[:3], **given)
        into.append(out)
        into.extend(torch.autograd.grad(out.square().sum(), own))
    for a, b in zip(found, expected, strict=True):
        close(a, b)


def test_sdpa_takes_grouped_heads_and_a_scale_when_asked() -> None:
    q, k, v = normal(2, 4, 9, 16), normal(2, 2, 9, 16), normal(2, 2, 9, 16)
    found = repro.scaled_dot_product_attention(q, k, v, scale=0.5, enable_gqa=True)
    close(found, reference_of_torch(q, k, v, scale=0.5, enable_gqa=True))
    with pytest.raises(ValueError, match=r"\(2, 4\) and \(2, 2\); enable_gqa=True"):
        repro.scaled_dot_product_attention(q, k, v)


def test_sdpa_refuses_what_torch_refuses() -> None:
    q = normal(2, 3, 9, 16)
    with pytest.raises(ValueError, match="exclude each other"):
        repro.scaled_dot_product_attention(q, q, q, q[0, 0] > 0, is_causal=True)
    with pytest.raises(ValueError, match=r"\(4, 9\) does not broadcast to .* \(2, 3, 9, 9\)"):
        repro.scaled_dot_product_attention(q, q, q, torch.ones(4, 9, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"booleans or floats, got torch\.int64"):
        repro.scaled_dot_product_attention(q, q, q, torch.ones(9, 9, dtype=torch.int64))
    nested = torch.nested.nested_tensor([q[0], q[1]], layout=torch.jagged)
    with pytest.raises(TypeError, match="query is a nested tensor"):
        repro.scaled_dot_product_attention(nested, q, q)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence (N, H, D) in float64: out and lse (H, N)."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[2])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = scores.shape[1:]
    ahead = torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * ahead.abs()
    left, right = window
    hidden = (ahead > 0) & causal
    hidden |= (ahead < -left) if left >= 0 else torch.zeros_like(hidden)
    hidden |= (ahead > right) if right >= 0 else torch.zeros_like(hidden)
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.nan_to_num(torch.exp(scores - lse[..., None]))
    return (weights @ v).transpose(0, 1), lse


FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": False, "window": (4, 2)},
    "cap and slopes": {"causal": True, "softcap": 1.5, "slopes": torch.tensor([0.5, 0.25])},
}


def theirs(features: dict[str, Any]) -> dict[str, Any]:
    """Options by FlashAttention's names."""
    names = {"window": "window_size", "slopes": "alibi_slopes"}
    return {names.get(name, name): value for name, value in features.items()}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
def test_flash_attn_functions_agree_in_every_layout(features: dict[str, Any]) -> None:
    q, k, v = normal(2, 9, 2, 16), normal(2, 9, 2, 16, seed=1), normal(2, 9, 2, 16, seed=2)
    expected = [dense(*item, **features) for item in zip(q, k, v, strict=True)]
    options = theirs(features)
    out, lse, nothing = flash_attn.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    assert nothing is None
    close(out, torch.stack([o for o, _ in expected]))
    close(lse, torch.stack([x for _, x in expected]))
    packed = flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options)
    pairs = flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options)
    assert torch.equal(packed, out)
    assert torch.equal(pairs, out)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
def test_flash_attn_packed_functions_agree_with_separate_sequences(features: dict[str, Any]) -> None:
    lengths = (5, 0, 9)
    starts = torch.tensor([0, 5, 5, 14], dtype=torch.int32)
    q, k, v = normal(14, 2, 16), normal(14, 2, 16, seed=1), normal(14, 2, 16, seed=2)
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    expected = [dense(*part, **features) for part in parts]
    options = theirs(features)
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, starts, starts, 9, 9, **options, return_attn_probs=True)
    close(out, torch.cat([o for o, _ in expected]))
    close(lse, torch.cat([x for _, x in expected], dim=1))
    qkv = torch.stack([q, k, v], 1)
    assert torch.equal(flash_attn.flash_attn_varlen_qkvpacked_func(qkv, starts, 9, **options), out)
    assert torch.equal(flash_attn.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], starts, starts, 9, 9, **options), out)
    pages, table = torch.zeros(3, 16, 2, 2, 16), torch.tensor([[2], [1], [0]], dtype=torch.int32)
    for page, part in zip((2, 1, 0), qkv[:, 1:].split(lengths), strict=True):
        pages[page, : len(part)] = part
    paged = flash_attn.flash_attn_varlen_func(
        q, pages[:, :, 0], pages[:, :, 1], starts, starts, 9, 9, **options, block_table=table
    )
    assert torch.equal(paged, out)


def rotated(x: Tensor, angle: Tensor, position: int, *, interleaved: bool) -> Tensor:
    """One row (H, D), each pair turned as a complex number."""
    half = len(angle)
    pairs = (
        x[:, : 2 * half].reshape(-1, half, 2) if interleaved else torch.stack([x[:, :half], x[:, half : 2 * half]], -1)
    )
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(half), position * angle)
    )
    first = turned.flatten(1) if interleaved else torch.cat([turned[..., 0], turned[..., 1]], 1)
    return torch.cat([first, x[:, 2 * half :]], 1)


CACHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pages": {"pages": True},
    "chosen items": {"items": [2, 0]},
    "left padding": {"left": [1, 3]},
    "window": {"window": (4, 0)},
    "cap and slopes": {"softcap": 1.5, "slopes": torch.tensor([0.5, 0.25])},
    "width 20": {"width": 20},
    "rotary": {"rotary": True},
    "rotary by halves": {"rotary": False},
    "window in pages": {"pages": True, "window": (4, 0), "rotary": True},
}


@pytest.mark.parametrize("case", CACHES.values(), ids=CACHES.keys())
@pytest.mark.parametrize("new", [0, 3])
def test_flash_attn_with_kvcache(case: dict[str, Any], new: int) -> None:
    """New keys are appended in place, and each sequence is what it would be by itself."""
    if new == 0 and "rotary" in case:
        pytest.skip("a cache is rotated when keys are appended")
    width, rows = case.get("width", 16), new or 2
    lengths, items = [17, 9], case.get("items", [0, 1])
    left = case.get("left", [0, 0])
    cache = normal(3, 32, 2, 2, width)
    q, fresh = normal(2, rows, 2, width, seed=1), normal(2, rows, 2, 2, width, seed=2)
    angle = torch.tensor([1.0, 0.1, 0.01])
    expected = []
    for n, item in enumerate(items):
        k, v = cache[item].clone().unbind(1)
        queries, keys, length = q[n].clone(), fresh[n, :, 0].clone(), lengths[n]
        if "rotary" in case:
            for i in range(rows):
                how = {"interleaved": case["rotary"]}
                queries[i] = rotated(queries[i], angle, length + i, **how)
                keys[i] = rotated(keys[i], angle, length + i, **how)
        k[length : length + new] = keys[:new]
        v[length : length + new] = fresh[n, :new, 1]
        seen = slice(left[n], length + new)
        features = {x: case[x] for x in ("window", "softcap", "slopes") if x in case}
        expected.append(dense(queries, k[seen], v[seen], causal=True, **features))
    options = theirs({x: case[x] for x in ("window", "softcap", "slopes") if x in case})
    if "items" in case:
        options["cache_batch_idx"] = torch.tensor(items)
    if "left" in case:
        options["cache_leftpad"] = torch.tensor(left)
    k_cache, v_cache = (x.clone() for x in cache.unbind(2))
    if "pages" in case:
        k_cache, v_cache = (x.reshape(6, 16, 2, width) for x in (k_cache, v_cache))
        options["block_table"] = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    if "rotary" in case:
        turns = torch.arange(32.0)[:, None] * angle
        options |= {"rotary_cos": turns.cos(), "rotary_sin": turns.sin()}
        options["rotary_interleaved"] = case["rotary"]
    if new:
        options |= {"k": fresh[:, :, 0], "v": fresh[:, :, 1]}
    out, lse = flash_attn.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        **options,
        causal=True,
        return_softmax_lse=True,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
    )
    close(out, torch.stack([o for o, _ in expected]))
    close(lse, torch.stack([x for _, x in expected]))


def test_flash_attn_refuses_in_words() -> None:
    q = normal(2, 3, 2, 16)
    with pytest.raises(ValueError, match=r"qkv must be \(\.\.\., 3, H, D\), got \(2, 3, 2, 1, 16\)"):
        flash_attn.flash_attn_qkvpacked_func(q[..., None, :])
    with pytest.raises(ValueError, match="room for 3 keys, 3 to 6 are wanted"):
        flash_attn.flash_attn_with_kvcache(q, q, q, q, q)
    with pytest.raises(ValueError, match="one of them alone"):
        flash_attn.flash_attn_with_kvcache(q, q, q, k=q)
    with pytest.raises(ValueError, match="rotary_cos without k"):
        flash_attn.flash_attn_with_kvcache(q, q, q, rotary_cos=q, rotary_sin=q)


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_of_transformers_runs_on_it(padded: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from repro.integrations import transformers as integration

    integration.register()
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.arange(18).reshape(2, 9) % 64
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, :4] = 0
    logits = []
    for name in ("eager", "repro"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits.append(model(input_ids=tokens, attention_mask=mask).logits[mask.bool()])
    assert (logits[0] - logits[1]).abs().max() <= 1e-5 * logits[0].abs().max()
    model.set_attn_implementation("repro")
    with pytest.raises(ValueError, match="takes no s_aux"):
        integration.attention(model, *(normal(1, 2, 4, 8),) * 3, None, s_aux=normal(2))
