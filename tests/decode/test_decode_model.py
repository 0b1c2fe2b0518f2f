"""A step of decoding of a whole model: the numbers by hand, and the command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from analysis.hardware import gpu_named
from analysis.serving import decoding_step
from repro.commands.chains import PRESETS
from tests.support.command_support import run

H200 = gpu_named("H200")


def test_llama_3_70b_by_hand() -> None:
    """Llama 3 70B: 80 layers of 8192, 64 heads on 8, an MLP of 28672, 128256 words."""
    step = decoding_step(PRESETS["llama3-70b"], H200, context=4096, batch=3, width=2, ranks=4)
    projections = 80 * (8192 * 8192 * 2 + 2 * 8192 * 1024)
    mlp, words = 80 * 3 * 8192 * 28672, 128256 * 8192
    by_name = {part.name: part for part in step.parts}
    assert by_name["projections of q, k, v and out"].hbm_bytes == 2 * projections / 4
    assert by_name["MLP"].hbm_bytes == 2 * mlp / 4
    assert by_name["logits"].hbm_bytes == 2 * words / 4
    assert by_name["MLP"].flops == 2 * 6 * mlp / 4
    # Of a rank: 16 query heads on 2; q and out in 16 bits, lse in fp32; keys and values once.
    rows = 3 * 2 * 16
    cache = 3 * 4096 * 2 * 2 * 128 * 2
    assert by_name["attention to the cache"].hbm_bytes == 80 * (cache + rows * (2 * 256 + 4))
    assert by_name["attention to the cache"].flops == 80 * 3 * 4096 * 2 * 16 * 2 * 256
    assert step.cache_bytes == 80 * cache
    assert step.weight_bytes == 2 * (projections + mlp + 2 * words) / 4
    assert step.weight_bytes == pytest.approx(2 * PRESETS["llama3-70b"].parameters / 4, rel=1e-4)
    assert step.sent_bytes == 80 * 2 * 2 * (6 * 8192 * 2) * 3 / 4  # two all-reduces, each twice 3/4
    assert step.bound_s == sum(p.hbm_bytes for p in step.parts) / H200.hbm_bandwidth_bytes_per_s
    assert step.fits
    assert step.tokens == 6


def test_more_ranks_than_heads_of_keys_hold_them_twice() -> None:
    """Sixteen ranks of eight heads: each rank reads a whole head, not a half."""
    model = PRESETS["llama3-8b"]
    eight, sixteen = (decoding_step(model, H200, context=1000, ranks=n) for n in (8, 16))
    assert sixteen.cache_bytes == eight.cache_bytes
    extra = 32 * 2 * 4096 * 1024 * 2  # keys' and values' projections, once more over all ranks
    assert 16 * sixteen.weight_bytes - 8 * eight.weight_bytes == extra


def test_a_cache_in_fp8_is_half_and_the_tied_embedding_is_held_once() -> None:
    model = PRESETS["gpt2-small"]
    plain, small = (decoding_step(model, H200, context=1000, fp8_cache=fp8) for fp8 in (False, True))
    assert small.cache_bytes * 2 == plain.cache_bytes
    assert plain.weight_bytes == 2 * (12 * 12 * 768 * 768 + 50257 * 768)


def test_many_sequences_are_bound_by_tensor_cores() -> None:
    short = decoding_step(PRESETS["llama3-8b"], H200, context=1, batch=4096)
    assert short.bound_s == short.tensor_seconds > short.hbm_seconds


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks do not divide 32 query heads and 8 key/value"):
        decoding_step(PRESETS["llama3-8b"], H200, context=1000, ranks=3)
    odd = replace(PRESETS["llama3-8b"], heads=64, kv_heads=16)
    with pytest.raises(ValueError, match="ranks=0 is below 1"):
        decoding_step(odd, H200, context=1000, ranks=0)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("decode", "llama3-70b", "--context", "32k", "--batch", "16", "--gpu", "2xH200,4xH200")
    status, out, _ = run(capsys, *asked, "--json")
    assert status == 0
    two, four = json.loads(out)
    assert (two["gpus"], two["fits"], four["gpus"], four["fits"]) == (2, False, 4, True)
    expected = decoding_step(PRESETS["llama3-70b"], H200, context=32768, batch=16, ranks=4)
    assert four["time_bound_s"] == expected.bound_s
    assert four["tokens_per_s_bound"] == 16 / expected.bound_s
    status, out, _ = run(capsys, *asked)
    assert status == 0
    assert "does not fit" in out
    status, out, _ = run(capsys, *asked[:-1], "4xH200")
    assert "attention to the cache" in out
    status, _, err = run(capsys, *asked, "--heads", "8")
    assert status != 0
    assert "--heads with the model llama3-70b: it has its own sizes" in err
