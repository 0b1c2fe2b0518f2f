"""Calls that run an earlier call's launches again, and calls that skip torch's dispatcher.

Both must be invisible: the same results as a first call, and whoever listens to operators hears
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_support import BOUNDS, Result, inputs, run
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import repro
from repro.attention import engine
from repro.attention.reference import attention_reference, max_error


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    engine.forget()
    yield
    engine.forget()


def attend(*operands: Tensor, **options: Any) -> Result:
    """With the same bits in every run."""
    return run(*operands, deterministic=True, **options)


def same(first: Result, second: Result) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_layout_is_kept_once_and_every_call_has_its_own_numbers() -> None:
    for seed in range(3):
        q, k, v, dout = inputs(1, 4, 70, 50, 32, kv_heads=2, seed=seed)
        got = attend(q, k, v, dout, causal=True)
        expected = attention_reference(q, k, v, causal=True, scale=32**-0.5)
        assert max_error(got.out, expected.out) < BOUNDS[torch.float32][0]
        assert len(engine._REPEATED) == 2
        calls = dict(engine._REPEATED)
        engine.forget()
        assert same(got, attend(q, k, v, dout, causal=True))
        engine.forget()
        engine._REPEATED.update(calls)


VARIATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"scale": 0.5},
    "negative scale": {"scale": -0.5},
    "tile": {"tile": (32, 32)},
    "sawtooth": {"order": "sawtooth", "tile": (32, 32)},
    "cap": {"softcap": 1.0},
    "another cap": {"softcap": 2.0},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "other slopes": {"alibi_slopes": torch.tensor([0.25, 0.5])},
    "bias": {"bias": torch.arange(40.0).expand(1, 1, 40, 40)},
    "another bias": {"bias": torch.arange(40.0).flip(0).expand(1, 1, 40, 40)},
    "mask": {"key_mask": torch.arange(40)[None] < 30},
    "another mask": {"key_mask": torch.arange(40)[None] < 20},
    "dropout": {"dropout_p": 0.2, "seed": 1},
    "another seed": {"dropout_p": 0.2, "seed": 2},
    "blocks": {"tile": (32, 32), "block_mask": torch.ones(2, 2, dtype=torch.bool).tril()},
}


def test_calls_are_not_taken_for_one_another() -> None:
    """Every option after every other on the same tensors, as if each were the first."""
    operands = inputs(1, 2, 40, 40, 16)
    alone = {}
    for name, options in VARIATIONS.items():
        engine.forget()
        alone[name] = attend(*operands, **options)
    outs = {tuple(result.out.flatten().tolist()) for result in alone.values()}
    assert len(outs) >= len(VARIATIONS) - 2  # a tile and a sawtooth need not change the result
    for _ in range(2):
        for name, options in VARIATIONS.items():
            assert same(attend(*operands, **options), alone[name]), name


def test_layouts_and_types_are_not_taken_for_one_another() -> None:
    q, k, v, dout = inputs(2, 2, 24, 24, 16)

    def rows_first(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)

    first = attend(q, k, v, dout)
    for _ in range(2):
        assert same(attend(*(rows_first(t) for t in (q, k, v, dout))), first)
        assert same(attend(q, rows_first(k), v, dout), first)
        half = attend(*(t.half() for t in (q, k, v, dout)))
        assert half.out.dtype == torch.float16
        assert max_error(half.out, first.out) < BOUNDS[torch.float16][0]
        assert same(attend(q, k, v, dout), first)


def test_memory_that_kernels_cannot_read_in_place() -> None:
    """The same layout, 4 bytes from where kernels could: a copy, whatever is kept."""
    q, k, v, dout = inputs(1, 2, 24, 24, 16)
    first = attend(q, k, v, dout)
    moved = torch.empty(q.numel() + 1)[1:].view(q.shape)
    assert moved.data_ptr() % 16
    for _ in range(2):
        assert same(attend(moved.copy_(q), k, v, dout), first)


def test_very_many_layouts_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_REPEATED_LIMIT", 3)
    for seqlen in range(1, 9):
        q, k, v, _ = inputs(1, 1, seqlen, seqlen, 8)
        out = repro.flash_attention(q, k, v)
        assert isinstance(out, Tensor)
        assert max_error(out, attention_reference(q, k, v, scale=8**-0.5).out) < 1e-5
        assert len(engine._REPEATED) <= 3


def test_what_is_wrong_is_refused_beside_a_call_that_is_kept() -> None:
    """A kept call is not checked again; whatever differs from it is."""
    q, k, v, _ = inputs(1, 2, 24, 24, 16)
    for _ in range(2):
        repro.flash_attention(q, k, v)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        ((q, k, v.half()), {}, TypeError, "q and v differ in type"),
        ((q, k, v[:, :, :20]), {}, ValueError, "k and v differ in shape"),
        ((q, k, v.to("meta")), {}, TypeError, "different devices"),
        ((q, k, v.tolist()), {}, TypeError, "must be a torch.Tensor"),
        ((q, k, v), {"scale": True}, TypeError, "scale=True is a bool, not a real number"),
        ((q, k, v), {"causal": 0}, TypeError, "causal=0 is a int, not True or False"),
        ((q, k, v), {"dropout_p": False}, TypeError, "dropout_p=False is a bool"),
        ((q, k, v), {"sinks": False}, TypeError, "sinks=False is a bool"),
        ((q, k, v), {"scale_block": 16}, ValueError, "scale_block is for k and v of"),
        ((q, k, v), {"tile": ()}, TypeError, r"two whole numbers, got \(\)"),
        ((q, k, v), {"key_mask": torch.ones(1, 23, dtype=torch.bool)}, ValueError, "key_mask"),
    ]
    for operands, options, kind, said in wrong:
        with pytest.raises(kind, match=said):
            repro.flash_attention(*operands, **options)


def test_a_kept_call_has_the_results_of_the_others() -> None:
    q, k, v, dout = inputs(1, 2, 24, 24, 16)
    first, lse = repro.flash_attention(q, k, v, return_lse=True)
    assert len(engine._REPEATED) == 1
    for options in ({}, {"scale": 0.25}, {"causal": False}, {"deterministic": False}):
        again = repro.flash_attention(q, k, v, return_lse=True, **options)
        assert torch.equal(again[0], first)
        assert torch.equal(again[1], lse)
    assert len(engine._REPEATED) == 1  # 0.25 is 1 / sqrt(16)
    with torch.inference_mode():
        assert torch.equal(repro.flash_attention(q, k, v), first)
    leaf = q.clone().requires_grad_()
    out = repro.flash_attention(leaf, k, v)
    assert isinstance(out, Tensor)
    out.backward(dout)
    assert leaf.grad is not None
    with torch.no_grad():
        assert not repro.flash_attention(leaf, k, v).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert repro.flash_attention(q, k, v).dtype == torch.bfloat16


# ---- who listens -------------------------------------------------------------------------------

NAMES = ["repro.flash_attention.default", "repro.flash_attention_backward.default"]


def call() -> None:
    q, k, v, dout = inputs(1, 1, 16, 16, 8)
    repro.flash_attention(q.requires_grad_(), k, v).backward(dout)


def test_a_dispatch_mode_sees_both_operators() -> None:
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        call()
    assert [name for name in seen if name.startswith("repro.")] == NAMES


def test_a_function_mode_sees_the_operator() -> None:
    seen: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        call()
    assert NAMES[0] in seen


def test_a_profiler_lists_both_operators() -> None:
    with torch.profiler.profile() as profile:
        call()
    listed = {event.key for event in profile.key_averages()}
    assert {"repro::flash_attention", "repro::flash_attention_backward"} <= listed


def test_tensors_that_are_more_than_memory_go_through_the_dispatcher() -> None:
    q, k, v, _ = inputs(1, 1, 16, 16, 8)
    expected = repro.flash_attention(q, k, v)
    seen: list[str] = []

    class Traced(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs)

    got = repro.flash_attention(q.as_subclass(Traced), k, v)
    assert NAMES[0] in seen
    assert isinstance(got, Traced)
    assert torch.equal(got.as_subclass(Tensor), expected)
    negated = torch._neg_view(-q)  # its memory holds -q, which a kernel would read
    assert torch.equal(repro.flash_attention(negated, k, v), expected)
