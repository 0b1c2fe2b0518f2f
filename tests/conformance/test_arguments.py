"""Every option: what it cannot be is refused by name, with both values, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import repro
from kernels.host import HostBackend
from repro.attention import engine
from repro.attention.validation import FP8

E = dict[str, Any]
Q = torch.zeros(2, 4, 6, 16)
HALF = Q.half()
K8 = torch.zeros(2, 2, 40, 16).to(FP8)
PACKED = torch.zeros(1, 2, 10, 16)
CU = torch.tensor([0, 4, 10], dtype=torch.int32)
TABLES: E = {"cu_seqlens_q": CU, "cu_seqlens_k": CU}
BLOCKS = torch.ones(2, 2, 3)
MASK = torch.ones(2, 6, dtype=torch.bool)
META = torch.device("meta")
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal comes before any work: the host backend launches nothing."""

    def launch(*_: Any, **__: Any) -> None:
        raise AssertionError("a kernel was launched")

    engine.forget()
    monkeypatch.setattr(HostBackend, "launch", launch)


TENSORS: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    ((Q[0], Q, Q), ValueError, r"4 dimensions \(B, H, N, D\), got 3"),
    ((Q, Q.half(), Q), TypeError, "differ in type: torch.float32 and torch.float16"),
    ((Q.double(),) * 3, TypeError, "torch.float64"),
    ((Q.int(),) * 3, TypeError, "torch.int32"),
    ((Q, Q, Q.tolist()), TypeError, "v must be a torch.Tensor, got list"),
    ((Q, None, Q), TypeError, "k must be a torch.Tensor, got NoneType"),
    ((Q.to_sparse(), Q, Q), TypeError, "q is a tensor of layout"),
    ((Q, Q, torch.nested.nested_tensor([Q[0]])), TypeError, "v is a nested tensor"),
    ((Q, Q[:, :, :5], Q), ValueError, r"\(2, 4, 5, 16\) and \(2, 4, 6, 16\)"),
    ((Q[:1], Q, Q), ValueError, "differ in batch: 1 and 2"),
    ((Q[..., :4], Q, Q), ValueError, "differ in head dimension: 4 and 16"),
    ((Q[..., :0],) * 3, ValueError, "1 to 256, got 0"),
    ((Q.repeat(1, 1, 1, 17),) * 3, ValueError, "1 to 256, got 272"),
    ((Q, Q[:, :3], Q[:, :3]), ValueError, "4 heads, not a multiple of the 3 heads"),
    ((Q, Q[:, :0], Q[:, :0]), ValueError, "4 heads, not a multiple of the 0 heads"),
    ((Q.to("meta"), Q, Q), TypeError, "different devices: meta, cpu"),
]


@pytest.mark.parametrize(("tensors", "error", "message"), TENSORS)
def test_of_tensors(tensors: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        repro.flash_attention(*tensors)


OPTIONS: list[tuple[E, type[Exception], str]] = [
    ({"scale": 1e300}, ValueError, r"scale=1e\+300 is above 2\.359e\+38"),
    ({"scale": -1e39}, ValueError, r"scale=-1e\+39 is above"),
    ({"scale": NAN}, ValueError, "scale=nan is not finite"),
    ({"scale": "1"}, TypeError, "scale='1' is a str, not a real number"),
    ({"scale": True}, TypeError, "scale=True is a bool, not a real number"),
    ({"scale": 1j}, TypeError, "scale=1j is a complex"),
    ({"causal": "no"}, TypeError, "causal='no' is a str, not True or False"),
    ({"deterministic": 2}, TypeError, "deterministic=2 is a int"),
    ({"return_lse": 1}, TypeError, "return_lse=1 is a int, not True or False"),
    ({"key_mask": MASK.int()}, TypeError, "boolean .* got torch.int32"),
    ({"key_mask": True}, TypeError, "key_mask must be a boolean tensor"),
    ({"key_mask": MASK.to_sparse()}, TypeError, "key_mask is"),
    ({"key_mask": MASK[:, :5]}, ValueError, r"\(2, 6\), got \(2, 5\)"),
    ({"block_mask": MASK}, ValueError, r"needs tile=\(block_m, block_n\), got None"),
    ({"block_mask": MASK, "tile": (16, 16)}, ValueError, r"\(1, 1\).* for tile \(16, 16\), got \(2, 6\)"),
    ({"tile": 16}, TypeError, "two whole numbers, got 16"),
    ({"tile": "64"}, TypeError, "two whole numbers, got '64'"),
    ({"tile": (16,)}, TypeError, r"two whole numbers, got \(16,\)"),
    ({"tile": (16.0, 16)}, TypeError, r"tile block_m=16.0 is a float"),
    ({"tile": (16, True)}, TypeError, "tile block_n=True is a bool"),
    ({"tile": (16, 0)}, ValueError, "tile block_n=0 is below 1"),
    ({"tile": (60, 64)}, ValueError, "block_m=60 is not a multiple of 16"),
    ({"tile": (4096, 4096)}, ValueError, "4096"),
    ({"order": "up"}, ValueError, "order must be one of rows, sawtooth, got 'up'"),
    ({"order": None}, TypeError, "order must be a string, got NoneType"),
    ({"window": (-1, 0)}, ValueError, "window left=-1 is below 0"),
    ({"window": (4, -1)}, ValueError, "right=-1 is below 0; None is unlimited"),
    ({"window": 4}, TypeError, r"window must be \(left, right\), .* got 4"),
    ({"window": (4, 1.5)}, TypeError, "window right=1.5 is a float, not a whole"),
    ({"sinks": -1}, ValueError, "sinks=-1 is below 0"),
    ({"sinks": True}, TypeError, "sinks=True is a bool, not a whole number"),
    ({"dropout_p": None}, TypeError, "dropout_p=None is a NoneType"),
    ({"dropout_p": "0.5"}, TypeError, "dropout_p='0.5' is a str"),
    ({"dropout_p": NAN}, ValueError, r"dropout_p must lie in \[0, 1\], got nan"),
    ({"dropout_p": -0.1}, ValueError, r"dropout_p must lie in \[0, 1\], got -0.1"),
    ({"dropout_p": 1.5}, ValueError, r"dropout_p must lie in \[0, 1\], got 1.5"),
    ({"seed": -1}, ValueError, r"seed must lie in \[0, 2\*\*63\), got -1"),
    ({"dropout_p": 0.5, "seed": 2**63}, ValueError, "got 9223372036854775808"),
    ({"dropout_p": 0.5, "seed": 1.5}, TypeError, "seed=1.5 is a float, not a whole"),
    ({"dropout_p": 0.5, "seed": True}, TypeError, "seed=True is a bool"),
    ({"softcap": 0}, ValueError, "softcap=0.0 is outside"),
    ({"softcap": -1}, ValueError, "softcap=-1.0 is outside"),
    ({"softcap": NAN}, ValueError, "softcap=nan"),
    ({"softcap": 1e-39}, ValueError, "softcap=1e-39 is outside"),
    ({"softcap": 1e39}, ValueError, r"softcap=1e\+39 is outside"),
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
    ({"scale_block": 16}, ValueError, "k is torch.float32"),
    ({"v_scale": torch.ones(4)}, ValueError, "v_scale is for k and v"),
]


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS)
def test_of_options(options: E, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        repro.flash_attention(Q, Q, Q, **options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dropout_p": None}, TypeError),
        ({"dropout_p": 2}, ValueError),
        ({"tile": 16}, TypeError),
        ({"scale": INF}, ValueError),
        ({"causal": "no"}, TypeError),
        ({"order": "up"}, ValueError),
        ({"window": (-1, 0)}, ValueError),
    ],
)
def test_the_module_refuses_where_it_is_made(options: E, error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        repro.FlashAttention(**options)


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


def test_packed_sequences_lie_in_one_item_and_take_no_e4m3() -> None:
    two = PACKED.expand(2, -1, -1, -1)
    with pytest.raises(ValueError, match=r"\(1, H, total, D\), got B = 2"):
        repro.flash_attention(two, two, two, **TABLES)
    with pytest.raises(ValueError, match="and k and v of e4m3 exclude each other"):
        repro.flash_attention(PACKED.half(), PACKED.to(FP8), PACKED.to(FP8), **TABLES)
