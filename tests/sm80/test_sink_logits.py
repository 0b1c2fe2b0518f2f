"""What is special about sink logits; the rest is the conformance suite's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_support import inputs
from torch import Tensor

import repro
from analysis.hardware import H200
from analysis.problem import Problem
from analysis.shapes import AttentionShape, Tile
from kernels.host import HostBackend
from kernels.launches import Device, launches_of
from repro.attention.reference import attention_reference, max_error
from repro.instruments.run_pass import run_pass
from repro.prediction import predict

SHAPE = AttentionShape(2, 4, 70, 91, 32, 2, "fp16")


def as_one_more_key(q: Tensor, k: Tensor, v: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, by autograd: a score of its own and a value of 0."""
    group = q.shape[1] // k.shape[1]
    scores = (q @ k.repeat_interleave(group, 1).mT) / q.shape[3] ** 0.5
    column = logits[None, :, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, column], -1)
    return weights.softmax(-1)[..., :-1] @ v.repeat_interleave(group, 1), weights.logsumexp(-1)


def test_the_reference_is_one_more_key() -> None:
    q, k, v, dout = inputs(2, 4, 17, 23, 8, kv_heads=2)
    logits, dlse = torch.tensor([0.0, 3.0, -4.0, 30.0]), torch.randn(2, 4, 17)
    leaves = [x.double().requires_grad_() for x in (q, k, v, logits)]
    out, lse = as_one_more_key(*leaves)
    grads = torch.autograd.grad([out, lse], leaves, [dout.double(), dlse.double()])
    got = attention_reference(q, k, v, dout, dlse=dlse, sink_logits=logits)
    for mine, wanted in zip(
        (got.out, got.lse, got.dq, got.dk, got.dv, got.dsink_logits), (out, lse, *grads), strict=True
    ):
        assert mine is not None
        assert max_error(mine, wanted) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits_of_all_sizes(dtype: torch.dtype) -> None:
    """Without weight, beside the scores, and above all of them; scores in the thousands."""
    q, k, v, _ = inputs(1, 4, 40, 50, 32, dtype=dtype)
    logits = torch.tensor([-torch.inf, 0.0, 80.0, 5000.0])
    for scale in (0.2, 300.0):
        out, lse = repro.flash_attention(q, k, v, scale=scale, sink_logits=logits, return_lse=True)
        want = attention_reference(q, k, v, scale=scale, sink_logits=logits)
        known = attention_reference(q, k, v, scale=scale).lse.abs().max()
        assert max_error(lse, want.lse) <= 4 * torch.finfo(torch.float32).eps * float(known + 5000.0)
        off = 2 * torch.finfo(torch.float32).eps * float(known + 5000.0)  # of an exponent
        assert max_error(out, want.out) <= (off + 4 * torch.finfo(dtype).eps) * float(v.abs().max())
    plain = repro.flash_attention(q, k, v)
    assert torch.equal(repro.flash_attention(q, k, v, sink_logits=logits)[:, 0], plain[:, 0])


@pytest.mark.parametrize("algorithm", ["flash", "flash-split", "flash-deterministic"])
def test_each_backward(algorithm: str) -> None:
    q, k, v, dout = inputs(2, 4, 70, 91, 32, kv_heads=2)
    logits = torch.tensor([1.0, -1.0, 4.0, 0.0])
    tensors = {"q": q, "k": k, "v": v, "dout": dout}
    ran = run_pass(algorithm, "backward", tensors, HostBackend(), tile=Tile(32, 32), sink_logits=logits)
    assert max(ran.errors(attention_reference(q, k, v, dout, sink_logits=logits)).values()) < 2e-5
    problem = Problem(replace(SHAPE, dtype="fp32"), tile=Tile(32, 32), sink_logits=True, sink_gradient=True)
    assert ran.traffic.kernels == predict(algorithm, problem, "backward", H200).traffic.kernels


def test_a_gradient_of_the_logits_alone() -> None:
    q, k, v, dout = inputs(1, 2, 40, 50, 32)
    logits = torch.tensor([1.0, -1.0], requires_grad=True)
    (got,) = torch.autograd.grad(repro.flash_attention(q, k, v, sink_logits=logits), [logits], dout)
    want = attention_reference(q, k, v, dout, sink_logits=logits)
    assert want.dsink_logits is not None
    assert max_error(got, want.dsink_logits) < 1e-5


def test_no_keys_at_all() -> None:
    q, k, v, _ = inputs(2, 2, 5, 0, 32)
    logits = torch.tensor([1.0, -1.0], requires_grad=True)
    out, lse = repro.flash_attention(q.requires_grad_(), k, v, sink_logits=logits, return_lse=True)
    assert not out.any()
    assert torch.equal(lse, logits[None, :, None].expand(2, 2, 5))
    assert torch.equal(torch.autograd.grad(lse.sum(), [logits])[0], torch.tensor([10.0, 10.0]))


def test_who_does_not_take_them_says_so() -> None:
    problem = Problem(AttentionShape(2, 4, 128, 128, 64, dtype="bf16"), sink_logits=True)
    for name in ("standard", "flash1-literal", "flash-sm90"):
        with pytest.raises(ValueError, match=f"{name} does not take sink_logits"):
            launches_of(name, problem, "forward", Device("90"))
    found = launches_of("auto", problem, "forward", Device("90"))
    assert (found.algorithm, found.reason) == ("flash", "sink logits")
    with pytest.raises(ValueError, match="sink_gradient=True without sink_logits"):
        Problem(problem.shape, sink_gradient=True)


def test_bytes_by_hand() -> None:
    """A logit a query tile, and around the backward lse and delta once."""
    options = {"sink_logits": True, "sink_gradient": True}
    forward = predict("flash", Problem(SHAPE, tile=Tile(32, 32), sink_logits=True), "forward", H200)
    assert forward.traffic.by_tensor()["sink_logits", "read"] == 2 * 4 * 3 * 4
    backward = predict("flash", Problem(SHAPE, tile=Tile(32, 32), **options), "backward", H200)
    rows = 2 * 4 * 70 * 4
    assert backward.traffic.kernels["flash_sink_postprocess"] == {
        ("lse", "read"): rows,
        ("delta", "read"): rows,
        ("sink_logits", "read"): 16,
        ("dsink_logits", "write"): 16,
    }
