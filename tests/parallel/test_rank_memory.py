"""Memory of a rank by part: hand counts, published equations, and what torch allocates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from analysis.decoders import Decoder
from analysis.hardware import gpu_named
from analysis.parallel_activations import LayerShape, saved_bytes
from analysis.rank_memory import Ranks, parameters_of, rank_bytes
from repro.commands.chains import PRESETS, Resident, transformer_chain
from tests.support.command_support import run

LLAMA = PRESETS["llama3-8b"]
GPT = Decoder(96, 12288, 96, 2048, 51200)  # 175B of Korthikanti et al., Table 3


def test_one_gpu_holds_all() -> None:
    (only,) = rank_bytes(LLAMA, Ranks(), micro_batch=2)
    size = LLAMA.parameters
    assert only.parts == {
        "parameters": 2 * size,
        "gradients": 2 * size,
        "optimiser": 12 * size,
        "logits": 4 * 2 * 8192 * 128256,
        "buffers of collectives": 0,
    }


@pytest.mark.parametrize("model", [LLAMA, GPT])
def test_parameters_of_all_ranks_are_those_of_the_model(model: Decoder) -> None:
    """And what is there more than once: norms and rows' biases on tensor ranks, the words of a
    "gpt" on the first and the last stage."""
    tensor, pipeline = 4, 8
    found = sum(
        tensor * parameters_of(model, Ranks(tensor=tensor, pipeline=pipeline), stage) for stage in range(pipeline)
    )
    whole, again = (2, 0) if model.kind == "llama" else (6, model.vocab + 3 * model.seqlen)
    last_norm = model.hidden if model.kind == "llama" else 2 * model.hidden
    more = 3 * (model.layers * whole * model.hidden + last_norm) + again * model.hidden
    assert found == model.parameters + more


def test_a_tensor_parallel_layer_has_the_parameters_that_torch_counts() -> None:
    """A "gpt" layer as one of two ranks builds it, module by module."""
    h, t = 64, 2
    rank = nn.ModuleList(
        [
            nn.LayerNorm(h),
            nn.Linear(h, 3 * h // t),
            nn.Linear(h // t, h, bias=False),
            nn.LayerNorm(h),
            nn.Linear(h, 4 * h // t),
            nn.Linear(4 * h // t, h, bias=False),
        ]
    )
    biases = nn.ParameterList([torch.zeros(h), torch.zeros(h)])  # added once, after the sum
    counted = sum(p.numel() for p in (*rank.parameters(), *biases))
    model = Decoder(1, h, 4, 16, 100)
    outside = 100 * h // t + 16 * h + 2 * h
    assert parameters_of(model, Ranks(tensor=t), 0) - outside == counted


def test_zero_shards_what_its_stage_says() -> None:
    """ZeRO's Fig. 1: 120, 31.4, 16.6 and 1.9 GB for 7.5 billion parameters on 64 ranks."""
    size = LLAMA.parameters
    totals = []
    for zero in range(4):
        (held,) = rank_bytes(LLAMA, Ranks(data=64, zero=zero))
        states = sum(held.parts[name] for name in ("parameters", "gradients", "optimiser"))
        totals.append(states * 7.5e9 / size / 1e9)
    assert totals == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_the_first_of_eight_stages_keeps_as_much_as_one_without_a_pipeline() -> None:
    """Korthikanti et al., Eq. 5: s b h L / t · (34 + 5 a s / h), whatever p under 1F1B."""
    h200 = gpu_named("H200")
    ranks = Ranks(tensor=8, pipeline=8, sequence_parallel=True)
    chain = transformer_chain(GPT, batch=1, gpu=h200, attention="standard", ranks=ranks)
    held = sum(stage.activation_bytes + stage.saved_bytes for stage in chain.stages)
    shape = LayerShape(GPT.seqlen, 1, GPT.hidden, GPT.heads)
    sbh, a_s_over_h = GPT.seqlen * GPT.hidden, GPT.heads * GPT.seqlen / GPT.hidden
    assert ranks.in_flight(0) * held == pytest.approx(sbh * GPT.layers / 8 * (34 + 5 * a_s_over_h), rel=1e-12)
    assert held == 12 * saved_bytes(shape, ranks=8, sequence_parallel=True)
    assert [ranks.in_flight(stage) for stage in (0, 3, 7)] == [8, 5, 1]
    assert replace(ranks, microbatches=4).in_flight(0) == 4


def test_a_budget_is_what_the_tightest_stage_leaves() -> None:
    sizes = {"layers": 8, "seqlen": 1024}
    rest = Resident.of("llama3-8b", 1, 16, sizes, Ranks(pipeline=4))
    total = 60 * 10**9
    by_hand = [(total - stage.total) / flying for stage, flying in zip(rest.pipeline_stages, (4, 3, 2, 1), strict=True)]
    assert rest.left(total) == int(min(by_hand))


def test_sizes_that_do_not_divide_are_refused() -> None:
    for ranks, said in (
        (Ranks(pipeline=5), "layers 32 do not divide among 5 ranks"),
        (Ranks(tensor=16), "heads of k and v 8 do not divide among 16 ranks"),
        (Ranks(tensor=3), "heads 32 do not divide among 3 ranks"),
    ):
        with pytest.raises(ValueError, match=said):
            rank_bytes(LLAMA, ranks)
    with pytest.raises(ValueError, match="zero=4 is not one of 0, 1, 2, 3"):
        Ranks(zero=4)


def test_the_command_says_what_a_gpu_holds(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("plan", "llama3-8b", "--total-budget", "80GB", "--strategy", "optimal")
    status, _, err = run(capsys, *asked)
    assert status != 0
    assert "--zero" in err
    status, out, _ = run(capsys, *asked, "--data", "8", "--zero", "1")
    assert status == 0
    assert "optimiser 12.05 GB" in out
    status, _, err = run(capsys, "plan", "chain-8", "--tensor", "2")
    assert status != 0
    assert "only named models are spread" in err
