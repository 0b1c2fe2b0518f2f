"""The Hopper backward on packed sequences: each has the gradients it has alone, whatever lies
beside it, and every byte is as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from flash_support import Problem, aligned, check, to_bits, to_float, view
from packed_support import lengths_of, packed_of, problems

from analysis.hardware import H200
from analysis.packed import Lengths
from analysis.shapes import AttentionShape
from analysis.traffic import Traffic, predict_traffic
from kernels import hopper
from kernels.hopper import BackwardForm, backward_form
from kernels.host import HostBackend
from kernels.launch import Array
from kernels.packed import Packed
from repro.prediction import predict

#: (queries, keys): nothing of either, one token, below, at and beyond tiles of 64 and 128 rows.
MIXED = Lengths((129, 0, 1, 70, 16, 0, 64), (50, 20, 1, 260, 0, 0, 128))
GRADIENTS = ("dq", "dk", "dv")
LIKE = {"out": "q", "dout": "q", "dq": "q", "dk": "k", "dv": "v"}


def run(
    sequences: Sequence[Problem],
    packed: Packed | None,
    *,
    deterministic: bool,
    seed: int | None,
    form: BackwardForm | None = None,
) -> tuple[dict[str, np.ndarray], Traffic]:
    """Bits of the results of the sequences side by side, of a forward and a backward, and what the
    backward counted. What the kernels leave unwritten stays not a number."""
    first, dtype = sequences[0], sequences[0].dtype
    memory: dict[str, np.ndarray] = {}
    arrays: dict[str, Array] = {}
    for name in ("q", "k", "v", "dout", "out", *GRADIENTS):
        like = name if name in ("q", "k", "v", "dout") else LIKE[name]
        rows = np.concatenate([to_bits(p.data[like], dtype) for p in sequences], axis=2)
        memory[name] = aligned(rows.shape, dtype)
        memory[name][...] = rows if like == name else to_bits(np.full(rows.shape, np.nan), dtype)
        arrays[name] = view(name, memory[name], dtype)
    memory["lse"] = aligned(memory["q"].shape[:3], "fp32")
    operands = [arrays[name] for name in ("q", "k", "v", "out")]
    lse = view("lse", memory["lse"], "fp32")
    options: dict[str, Any] = {"scale": first.scale, "causal": first.causal, "packed": packed}
    hopper.forward(HostBackend(), *operands, lse, **options)
    if first.with_dlse:
        dlse = np.concatenate([p.data["dlse"] for p in sequences], axis=2).astype(np.float32)
        options["dlse"] = view("dlse", dlse, "fp32")
    backend = HostBackend(seed=seed, os_threads=1)
    hopper.backward(
        backend,
        *operands,
        arrays["dout"],
        lse,
        *(arrays[name] for name in GRADIENTS),
        deterministic=deterministic,
        form=form,
        **options,
    )
    return {name: memory[name] for name in ("out", "lse", *GRADIENTS)}, Traffic(backend.traffic)


def hold(sequences: Sequence[Problem], *, deterministic: bool, seed: int | None = None) -> None:
    """Bits to those of separate calls (of dq where its order is fixed), all to float64 where it is
    finite, and bytes to the prediction."""
    first, lengths = sequences[0], lengths_of(sequences)
    form = backward_form(first.head_dim, first.causal, featured=True)
    got, counted = run(sequences, packed_of(lengths), deterministic=deterministic, seed=seed)
    some = AttentionShape(1, first.heads, 1, 1, first.head_dim, first.kv_heads, first.dtype, first.causal)
    predicted = predict_traffic(
        hopper.DETERMINISTIC if deterministic else hopper.ALGORITHM,
        lengths.packed_shape(some),
        form.tile,
        "backward",
        lengths=lengths,
        lse_gradient=first.with_dlse,
    )
    assert counted.kernels == predicted.kernels
    ends = [list(accumulate(side)) for side in (lengths.queries, lengths.keys)]
    for p, end_q, end_k in zip(sequences, *ends, strict=True):
        rows = slice(end_q - p.seqlen_q, end_q)
        keys = slice(end_k - p.seqlen_k, end_k)
        mine = {name: bits[:, :, keys if name in ("dk", "dv") else rows] for name, bits in got.items()}
        finite = all(np.isfinite(x).all() for x in p.data.values())
        if not p.seqlen_q or not p.seqlen_k:
            assert not any(mine[name].any() for name in GRADIENTS)
            continue
        if not finite:
            continue
        want, _ = run([p], None, deterministic=deterministic, seed=None, form=form)
        for name, bits in mine.items():
            if name != "dq" or deterministic or p.seqlen_k <= form.tile.block_n:
                np.testing.assert_array_equal(bits, want[name], err_msg=name)
        results = {name: to_float(bits, p.dtype) for name, bits in mine.items() if name != "lse"}
        check(p, results | {"lse": mine["lse"].astype(np.float64)})


CASES = [
    pytest.param(
        head_dim,
        dtype,
        causal,
        deterministic,
        id=f"d{head_dim} {dtype} {'causal' if causal else 'dense'}{', in turns' * deterministic}",
        marks=() if (head_dim, dtype, causal, deterministic) in quick else pytest.mark.thorough,
    )
    for quick in [{(64, "fp16", True, True), (128, "fp16", False, False)}]
    for head_dim in (64, 128)
    for dtype in ("fp16", "bf16")
    for causal in (False, True)
    for deterministic in (False, True)
]
EACH = pytest.mark.parametrize(("head_dim", "dtype", "causal", "deterministic"), CASES)


@EACH
def test_gradients_are_those_of_separate_calls_and_bytes_those_predicted(
    head_dim: int, dtype: str, causal: bool, deterministic: bool
) -> None:
    hold(problems(MIXED, head_dim, dtype, causal), deterministic=deterministic, seed=3)


@EACH
def test_what_lies_in_the_neighbours_changes_nothing(
    head_dim: int, dtype: str, causal: bool, deterministic: bool
) -> None:
    lengths = Lengths((70, 30, 1, 90), (40, 30, 133, 90))
    for bad in (np.nan, np.inf):
        sequences = problems(lengths, head_dim, dtype, causal)
        for p in sequences[1::2]:
            for values in p.data.values():
                values[...] = bad
        hold(sequences, deterministic=deterministic)


def test_many_short_sequences() -> None:
    sequences = problems(Lengths.equal([1, 0, 3, 2] * 12), 64, "fp16", True, heads=1)
    hold(sequences, deterministic=True)


def test_one_sequence_costs_the_plain_call_and_the_tables() -> None:
    """And where the last tile is whole, blocks of one number more that find no rows."""
    for length, extra in ((300, 0), (384, 1)):
        shape = AttentionShape(1, 4, length, length, 64, kv_heads=2, causal=True, dtype="bf16")
        for algorithm in (hopper.ALGORITHM, hopper.DETERMINISTIC):
            plain = predict(algorithm, shape, "backward", H200)
            packed = predict(algorithm, shape, "backward", H200, lengths=Lengths((length,), (length,)))
            numbers = 3 + extra  # of 128 queries, and of 128 keys
            # The preprocess looks once for 16 rows.
            blocks = {"_preprocess": 4 * 8 * numbers, "": 2 * numbers, "_postprocess": 4 * numbers}
            for kernel, entries in packed.traffic.kernels.items():
                moved = dict(entries)
                found = [moved.pop((f"cu_seqlens_{side}", "read")) for side in "qk"]
                times = blocks[kernel.removeprefix("flash_backward_sm90")]
                assert found == [8 * times] * 2
                assert moved == plain.traffic.kernels[kernel]
            assert packed.useful_flops == plain.useful_flops
            assert packed.blocks == plain.blocks


def test_what_does_not_go_together_is_refused() -> None:
    (p,) = problems(Lengths.equal([20]), 64, "bf16", False)
    arrays = {
        name: view(name, to_bits(p.data[LIKE.get(name, name)], "bf16"), "bf16")
        for name in ("q", "k", "v", "out", "dout", *GRADIENTS)
    }
    lse = view("lse", np.zeros((1, 2, 20), np.float32), "fp32")
    packed = packed_of(Lengths.equal([20]))

    def backward(**options: Any) -> None:
        hopper.backward(
            HostBackend(),
            *(arrays[n] for n in ("q", "k", "v", "out", "dout")),
            lse,
            *(arrays[n] for n in GRADIENTS),
            scale=1.0,
            **{"packed": packed, **options},
        )

    for options, message in (
        ({"order": "sawtooth"}, r"packed sequences \(cu_seqlens_q\) do not go with order"),
        ({"softcap": 2.0}, "do not go with softcap"),
        ({"window": (3, 3)}, "do not go with window"),
        ({"form": backward_form(128, False)}, "form for head_dim 128, arrays with 64"),
        ({"packed": packed_of(Lengths.equal([19]))}, "q has 20 rows, its sequences 19 together"),
    ):
        with pytest.raises(ValueError, match=message):
            backward(**options)
    for more in ("sawtooth", "window"):
        with pytest.raises(ValueError, match="packed sequences go with a causal mask and turns al"):
            backward_form(64, False).kernel("", "bf16", False, features=["packed", more])
    direct = BackwardForm(128, 64, dq_from_registers=True)
    with pytest.raises(ValueError, match="packed sequences go with a causal mask and turns alone"):
        direct.kernel("", "bf16", False, features=["packed"])


@pytest.mark.thorough
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gradient_of_lse(deterministic: bool) -> None:
    sequences = [replace(p, with_dlse=True) for p in problems(MIXED, 64, "bf16", False)]
    hold(sequences, deterministic=deterministic)
