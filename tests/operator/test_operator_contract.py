"""The operator as torch sees it: registration, compilation, autocast, arguments, lse gradients."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_support import BOUNDS, inputs, run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import repro
from repro.attention import decode, registered
from repro.attention.options import Options
from repro.attention.reference import attention_reference, max_error

VARIATIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "key_mask": torch.arange(20)[None].expand(2, 20) < 15},
    {"dropout_p": 0.3, "seed": torch.tensor(5)},
    {"block_mask": torch.ones(2, 2, dtype=torch.bool).tril(), "tile": [16, 16]},
    {"order": "sawtooth"},
    {"softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.25])},
    {"bias": torch.ones(1, 2, 20, 20, requires_grad=True)},
    {"left": 7, "right": 2, "sinks": 3},
]


@pytest.mark.parametrize("changes", VARIATIONS)
def test_opcheck_forward(changes: dict[str, Any]) -> None:
    q, k, v, _ = inputs(2, 2, 20, 20, 16)
    arguments = (q.requires_grad_(), k.requires_grad_(), v, *Options(scale=0.25, **changes))
    torch.library.opcheck(torch.ops.repro.flash_attention, arguments)


PACKED = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 7, 7, 20], dtype=torch.int32))


@pytest.mark.parametrize("changes", [{}, {"alibi_slopes": torch.rand(3, 2), "left": 7}])
def test_opcheck_packed(changes: dict[str, Any]) -> None:
    q, k, v, dout = inputs(1, 2, 20, 20, 16)
    options = Options(scale=0.25, **PACKED, **changes)
    out, lse = torch.ops.repro.flash_attention(q, k, v, *options)
    leaves = (q.requires_grad_(), k.requires_grad_(), v)
    torch.library.opcheck(torch.ops.repro.flash_attention, (*leaves, *options))
    torch.library.opcheck(
        torch.ops.repro.flash_attention_backward,
        (dout, None, q.detach(), k.detach(), v, out, lse, *options, [True, True, True, False]),
    )


@pytest.mark.parametrize("needed", [[True, True, True, False], [True, False, False, False], [True, False, False, True]])
@pytest.mark.parametrize("changes", [{}, {"left": 7, "sinks": 3}], ids=["plain", "window"])
def test_opcheck_backward(needed: list[bool], changes: dict[str, Any]) -> None:
    q, k, v, dout = inputs(2, 2, 20, 20, 16)
    options = Options(scale=0.25, causal=True, bias=torch.ones(2, 1, 20, 20), **changes)
    out, lse = torch.ops.repro.flash_attention(q, k, v, *options)
    torch.library.opcheck(torch.ops.repro.flash_attention_backward, (dout, None, q, k, v, out, lse, *options, needed))


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


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p"])
def test_compiled_with_a_number_that_changes(name: str) -> None:
    """From its second value on torch traces a float as a symbol."""
    torch._dynamo.reset()
    compiled = torch.compile(repro.flash_attention, backend="aot_eager", fullgraph=True)
    q, k, v, _ = inputs(1, 2, 20, 20, 16)
    for number in (0.5, 0.75, 0.25):
        options: dict[str, Any] = {name: number, "seed": 1}
        assert torch.equal(compiled(q, k, v, **options), repro.flash_attention(q, k, v, **options))


@pytest.mark.parametrize("dynamic", [False, True])
def test_each_window_is_compiled_for_itself(dynamic: bool) -> None:
    """Another window, or the same one beside sinks, is another call: neither a compiled graph nor
    recorded launches of one may serve the other."""
    torch._dynamo.reset()
    compiled = torch.compile(repro.flash_attention, backend="aot_eager", dynamic=dynamic)
    q, k, v, _ = inputs(1, 2, 40, 40, 16)
    windows = [(5, 0), (6, 0), (5, 1), (5, None), None, (5, 0)]
    found = [compiled(q, k, v, window=window, sinks=sinks) for window in windows for sinks in (0, 2)]
    plain = [repro.flash_attention(q, k, v, window=window, sinks=sinks) for window in windows for sinks in (0, 2)]
    for got, want in zip(found, plain, strict=True):
        assert torch.equal(got, want)
    distinct = {tuple(out.flatten().tolist()) for out in plain}
    assert len(distinct) == 9  # of 12: (5, 0) comes twice, and None has nothing to spare sinks from


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


def test_autocast_casts_like_the_framework(device: str) -> None:
    q, k, v, _ = inputs(1, 1, 20, 20, 128, device=device)
    with torch.autocast(device, torch.bfloat16):
        out = repro.flash_attention(q.requires_grad_(), k.half(), v)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert isinstance(out, Tensor)
    assert out.dtype == theirs.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


def test_deterministic_gradients_repeat(device: str) -> None:
    tensors = inputs(2, 2, 130, 130, 32, device=device)
    first = run(*tensors, causal=True, deterministic=True)
    for _ in range(3):
        for got, want in zip(run(*tensors, causal=True, deterministic=True), first, strict=True):
            assert torch.equal(got, want)


def _q(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


Q = _q(2, 4, 6, 8)
MASK = torch.ones(2, 6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((Q[0], Q, Q), {}, ValueError, r"4 dimensions \(B, H, N, D\), got 3"),
        ((Q, Q.half(), Q), {}, TypeError, "differ in type: torch.float32 and torch.float16"),
        ((Q, Q, Q.tolist()), {}, TypeError, "v must be a torch.Tensor, got list"),
        ((Q, Q[:, :, :5], Q), {}, ValueError, r"\(2, 4, 5, 8\) and \(2, 4, 6, 8\)"),
        ((Q[:1], Q, Q), {}, ValueError, "differ in batch: 1 and 2"),
        ((Q[..., :4], Q, Q), {}, ValueError, "differ in head dimension: 4 and 8"),
        ((Q, Q[:, :3], Q[:, :3]), {}, ValueError, "4 heads, not a multiple of the 3 heads"),
        ((Q, Q[:, :0], Q[:, :0]), {}, ValueError, "4 heads, not a multiple of the 0 heads"),
        ((Q.to("meta"), Q, Q), {}, TypeError, "different devices: meta, cpu"),
        ((Q, Q, Q), {"key_mask": MASK.int()}, TypeError, "boolean .* got torch.int32"),
        ((Q, Q, Q), {"key_mask": MASK[:, :5]}, ValueError, r"\(2, 6\), got \(2, 5\)"),
        ((Q, Q, Q), {"scale": "1"}, TypeError, "scale='1' is a str, not a real number"),
        ((Q, Q, Q), {"scale": True}, TypeError, "scale=True is a bool, not a real number"),
        ((Q, Q, Q), {"scale": float("inf")}, ValueError, "scale=inf is not finite"),
        ((Q, Q, Q), {"tile": (64, 0)}, ValueError, "block_n=0 is below 1"),
        ((Q, Q, Q), {"tile": (60, 64)}, ValueError, "60"),
        ((Q, Q, Q), {"tile": (4096, 4096)}, ValueError, "4096"),
        ((Q, Q, Q), {"block_mask": MASK}, ValueError, r"needs tile=\(block_m, block_n\), got None"),
        (
            (Q, Q, Q),
            {"block_mask": MASK, "tile": (16, 16)},
            ValueError,
            r"\(1, 1\).* for tile \(16, 16\), got \(2, 6\)",
        ),
        ((Q, Q, Q), {"window": (4, -1)}, ValueError, "right=-1 is below 0; None is unlimited"),
        ((Q, Q, Q), {"window": 4}, TypeError, r"window must be \(left, right\), .* got 4"),
        ((Q, Q, Q), {"window": (4, 1.5)}, TypeError, "window right=1.5 is a float, not a whole"),
        ((Q, Q, Q), {"sinks": -1}, ValueError, "sinks=-1 is below 0"),
        ((Q, Q, Q), {"sinks": True}, TypeError, "sinks=True is a bool, not a whole number"),
        ((Q, Q, Q), {"dropout_p": 0.5, "seed": 2**63}, ValueError, "got 9223372036854775808"),
        ((Q, Q, Q), {"dropout_p": 0.5, "seed": 1.5}, TypeError, "seed=1.5 is a float, not a whole"),
        ((Q, Q, Q), {"seed": -1}, ValueError, r"seed must lie in \[0, 2\*\*63\), got -1"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        repro.flash_attention(*arguments, **options)


def test_what_is_wrong_is_said_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what decides about the results alone."""

    def launched(*_: Any) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(registered, "attention", launched)
    monkeypatch.setattr(decode, "_results", launched)
    for call in (repro.flash_attention, repro.decode_attention):
        with pytest.raises(AssertionError, match="launched"):
            call(Q, Q, Q)
        with pytest.raises(TypeError, match="return_lse=1 is a int, not True or False"):
            call(Q, Q, Q, return_lse=1)  # type: ignore[arg-type]


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
