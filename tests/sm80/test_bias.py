"""A stored bias and its gradient: kernels on the host with all checks on, operator, prediction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_case import BIAS_LAYOUTS, Case, failure
from attention_support import BOUNDS, inputs, normal
from flash_support import Problem, check_all, execute
from torch import Tensor

import repro
from analysis.hbm import compulsory_hbm
from analysis.lower_bounds import compulsory_bias_bytes
from analysis.shapes import AttentionShape, Tile, bias_elements
from analysis.traffic import predict_traffic
from kernels import attention
from kernels.bias_gradient import form_of
from kernels.flash_config import FlashConfig
from kernels.host import HostBackend
from kernels.launch import from_numpy
from repro.attention.reference import attention_reference, max_error
from repro.prediction import predict

SHARINGS = [(2, 2), (1, 2), (2, 1), (1, 1)]
"""(items, heads) of a bias for two items of two heads."""


# ---- kernels ------------------------------------------------------------------------------------


def test_minus_infinity_takes_a_pair_out() -> None:
    """As a causal mask: the same results, but for tiles that need not be visited."""
    p = Problem(1, 2, 70, 70, 32, "fp32", bias=(1, 1))
    p.data["bias"] = np.where(np.tri(70, dtype=bool), 0.0, -np.inf)[None, None]
    p.data["bias"][0, 0, 40] = -np.inf  # a row that sees nothing
    got = check_all(p, Tile(32, 32))
    assert (got["lse"][:, :, 40] == -np.inf).all()
    assert not got["dbias"][0, 0, 40].any()
    masked, _ = execute(Problem(1, 2, 70, 70, 32, "fp32", True), tile=Tile(32, 32))
    rest = np.arange(70) != 40
    assert np.abs(got["out"][:, :, rest] - masked["out"][:, :, rest]).max() < 1e-5


def test_what_no_query_sees_is_not_read() -> None:
    """Above the diagonal the bias may hold anything."""
    p = Problem(1, 2, 70, 70, 32, "fp16", True, bias=(1, 2))
    clean, _ = execute(p, tile=Tile(32, 32), backend=HostBackend(os_threads=1))
    p.data["bias"] = np.where(np.tri(70, dtype=bool), p.data["bias"], np.nan)
    got, _ = execute(p, tile=Tile(32, 32), backend=HostBackend(os_threads=1))
    for name, value in clean.items():
        assert np.array_equal(got[name], value), name


def test_an_ordered_gradient_repeats_to_the_bit() -> None:
    p = Problem(2, 2, 100, 100, 32, "fp16", True, bias=(1, 1))
    first, _ = execute(p, tile=Tile(32, 32), algorithm="flash-split", backend=HostBackend(seed=1))
    second, _ = execute(p, tile=Tile(32, 32), algorithm="flash-split", backend=HostBackend(seed=2))
    assert np.array_equal(first["dbias"], second["dbias"])


def test_the_form_follows_who_shares() -> None:
    assert form_of((2, 3), (2, 3), False) == form_of((1, 1), (1, 1), True) == "write"
    assert form_of((1, 3), (2, 3), False) == "atomic"
    assert form_of((1, 3), (2, 3), True) == "workspace"
    with pytest.raises(ValueError, match="bias_gradient='sum' is not one of"):
        FlashConfig("backward", "fp16", 64, Tile(64, 64), frozenset({"bias"}), bias_gradient="sum")
    with pytest.raises(ValueError, match="forward: bias_gradient='write' is of a backward"):
        FlashConfig("forward", "fp16", 64, Tile(64, 64), frozenset({"bias"}), bias_gradient="write")


def test_a_gradient_that_cannot_be_made_is_refused() -> None:
    def array(name: str, *shape: int) -> Any:
        return from_numpy(name, np.zeros(shape, np.float32), "rw")

    q, stats = array("q", 2, 2, 8, 32), {"lse": array("lse", 2, 2, 8)}
    bias, dbias = array("bias", 1, 2, 8, 8), array("dbias", 2, 2, 8, 8)
    for options, message in (
        ({"bias": bias, "dbias": dbias}, r"dbias has shape \(2, 2, 8, 8\), bias \(1, 2, 8, 8\)"),
        ({"dbias": dbias}, "dbias without a bias"),
        ({"bias": bias, "dbias": bias, "dk": None, "dv": None}, "together with dk and dv, which are None"),
    ):
        given = {"scale": 1.0, "dq": q, "dk": q, "dv": q, **options}
        with pytest.raises(ValueError, match=message):
            attention.backward(HostBackend(), "flash-split", q, q, q, q, q, stats, **given)


# ---- the reference ------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", SHARINGS)
def test_the_reference_is_the_framework_with_a_bias(sharing: tuple[int, int]) -> None:
    q, k, v, dout = (t.double() for t in inputs(2, 2, 5, 9, 8))
    bias = normal(*sharing, 5, 9).double()
    leaves = [t.requires_grad_() for t in (q, k, v, bias)]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    want = torch.autograd.grad(out, leaves, dout)
    got = attention_reference(q, k, v, dout, bias=bias)
    assert max_error(got.out, out) < 1e-12
    for name, grad in zip(("dq", "dk", "dv", "dbias"), want, strict=True):
        assert max_error(getattr(got, name), grad) < 1e-12


# ---- the operator -------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, **options: Any) -> Tensor:
    out = repro.flash_attention(q, k, v, bias=bias, **options)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize("layout", BIAS_LAYOUTS)
@pytest.mark.parametrize("needed", [(True, True, True), (True, False, False)])
def test_any_strides_and_any_gradients(layout: str, needed: tuple[bool, bool, bool]) -> None:
    """Bytes counted and predicted too, of the copy that a transposed bias takes."""
    for gradient in (False, True):
        case = Case(
            2, 2, 2, 33, 45, 16, "fp32", True, bias=(0, 1), bias_layout=layout, bias_gradient=gradient, needed=needed
        )
        assert failure(case) is None, case


def test_an_expanded_bias_and_one_that_only_has_a_gradient() -> None:
    q, k, v, dout = inputs(2, 2, 20, 30, 16)
    bias = normal(1, 2, 20, 30).requires_grad_()
    (whole,) = torch.autograd.grad(attend(q, k, v, bias), [bias], dout)
    (expanded,) = torch.autograd.grad(attend(q, k, v, bias.expand(2, 2, 20, 30)), [bias], dout)
    assert max_error(expanded, whole) < 1e-6
    want = attention_reference(q, k, v, dout, bias=bias)
    assert want.dbias is not None
    assert max_error(whole, want.dbias) < BOUNDS[torch.float32][1]


# ---- prediction ---------------------------------------------------------------------------------


def test_a_bias_is_n_squared_again() -> None:
    """Its bytes at both levels; nothing else changes."""
    shape = AttentionShape(2, 4, 512, 512, 64)
    pairs = 8 * 512 * 512
    for pass_ in ("forward", "backward"):
        plain = predict_traffic("flash", shape, Tile(64, 64), pass_)
        stored = predict_traffic("flash", shape, Tile(64, 64), pass_, bias=(2, 4))
        assert stored.total_bytes - plain.total_bytes == 2 * pairs
        shared = predict_traffic("flash", shape, Tile(64, 64), pass_, bias=(1, 1))
        assert shared == stored  # every head reads it
        once = compulsory_hbm(shared, shape, (1, 1)).read_bytes
        assert once - compulsory_hbm(plain, shape).read_bytes == 2 * 512 * 512
    with pytest.raises(ValueError, match=r"bias=\(3, 1\) is not \(1 or 2, 1 or 4\)"):
        bias_elements(shape, (3, 1))


def test_a_shared_bias_comes_from_hbm_again_where_it_outgrows_l2() -> None:
    for seqlen, again in ((1024, 1), (16384, 16)):
        shape = AttentionShape(1, 16, seqlen, seqlen, 64)
        found = predict("flash", shape, "forward", "A100", bias=(1, 1), waves=True)
        assert found.hbm.reads["flash_forward"]["bias"] == again * 2 * seqlen * seqlen


def test_what_is_saved_and_alive() -> None:
    shape = AttentionShape(2, 4, 100, 120, 64)
    asked: dict[str, Any] = {"bias": (1, 4), "bias_gradient": True}
    found = predict("auto", shape, "backward", "A100", **asked)
    assert {"bias", "dbias", "dbias_accum"} <= {t.name for t in found.peak}
    assert {t.name: t.bytes for t in found.saved}["bias"] == 2 * 4 * 100 * 120
    assert "a bias" in predict("auto", shape, "forward", "H200", bias=(1, 1)).reason  # type: ignore[operator]
    with pytest.raises(ValueError, match="bias_gradient=True without a bias"):
        predict("auto", shape, "backward", "A100", bias_gradient=True)


# ---- theory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_no_prediction_is_below_the_bias_itself(sharing: tuple[int, int], causal: bool) -> None:
    """Counted in the kernels, read again by every head that shares it, or once behind L2."""
    shape = AttentionShape(2, 2, 96, 160, 32, causal=causal)
    least = compulsory_bias_bytes(shape, sharing)
    for pass_ in ("forward", "backward"):
        stored = predict_traffic("flash", shape, Tile(32, 32), pass_, bias=sharing)
        again = 4 // (sharing[0] * sharing[1])
        assert stored.by_tensor()["bias", "read"] == again * least
        main = f"flash_{pass_}"
        assert compulsory_hbm(stored, shape, sharing).reads[main]["bias"] == least
