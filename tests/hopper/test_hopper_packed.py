"""The Hopper kernels on packed sequences: each is bit for bit what it is alone, whatever lies beside
it, and every byte is as predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flash_support import Problem, to_bits, view
from hopper_runs import BOTH, GRADIENTS, RESULTS, hold_packed, packed_of, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.hardware import H200
from analysis.packed import Lengths
from analysis.shapes import AttentionShape, Tile
from analysis.traffic import predict_traffic
from kernels import hopper
from kernels.hopper import BackwardForm, ForwardForm, backward_form, packed_form
from kernels.host import HostBackend
from kernels.launch import Array, TensorMap
from kernels.launches import Device, launches_of
from kernels.launching import driver
from repro.prediction import predict

#: (queries, keys): nothing of either, one token, below, at and beyond tiles of 64, 128 and 192 rows.
MIXED = Lengths((193, 0, 1, 70, 16, 0, 128), (50, 20, 1, 300, 0, 0, 129))
#: Every second of these may hold anything.
NEIGHBOURS = Lengths((70, 30, 1, 90), (40, 30, 133, 90))
HOPPER = Device("90")


FORWARD_CASES = [(d, dtype, causal) for d in (64, 128) for dtype in ("fp16", "bf16") for causal in (False, True)]
BACKWARD_CASES = [(*case, turns) for case in FORWARD_CASES for turns in (False, True)]


def named(cases: list[tuple[Any, ...]], *quick: tuple[Any, ...]) -> list[Any]:
    """As parameters; all but the quick ones are thorough."""
    found = []
    for case in cases:
        head_dim, dtype, causal, *turns = case
        name = f"d{head_dim} {dtype} {'causal' if causal else 'dense'}{', in turns' * any(turns)}"
        found.append(pytest.param(*case, id=name, marks=() if case in quick else pytest.mark.thorough))
    return found


def hold_forward(sequences: list[Problem], **how: Any) -> None:
    form = packed_form(sequences[0].head_dim)
    hold_packed(sequences, form, replace(form, packed=False), **how)


def hold_backward(sequences: list[Problem], deterministic: bool, seed: int | None = None) -> None:
    form = backward_form(sequences[0].head_dim, sequences[0].causal, featured=True)
    backend = HostBackend(seed=seed, os_threads=1)
    hold_packed(sequences, form, form, BOTH, deterministic=deterministic, backend=backend)


def spoilt(head_dim: int, dtype: str, causal: bool, bad: float) -> list[Problem]:
    sequences = problems(NEIGHBOURS, head_dim, dtype, causal)
    for p in sequences[1::2]:
        for values in p.data.values():
            values[...] = bad
    return sequences


@pytest.mark.parametrize(
    ("head_dim", "dtype", "causal"), named(FORWARD_CASES, (64, "fp16", True), (128, "fp16", False))
)
def test_what_lies_in_the_neighbours_changes_nothing(head_dim: int, dtype: str, causal: bool) -> None:
    """Rows of other sequences that a box would reach past the end of its own, of every operand:
    0 times infinity is no number."""
    for bad in (np.nan, np.inf):
        hold_forward(spoilt(head_dim, dtype, causal, bad))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "causal", "deterministic"),
    named(BACKWARD_CASES, (64, "fp16", True, True), (128, "fp16", False, False)),
)
def test_gradients_are_those_of_separate_calls(head_dim: int, dtype: str, causal: bool, deterministic: bool) -> None:
    """Also where the neighbours hold no numbers."""
    hold_backward(problems(MIXED, head_dim, dtype, causal), deterministic, seed=3)
    for bad in (np.nan, np.inf):
        hold_backward(spoilt(head_dim, dtype, causal, bad), deterministic)


@pytest.mark.thorough
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gradient_of_lse(deterministic: bool) -> None:
    hold_backward([replace(p, with_dlse=True) for p in problems(MIXED, 64, "bf16", False)], deterministic)


length = st.sampled_from([0, 0, 1, 1, 15, 64, 65, 128, 191, 192, 193, 260])


@given(st.lists(st.tuples(length, length), min_size=1, max_size=7), st.integers(0, 9))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_drawn_lengths(pairs: list[tuple[int, int]], seed: int) -> None:
    """Also of numbers without rows that a block is given, last or alone."""
    if not sum(q for q, _ in pairs) or not sum(k for _, k in pairs):
        pairs.append((1, 1))
    lengths = Lengths(tuple(q for q, _ in pairs), tuple(k for _, k in pairs))
    sequences = problems(lengths, 64, "fp16", True, heads=1 + seed % 2, seed=seed)
    hold_forward(sequences, backend=HostBackend(seed=seed or None))


def test_many_short_sequences() -> None:
    """More than a step of the search looks at; ones and nothing, which leave numbers without rows, and
    whole blocks without work: more SMs than tiles."""
    sequences = problems(Lengths.equal([1, 0, 0, 3, 1] * 14 + [0] * 5), 64, "fp16", True, heads=1)
    hold_forward(sequences)
    hold_backward(sequences[:48], deterministic=True)


# ---- what it costs ------------------------------------------------------------------------------


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
        assert (packed.useful_flops, packed.blocks) == (plain.useful_flops, plain.blocks)


@pytest.mark.parametrize("algorithm", [hopper.ALGORITHM, hopper.DETERMINISTIC])
def test_so_does_its_backward(algorithm: str) -> None:
    """And where the last tile is whole, blocks of one number more that find no rows."""
    for length, extra in ((300, 0), (384, 1)):
        shape = AttentionShape(1, 4, length, length, 64, kv_heads=2, causal=True, dtype="bf16")
        plain = predict(algorithm, shape, "backward", H200)
        packed = predict(algorithm, shape, "backward", H200, lengths=Lengths((length,), (length,)))
        numbers = 3 + extra  # of 128 queries, and of 128 keys
        # The preprocess looks once for 16 rows.
        blocks = {"_preprocess": 4 * 8 * numbers, "": 2 * numbers, "_postprocess": 4 * numbers}
        for kernel, entries in packed.traffic.kernels.items():
            moved = dict(entries)
            found = [moved.pop((f"cu_seqlens_{side}", "read")) for side in "qk"]
            assert found == [8 * blocks[kernel.removeprefix("flash_backward_sm90")]] * 2
            assert moved == plain.traffic.kernels[kernel]
        assert (packed.useful_flops, packed.blocks) == (plain.useful_flops, plain.blocks)


# ---- dispatch and refusals ----------------------------------------------------------------------


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
    found = launches_of("auto", replace(shape, window=(70, 0)), "forward", HOPPER, lengths=lengths)
    assert (found.algorithm, found.reason) == ("flash", changed)
    # One that hides nothing in any sequence is none.
    found = launches_of("auto", replace(shape, window=(999, 999)), "forward", HOPPER, lengths=lengths)
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
    (p,) = problems(Lengths.equal([20]), 64, "bf16", False)
    names = ("q", "k", "v", "out", "dout", *GRADIENTS)
    arrays = {n: view(n, to_bits(p.data[RESULTS.get(n, n)], "bf16"), "bf16") for n in names}
    lse = view("lse", np.zeros((1, 2, 20), np.float32), "fp32")
    q, k, v, out, dout, *gradients = arrays.values()
    both: list[tuple[dict[str, Any], str]] = [
        ({"order": "sawtooth"}, r"packed sequences \(cu_seqlens_q\) do not go with order"),
        ({"softcap": 2.0}, "do not go with softcap"),
        ({"window": (3, 3)}, "do not go with window"),
        ({"packed": packed_of(Lengths.equal([19]))}, "q has 20 rows, its sequences 19 together"),
    ]
    forward: list[tuple[dict[str, Any], str]] = [
        ({"optimistic": True}, "do not go with optimistic"),
        ({"tile": Tile(128, 128)}, r"forward of packed sequences has no tile \(128, 128\)"),
        ({"form": hopper.forward_form(64, False, 20)}, "pingpong for packed sequences with"),
        ({"form": packed_form(128)}, "packed for packed sequences with head_dim 64"),
    ]
    backward = [({"form": backward_form(128, False)}, "form for head_dim 128, arrays with 64")]
    shared = {"scale": 1.0, "packed": packed_of(Lengths.equal([20]))}
    for options, message in both + forward:
        with pytest.raises(ValueError, match=message):
            hopper.forward(HostBackend(), q, k, v, out, lse, **shared | options)
    for options, message in both + backward:
        with pytest.raises(ValueError, match=message):
            hopper.backward(HostBackend(), q, k, v, out, dout, lse, *gradients, **shared | options)


def test_forms_that_there_are_not_are_refused() -> None:
    with pytest.raises(ValueError, match=r"head_dim=256 is not one of 64, 128"):
        packed_form(256)
    with pytest.raises(ValueError, match="packed=True is for blocks that stay"):
        ForwardForm(64, 3, 128, packed=True)
    with pytest.raises(ValueError, match="is exact, not optimistic"):
        packed_form(64).kernel("bf16", False, "optimistic")
    for form, more in (
        (backward_form(64, False), ["sawtooth"]),
        (backward_form(64, False), ["window"]),
        (BackwardForm(128, 64, dq_from_registers=True), []),
    ):
        with pytest.raises(ValueError, match="packed sequences go with a causal mask and turns alone"):
            form.kernel("", "bf16", False, features=["packed", *more])


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
    for longest in (0, 1001):
        with pytest.raises(ValueError, match=f"q: longest={longest} of sequences in 1 items of 1000"):
            TensorMap(q, 64, longest)
    with pytest.raises(ValueError, match="longest=3 of sequences in 2 items"):
        TensorMap(replace(q, shape=(2, *q.shape[1:])), 64, 3)
