"""K and V of e4m3 in the forward: exact numbers, bytes to the last one, and what rounding costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_support import inputs, normal
from torch import Tensor

import repro
from analysis.hardware import A100_80GB, H200
from analysis.hbm import predict_hbm
from analysis.l2 import available
from analysis.shapes import AttentionShape, Tile, scale_blocks
from analysis.traffic import predict_traffic
from kernels.attention import configure, default_tile
from kernels.fp8 import KeyScales, key_scales
from kernels.launch import from_numpy
from kernels.launches import Device, launches_of
from repro.attention import launcher
from repro.attention.quantize import quantize_e4m3
from repro.attention.reference import attention_reference, framework_result, max_error, visible
from repro.attention.validation import FP8
from repro.prediction import predict


@pytest.fixture(autouse=True)
def with_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launcher.CHECKS_VARIABLE, "1")


def spread(scales: Tensor, k: Tensor, block: int | None) -> Tensor:
    """The scale of every key, (B, Hkv, Nk, 1)."""
    if block is None:
        return scales[None, :, None, None].expand(*k.shape[:3], 1)
    return scales.repeat_interleave(block, 2)[:, :, : k.shape[2], None]


def exact(q: Tensor, k8: Tensor, v8: Tensor, scales: dict[str, Any], **options: Any) -> Any:
    """float64 attention of the numbers that the e4m3 codes and scales stand for."""
    block = scales.get("scale_block")
    k = k8.double() * spread(scales["k_scale"].double(), k8, block)
    v = v8.double() * spread(scales["v_scale"].double(), v8, block)
    return attention_reference(q, k, v, **options), k, v


def bound(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, want: Tensor, **changes: Any) -> float:
    """Twice the framework's own error in the type of q, and one rounding of the largest result.
    The framework has no scales: it gets K and V as ``dtype`` holds them."""
    dtype = q.dtype
    theirs = framework_result(
        q, k.to(dtype), v.to(dtype), torch.zeros_like(q), seen=seen, scale=q.shape[3] ** -0.5, **changes
    )
    error = float((theirs.out.double() - want).abs().max())
    return 2 * error + torch.finfo(dtype).eps * float(want.abs().max())


# ---- results ------------------------------------------------------------------------------------


def test_every_code_as_torch_reads_it() -> None:
    """A lone key has weight 1: what comes out is the value, of every code."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).view(FP8)
    q = torch.zeros(1, 16, 1, 16, dtype=torch.float16)
    out = repro.flash_attention(q, torch.zeros_like(codes), codes)
    want = codes.half()
    assert int(want.isnan().sum()) == 2
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("block", [None, 16])
def test_scales_of_any_size_and_sign(block: int | None) -> None:
    """Powers of two change nothing but the exponent: results are those of the numbers times them,
    to the bit where the sums meet the same terms."""
    q, k, v, _ = inputs(1, 2, 20, 16, 32, dtype=torch.bfloat16)
    k8, v8 = k.to(FP8), v.to(FP8)
    shape = (2,) if block is None else (1, 2, 1)
    plain = repro.flash_attention(q, k8, v8)
    for size in (2.0**-100, 1.0, 2.0**90, -4.0, 0.0):
        scales = {"k_scale": torch.ones(shape), "v_scale": torch.full(shape, size)}
        out = repro.flash_attention(q, k8, v8, **scales, scale_block=block)
        assert torch.equal(out, (plain.double() * size).to(torch.bfloat16))
    negative = repro.flash_attention(q, k8, v8, k_scale=-torch.ones(2))
    assert torch.equal(negative, repro.flash_attention(-q, k8, v8))


def test_a_value_scale_far_below_others_is_not_lost() -> None:
    """P is kept in units of the largest scale so far, whichever comes first."""
    q = torch.zeros(1, 1, 1, 16, dtype=torch.float16)
    k8 = torch.zeros(1, 1, 64, 16).to(FP8)
    v8 = torch.ones(1, 1, 64, 16).to(FP8)
    sizes = torch.tensor([1e-3, 1e3, 1e-6, 1.0])
    for order in ([0, 1, 2, 3], [1, 0, 3, 2], [2, 0, 3, 1]):
        out = repro.flash_attention(
            q, k8, v8, k_scale=torch.ones(1, 1, 4), v_scale=sizes[order].view(1, 1, 4), scale_block=16, tile=(16, 16)
        )
        assert float(out.max()) == float(out.min())
        assert float(out[0, 0, 0, 0]) == pytest.approx(float(sizes.mean()), rel=2e-3)


@pytest.mark.parametrize("tile", [(16, 16), (64, 64)])
@pytest.mark.parametrize(
    "mask",
    [{"causal": True}, {"window": (0, 0)}, {"key_mask": torch.arange(64)[None] < 16}],
    ids=["causal", "window", "key_mask"],
)
def test_a_row_that_does_not_see_a_key_is_not_touched_by_its_scale(
    mask: dict[str, Tensor], tile: tuple[int, int]
) -> None:
    """To the bit, though the keys may be of one tile and the others' scale beyond fp16."""
    q, k, v, _ = inputs(1, 2, 64, 64, 64, dtype=torch.float16)
    k8, v8 = k.to(FP8), v.to(FP8)
    ones, large = torch.ones(1, 2, 4), torch.ones(1, 2, 4)
    large[..., 1:] = 1e30
    outs = [
        repro.flash_attention(q, k8, v8, k_scale=ones, v_scale=scale, scale_block=16, tile=tile, **mask)
        for scale in (ones, large)
    ]
    alone = 64 if "key_mask" in mask else 16
    assert torch.equal(*(out[:, :, :alone] for out in outs))


@pytest.mark.parametrize("tile", [(16, 16), (16, 64)])
@pytest.mark.parametrize("first", [True, False])
def test_a_large_scale_that_is_hardly_weighed_takes_no_precision(first: bool, tile: tuple[int, int]) -> None:
    """16 keys of weight e⁻³⁰ whose values are as large as e³⁰ beside 48 ordinary ones, whichever
    come first: all are half of the result, and both are kept to the rounding of P."""
    q = torch.ones(1, 1, 1, 16, dtype=torch.float16)
    k, v = torch.zeros(1, 1, 64, 16), normal(1, 1, 64, 16, seed=5)
    light = slice(0, 16) if first else slice(48, 64)
    k[:, :, light] = -7.5  # times 16 columns, over the root of them: -30
    sizes = torch.ones(1, 1, 4)
    sizes[..., 0 if first else 3] = 3 * torch.e**30
    k8, v8 = k.to(FP8), v.to(FP8)
    scales = {"k_scale": torch.ones(1, 1, 4), "v_scale": sizes, "scale_block": 16}
    out = repro.flash_attention(q, k8, v8, tile=tile, **scales)
    want, _, v_exact = exact(q, k8, v8, scales)
    weights = torch.softmax((q.double() @ k8.double().mT) / 4, -1)
    # P and the result are rounded once each: half a unit of fp16, of all that is added up.
    limit = torch.finfo(torch.float16).eps * float((weights @ v_exact.abs()).max())
    assert max_error(out, want.out) <= limit


# ---- wrong arguments ----------------------------------------------------------------------------


def test_arrays_that_do_not_fit_are_refused_before_a_launch() -> None:
    shape = AttentionShape(1, 2, 64, 64, 64, fp8=True)
    for name in ("standard", "flash1-literal", "flash-sm90"):
        with pytest.raises(ValueError, match=f"{name} does not take k_scale"):
            launches_of(name, shape, "forward", Device("90"))
    with pytest.raises(ValueError, match="no gradient"):
        launches_of("flash", shape, "backward")
    assert launches_of("auto", shape, "forward", Device("90")).reason == "K and V of e4m3"
    for pass_ in ("forward", "backward"):
        name = "flash" if pass_ == "backward" else "standard"
        with pytest.raises(ValueError, match=f"the {pass_} of {name} does not take k_scale"):
            predict_traffic(name, shape, Tile(64, 64), pass_)
    with pytest.raises(ValueError, match="multiplied in 16 bits"):
        AttentionShape(1, 1, 8, 8, 64, dtype="fp32", fp8=True)
    with pytest.raises(ValueError, match="head_dim=40 is not a multiple of 16"):
        AttentionShape(1, 1, 8, 8, 40, fp8=True)
    with pytest.raises(ValueError, match="scale_block=16 with fp8=False"):
        AttentionShape(1, 1, 8, 8, 64, scale_block=16)
    with pytest.raises(ValueError, match="backward in fp16"):
        configure("backward", "fp16", 64, fp8=True)


def test_scales_come_together_and_in_whole_steps() -> None:
    q = from_numpy("q", np.zeros((1, 2, 8, 32), np.float16), "r")
    wide = from_numpy("k_scale", np.ones((1, 2, 3), np.float32), "r")
    with pytest.raises(ValueError, match="v_scale is None"):
        key_scales(wide, None, None)
    with pytest.raises(ValueError, match="scale_block=16 without"):
        key_scales(None, None, 16)
    for block in (0, 8, 24):
        with pytest.raises(ValueError, match=f"scale_block={block} is not a multiple of 16"):
            scale_blocks(100, block)
    assert [scale_blocks(100, block) for block in (None, 16, 112)] == [1, 7, 1]
    with pytest.raises(ValueError, match=r"\(1, 2, 3\), not \(B, Hkv, .*\) = \(1, 2, 1\)"):
        KeyScales(wide, wide).check(q, q)
    with pytest.raises(TypeError, match="v_scale has dtype fp16"):
        KeyScales(replace(wide, shape=(1, 2, 1)), q).check(q, q)


# ---- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, 64])
def test_half_the_bytes_of_keys_and_values_at_both_levels(block: int | None) -> None:
    sixteen = AttentionShape(1, 16, 64, 65536, 128, kv_heads=4)
    eight = AttentionShape(1, 16, 64, 65536, 128, kv_heads=4, fp8=True, scale_block=block)
    for gpu in (A100_80GB, H200):
        plain = predict("flash", sixteen, "forward", gpu)
        half = predict("flash", eight, "forward", gpu)
        moved, also = plain.traffic.by_tensor(), half.traffic.by_tensor()
        for tensor in ("k", "v"):
            assert 2 * also[tensor, "read"] == moved[tensor, "read"]
            scales = also[f"{tensor}_scale", "read"]
            assert scales == 16 * 65536 // 16 * 4
            hbm, of_hbm = (p.hbm.reads["flash_forward"] for p in (half, plain))
            assert 2 * hbm[tensor] == pytest.approx(of_hbm[tensor], rel=0.02)
            blocks = 1 if block is None else 65536 // block
            assert half.compulsory.reads["flash_forward"][f"{tensor}_scale"] == 4 * 4 * blocks
        assert half.time.bytes_seconds < plain.time.bytes_seconds
        assert not half.saved


def test_the_simulated_l2_holds_twice_as_many_keys() -> None:
    """A head whose K and V outgrow L2 in 16 bits, and in e4m3 do not: moved once instead of once a
    wave of blocks."""
    if not available():
        pytest.skip("no C compiler to simulate L2 with")
    moved = []
    for fp8 in (False, True):
        shape = AttentionShape(1, 1, 65536, 65536, 128, fp8=fp8)
        found = predict_hbm("flash", shape, Tile(128, 64), "forward", H200)
        moved.append(found.reads["flash_forward"]["k"] / shape.key_bytes)
    assert moved[0] > 3.5
    assert moved[1] == 1


def test_less_shared_memory_than_two_stages() -> None:
    for head_dim in (32, 64, 128, 256):
        plain, half = (configure("forward", "bf16", head_dim, fp8=fp8) for fp8 in (False, True))
        assert plain.tile == half.tile
        assert half.shared_bytes < replace(plain, stages=2).shared_bytes
    small = 99 * 1024  # of an Ada or a GA102 card
    tile = default_tile(256, "fp16", "forward", small, fp8=True)
    assert configure("forward", "fp16", 256, tile=tile, fp8=True).shared_bytes <= small


# ---- what rounding costs ------------------------------------------------------------------------


def with_outlier(size: float) -> tuple[Tensor, Tensor, Tensor]:
    """N(0, 1) numbers, but for the key and value of the last token, ``size`` times as large; its
    own query alone sees them under a causal mask."""
    q, k, v, _ = inputs(1, 2, 128, 128, 64, seed=2)
    k[:, :, -1] *= size
    v[:, :, -1] *= size
    return (0.1 * q).half(), k, v


def rounding_error(block: int | None, tensors: tuple[Tensor, Tensor, Tensor]) -> float:
    """Of the queries before the last, against float64 attention of the numbers before rounding."""
    q, k, v = tensors
    (k8, k_scale), (v8, v_scale) = (quantize_e4m3(x, block=block) for x in (k, v))
    out = repro.flash_attention(q, k8, v8, k_scale=k_scale, v_scale=v_scale, scale_block=block, causal=True)
    want = attention_reference(q, k, v, causal=True).out
    return max_error(out[:, :, :96], want[:, :, :96])


def test_a_scale_a_block_keeps_what_an_outlier_elsewhere_would_coarsen() -> None:
    calm = [rounding_error(block, with_outlier(1.0)) for block in (None, 32)]
    wild = [rounding_error(block, with_outlier(1e6)) for block in (None, 32)]
    assert calm[1] <= 1.5 * calm[0]
    assert wild[1] == calm[1]  # blocks before the outlier's are what they were
    assert wild[0] > 5 * wild[1]


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("block", [None, 32])
def test_the_arithmetic_is_as_exact_with_outliers(size: float, block: int | None) -> None:
    """Numbers move by at most max(|x| / 16, scale / 1024) when they are rounded; what comes after
    is held to the rounded numbers as ever."""
    q, k, v = with_outlier(size)
    (k8, k_scale), (v8, v_scale) = (quantize_e4m3(x, block=block) for x in (k, v))
    scales = {"k_scale": k_scale, "v_scale": v_scale, "scale_block": block}
    for x, x8, scale in ((k, k8, k_scale), (v, v8, v_scale)):
        wide = spread(scale.double(), x8, block)
        allowed = torch.maximum(x.double().abs() / 16, wide / 1024) * (1 + 1e-6)
        assert bool(((x8.double() * wide - x.double()).abs() <= allowed).all())
    q = q.bfloat16()  # fp16 could not hold what the framework is to be given
    out = repro.flash_attention(q, k8, v8, causal=True, **scales)
    want, k_exact, v_exact = exact(q, k8, v8, scales, causal=True)
    seen = visible(1, 2, 128, 128, causal=True)
    for rows in (slice(0, 127), slice(127, 128)):  # the last sees the outlier, others do not
        limit = bound(q[:, :, rows], k_exact, v_exact, seen[:, :, rows], want.out[:, :, rows])
        assert max_error(out[:, :, rows], want.out[:, :, rows]) <= limit


def test_quantising_by_blocks() -> None:
    x = normal(2, 3, 50, 16, seed=4)
    x[0, 1, 17] *= 1000
    numbers, scale = quantize_e4m3(x, block=16)
    assert scale.shape == (2, 3, 4)
    assert torch.equal(numbers[:, :, 48:].float().abs().amax((2, 3)), torch.full((2, 3), 448.0))
    assert float(scale[0, 1, 1]) > 100 * float(scale[0, 1, 0])
    pages, again = quantize_e4m3(x.transpose(1, 2), 2, block=16)
    assert torch.equal(pages.float().transpose(1, 2), numbers.float())
    assert torch.equal(again, scale.transpose(1, 2))
    with pytest.raises(ValueError, match="blocks are of"):
        quantize_e4m3(x[0], 0, block=16)
    with pytest.raises(ValueError, match="block=24 is not a multiple"):
        quantize_e4m3(x, block=24)
