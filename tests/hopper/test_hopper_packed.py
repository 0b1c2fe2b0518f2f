"""The Hopper forward on packed sequences: each is bit for bit what it is alone, whatever lies
beside it, and every byte is as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from flash_support import Problem, aligned, check, to_bits, to_float, view
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_support import lengths_of, packed_of, problems

from analysis.hardware import H200
from analysis.packed import Lengths
from analysis.shapes import AttentionShape, Tile
from analysis.traffic import Traffic, predict_traffic
from kernels import hopper
from kernels.hopper import PACKED_FORMS, ForwardForm, packed_form
from kernels.host import HostBackend
from kernels.launch import Array, TensorMap
from kernels.launches import Device, launches_of
from kernels.launching import driver
from kernels.packed import Packed
from repro.prediction import predict

#: (queries, keys): nothing of either, one token, below, at and beyond tiles of 128 and 192 rows.
MIXED = Lengths((193, 0, 1, 70, 16, 0, 128), (50, 20, 1, 300, 0, 0, 129))
HOPPER = Device("90")


def run(
    sequences: Sequence[Problem], form: ForwardForm, packed: Packed | None, **how: Any
) -> tuple[dict[str, np.ndarray], Traffic]:
    """Bits of out and lse of the sequences side by side, and what was counted. What the kernel
    leaves unwritten stays not a number."""
    first, dtype = sequences[0], sequences[0].dtype
    given = {}
    for name in ("q", "k", "v"):
        rows = np.concatenate([to_bits(p.data[name], dtype) for p in sequences], axis=2)
        given[name] = aligned(rows.shape, dtype)
        given[name][...] = rows
    out, lse = aligned(given["q"].shape, dtype), aligned(given["q"].shape[:3], "fp32")
    out[...], lse[...] = to_bits(np.full(out.shape, np.nan), dtype), np.nan
    backend = HostBackend(**how)
    hopper.forward(
        backend,
        *(view(name, given[name], dtype) for name in "qkv"),
        view("out", out, dtype),
        view("lse", lse, "fp32"),
        scale=first.scale or 1.0,
        causal=first.causal,
        form=form,
        packed=packed,
    )
    return {"out": out, "lse": lse}, Traffic(backend.traffic)


def hold(sequences: Sequence[Problem], form: ForwardForm, **how: Any) -> None:
    """Bits to those of separate calls, these to float64 where all is finite, and bytes to the
    prediction."""
    first, lengths = sequences[0], lengths_of(sequences)
    got, counted = run(sequences, form, packed_of(lengths), **how)
    some = AttentionShape(1, first.heads, 1, 1, first.head_dim, first.kv_heads, first.dtype, first.causal)
    predicted = predict_traffic("flash-sm90", lengths.packed_shape(some), form.tile, "forward", lengths=lengths)
    assert counted.kernels == predicted.kernels
    for p, end in zip(sequences, accumulate(lengths.queries), strict=True):
        mine = {name: bits[:, :, end - p.seqlen_q : end] for name, bits in got.items()}
        if not p.seqlen_k:
            assert not mine["out"].any()
            assert np.isneginf(mine["lse"]).all()
        elif p.seqlen_q:
            want, _ = run([p], replace(form, packed=False), None)
            finite = all(np.isfinite(p.data[name]).all() for name in ("q", "k", "v"))
            for name in mine:
                # Which of the bits of not a number come out is no promise.
                assert np.array_equal(mine[name], want[name]) or not finite
            if finite:
                results = {"out": to_float(mine["out"], p.dtype)}
                check(p, results | {"lse": mine["lse"].astype(np.float64)})


FORM_DTYPE_CAUSAL = [
    pytest.param(
        form,
        dtype,
        causal,
        id=f"{form.name} {dtype} {'causal' if causal else 'dense'}",
        marks=() if (form.head_dim, dtype, causal) in quick else pytest.mark.thorough,
    )
    for quick in [{(64, "fp16", True), (128, "fp16", False)}]
    for form in PACKED_FORMS
    for dtype in ("fp16", "bf16")
    for causal in (False, True)
]


@pytest.mark.parametrize(("form", "dtype", "causal"), FORM_DTYPE_CAUSAL)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_lies_in_the_neighbours_changes_nothing(bad: float, form: ForwardForm, dtype: str, causal: bool) -> None:
    """Rows of other sequences that a box would reach past the end of its own, of every operand:
    0 times infinity is no number."""
    lengths = Lengths((70, 30, 1, 90), (40, 30, 33, 90))
    sequences = problems(lengths, form.head_dim, dtype, causal)
    for p in sequences[1::2]:
        for name in ("q", "k", "v"):
            p.data[name][...] = bad
    hold(sequences, form)


length = st.sampled_from([0, 0, 1, 1, 15, 64, 65, 128, 191, 192, 193, 260])


@given(st.lists(st.tuples(length, length), min_size=1, max_size=7), st.integers(0, 9))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_drawn_lengths(pairs: list[tuple[int, int]], seed: int) -> None:
    """Also of numbers without rows that a block is given, last or alone."""
    if not sum(q for q, _ in pairs) or not sum(k for _, k in pairs):
        pairs.append((1, 1))
    lengths = Lengths(tuple(q for q, _ in pairs), tuple(k for _, k in pairs))
    form = packed_form(64)
    sequences = problems(lengths, form.head_dim, "fp16", True, heads=1 + seed % 2, seed=seed)
    hold(sequences, form, seed=seed or None)


def test_more_sequences_than_a_step_of_the_search_looks_at() -> None:
    """Ones and nothing, which leave numbers without rows, and whole blocks without work: more SMs
    than tiles."""
    form = packed_form(64)
    lengths = Lengths.equal([1, 0, 0, 3, 1] * 14 + [0] * 5)
    hold(problems(lengths, form.head_dim, "fp16", True, heads=1), form)


def test_one_sequence_costs_the_plain_call_and_the_tables() -> None:
    """And one number without rows for each head where the last tile is whole."""
    for queries, extra in ((300, 0), (384, 1)):
        shape = AttentionShape(1, 4, queries, 400, 64, kv_heads=2, causal=True, dtype="bf16")
        plain = predict("flash-sm90", shape, "forward", H200)
        packed = predict("flash-sm90", shape, "forward", H200, lengths=Lengths((queries,), (400,)))
        moved, tables = packed.traffic.by_tensor(), 2 * 4 * 4 * (2 + extra)
        assert [moved.pop((f"cu_seqlens_{side}", "read")) for side in "qk"] == [tables] * 2
        moved["tile_counter", "atomic"] -= 4 * 4 * extra
        assert moved == plain.traffic.by_tensor()
        assert packed.useful_flops == plain.useful_flops
        assert packed.blocks == plain.blocks


def test_dispatch_takes_the_hopper_kernels() -> None:
    lengths = Lengths.equal([1000, 0, 24])
    for head_dim, dtype, pass_, reason in (
        (64, "fp16", "forward", None),
        (128, "bf16", "forward", None),
        (256, "bf16", "forward", "packed sequences of head_dim 256 (no persistent form)"),
        (64, "fp16", "backward", None),
        (128, "bf16", "backward", None),
    ):
        shape = lengths.packed_shape(AttentionShape(1, 2, 1, 1, head_dim, dtype=dtype))
        found = launches_of("auto", shape, pass_, HOPPER, lengths=lengths)
        assert found.algorithm == ("flash" if reason else "flash-sm90")
        assert found.reason == (reason or "the Hopper kernels cover it")
    changed = "packed sequences with a window, a softcap or ALiBi"
    for more, reason in (({"softcap": True}, changed), ({"alibi": True}, changed), ({"dropout_p": 0.5}, "dropout")):
        found = launches_of("auto", shape, "forward", HOPPER, lengths=lengths, **more)
        assert (found.algorithm, found.reason) == ("flash", reason)
    windowed = replace(shape, window=(70, 0))
    found = launches_of("auto", windowed, "forward", HOPPER, lengths=lengths)
    assert (found.algorithm, found.reason) == ("flash", changed)
    # One that hides nothing in any sequence is none.
    hides_nothing = replace(shape, window=(999, 999))
    found = launches_of("auto", hides_nothing, "forward", HOPPER, lengths=lengths)
    assert found.algorithm == "flash-sm90"


def test_sums_refuse_what_the_kernels_do() -> None:
    lengths = Lengths.equal([100, 28])
    shape = lengths.packed_shape(AttentionShape(1, 2, 1, 1, 64))
    for some, options, name in ((shape, {"alibi": True}, "alibi"), (replace(shape, window=(30, 30)), {}, "window")):
        with pytest.raises(ValueError, match=f"flash-sm90: packed sequences do not go with {name}"):
            predict_traffic("flash-sm90", some, Tile(192, 128), "forward", lengths=lengths, **options)
        with pytest.raises(ValueError, match="flash-sm90-optimistic forward takes no packed"):
            predict_traffic("flash-sm90-optimistic", shape, Tile(192, 128), "forward", lengths=lengths)


def test_what_does_not_go_together_is_refused() -> None:
    p = problems(Lengths.equal([20]), 64, "bf16", False)
    arrays = {name: view(name, to_bits(p[0].data[name], "bf16"), "bf16") for name in "qkv"}
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    lse = view("lse", np.zeros(q.shape[:3], np.float32), "fp32")
    packed = packed_of(Lengths.equal([20]))

    def forward(**options: Any) -> None:
        hopper.forward(HostBackend(), q, k, v, q, lse, scale=1.0, **{"packed": packed, **options})

    for options, message in (
        ({"optimistic": True}, r"packed sequences \(cu_seqlens_q\) do not go with optimistic"),
        ({"order": "sawtooth"}, "do not go with order"),
        ({"softcap": 2.0}, "do not go with softcap"),
        ({"window": (3, 3)}, "do not go with window"),
        ({"tile": Tile(128, 128)}, r"forward of packed sequences has no tile \(128, 128\)"),
        ({"form": hopper.forward_form(64, False, 20)}, "pingpong for packed sequences with"),
        ({"form": packed_form(128)}, "packed for packed sequences with head_dim 64"),
        ({"packed": packed_of(Lengths.equal([19]))}, "q has 20 rows, its sequences 19 together"),
    ):
        with pytest.raises(ValueError, match=message):
            forward(**options)
    with pytest.raises(ValueError, match=r"head_dim=256 is not one of 64, 128"):
        packed_form(256)
    with pytest.raises(ValueError, match="packed=True is for blocks that stay"):
        ForwardForm(64, 3, 128, packed=True)
    with pytest.raises(ValueError, match="is exact, not optimistic"):
        packed_form(64).kernel("bf16", False, "optimistic")
    for longest in (0, 21):
        with pytest.raises(ValueError, match=f"q: longest={longest} of sequences in 1 items of 20"):
            TensorMap(q, 64, longest)
    two = replace(q, shape=(2, *q.shape[1:]))
    with pytest.raises(ValueError, match="longest=3 of sequences in 2 items"):
        TensorMap(two, 64, 3)


def test_the_driver_s_map_begins_before_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """(1, 2, 1000, 128) in bf16, rows first in memory, sequences of up to 300 rows: by hand. Row
    300 - n of item e is row e - n of the tensor."""
    seen: list[Any] = []

    def encode(pointer: int, *rest: Any) -> bytes:
        seen.append((pointer, *rest))
        return bytes(128)

    monkeypatch.setattr(driver, "bindings", lambda: None)
    monkeypatch.setattr(driver.libcuda, "encode_tiled", encode)
    start, row = 1 << 30, 2 * 2 * 128
    q = Array("q", start, (1, 2, 1000, 128), (256000, 128, 256, 1), "bf16", "r")
    driver.tensor_map.cache_clear()
    driver.tensor_map(q.pointer, *driver.layout_of(TensorMap(q, 64, 300)))
    [(pointer, _, sizes, steps, box)] = seen
    assert pointer == start - 300 * row
    assert sizes == [64, 300, 2, 2, 1001]
    assert steps == [row, 128, 2 * 128, row]
    assert box == [64, 64, 2, 1, 1]
    n, end = 77, 500
    assert pointer + (300 - n) * steps[0] + end * steps[3] == start + (end - n) * row
    with pytest.raises(ValueError, match="an array at 0x100 has no 300 rows of 512 bytes bef"):
        driver.tensor_map(0x100, *driver.layout_of(TensorMap(q, 64, 300)))
