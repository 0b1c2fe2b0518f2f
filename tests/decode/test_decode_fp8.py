"""fp8 caches: each of the 256 codes, half the bytes, and an error within what the format allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_support import BOUNDS, normal
from decode_support import FP8, Problem
from torch import Tensor

import repro
from repro.attention import launcher
from repro.attention.quantize import quantize_e4m3
from repro.attention.reference import attention_reference, max_error

CODES = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).view(FP8)


@pytest.fixture(autouse=True)
def with_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launcher.CHECKS_VARIABLE, "1")


def test_every_code_as_torch_reads_it(device: str) -> None:
    """A lone key has weight 1: what comes out is the value, of every code."""
    q = torch.zeros(1, 16, 1, 16, dtype=torch.float16, device=device)
    codes = CODES.to(device)
    out = repro.decode_attention(q, torch.zeros_like(codes), codes)
    want = CODES.half()
    assert int(want.isnan().sum()) == 2
    assert torch.equal(out.cpu().isnan(), want.isnan())
    assert torch.equal(out.cpu().nan_to_num(), want.nan_to_num())


def test_every_code_of_a_key(device: str) -> None:
    """q picks a column: the score of a lone key is that number, and so is lse."""
    codes = CODES.to(device)
    want = CODES.float()[0, :, 0]
    for column in range(16):
        q = torch.zeros(1, 16, 1, 16, dtype=torch.float16, device=device)
        q[..., column] = 1
        values = torch.zeros_like(codes)
        keys = codes.clone()
        others = torch.arange(16, device=device) != column  # 0 · NaN would hide the rest
        keys.view(torch.uint8)[..., others] = 0
        _, lse = repro.decode_attention(q, keys, values, scale=1.0, return_lse=True)
        got = lse.cpu()[0, :, 0]
        assert torch.equal(got.isnan(), want[:, column].isnan())
        torch.testing.assert_close(got.nan_to_num(), want[:, column].nan_to_num(), rtol=3e-7, atol=0)


def test_half_the_bytes() -> None:
    for latent in (False, True):
        plain = Problem(seqlens=(300, 200), latent=latent, head_dim=64, splits=3)
        (_, counted), (_, fp8) = plain.counted(), plain.but(fp8=True).counted()
        for tensor in ("k",) if latent else ("k", "v"):
            key = (tensor, "read")
            assert 2 * fp8["flash_decode"][key] == counted["flash_decode"][key]


def test_scales_are_of_heads(device: str) -> None:
    """k_scale multiplies the scores of its head, v_scale the output: with powers of two, nothing
    is rounded otherwise."""
    (q, k, v), options = Problem(fp8=True, device=device).arguments()
    options["splits"] = 2
    scales = [torch.tensor([2.0, 0.5], device=device), torch.tensor([0.25, 8.0], device=device)]
    out, lse = repro.decode_attention(q, k, v, k_scale=scales[0], v_scale=scales[1], return_lse=True, **options)
    of_rows = [s.repeat_interleave(2)[None, :, None, None].half() for s in scales]
    plain, plain_lse = repro.decode_attention(q * of_rows[0], k, v, return_lse=True, **options)
    assert max_error(lse, plain_lse) <= BOUNDS[torch.float32][0]
    torch.testing.assert_close(out, plain * of_rows[1], rtol=2e-3, atol=1e-5)


def bound_of(q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor]) -> Tensor:
    """What rounding K and V to e4m3 may change of out, in float64, element by element.

    A number x of a head with scale s becomes x + δ, |δ| <= max(|x|/16, s/1024). A score moves by at
    most t = scale·Σ|q|·max|δk|; if no score of a row moves by more, every weight stays within a
    factor e^(2t), so out moves by at most (e^(2t) - 1)·Σp|v| + e^(2t)·Σp|δv|.
    """
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]

    def wide(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, 1)

    of_k, of_v = (s.double()[None, :, None, None] for s in scales)
    delta_k = torch.maximum(k.abs() / 16, of_k / 1024)
    delta_v = torch.maximum(v.abs() / 16, of_v / 1024)
    unit = q.shape[3] ** -0.5
    weights = torch.softmax(unit * q @ wide(k).mT, -1)
    moved = (unit * q.abs() @ wide(delta_k).mT).amax(-1, keepdim=True)
    factor = torch.exp(2 * moved)
    return (factor - 1) * (weights @ wide(v).abs()) + factor * (weights @ wide(delta_v))


def data(outlier: float) -> tuple[Tensor, Tensor, Tensor]:
    """Small q, so that scores, and what rounding does to them, stay near 1; in K and in V some
    channels and some tokens are ``outlier`` times as large as the rest."""
    q = 0.05 * normal(2, 4, 2, 64, dtype=torch.float16, seed=1)
    k, v = (normal(2, 2, 300, 64, dtype=torch.float16, seed=seed) for seed in (2, 3))
    k[..., 5] *= outlier
    v[..., 7] *= outlier
    v[:, 1, 11] *= outlier
    return q, k, v


@pytest.mark.parametrize("outlier", [1.0, 30.0, 100.0])
def test_the_error_is_within_what_rounding_allows(outlier: float, device: str) -> None:
    q, k, v = data(outlier)
    (k8, k_scale), (v8, v_scale) = quantize_e4m3(k), quantize_e4m3(v)
    arguments = [x.to(device) for x in (q, k8, v8)]
    out = repro.decode_attention(
        *arguments, k_scale=k_scale.to(device), v_scale=v_scale.to(device), causal=False, splits=2
    ).cpu()
    exact = attention_reference(q, k, v)
    error = (out.double() - exact.out).abs()
    # The arithmetic's own share: fp16's bound, for values this large.
    own = BOUNDS[torch.float16][0] * max(1.0, float(v.abs().max()))
    assert bool((error <= bound_of(q, k, v, (k_scale, v_scale)) + own).all())
    # What comes of the rounded numbers, computed exactly, is what the kernel is held to as ever.
    rounded = [x.double() * s.double()[None, :, None, None] for x, s in ((k8, k_scale), (v8, v_scale))]
    assert max_error(out, attention_reference(q, *rounded).out) <= own


def test_a_scale_a_head_keeps_small_heads_exact(device: str) -> None:
    """One scale for all is set by the largest head, and rounds the others' numbers to few steps."""
    q = normal(1, 4, 1, 64, dtype=torch.float16, seed=1)
    k, v = (normal(1, 4, 200, 64, dtype=torch.float16, seed=seed) for seed in (2, 3))
    sizes = torch.tensor([1000.0, 1.0, 0.03, 0.001])[None, :, None, None]
    v = (v * sizes).half()
    exact = attention_reference(q, k, v, causal=False).out
    k8, k_scale = quantize_e4m3(k)
    errors = {}
    for name, (v8, v_scale) in {
        "a head": quantize_e4m3(v),
        "all": quantize_e4m3(v.flatten(0, 2)[None, None], 0),
    }.items():
        out = repro.decode_attention(
            q.to(device),
            k8.to(device),
            v8.view(v.shape).to(device),
            causal=False,
            k_scale=k_scale.to(device),
            v_scale=v_scale.expand(4).contiguous().to(device),
        ).cpu()
        error = (out.double() - exact).abs().amax((0, 2, 3))
        errors[name] = error / exact.abs().amax((0, 2, 3))
    assert float(errors["a head"].max()) < 0.25
    assert float(errors["all"][3]) > 10 * float(errors["a head"][3])


def test_quantising() -> None:
    x = normal(2, 3, 50, 16, seed=4) * torch.tensor([1.0, 100.0, 1e-3])[None, :, None, None]
    numbers, scale = quantize_e4m3(x)
    assert numbers.dtype == FP8
    assert torch.equal(numbers.float().abs().amax((0, 2, 3)), torch.full((3,), 448.0))
    of_heads = scale[None, :, None, None]
    allowed = torch.maximum(x.abs() / 16, of_heads / 1024) * (1 + 1e-6)
    assert bool(((numbers.float() * of_heads - x).abs() <= allowed).all())
    pages, again = quantize_e4m3(x.transpose(1, 2), 2)
    assert torch.equal(pages.float().transpose(1, 2), numbers.float())
    assert torch.equal(again, scale)
    zeros, one = quantize_e4m3(torch.zeros(1, 2, 3, 16))
    assert torch.equal(one, torch.ones(2))
    assert torch.equal(zeros.float(), torch.zeros(1, 2, 3, 16))
    with pytest.raises(ValueError, match="not finite"):
        quantize_e4m3(torch.full((1, 1, 1, 16), torch.inf))
    with pytest.raises(ValueError, match="not finite"):
        quantize_e4m3(torch.full((1, 1, 1, 16), 1e300, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"cache has type torch.int32, not a floating type"):
        quantize_e4m3(torch.ones(1, 1, 1, 16, dtype=torch.int32))
    with pytest.raises(ValueError, match="heads=4 is above 3"):
        quantize_e4m3(x, 4)


@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize("size", [1e-43, 1e-40, 1e-37, 1e-30])
def test_quantising_numbers_that_fp32_hardly_holds(size: float, block: int | None) -> None:
    """A scale below the normal numbers of fp32 would be rounded by more than a number may move."""
    x = size * normal(1, 1, 20, 16, seed=6)
    numbers, scale = quantize_e4m3(x, block=block)
    wide = scale.double() if block is None else scale.double().repeat_interleave(16, 2)[..., :20]
    error = (numbers.double() * wide.view(1, 1, -1, 1) - x.double()).abs()
    allowed = torch.maximum(x.double().abs() / 16, wide.view(1, 1, -1, 1) / 1024)
    assert bool((error <= allowed * (1 + 1e-6)).all())


def test_quantising_nothing() -> None:
    """A cache without keys has its scale a head, and no block of keys that could have one."""
    for empty in (torch.zeros(2, 3, 0, 16), torch.zeros(0, 3, 5, 16)):
        numbers, scale = quantize_e4m3(empty)
        assert (numbers.dtype, numbers.shape) == (FP8, empty.shape)
        assert torch.equal(scale, torch.ones(3))
    numbers, scale = quantize_e4m3(torch.zeros(2, 3, 0, 16), block=16)
    assert (numbers.shape, scale.shape) == ((2, 3, 0, 16), (2, 3, 0))
    numbers, scale = quantize_e4m3(torch.zeros(0, 32, 3, 16), 2, block=16)
    assert (numbers.shape, scale.shape) == ((0, 32, 3, 16), (0, 2, 3))


def test_a_row_that_does_not_see_a_key_is_not_touched_by_its_scale(device: str) -> None:
    """Of a draft of three, the first query sees the first 16 keys alone."""
    q = normal(1, 2, 3, 64, dtype=torch.float16, seed=1).to(device)
    k, v = (normal(1, 2, 18, 64, seed=seed).to(FP8).to(device) for seed in (2, 3))
    ones, large = torch.ones(1, 2, 2, device=device), torch.ones(1, 2, 2, device=device)
    large[..., 1] = 1e30
    first = [
        repro.decode_attention(q, k, v, k_scale=ones, v_scale=scale, scale_block=16)[:, :, 0] for scale in (ones, large)
    ]
    assert torch.equal(*first)


@pytest.mark.parametrize(("changes", "splits"), [({}, 4), ({"latent": True}, 1), ({"page_size": 32}, 4)], ids=str)
def test_scales_of_blocks_of_keys(changes: dict[str, Any], splits: int, device: str) -> None:
    """Right with any number of splits, and the parts merge as they do with a scale a head."""
    problem = Problem(
        seqlens=(300, 37),
        seqlen_q=2,
        fp8=True,
        scale_block=48,
        splits=splits,
        device=device,
        dtype=torch.bfloat16,
        **changes,
    )
    (out, lse), (want, want_lse) = problem.run(), problem.answer()
    own = BOUNDS[torch.bfloat16][0] * max(1.0, float(want.abs().max()))
    assert max_error(out, want) <= own
    assert max_error(lse, want_lse) <= BOUNDS[torch.bfloat16][0]
    if device == "cpu":
        _, counted = problem.counted()
        assert counted == problem.expected(splits)


def test_a_page_with_an_outlier_coarsens_no_other_page(device: str) -> None:
    """With a scale a page and head, against a scale a head: what an outlier in a page that the
    sequence does not read costs the sequence."""
    q = 0.1 * normal(1, 4, 1, 64, dtype=torch.float16, seed=1)
    pages = [normal(5, 32, 2, 64, seed=seed) for seed in (2, 3)]
    for cache in pages:
        cache[4] *= 1e6
    table = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)
    k, v = (cache[table[0].long()].flatten(0, 1).transpose(0, 1)[None] for cache in pages)
    exact = attention_reference(q, k, v).out
    errors = []
    for block in (None, 32):
        (k8, k_scale), (v8, v_scale) = (quantize_e4m3(x, 2, block=block) for x in pages)
        moved = [x.to(device) for x in (q, k8, v8, table, k_scale, v_scale)]
        out = repro.decode_attention(
            *moved[:3], block_table=moved[3], k_scale=moved[4], v_scale=moved[5], scale_block=block
        )
        errors.append(max_error(out.cpu(), exact))
    assert errors[0] > 5 * errors[1]


def test_scales_that_do_not_fit_their_blocks_are_named() -> None:
    q = torch.zeros(1, 2, 1, 16, dtype=torch.float16)
    k = torch.zeros(1, 1, 40, 16).to(FP8)
    scales = {"k_scale": torch.ones(1, 1, 2), "v_scale": torch.ones(1, 1, 3), "scale_block": 16}
    with pytest.raises(ValueError, match=r"\(B, Hkv, blocks\) = \(1, 1, 3\), got \(1, 1, 2\)"):
        repro.decode_attention(q, k, k, **scales)
    with pytest.raises(ValueError, match="scale_block=16 without v_scale"):
        repro.decode_attention(q, k, k, k_scale=torch.ones(1, 1, 3), scale_block=16)
    with pytest.raises(ValueError, match="scale_block=24 is not a multiple of 16"):
        repro.decode_attention(q, k, k, scale_block=24)
    with pytest.raises(ValueError, match="scale_block=16 is for torch"):
        repro.decode_attention(q, k.half(), k.half(), scale_block=16)
    table = torch.zeros(1, 2, dtype=torch.int32)
    pages = torch.zeros(3, 32, 1, 16).to(FP8)
    with pytest.raises(ValueError, match=r"\(pages, blocks, Hkv\) = \(3, 2, 1\), got \(1, 1, 2\)"):
        repro.decode_attention(q, pages, pages, block_table=table, **scales)
