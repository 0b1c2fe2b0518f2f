"""Packed sequences: each is what it would be alone, and the bytes are theirs and the tables'."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from attention_support import inputs, normal
from sequence_by_sequence import separate_calls
from torch import Tensor

import repro
from analysis.hardware import H200
from analysis.packed import Lengths
from analysis.shapes import AttentionShape, Tile
from analysis.traffic import predict_traffic
from kernels.launches import Device, launches_of
from repro.attention.packed import each_sequence
from repro.attention.reference import Reference, attention_reference
from repro.prediction import predict


def table(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def tables(lengths: Lengths) -> dict[str, Tensor]:
    return {"cu_seqlens_q": table(lengths.queries), "cu_seqlens_k": table(lengths.keys)}


def packed_call(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lengths: Lengths, **options: Any) -> Reference:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = repro.flash_attention(*leaves, return_lse=True, **tables(lengths), **options)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    return Reference(out.detach(), lse.detach(), dq, dk, dv)


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
        assert torch.equal(getattr(got, name), tensor.transpose(0, 1).reshape(1, 2, 120, *tensor.shape[3:])), name


def test_a_row_of_gradients_of_lse() -> None:
    lengths = Lengths((20, 0, 30), (25, 9, 30))
    q, k, v, dout = inputs(1, 2, 50, 64, 16)
    dlse = normal(1, 2, 50, seed=9)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = repro.flash_attention(*leaves, return_lse=True, **tables(lengths))
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    parts = [
        attention_reference(q[:, :, rows], k[:, :, keys], v[:, :, keys], dout[:, :, rows], dlse=dlse[:, :, rows])
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


def test_what_has_no_packed_sequences_says_so() -> None:
    lengths = Lengths.equal([100, 28])
    shape = lengths.packed_shape(AttentionShape(1, 2, 1, 1, 64))
    for name, pass_ in (("standard", "forward"), ("flash1-literal", "forward"), ("flash-sm90-optimistic", "forward")):
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
    with pytest.raises(ValueError, match="do not go with k_scale"):
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
