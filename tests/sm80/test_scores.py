"""A cap of the scores and ALiBi: kernels on the host with all checks on, operator, prediction."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from attention_case import Case, failure
from attention_support import inputs, run, run_and_check
from flash_support import Problem, check_all, execute

from analysis.flops import visited_pairs
from analysis.shapes import AttentionShape, Tile
from kernels.attention import configure
from repro.attention.reference import attention_reference, changed, max_error
from repro.prediction import predict

SLOPES = np.array([0.5, 0.0625], np.float32)
ITEMS = np.array([[0.5, 0.0], [0.03125, 2.0]], np.float32)


# ---- kernels ------------------------------------------------------------------------------------


def test_more_queries_than_keys_are_far_from_all_of_them() -> None:
    """The distance counts from the query's own place, which the first queries have before key 0."""
    check_all(Problem(1, 2, 90, 20, 32, "fp32", alibi_slopes=SLOPES), Tile(32, 32))


def test_a_lone_key_has_weight_one_to_the_bit() -> None:
    """Both passes find the same score, so that exp(s - lse) is 1."""
    p = Problem(1, 2, 9, 1, 32, "fp32", softcap=3.0, alibi_slopes=SLOPES)
    got, _ = execute(p, tile=Tile(32, 32))
    assert np.array_equal(got["out"], np.broadcast_to(p.data["v"], got["out"].shape))
    assert np.abs(got["dq"]).max() <= 1e-6


def test_the_kernels_without_them_refuse_them() -> None:
    for algorithm in ("standard", "flash1-released", "flash-sm90-optimistic"):
        with pytest.raises(ValueError, match=f"{algorithm} does not take softcap"):
            execute(Problem(1, 2, 8, 8, 64, softcap=1.0), algorithm=algorithm)


# ---- the reference ------------------------------------------------------------------------------


def test_the_reference_is_the_framework_with_a_bias() -> None:
    """ALiBi in the reference is the framework's attention with the distances as a bias."""
    q, k, v, dout = (t.double() for t in inputs(2, 2, 5, 9, 8))
    slopes = torch.from_numpy(ITEMS)
    bias, _ = changed(torch.zeros(2, 2, 5, 9, dtype=torch.float64), {"alibi_slopes": slopes})
    # Query 0 of 5 stands at key 4 of 9; query 4 at key 8.
    assert bias[0, 0, 0].tolist() == [-2.0, -1.5, -1.0, -0.5, 0, -0.5, -1.0, -1.5, -2.0]
    assert bias[1, 1, 4].tolist() == [-2.0 * distance for distance in range(8, -1, -1)]
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=bias)
    want = torch.autograd.grad(out, leaves, dout)
    got = attention_reference(q, k, v, dout, alibi_slopes=slopes)
    assert max_error(got.out, out) < 1e-12
    for name, grad in zip(("dq", "dk", "dv"), want, strict=True):
        assert max_error(getattr(got, name), grad) < 1e-12


def test_the_gradients_of_the_reference_are_those_of_autograd() -> None:
    q, k, v, dout = (t.double().requires_grad_() for t in inputs(1, 2, 6, 7, 8))
    scores, _ = changed(q @ k.mT, {"softcap": 1.5, "alibi_slopes": torch.from_numpy(SLOPES)})
    want = torch.autograd.grad(torch.softmax(scores, -1) @ v, (q, k, v), dout)
    options: dict[str, Any] = {"softcap": 1.5, "alibi_slopes": torch.from_numpy(SLOPES)}
    got = attention_reference(q, k, v, dout, scale=1.0, **options)
    for name, grad in zip(("dq", "dk", "dv"), want, strict=True):
        assert max_error(getattr(got, name), grad) < 1e-12


# ---- the operator -------------------------------------------------------------------------------


def test_a_saturated_cap_keeps_small_gradients_and_stays_finite() -> None:
    q, k, v, dout = inputs(1, 1, 20, 20, 16)
    run_and_check(300 * q, 300 * k, v, dout, softcap=0.5)
    far = run(1e4 * q, 1e4 * k, v, dout, softcap=0.5)
    assert bool(torch.stack([far.dq, far.dk, far.dv, far.out]).isfinite().all())


# ---- prediction ---------------------------------------------------------------------------------


def test_a_cap_costs_exponentials_and_slopes_cost_four_bytes_a_tile() -> None:
    shape = AttentionShape(2, 4, 1000, 1000, 64, causal=True)
    for (pass_, main), (dtype, specials) in product(
        (("forward", "flash_forward"), ("backward", "flash_backward")), (("fp16", 2), ("bf16", 1))
    ):
        shape = replace(shape, dtype=dtype)
        plain = predict("flash", shape, pass_, "A100")
        with_cap = predict("flash", shape, pass_, "A100", softcap=True)
        assert with_cap.traffic == plain.traffic
        made = [p.time.by_resource["exponentials"] * p.ceilings.exp_per_s * p.busy for p in (plain, with_cap)]
        more = made[1] - made[0]
        assert more == pytest.approx(specials * 8 * visited_pairs(shape, with_cap.tile), rel=1e-9)
        sloped = predict("flash", shape, pass_, "A100", alibi=True).traffic
        assert set(sloped.by_tensor()) - set(plain.traffic.by_tensor()) == {("alibi_slopes", "read")}
        blocks = 8 * -(-1000 // plain.tile.block_m)
        read = sloped.kernels[main]["alibi_slopes", "read"]
        assert read == 4 * blocks if pass_ == "forward" else read > 4 * blocks


def test_their_forms_have_shared_memory_and_warps_of_their_own() -> None:
    plain = configure("forward", "fp16", 64)
    for feature, more in (("softcap", 0), ("alibi", 16)):
        form = configure("forward", "fp16", 64, **{feature: True})
        assert form.shared_bytes == plain.shared_bytes + more
        assert form.threads == 2 * plain.threads  # a warp has 16 rows, to leave registers
        assert dict(form.kernel().macros)[feature.upper()] == 1


def test_a_cap_that_holds_every_score_leaves_a_bound_above_zero() -> None:
    """Found by the fuzzer: the derivative 1 - tanh² is 0 in float64 itself there."""
    case = Case(
        seqlen_q=32,
        seqlen_k=32,
        head_dim=124,
        block_keep=0.2,
        softcap=0.5,
        tile=(16, 16),
        window=(1, None),
        values="large",
        needed=(False, True, True),
        seed=1180278626,
    )
    assert failure(case) is None
