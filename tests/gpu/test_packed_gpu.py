"""Packed sequences on a GPU: the bits of separate calls, and the reference's numbers.

The host runs the same sources in ``tests/sm80/test_packed.py``; here a card's own order of blocks,
barriers and atomic additions are at work.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from attention_support import BOUNDS, inputs
from sequence_by_sequence import by_sequence, separate_calls

import repro
from analysis.packed import Lengths
from repro.attention.packed import each_sequence
from repro.attention.reference import Reference, attention_reference, max_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

LENGTHS = Lengths((300, 0, 1, 129, 64, 0, 500, 1), (300, 77, 1, 200, 0, 0, 500, 640))


def packed_call(tensors: list[torch.Tensor], lengths: Lengths, **options: Any) -> Reference:
    *operands, dout = tensors
    leaves = [x.detach().requires_grad_() for x in operands]
    tables = [
        torch.tensor([0, *accumulate(side)], dtype=torch.int32, device="cuda")
        for side in (lengths.queries, lengths.keys)
    ]
    out, lse = repro.flash_attention(
        *leaves, cu_seqlens_q=tables[0], cu_seqlens_k=tables[1], return_lse=True, **options
    )
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    return Reference(out.detach(), lse.detach(), dq, dk, dv)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_is_separate(dtype: torch.dtype, head_dim: int, causal: bool, deterministic: bool) -> None:
    """Bit for bit; dq, where its additions are atomic, within the bound of any call. A tile is
    named so that separate calls, too, run the sm_80 kernels on every card."""
    tile = (32, 32)
    tensors = list(inputs(1, 4, LENGTHS.total_q, LENGTHS.total_k, head_dim, kv_heads=2, dtype=dtype, device="cuda"))
    options: dict[str, Any] = {"causal": causal, "deterministic": deterministic, "tile": tile}
    got = packed_call(tensors, LENGTHS, **options)
    want = separate_calls(*tensors, LENGTHS, **options)
    exact = by_sequence(attention_reference, *(x.cpu() for x in tensors), LENGTHS, causal=causal)
    for name in ("out", "lse", "dq", "dk", "dv"):
        mine, theirs = getattr(got, name), getattr(want, name)
        if name != "dq" or deterministic:
            assert torch.equal(mine, theirs), name
        bound = BOUNDS[dtype][0 if name in ("out", "lse") else 1]
        assert max_error(mine, getattr(exact, name)) <= bound, name


@pytest.mark.parametrize("window", [None, (70, 0)])
def test_on_a_side_stream_with_every_feature(window: tuple[int, int] | None) -> None:
    """The host's look at the tables waits for the stream they were made on."""
    tensors = list(inputs(1, 4, LENGTHS.total_q, LENGTHS.total_k, 64, dtype=torch.bfloat16, device="cuda"))
    options: dict[str, Any] = {
        "causal": True,
        "window": window,
        "softcap": 20.0,
        "deterministic": True,
        "alibi_slopes": torch.rand(LENGTHS.sequences, 4, device="cuda"),
    }
    want = separate_calls(*tensors, LENGTHS, **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = packed_call(tensors, LENGTHS, **options)
    stream.synchronize()
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_many_sequences_of_one_token() -> None:
    lengths = Lengths.equal([1] * 5000)
    tensors = list(inputs(1, 2, 5000, 5000, 64, dtype=torch.float16, device="cuda"))
    got = packed_call(tensors, lengths)
    assert torch.equal(got.out, tensors[2])
    assert torch.equal(got.dv, tensors[3])


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_on_the_hopper_kernels(dtype: torch.dtype, head_dim: int, deterministic: bool, bad: float | None) -> None:
    """Bit for bit what separate calls give, whose tiles are the same under a causal mask, also
    where every second sequence holds no numbers: what TMA would reach of it must not be met."""
    tensors = list(inputs(1, 4, LENGTHS.total_q, LENGTHS.total_k, head_dim, kv_heads=2, dtype=dtype, device="cuda"))
    if bad is not None:
        for number, queries, keys in each_sequence(LENGTHS):
            if number % 2:
                for tensor, rows in zip(tensors, (queries, keys, keys, queries), strict=True):
                    tensor[:, :, rows] = bad
    options: dict[str, Any] = {"causal": True, "deterministic": deterministic}
    got = packed_call(tensors, LENGTHS, **options)
    want = separate_calls(*tensors, LENGTHS, **options)
    exact = by_sequence(attention_reference, *(x.cpu() for x in tensors), LENGTHS, causal=True)
    for number, queries, keys in each_sequence(LENGTHS):
        if bad is not None and number % 2:
            continue
        for name in ("out", "lse", "dq", "dk", "dv"):
            rows = keys if name in ("dk", "dv") else queries
            mine = getattr(got, name)[:, :, rows]
            if name != "dq" or deterministic:
                assert torch.equal(mine, getattr(want, name)[:, :, rows]), (number, name)
            bound = BOUNDS[dtype][0 if name in ("out", "lse") else 1]
            assert max_error(mine, getattr(exact, name)[:, :, rows]) <= bound, (number, name)
