"""The operator as torch sees it: registration, compilation, meta tensors, gradients of lse."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_support import BOUNDS, inputs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import repro
from repro.attention.options import Options
from repro.attention.quantize import quantize_e4m3
from repro.attention.reference import attention_reference, max_error

VARIATIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "key_mask": torch.arange(20)[None].expand(2, 20) < 15, "dropout_p": 0.3, "seed": torch.tensor(5)},
    {"block_mask": torch.ones(2, 2, dtype=torch.bool).tril(), "tile": [16, 16]},
    {"softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.25]), "bias": torch.ones(1, 2, 20, 20, requires_grad=True)},
    {"left": 7, "right": 2, "sinks": 3},
]


@pytest.mark.parametrize("changes", VARIATIONS)
def test_opcheck_forward(changes: dict[str, Any]) -> None:
    q, k, v, _ = inputs(2, 2, 20, 20, 16)
    arguments = (q.requires_grad_(), k.requires_grad_(), v, *Options(scale=0.25, **changes))
    torch.library.opcheck(torch.ops.repro.flash_attention, arguments)


def test_opcheck_e4m3() -> None:
    """Not its test of the schema, which multiplies the inputs: torch has no product of e4m3 here."""
    q, k, v, _ = inputs(1, 2, 20, 40, 16, dtype=torch.float16)
    (k8, k_scale), (v8, v_scale) = (quantize_e4m3(x, block=16) for x in (k, v))
    options = Options(scale=0.25, k_scale=k_scale, v_scale=v_scale, scale_block=16)
    others = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.repro.flash_attention, (q, k8, v8, *options), test_utils=others)


PACKED = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 7, 7, 20], dtype=torch.int32))


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({**PACKED, "alibi_slopes": torch.rand(3, 2), "left": 7}, [True, True, True, False]),
        ({"causal": True, "bias": torch.ones(1, 1, 20, 20)}, [True, False, False, True]),
        ({"left": 7, "sinks": 3}, [True, False, False, False]),
    ],
    ids=["packed", "bias", "window"],
)
def test_opcheck_backward(options: dict[str, Any], needed: list[bool]) -> None:
    q, k, v, dout = inputs(1, 2, 20, 20, 16)
    given = Options(scale=0.25, **options)
    out, lse = torch.ops.repro.flash_attention(q, k, v, *given)
    torch.library.opcheck(torch.ops.repro.flash_attention_backward, (dout, None, q, k, v, out, lse, *given, needed))
    if "cu_seqlens_q" in options:
        torch.library.opcheck(torch.ops.repro.flash_attention, (q.requires_grad_(), k, v, *given))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_compiled_equals_eager(backend: str) -> None:
    if backend == "inductor" and not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("inductor compiles against Python.h, which is not installed (python3-dev)")
    q, k, v, dout = inputs(1, 2, 20, 20, 16)
    mask = torch.arange(20)[None] < 17

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = repro.flash_attention(q * 2, k, v, key_mask=mask, dropout_p=0.2)
        assert isinstance(out, Tensor)
        return out + 1

    leaves = [t.requires_grad_() for t in (q, k, v)]
    torch.manual_seed(1)
    plain = torch.autograd.grad(attend(*leaves), leaves, dout)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    if backend == "inductor":
        # Inductor has a random generator of its own; the framework's is the one to compare with.
        torch._inductor.config.fallback_random = True
    torch.manual_seed(1)
    for got, want in zip(torch.autograd.grad(compiled(*leaves), leaves, dout), plain, strict=True):
        assert torch.equal(got, want)


def test_compiled_for_any_length() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(repro.flash_attention, backend="aot_eager", dynamic=True)
    for seqlen in (5, 20, 33):
        q, k, v, _ = inputs(1, 2, seqlen, seqlen, 16)
        assert torch.equal(compiled(q, k, v, causal=True), repro.flash_attention(q, k, v, causal=True))


def test_compiled_with_a_number_that_changes() -> None:
    """From its second value on torch traces a float as a symbol."""
    q, k, v, _ = inputs(1, 2, 20, 20, 16)
    for name in ("scale", "softcap", "dropout_p"):
        torch._dynamo.reset()
        compiled = torch.compile(repro.flash_attention, backend="aot_eager", fullgraph=True)
        for number in (0.5, 0.75, 0.25):
            options: dict[str, Any] = {name: number, "seed": 1}
            assert torch.equal(compiled(q, k, v, **options), repro.flash_attention(q, k, v, **options))


def test_each_window_is_compiled_for_itself() -> None:
    """Another window, or the same one beside sinks, is another call: neither a compiled graph nor
    recorded launches of one may serve the other."""
    torch._dynamo.reset()
    compiled = torch.compile(repro.flash_attention, backend="aot_eager", dynamic=True)
    q, k, v, _ = inputs(1, 2, 40, 40, 16)
    asked = [((5, 0), 0), ((6, 0), 0), ((5, 1), 2), ((5, 0), 2), ((5, None), 0), (None, 2), ((5, 0), 0)]
    found, plain = (
        [attend(q, k, v, window=window, sinks=sinks) for window, sinks in asked]
        for attend in (compiled, repro.flash_attention)
    )
    for got, want in zip(found, plain, strict=True):
        assert torch.equal(got, want)
    assert len({tuple(out.flatten().tolist()) for out in plain}) == len(asked) - 1  # one comes twice


def test_both_operators_stand_in_the_compiled_graph() -> None:
    """A compiler sees two nodes, not their insides."""
    from torch._dynamo.backends.common import aot_autograd

    seen: list[str] = []

    def collect(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    leaves = [t.requires_grad_() for t in inputs(1, 1, 8, 8, 8)[:3]]
    backend = aot_autograd(fw_compiler=collect, bw_compiler=collect)
    torch.compile(repro.flash_attention, backend=backend, fullgraph=True)(*leaves).sum().backward()
    assert seen.count("repro.flash_attention.default") == 1
    assert seen.count("repro.flash_attention_backward.default") == 1


def test_gradient_of_the_row_sums(device: str) -> None:
    """lse is a result like any other: its gradient reaches q and k."""
    q, k, v, dout = inputs(1, 2, 40, 50, 16, device=device)
    dlse = torch.linspace(-1, 1, 80, device=device).view(1, 2, 40)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    for incoming in (dout, torch.zeros_like(dout)):
        out, lse = repro.flash_attention(*leaves, causal=True, return_lse=True)
        grads = torch.autograd.grad((out, lse), leaves, (incoming, dlse))
        want = attention_reference(q, k, v, incoming, causal=True, dlse=dlse)
        for got, expected in zip(grads, (want.dq, want.dk, want.dv), strict=True):
            assert expected is not None
            assert max_error(got, expected) <= BOUNDS[torch.float32][1]
    _, lse = repro.flash_attention(*leaves, return_lse=True)
    (dq,) = torch.autograd.grad(lse.sum(), leaves[:1])
    want = attention_reference(q, k, v, torch.zeros_like(dout), dlse=torch.ones_like(lse))
    assert want.dq is not None
    assert max_error(dq, want.dq) <= BOUNDS[torch.float32][1]


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_a_device_without_kernels_is_named(device: str) -> None:
    with FakeTensorMode():
        q = torch.empty(1, 1, 2, 8, device=device)
        with pytest.raises(TypeError, match=f"q is on {device}.*cpu and cuda"):
            repro.flash_attention(q, q, q)


@pytest.mark.parametrize(
    "options",
    [
        {"key_mask": torch.ones(2, 5, dtype=torch.bool), "dropout_p": 0.1},
        {"causal": True, "window": (3, 0), "alibi_slopes": torch.ones(4), "tile": (16, 16)},
        {"bias": torch.ones(1, 4, 6, 5, requires_grad=True)},
    ],
    ids=["mask", "window", "bias"],
)
def test_shapes_on_meta_are_those_on_the_cpu(options: dict[str, Any]) -> None:
    """As other operators of torch do, out and gradients of meta tensors come as meta tensors."""

    def shapes(device: str) -> list[tuple[Any, ...]]:
        q, k, v = (
            torch.ones(2, heads, rows, 8, device=device, requires_grad=True) for heads, rows in ((4, 6), (2, 5), (2, 5))
        )
        there = {
            name: value.detach().to(device).requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
            for name, value in options.items()
        }
        out, lse = repro.flash_attention(q, k, v, return_lse=True, **there)
        leaves = [x for x in (q, k, v, there.get("bias")) if x is not None]
        found = (out, lse, *torch.autograd.grad([out.sum(), lse.sum()], leaves))
        assert {x.device.type for x in found} == {device}
        return [(x.shape, x.dtype, x.stride()) for x in found]

    assert shapes("meta") == shapes("cpu")


def test_decoding_and_packed_sequences_on_meta() -> None:
    q, latent = (torch.ones(2, h, n, 576, dtype=torch.bfloat16, device="meta") for h, n in ((8, 1), (1, 40)))
    out, lse = repro.decode_attention(q, latent, None, value_dim=512, return_lse=True)
    assert (out.device.type, out.shape, lse.shape) == ("meta", (2, 8, 1, 512), (2, 8, 1))
    x = torch.ones(1, 2, 9, 8, device="meta")
    table = torch.tensor([0, 4, 9], dtype=torch.int32, device="meta")
    out = repro.flash_attention(x, x, x, cu_seqlens_q=table, cu_seqlens_k=table)
    assert isinstance(out, Tensor)
    assert out.shape == x.shape


def test_importing_repro_is_cheap() -> None:
    """`import repro` loads no torch; the names in it are found when they are asked for."""
    code = "import sys, repro; assert 'torch' not in sys.modules; assert 'flash_attention' in dir(repro)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        _ = repro.nothing
