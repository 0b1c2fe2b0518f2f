"""Which kernels run a problem: the rule of ``kernels.dispatch``, alone and in the operator."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_support import inputs, run_and_check
from flash_support import Problem, aligned, check, execute, to_bits, to_float, view

import repro
from analysis.shapes import Tile
from analysis.traffic import predict_traffic
from kernels import attention, dispatch, hopper
from kernels.host import HostBackend
from kernels.launch import Array, from_numpy
from repro.attention.launcher import backend_of, host_as

CPU = torch.device("cpu")
#: Kernels of both passes, but for the forward's, by whose they are.
PERSISTENT = {"flash_forward_sm90_clear_counter", "flash_forward_sm90_persistent"}
BACKWARD_SM90 = {f"flash_backward_sm90{part}" for part in ("", "_preprocess", "_postprocess")}
SM80 = {"flash_forward", "flash_backward", "flash_backward_preprocess", "flash_backward_postprocess"}


class PretendedHopper(HostBackend):
    """Executes on the host, and says that it is a Hopper GPU."""

    compute_capability = "90"


class PretendedAmpere(HostBackend):
    compute_capability = "80"


def array(name: str = "q", dtype: str = "fp16", shape: tuple[int, ...] = (1, 2, 8, 64)) -> Array:
    kind = {"fp16": np.float16, "bf16": np.uint16, "fp32": np.float32}[dtype]
    return from_numpy(name, np.zeros(shape, kind), "rw", dtype)


def beside(name: str, **changes: Any) -> list[Array]:
    """q, and another array with something changed."""
    return [array(), replace(array(name), **changes)]


@pytest.mark.parametrize(
    ("backend", "arrays", "settings", "reason"),
    [
        (PretendedHopper(), [array()], {}, "the Hopper kernels cover it"),
        (HostBackend(), [array()], {}, "the host"),
        (PretendedAmpere(), [array()], {}, "compute capability 9.0, this has 8.0"),
        (PretendedHopper(), [array()], {"tile": Tile(64, 64)}, r"tile \(64, 64\)"),
        (PretendedHopper(), [array(dtype="fp32")], {}, "dtype fp32"),
        (PretendedHopper(), [array(shape=(1, 1, 8, 32))], {}, "head_dim 32"),
        (PretendedHopper(), [array()], {"scale": 0.0}, "scale 0.0"),
        (PretendedHopper(), [array()], {"scale": -1.0}, "scale -1.0"),
        (PretendedHopper(), [array()], {"features": ["key_mask"]}, "a key mask"),
        (PretendedHopper(), [array()], {"features": ["dropout"]}, "dropout"),
        (PretendedHopper(), [array()], {"features": ["block_mask"]}, "a block mask"),
        (PretendedHopper(), [array()], {"features": ["softcap"], "pass_": "backward"}, "a softcap in"),
        (PretendedHopper(), [array()], {"features": ["bias"]}, "a bias"),
        (PretendedHopper(), beside("k", shape=(1, 2, 0, 64)), {}, "a sequence without rows"),
        (PretendedHopper(), beside("k", strides=(0, 0, 64, 1)), {}, "k has a stride of 0 bytes"),
        (PretendedHopper(), beside("v", strides=(1032, 516, 64, 1)), {}, "v has a stride of 1032 bytes"),
    ],
)
def test_hopper_takes_what_it_covers_and_the_sm80_form_the_rest(
    backend: HostBackend, arrays: list[Array], settings: dict[str, Any], reason: str
) -> None:
    chosen = dispatch.choose(backend, arrays, **{"scale": 0.125, **settings})
    assert chosen.algorithm == ("flash-sm90" if "cover it" in reason else "flash")
    assert re.search(reason, chosen.reason), chosen.reason


def test_a_deterministic_backward_has_a_form_of_its_own() -> None:
    options: dict[str, Any] = {"scale": 1.0, "features": ["deterministic"]}
    chosen = dispatch.choose(PretendedHopper(), [array()], **options)
    assert chosen.algorithm == "flash-sm90-deterministic"
    chosen = dispatch.choose(PretendedAmpere(), [array()], **options)
    assert chosen.algorithm == "flash-split"
    assert chosen.reason == "the Hopper kernels need compute capability 9.0, this has 8.0"
    chosen = dispatch.choose(PretendedHopper(), [array()], ["deterministic", "sawtooth"], pass_="backward")
    assert chosen.algorithm == "flash-split"
    assert chosen.reason.startswith("dq in a fixed order and a sawtooth")


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("algorithm", ["flash", "flash-sm90"])
def test_the_default_tile_is_the_one_that_runs(algorithm: str, head_dim: int, pass_: str) -> None:
    """The bytes counted are those predicted for the reported tile."""
    p = Problem(heads=1, seqlen_q=200, seqlen_k=200, head_dim=head_dim, dtype="bf16")
    _, counted = execute(p, algorithm=algorithm, backward=pass_ == "backward")
    tile = dispatch.default_tile(algorithm, head_dim, "bf16", pass_, causal=False, seqlen_q=p.seqlen_q)
    options = {"persistent": True} if (algorithm, pass_) == ("flash-sm90", "forward") else {}
    predicted = predict_traffic(algorithm, p.shape, tile, pass_, **options)
    for kernel, entries in predicted.kernels.items():
        assert counted[kernel] == entries


def test_tiles_can_be_asked_for_by_name() -> None:
    p = Problem(heads=1, seqlen_q=70, seqlen_k=70, head_dim=128, dtype="bf16")
    got, counted = execute(p, algorithm="flash-sm90", tile=Tile(128, 176), backward=False)
    check(p, got)
    assert set(counted) == {"flash_forward_sm90"}
    with pytest.raises(ValueError, match=r"no tile \(64, 64\) at head_dim 128; known: \[\(128, 128"):
        execute(p, algorithm="flash-sm90", tile=Tile(64, 64), backward=False)
    assert hopper.form_of_tile(64, Tile(192, 128)) == hopper.ForwardForm(64, 3, 128, pingpong=True)
    assert hopper.default_tile(256, "forward", False, 100) == Tile(128, 80)
    for head_dim, pass_ in ((256, "backward"), (96, "forward")):
        with pytest.raises(ValueError, match=f"the Hopper {pass_} covers .* not {head_dim}"):
            hopper.default_tile(head_dim, pass_, False, 100)


@pytest.mark.parametrize(
    ("settings", "kernels"),
    [
        ({}, PERSISTENT | BACKWARD_SM90),
        ({"tile": (64, 64)}, SM80),
        ({"deterministic": True}, PERSISTENT | BACKWARD_SM90),
        ({"order": "sawtooth"}, {"flash_forward_sm90"} | BACKWARD_SM90),
        (
            {"order": "sawtooth", "deterministic": True},
            {"flash_forward_sm90", "flash_backward_preprocess", "flash_backward", "flash_backward_dq"},
        ),
    ],
    ids=["covered", "tile", "deterministic", "sawtooth", "deterministic sawtooth"],
)
def test_the_operator_follows_the_rule(settings: dict[str, Any], kernels: set[str]) -> None:
    with host_as(dispatch.HOPPER):
        backend: Any = backend_of(CPU)
        backend.reset()
        q, k, v = (torch.randn(1, 70, 2, 64).bfloat16().transpose(1, 2).requires_grad_() for _ in range(3))
        out = repro.flash_attention(q, k, v, causal=True, **settings)
        out.sum().backward()  # a gradient whose strides are all 0: copied, not refused
        assert set(backend.traffic) == kernels | {"copy"}
        assert {tensor for tensor, _ in backend.traffic["copy"]} == {"dout"}
        in_turns = any(tensor == "turns" for entries in backend.traffic.values() for tensor, _ in entries)
        assert in_turns == (settings == {"deterministic": True})


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "fixed order"])
def test_head_dim_256_goes_forward_on_hopper_and_back_on_sm80(deterministic: bool) -> None:
    """The log-sum-exp of one form is what the other recomputes P from."""
    with host_as(dispatch.HOPPER):
        backend: Any = backend_of(CPU)
        backend.reset()
        tensors = inputs(1, 2, 90, 90, 256, dtype=torch.bfloat16)
        run_and_check(*tensors, causal=True, deterministic=deterministic)
        assert {"flash_forward_sm90", "flash_backward"} <= set(backend.traffic)
        assert ("flash_backward_dq" in backend.traffic) == deterministic


def test_head_dim_256_by_name() -> None:
    """Passes of different forms can be mixed, and the backward that is not there says so."""
    p = Problem(heads=2, kv_heads=1, seqlen_q=100, seqlen_k=130, head_dim=256, dtype="bf16")
    backend = HostBackend()
    memory = {name: aligned(p.data[name].shape, p.dtype) for name in ("q", "k", "v", "dout")}
    results = {f"d{name}": aligned(p.data[name].shape, p.dtype) for name in ("q", "k", "v")}
    results["out"] = aligned(p.data["q"].shape, p.dtype)
    for name, values in memory.items():
        values[...] = to_bits(p.data[name], p.dtype)
    a = {name: view(name, values, p.dtype) for name, values in (memory | results).items()}
    stats: dict[str, Array] = {}
    assert p.scale is not None
    attention.forward(backend, "flash-sm90", a["q"], a["k"], a["v"], a["out"], stats, scale=p.scale)
    rest = [a[name] for name in ("q", "k", "v", "out", "dout")]
    gradients = [a[name] for name in ("dq", "dk", "dv")]
    with pytest.raises(ValueError, match=r"head_dim 256 \(the backward covers 64, 128\)"):
        attention.backward(backend, "flash-sm90", *rest, stats, *gradients, scale=p.scale)
    attention.backward(backend, "flash", *rest, stats, *gradients, scale=p.scale)
    check(p, {name: to_float(values, p.dtype) for name, values in results.items()})


def test_the_gradient_of_lse_stays_on_hopper() -> None:
    q, k, v, _ = inputs(1, 2, 70, 70, 64, dtype=torch.bfloat16)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with host_as(dispatch.HOPPER):
        backend: Any = backend_of(CPU)
        backend.reset()
        _, lse = repro.flash_attention(*leaves, return_lse=True)
        lse.square().sum().backward()
        assert ("dlse", "read") in backend.traffic["flash_backward_sm90_preprocess"]
    wide = [t.detach().double().requires_grad_() for t in (q, k)]
    torch.logsumexp(wide[0] @ wide[1].mT / 8, dim=3).square().sum().backward()
    for got, want in zip((q, k), wide, strict=True):
        assert (got.grad - want.grad).abs().max() < 4e-2 * want.grad.abs().max()
    assert not v.grad.any()


def test_the_host_keeps_the_sm80_form() -> None:
    backend: Any = backend_of(CPU)
    backend.reset()
    q = torch.randn(1, 1, 20, 64, dtype=torch.bfloat16)
    repro.flash_attention(q, q, q)
    assert set(backend.traffic) == {"flash_forward"}
