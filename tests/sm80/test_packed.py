"""Packed sequences: each is what it would be alone, and the bytes are theirs and the tables'."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from attention_case import Case, failure
from attention_support import inputs, normal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sequence_by_sequence import by_sequence, separate_calls
from torch import Tensor

import repro
from analysis.hardware import H200
from analysis.packed import Lengths
from analysis.shapes import AttentionShape, Tile
from analysis.traffic import predict_traffic
from kernels.launches import Device, launches_of
from kernels.philox import kept_weights
from repro.attention.launcher import backend_of
from repro.attention.packed import each_sequence
from repro.attention.reference import Reference, attention_reference
from repro.prediction import predict

LENGTHS = Lengths((33, 0, 1, 70, 16, 0), (50, 20, 1, 70, 0, 0))


def table(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def tables(lengths: Lengths) -> dict[str, Tensor]:
    return {"cu_seqlens_q": table(lengths.queries), "cu_seqlens_k": table(lengths.keys)}


def packed_call(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lengths: Lengths, **options: Any
) -> Reference:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = repro.flash_attention(*leaves, return_lse=True, **tables(lengths), **options)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    return Reference(out.detach(), lse.detach(), dq, dk, dv)


side = st.none() | st.integers(0, 60)
length = st.sampled_from([0, 1, 1, 15, 16, 17, 31, 40, 64, 65, 100])
FORMS: list[dict[str, Any]] = [
    {"dtype": "fp32", "head_dim": 32},
    {"dtype": "fp32", "head_dim": 32, "causal": True, "deterministic": True},
    {"dtype": "fp16", "head_dim": 64, "causal": True},
    {"dtype": "bf16", "head_dim": 64, "deterministic": True},
    {"dtype": "fp16", "head_dim": 64, "window": (), "alibi": "items", "deterministic": True},
    {"dtype": "fp32", "head_dim": 32, "window": (), "causal": True},
    {"dtype": "fp32", "head_dim": 32, "softcap": 2.0, "alibi": "heads", "tile": (16, 16)},
    {"dtype": "fp32", "head_dim": 32, "dropout_p": 0.4, "deterministic": True},
]


@st.composite
def problems(draw: st.DrawFn) -> Case:
    form = dict(draw(st.sampled_from(FORMS)))
    if "window" in form:
        form |= {"window": draw(st.tuples(side, side)), "sinks": draw(st.sampled_from([0, 5]))}
    pairs = draw(st.lists(st.tuples(length, length), min_size=1, max_size=6))
    if not sum(q for q, _ in pairs) or not sum(k for _, k in pairs):
        pairs.append((1, 1))
    kv_heads = draw(st.integers(1, 2))
    return Case(
        **form,
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        queries=tuple(q for q, _ in pairs),
        keys=tuple(k for _, k in pairs),
        layout=draw(st.sampled_from(["bhnd", "bnhd", "offset"])),
        needed=draw(st.sampled_from([(True, True, True), (True, False, False)])),
        seed=draw(st.integers(0, 99)),
    )


@given(problems())
@settings(
    max_examples=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
def test_packed_is_separate_bit_for_bit_and_counted_is_predicted(case: Case) -> None:
    """``failure`` holds results to float64, bytes to ``predict``, and bits to separate calls."""
    assert failure(case) is None


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_without_keys_or_queries(causal: bool) -> None:
    q, k, v, dout = inputs(1, 2, LENGTHS.total_q, LENGTHS.total_k, 16, seed=2)
    got = packed_call(q, k, v, dout, LENGTHS, causal=causal)
    for _, queries, keys in each_sequence(LENGTHS):
        if queries.start == queries.stop:
            assert not got.dk[:, :, keys].any()
            assert not got.dv[:, :, keys].any()
        if keys.start == keys.stop:
            assert not got.out[:, :, queries].any()
            assert not got.dq[:, :, queries].any()
            assert torch.isneginf(got.lse[:, :, queries]).all()


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_a_batch_without_any_queries_or_keys(queries: int, keys: int) -> None:
    q, k, v, dout = inputs(1, 2, queries, keys, 16)
    got = packed_call(q, k, v, dout, Lengths((0, queries, 0), (0, keys, 0)))
    assert not got.out.any()
    assert torch.isneginf(got.lse).all()
    assert not got.dk.any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_lone_token_is_its_own_value(deterministic: bool) -> None:
    q, k, v, dout = inputs(1, 2, 5, 5, 16)
    got = packed_call(q, k, v, dout, Lengths.equal([1] * 5), deterministic=deterministic)
    assert torch.equal(got.out, v)
    assert torch.equal(got.dv, dout)
    assert got.dq is not None
    # dP - D is 0: two sums of the same 16 products, each within 16 roundings of its terms.
    off = 2 * 16 * torch.finfo(torch.float32).eps / 2 * (dout * v).abs().sum(-1, keepdim=True)
    assert (got.dq.abs() <= 1.01 * off * k.abs() / 4).all()  # scale = 1/4


@pytest.mark.parametrize("deterministic", [False, True])
def test_equal_sequences_are_a_batch_with_its_dropout_mask(deterministic: bool) -> None:
    batch = inputs(3, 2, 40, 40, 16)
    packed = [x.transpose(0, 1).reshape(1, 2, 120, 16) for x in batch]
    options: dict[str, Any] = {"causal": True, "dropout_p": 0.3, "seed": 8}
    options |= {"deterministic": deterministic}
    got = packed_call(*packed, Lengths.equal([40] * 3), **options)
    leaves = [x.detach().requires_grad_() for x in batch[:3]]
    out, lse = repro.flash_attention(*leaves, return_lse=True, **options)
    want = Reference(out.detach(), lse, *torch.autograd.grad(out, leaves, batch[3]))
    for name in ("out", "lse", "dq", "dk", "dv"):  # one key tile: dq is one addition too
        tensor = getattr(want, name)
        assert torch.equal(
            getattr(got, name), tensor.transpose(0, 1).reshape(1, 2, 120, *tensor.shape[3:])
        ), name


def test_dropout_draws_the_mask_of_an_item() -> None:
    lengths = Lengths((9, 20), (30, 4))
    q, k, v, dout = inputs(1, 2, 29, 34, 16)
    got = packed_call(q, k, v, dout, lengths, dropout_p=0.5, seed=3)
    keep = torch.from_numpy(kept_weights(3, 0.5, 2, 2, 20, 30))
    want = by_sequence(attention_reference, q, k, v, dout, lengths, dropout_p=0.5, keep=keep)
    for name in ("out", "dq", "dk", "dv"):
        assert (getattr(got, name) - getattr(want, name)).abs().max() < 1e-5, name


def test_dq_has_the_bits_of_separate_calls_where_no_sequence_has_two_key_tiles() -> None:
    lengths = Lengths.equal([64, 3, 40])  # the backward's tile of fp32 has 64 keys
    tensors = inputs(1, 2, lengths.total_q, lengths.total_k, 32)
    got, want = packed_call(*tensors, lengths), separate_calls(*tensors, lengths)
    assert want.dq is not None
    assert torch.equal(got.dq, want.dq)


def test_a_row_of_gradients_of_lse() -> None:
    lengths = Lengths((20, 0, 30), (25, 9, 30))
    q, k, v, dout = inputs(1, 2, 50, 64, 16)
    dlse = normal(1, 2, 50, seed=9)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = repro.flash_attention(*leaves, return_lse=True, **tables(lengths))
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    parts = [
        attention_reference(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], dout[:, :, rows], dlse=dlse[:, :, rows]
        )
        for _, rows, keys in each_sequence(lengths)
    ]
    for grad, name in zip(grads, ("dq", "dk", "dv"), strict=True):
        assert (grad - torch.cat([getattr(part, name) for part in parts], 2)).abs().max() < 1e-5


def test_tables_may_change_between_calls_of_one_shape() -> None:
    """Recorded launches, and compiled graphs, are of a shape and the longest length: another
    table beside the same tensors is another answer, and a longer sequence another grid."""
    torch._dynamo.reset()
    compiled = torch.compile(repro.flash_attention, backend="aot_eager", fullgraph=True)
    q, k, v, dout = inputs(1, 2, 150, 150, 16)
    for queries in ([50, 100, 0], [100, 50, 0], [0, 149, 1], [50, 50, 50]):
        lengths = Lengths.equal(queries)
        for window in (None, (20, 20)):
            want = separate_calls(q, k, v, dout, lengths, window=window)
            for attend in (repro.flash_attention, compiled):
                got = attend(q, k, v, window=window, **tables(lengths))
                assert torch.equal(got, want.out), queries


def test_a_window_that_hides_nothing_in_any_sequence_is_the_same_kernel() -> None:
    shape = AttentionShape(1, 1, 120, 120, 64, window=(39, 39))
    assert shape.windowed
    device = Device("80")
    alone = launches_of("flash", shape, "forward", device, lengths=Lengths.equal([40] * 3))
    assert "WINDOW" not in dict(alone.main.kernel.macros)
    longer = launches_of("flash", shape, "forward", device, lengths=Lengths.equal([41, 79]))
    assert dict(longer.main.kernel.macros)["WINDOW"] == 1


def test_blocks_without_rows_read_two_entries() -> None:
    lengths, tile = Lengths.equal([1024, 1, 1, 0]), Tile(128, 64)
    shape = lengths.packed_shape(AttentionShape(1, 4, 1, 1, 64))
    moved = predict_traffic("flash", shape, tile, "forward", lengths=lengths)
    entries = moved.kernels["flash_forward"]
    assert entries["cu_seqlens_q", "read"] == 8 * 4 * 4 * 8  # heads, sequences, tiles of 1024
    assert entries["cu_seqlens_k", "read"] == 8 * 4 * (8 + 1 + 1)
    found = launches_of("flash", shape, "forward", lengths=lengths, tile=tile)
    assert found.main.grid[0] == 4 * 4 * 8


def test_one_sequence_costs_the_plain_call_and_the_tables() -> None:
    shape = AttentionShape(1, 4, 300, 400, 64, kv_heads=2, causal=True)
    lengths = Lengths((300,), (400,))
    for algorithm in ("flash", "flash-split"):
        for pass_ in ("forward", "backward"):
            plain = predict(algorithm, shape, pass_, H200)
            packed = predict(algorithm, shape, pass_, H200, lengths=lengths)
            extra = packed.traffic.by_tensor()
            read = [extra.pop((f"cu_seqlens_{side}", "read")) for side in "qk"]
            assert min(read) > 0
            assert extra == plain.traffic.by_tensor()
            assert packed.useful_flops == plain.useful_flops
            assert packed.executed_flops == plain.executed_flops
            kernels = 2 if algorithm == "flash-split" and pass_ == "backward" else 1
            least = plain.compulsory.read_bytes + 2 * 8 * kernels  # two tables of two entries
            assert packed.compulsory.read_bytes == packed.hbm.read_bytes == least
            assert packed.compulsory.write_bytes == plain.compulsory.write_bytes


def test_the_counted_bytes_of_a_call_are_those_of_predict() -> None:
    """With every length in one call, the driver's own tiles, and the gradient of lse."""
    backend: Any = backend_of(torch.device("cpu"))
    lengths = Lengths.equal([0, 1, 2, 63, 64, 65, 200, 1])
    q, k, v, dout = inputs(1, 4, lengths.total_q, lengths.total_k, 64, kv_heads=2)
    shape = lengths.packed_shape(AttentionShape(1, 4, 1, 1, 64, 2, "fp32", causal=True))
    backend.reset()
    packed_call(q, k, v, dout, lengths, causal=True)
    want: dict[str, dict[tuple[str, str], int]] = {}
    for pass_ in ("forward", "backward"):
        found = predict("flash", shape, pass_, H200, lengths=lengths).traffic.kernels
        want |= {kernel: dict(entries) for kernel, entries in found.items()}
    assert {kernel: dict(entries) for kernel, entries in backend.traffic.items()} == want


def test_the_tables_are_saved_with_the_rest() -> None:
    """So that offloading and checkpoints see them; a table changed in between is an error."""
    cu = table((4, 6))
    leaves = [x.requires_grad_() for x in inputs(1, 2, 10, 10, 16)[:3]]
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        repro.flash_attention(*leaves, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert [tensor.data_ptr() for tensor in saved[5:]] == [cu.data_ptr()] * 2
    out = repro.flash_attention(*leaves, cu_seqlens_q=cu, cu_seqlens_k=cu)
    cu[1] = 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


Q = torch.zeros(1, 2, 10, 16)
CU = torch.tensor([0, 4, 10], dtype=torch.int32)


@pytest.mark.parametrize(
    ("q_table", "k_table", "options", "error", "message"),
    [
        (CU, None, {}, ValueError, "cu_seqlens_q without cu_seqlens_k"),
        (None, CU, {}, ValueError, "cu_seqlens_k without cu_seqlens_q"),
        (CU.long(), CU, {}, TypeError, "cu_seqlens_q must be an int32 tensor, got torch.int64"),
        (CU, [0, 4, 10], {}, TypeError, "cu_seqlens_k must be an int32 tensor, got list"),
        (CU[None], CU[None], {}, ValueError, r"\(sequences \+ 1,\), got \(1, 3\)"),
        (CU[:0], CU, {}, ValueError, r"\(sequences \+ 1,\), got \(0,\)"),
        (CU, CU[[0, 2]], {}, ValueError, "has 2 sequences, cu_seqlens_k 1"),
        (CU.to("meta"), CU, {}, TypeError, "different devices: cpu, meta"),
        (CU + 1, CU, {}, ValueError, r"cu_seqlens_q\[0\] is 1, not 0"),
        (CU, CU[[0, 2, 1]], {}, ValueError, "cu_seqlens_k falls from 10 to 4 at entry 2"),
        (CU[:2], CU[[0, 2]], {}, ValueError, "cu_seqlens_q ends at 4, q has 10 rows"),
        (CU, CU, {"key_mask": torch.ones(1, 10).bool()}, ValueError, "and key_mask exclude each"),
        (CU, CU, {"bias": torch.zeros(1, 1, 10, 10)}, ValueError, "and bias exclude each other"),
        (
            CU,
            CU,
            {"block_mask": torch.ones(1, 1).bool(), "tile": (16, 16)},
            ValueError,
            "and block_mask exclude each other",
        ),
        (CU, CU, {"fp8": True}, ValueError, "and k and v of e4m3 exclude each other"),
        (CU, CU, {"order": "sawtooth"}, ValueError, "and order='sawtooth' exclude each other"),
        (
            CU,
            CU,
            {"alibi_slopes": torch.ones(3, 2)},
            ValueError,
            r"\(H,\) = \(2,\) or \(sequences, H\) = \(2, 2\), got \(3, 2\)",
        ),
    ],
)
def test_wrong_tables_are_named(
    q_table: Any, k_table: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    q, k = (Q.half(), Q.to(torch.float8_e4m3fn)) if options.pop("fp8", False) else (Q, Q)
    with pytest.raises(error, match=message):
        repro.flash_attention(q, k, k, cu_seqlens_q=q_table, cu_seqlens_k=k_table, **options)


def test_packed_sequences_lie_in_one_item() -> None:
    two = Q.expand(2, -1, -1, -1)
    with pytest.raises(ValueError, match=r"\(1, H, total, D\), got B = 2"):
        repro.flash_attention(two, two, two, cu_seqlens_q=CU, cu_seqlens_k=CU)


def test_what_has_no_packed_sequences_says_so() -> None:
    lengths = Lengths.equal([100, 28])
    shape = lengths.packed_shape(AttentionShape(1, 2, 1, 1, 64))
    for name, pass_ in (
        ("standard", "forward"),
        ("flash1-literal", "forward"),
        ("flash-sm90-optimistic", "forward"),
    ):
        with pytest.raises(ValueError, match=f"{name} does not take packed"):
            launches_of(name, replace(shape, dtype="bf16"), pass_, lengths=lengths)
        with pytest.raises(ValueError, match=f"{name} {pass_} takes no packed sequences"):
            predict_traffic(name, shape, Tile(64, 64), pass_, lengths=lengths)
    with pytest.raises(ValueError, match="do not go with workspace"):
        launches_of("flash-deterministic", shape, "backward", lengths=lengths)
    with pytest.raises(ValueError, match="do not go with key_mask, order"):
        launches_of("flash", shape, "forward", lengths=lengths, key_mask=True, order="sawtooth")
    with pytest.raises(ValueError, match="do not go with key_mask"):
        predict_traffic("flash", shape, Tile(64, 64), "forward", lengths=lengths, key_mask=True)
    codes = replace(shape, fp8=True)
    with pytest.raises(ValueError, match="do not go with k_scale"):
        launches_of("flash", codes, "forward", lengths=lengths)
    with pytest.raises(ValueError, match="do not go with k and v of e4m3"):
        predict_traffic("flash", codes, Tile(64, 64), "forward", lengths=lengths)
    found = launches_of("auto", shape, "forward", Device("90"), lengths=lengths, softcap=True)
    reason = "packed sequences with a window, a softcap or ALiBi"
    assert (found.algorithm, found.reason) == ("flash", reason)


def test_lengths_that_do_not_fit_are_named() -> None:
    shape = AttentionShape(1, 2, 128, 128, 64)
    with pytest.raises(ValueError, match="seqlen_q=128, the packed sequences make it 127"):
        predict("auto", shape, "forward", H200, lengths=Lengths((127,), (128,)))
    with pytest.raises(ValueError, match="2 lengths of queries but 1 of keys"):
        Lengths((1, 2), (3,))
    with pytest.raises(ValueError, match="keys=-1 is below 0"):
        Lengths((1,), (-1,))


def test_the_module_passes_the_tables_on() -> None:
    q, k, v, _ = inputs(1, 2, 10, 10, 16)
    want = repro.flash_attention(q, k, v, causal=True, cu_seqlens_q=CU, cu_seqlens_k=CU)
    module = repro.FlashAttention(causal=True)
    assert torch.equal(module(q, k, v, cu_seqlens_q=CU, cu_seqlens_k=CU), want)
    assert not torch.equal(module(q, k, v), want)
