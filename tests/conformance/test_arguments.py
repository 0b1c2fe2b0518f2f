"""Every option: what it cannot be is refused by name, with both values, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import repro
from repro.attention.validation import FP8

E = dict[str, Any]
Q = torch.zeros(2, 4, 6, 16)
HALF = Q.half()
K8 = torch.zeros(2, 2, 40, 16).to(FP8)
PACKED = torch.zeros(1, 2, 10, 16)
CU = torch.tensor([0, 4, 10], dtype=torch.int32)
TABLES: E = {"cu_seqlens_q": CU, "cu_seqlens_k": CU}
BLOCKS = torch.ones(2, 2, 3)
META = torch.device("meta")

OPTIONS: list[tuple[E, type[Exception], str]] = [
    ({"softcap": 0}, ValueError, "softcap=0.0 is outside"),
    ({"softcap": float("nan")}, ValueError, "softcap=nan"),
    ({"softcap": "50"}, TypeError, "softcap='50' is a str, not a real number"),
    ({"alibi_slopes": [1.0]}, TypeError, "float32 tensor, got list"),
    ({"alibi_slopes": torch.ones(4).half()}, TypeError, "float32 tensor, got torch.float16"),
    ({"alibi_slopes": torch.ones(3)}, ValueError, r"\(4,\) or \(B, H\) = \(2, 4\), got \(3,\)"),
    ({"alibi_slopes": torch.ones(4, device=META)}, TypeError, "devices: cpu, meta"),
    ({"alibi_slopes": torch.ones(4, requires_grad=True)}, ValueError, "requires a gradient"),
    ({"bias": [1.0]}, TypeError, "bias must be a torch.Tensor, got list"),
    ({"bias": torch.zeros(6, 6)}, ValueError, r"\(1 or 2, 1 or 4, 6, 6\), got \(6, 6\)"),
    ({"bias": torch.zeros(2, 2, 6, 6)}, ValueError, r"got \(2, 2, 6, 6\)"),
    ({"bias": torch.zeros(1, 1, 6, 5)}, ValueError, r"got \(1, 1, 6, 5\)"),
    ({"bias": torch.zeros(1, 1, 6, 6).half()}, TypeError, "type: torch.float32 and torch.float16"),
    ({"bias": torch.zeros(1, 1, 6, 6, device=META)}, TypeError, "devices: cpu, meta"),
    ({"sink_logits": [1.0]}, TypeError, "float32 tensor, got list"),
    ({"sink_logits": torch.ones(4).half()}, TypeError, "float32 tensor, got torch.float16"),
    ({"sink_logits": torch.ones(2, 4)}, ValueError, r"\(H,\) = \(4,\), got \(2, 4\)"),
    ({"sink_logits": torch.ones(4, device=META)}, TypeError, "devices: cpu, meta"),
    ({"window": (-1, 0)}, ValueError, "window left=-1 is below 0"),
    ({"scale_block": 16}, ValueError, "k is torch.float32"),
    ({"v_scale": torch.ones(4)}, ValueError, "v_scale is for k and v"),
]


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS)
def test_of_options(options: E, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        repro.flash_attention(Q, Q, Q, **options)


FP8_CALLS: list[tuple[tuple[torch.Tensor, ...], E, type[Exception], str]] = [
    ((Q, K8, K8), {}, TypeError, "q and k differ in type: torch.float32 and torch.fl"),
    ((HALF, K8, K8.half()), {}, TypeError, "k and v differ in type: torch.float8_e4m3fn and"),
    ((HALF.to(FP8), K8, K8), {}, TypeError, "q has type torch.float8_e4m3fn; supported are"),
    ((HALF, K8.view(torch.float8_e5m2), K8.view(torch.float8_e5m2)), {}, TypeError, "e5m2"),
    ((HALF[..., :8], K8[..., :8], K8[..., :8]), {}, ValueError, "8 is not a multiple of 16"),
    ((HALF, K8, K8), {"k_scale": torch.ones(3)}, ValueError, r"\(Hkv,\) = \(2,\), got \(3,\)"),
    ((HALF, K8, K8), {"v_scale": torch.ones(2).half()}, TypeError, "v_scale must be a float32"),
    ((HALF, K8, K8), {"k_scale": 1.0}, TypeError, "k_scale must be a float32 tensor, got float"),
    ((HALF, K8, K8), {"scale_block": 16}, ValueError, "scale_block=16 without k_scale"),
    (
        (HALF, K8, K8),
        {"scale_block": 24, "k_scale": BLOCKS, "v_scale": BLOCKS},
        ValueError,
        "scale_block=24 is not a mult",
    ),
    (
        (HALF, K8, K8),
        {"scale_block": 16, "k_scale": BLOCKS[..., :2], "v_scale": BLOCKS},
        ValueError,
        r"k_scale must have shape \(B, Hkv, .*\) = \(2, 2, 3\), got \(2, 2, 2\)",
    ),
    ((HALF, K8, K8), {"k_scale": torch.ones(2, device=META)}, TypeError, "devices: cpu, meta"),
    ((HALF.clone().requires_grad_(), K8, K8), {}, RuntimeError, "and q requires one"),
]


@pytest.mark.parametrize(("tensors", "options", "error", "message"), FP8_CALLS)
def test_of_keys_in_e4m3(tensors: tuple[torch.Tensor, ...], options: E, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        repro.flash_attention(*tensors, **options)


PACKED_CALLS: list[tuple[E, type[Exception], str]] = [
    ({"cu_seqlens_k": None}, ValueError, "cu_seqlens_q without cu_seqlens_k"),
    ({"cu_seqlens_q": None}, ValueError, "cu_seqlens_k without cu_seqlens_q"),
    ({"cu_seqlens_q": CU.long()}, TypeError, "must be an int32 tensor, got torch.int64"),
    ({"cu_seqlens_k": [0, 4, 10]}, TypeError, "cu_seqlens_k must be an int32 tensor, got list"),
    ({"cu_seqlens_q": CU[None]}, ValueError, r"\(sequences \+ 1,\), got \(1, 3\)"),
    ({"cu_seqlens_q": CU[:0]}, ValueError, r"\(sequences \+ 1,\), got \(0,\)"),
    ({"cu_seqlens_k": CU[[0, 2]]}, ValueError, "has 2 sequences, cu_seqlens_k 1"),
    ({"cu_seqlens_q": CU.to(META)}, TypeError, "different devices: cpu, meta"),
    ({"cu_seqlens_q": CU + 1}, ValueError, r"cu_seqlens_q\[0\] is 1, not 0"),
    ({"cu_seqlens_k": CU[[0, 2, 1]]}, ValueError, "cu_seqlens_k falls from 10 to 4 at entry 2"),
    ({"cu_seqlens_q": CU[:2], "cu_seqlens_k": CU[[0, 2]]}, ValueError, "cu_seqlens_q ends at 4, q has 10 rows"),
    ({"key_mask": torch.ones(1, 10).bool()}, ValueError, "and key_mask exclude each"),
    ({"sink_logits": torch.zeros(2)}, ValueError, "and sink_logits exclude each other"),
    ({"bias": torch.zeros(1, 1, 10, 10)}, ValueError, "and bias exclude each other"),
    ({"block_mask": torch.ones(1, 1).bool(), "tile": (16, 16)}, ValueError, "and block_mask exclude each other"),
    ({"order": "sawtooth"}, ValueError, "and order='sawtooth' exclude each other"),
    ({"alibi_slopes": torch.ones(3, 2)}, ValueError, r"\(H,\) = \(2,\) or \(sequences, H\) = \(2, 2\), got \(3, 2\)"),
]


@pytest.mark.parametrize(("options", "error", "message"), PACKED_CALLS)
def test_of_packed_sequences(options: E, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        repro.flash_attention(PACKED, PACKED, PACKED, **{**TABLES, **options})


def test_packed_sequences_take_no_e4m3() -> None:
    with pytest.raises(ValueError, match="and k and v of e4m3 exclude each other"):
        repro.flash_attention(PACKED.half(), PACKED.to(FP8), PACKED.to(FP8), **TABLES)
