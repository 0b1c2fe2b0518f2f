"""Latents of up to 576 columns, of which the first are values, as DeepSeek-V2 and V3 cache them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_support import BOUNDS
from decode_support import Problem

import repro
from analysis.decode import DecodeShape
from kernels.decode_config import DecodeConfig, configure, padded_columns
from repro.attention import launcher
from repro.attention.reference import attention_reference, max_error

DEEPSEEK = {"head_dim": 576, "value_dim": 512, "latent": True, "kv_heads": 1}


@pytest.fixture(autouse=True)
def with_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launcher.CHECKS_VARIABLE, "1")


@pytest.mark.parametrize(
    ("dtype", "heads", "splits"), [(torch.float16, 24, 1), (torch.bfloat16, 1, 3), (torch.bfloat16, 128, 3)]
)
def test_as_deepseek_caches_it(dtype: torch.dtype, heads: int, splits: int, device: str) -> None:
    problem = Problem(
        seqlens=(70, 33), heads=heads, dtype=dtype, splits=splits, device=device, page_size=64, **DEEPSEEK
    )
    (out, lse), (want, want_lse) = problem.run(), problem.answer()
    assert out.shape == (2, heads, 1, 512)
    assert max_error(out, want) <= BOUNDS[dtype][0]
    assert max_error(lse, want_lse) <= BOUNDS[dtype][0]


def test_the_cache_is_read_once_for_up_to_64_rows() -> None:
    """Although two warps make each score, and 128 heads are two tiles of rows."""
    for heads, times in ((1, 1), (64, 1), (128, 2)):
        problem = Problem(seqlens=(100,), heads=heads, **DEEPSEEK)
        _, counted = problem.counted()
        main = counted["flash_decode"]
        assert main["k", "read"] == times * 100 * 576 * 2
        assert main["out", "write"] == heads * 512 * 2
        assert ("v", "read") not in main
    _, counted = Problem(seqlens=(100,), heads=16, fp8=True, **DEEPSEEK).counted()
    assert counted["flash_decode"]["k", "read"] == 100 * 576


def test_other_columns_do_not_matter_to_the_values() -> None:
    """The 64 columns of positions change scores alone: out is their weights times the first 512."""
    (q, k, _), options = Problem(seqlens=(50,), heads=4, **DEEPSEEK).arguments()
    q[..., 512:] = 0
    out = repro.decode_attention(q, k, None, scale=0.05, **options)
    k[..., 512:] = 7
    assert torch.equal(repro.decode_attention(q, k, None, scale=0.05, **options), out)
    want = attention_reference(q, k[:, :, :50], k[:, :, :50], causal=True, scale=0.05)
    assert max_error(out, want.out[..., :512]) <= BOUNDS[torch.float16][0]


def test_a_step_counts_its_values() -> None:
    shape = DecodeShape(128, 1, 1, (4096,), 576, latent=True, value_dim=512)
    assert shape.token_bytes == 576 * 2
    assert shape.query_bytes == 128 * 576 * 2
    assert shape.out_bytes == 128 * 512 * 2
    assert shape.flops == 2 * 128 * (576 + 512) * 4096
    with pytest.raises(ValueError, match="value_dim=512 with latent=False"):
        DecodeShape(128, 1, 1, (4096,), 576, value_dim=512)
    with pytest.raises(ValueError, match="value_dim=577 is above 576"):
        DecodeShape(128, 1, 1, (4096,), 576, latent=True, value_dim=577)


Q = torch.zeros(1, 2, 1, 576, dtype=torch.float16)
K = torch.zeros(1, 1, 40, 576, dtype=torch.float16)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Q, K, K), {"value_dim": 512}, "1 to 256, got 576"),
        ((Q.float(), K.float(), None), {"value_dim": 512}, "1 to 256, got 576"),
        ((Q, K, None), {}, "needs value_dim, a multiple of 8 up to 512, got None"),
        ((Q, K, None), {"value_dim": 576}, "up to 512, got 576"),
        ((Q, K, None), {"value_dim": 500}, "multiple of 8 up to 512, got 500"),
        ((Q[..., :64], K[..., :64], None), {"value_dim": 32}, "more than 256 columns, q has 64"),
        ((torch.zeros(1, 1, 1, 584).half(), K, None), {"value_dim": 8}, "1 to 576, got 584"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        repro.decode_attention(*arguments, **options)


def test_forms_that_there_are_not_are_refused() -> None:
    assert [padded_columns(n) for n in (8, 256, 264, 576)] == [32, 256, 576, 576]
    with pytest.raises(ValueError, match="head_dim=584 is above 576"):
        padded_columns(584)
    with pytest.raises(ValueError, match="head_dim=300 is not a multiple of 8"):
        padded_columns(300)
    with pytest.raises(ValueError, match="latent=False and q is bf16"):
        configure("bf16", 576, 1)
    with pytest.raises(ValueError, match="q is fp32"):
        configure("fp32", 576, 1, latent=True)
    form = configure("bf16", 576, 128, latent=True)
    assert isinstance(form, DecodeConfig)
    assert form.partial_bytes(1) == 513 * 4
