"""Tensor and sequence parallelism: Korthikanti's Table 2 in formulas and on real ranks."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from ranks import results, rows

from analysis.model_states import ring_sent_bytes
from analysis.parallel_activations import (
    LayerShape,
    decoder_model_bytes,
    layer_collectives,
    saved_by_tensor,
    saved_bytes,
)
from repro.distributed.measure import LAYER
from repro.distributed.parallel_layer import ParallelTransformerLayer
from repro.instruments.without_products import WithoutProducts
from repro.training.live_bytes import LiveBytes

GPT3 = LayerShape(seqlen=2048, batch=1, hidden=12288, heads=96)


@pytest.mark.parametrize("t", [1, 2, 8])
def test_table_2_of_the_paper(t: int) -> None:
    s, b, h, a = GPT3.seqlen, GPT3.batch, GPT3.hidden, GPT3.heads
    sbh, scores = s * b * h, Fraction(5 * a * s, h)
    assert saved_bytes(GPT3) == sbh * (34 + scores)  # Eq. 1
    assert saved_bytes(GPT3, ranks=t) == sbh * (10 + Fraction(24, t) + scores / t)  # Eq. 2
    sequence = {"ranks": t, "sequence_parallel": True}
    assert saved_bytes(GPT3, **sequence) == sbh * (Fraction(34, t) + scores / t)  # Eq. 4
    selective = {"recompute": "selective"}
    assert saved_bytes(GPT3, ranks=t, **selective) == sbh * (10 + Fraction(24, t))
    assert saved_bytes(GPT3, **sequence, **selective) == sbh * Fraction(34, t)  # Eq. 6
    assert saved_bytes(GPT3, recompute="full") == 2 * sbh
    assert scores == 80  # the paper's value for GPT-3


def test_one_activation_of_a_7b_model() -> None:
    one = saved_by_tensor(LayerShape(4096, 1, 4096, 32))["norm1_input"]
    assert one == 32 * 2**20  # 1 x 4096 x 4096 in bf16
    long = {"batch": 1, "hidden": 4096, "heads": 32, "layers": 32, "mlp_hidden": 11008}
    with_matrix = decoder_model_bytes(seqlen=4096, **long)
    without = decoder_model_bytes(seqlen=4096, attention_matrix=False, **long)
    assert with_matrix - without == 32 * 32 * 4096**2 * 2
    assert without == 32 * 4096 * (8 * 4096 + 4 * 11008) * 2


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.bfloat16, 2), (torch.float32, 4), (torch.float64, 8)])
def test_one_rank_saves_exactly_what_the_items_say(recompute, dtype, itemsize: int) -> None:
    seqlen, batch, hidden, heads = LAYER
    layer = ParallelTransformerLayer(hidden, heads, recompute=recompute).to(dtype)
    with WithoutProducts(), LiveBytes(layer.parameters()) as live:
        x = torch.randn(seqlen, batch, hidden, dtype=dtype, requires_grad=True)
        out = layer(x)
        saved = live.live_bytes - out.nbytes
    shape = LayerShape(seqlen, batch, hidden, heads)
    options = {"itemsize": itemsize, "statistics_itemsize": itemsize, "recompute": recompute}
    assert saved == saved_bytes(shape, **options)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_ranks_save_and_send_what_the_formulas_say(ranks, sequence_parallel, recompute) -> None:
    seqlen, batch, hidden, heads = LAYER
    shape = LayerShape(seqlen, batch, hidden, heads)
    name = ("sequence" if sequence_parallel else "tensor") + ("" if recompute == "none" else f"+{recompute}")
    found = rows(ranks, "layers", implementation=name)
    saved = next(r["value"] for r in found if r["metric"] == "saved_bytes")
    predicted = saved_bytes(
        shape, ranks=ranks, sequence_parallel=sequence_parallel, recompute=recompute, statistics_itemsize=2
    )
    assert saved == predicted
    collectives = layer_collectives(shape, ranks, sequence_parallel=sequence_parallel)
    for row in (r for r in found if r["metric"] == "sent_bytes"):
        expected = sum(ring_sent_bytes(kind, nbytes, ranks) for kind, nbytes in collectives[row["pass"]].items())
        assert row["value"] == expected > 0


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sharded_layer_equals_one_rank(ranks: int, sequence_parallel: bool) -> None:
    assert results(ranks, "layers")["difference"][str(sequence_parallel)] < 1e-12  # float64


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="heads 6 do not divide among 4 ranks"):
        saved_bytes(LayerShape(8, 1, 12, 6), ranks=4)
    with pytest.raises(ValueError, match="seqlen 9 does not divide among 2 ranks"):
        saved_bytes(LayerShape(9, 1, 12, 6), ranks=2, sequence_parallel=True)
    with pytest.raises(ValueError, match="got 'some'"):
        saved_bytes(GPT3, recompute="some")
    with pytest.raises(ValueError, match="hidden 10 is not a multiple of heads 4"):
        LayerShape(8, 1, 10, 4)
