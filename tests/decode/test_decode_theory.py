"""Decoding on paper: what it moves at least, how long that takes, how many splits are best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from decode_support import Problem
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import decode
from analysis.decode import (
    DecodeShape,
    best_splits,
    hbm_seconds,
    passes,
    rows_at_the_ridge,
    splits_without_end,
    tensor_seconds,
)
from analysis.hardware import H100_SXM, H200
from analysis.shapes import Tile
from analysis.sums.decode import flash_decode
from analysis.traffic import Traffic
from kernels.decode_config import DecodeConfig, configure


def shape(**changes: Any) -> DecodeShape:
    """32 query heads of 128, 4096 keys, one sequence."""
    values = {"heads": 32, "kv_heads": 8, "seqlen_q": 1, "seqlens": (4096,), "head_dim": 128}
    return DecodeShape(**values | changes)


SHAPES = st.builds(
    lambda group, kv_heads, seqlen_q, seqlens, fp8, latent, page: DecodeShape(
        group * kv_heads, kv_heads, seqlen_q, tuple(seqlens), 64, "fp16", fp8, latent, page, True
    ),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 16),
    st.lists(st.integers(0, 5000), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 16, 64]),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SHAPES, st.integers(1, 40))
def test_nothing_beats_the_lower_bound(one: DecodeShape, splits: int) -> None:
    """The kernel reaches it up to its partial results, where one tile holds the rows of a group."""
    tile = configure(one.dtype, one.head_dim, one.rows).tile
    total = Traffic(flash_decode(one, tile, splits)).total_bytes
    if all(one.seqlens):
        assert total >= one.compulsory_bytes
    if one.rows <= tile.block_m and splits == 1 and all(one.seqlens):
        small = {"block_table", "seqlens", "k_scale", "v_scale"}
        entries = Traffic(flash_decode(one, tile, 1)).by_tensor()
        assert one.compulsory_bytes == sum(n for key, n in entries.items() if key[0] not in small)


def test_a_split_costs_q_and_partial_results() -> None:
    one, tile = shape(), Tile(16, 64)
    whole = Traffic(flash_decode(one, tile, 1)).total_bytes
    rows = 32
    for splits in (2, 8, 64):
        more = Traffic(flash_decode(one, tile, splits)).total_bytes - whole
        assert more == splits * rows * 2 * 4 * (128 + 1) + (splits - 1) * rows * 128 * 2
    # Splits beyond the key tiles have nothing to read and nothing to write.
    most = Traffic(flash_decode(one, tile, 64)).total_bytes
    assert Traffic(flash_decode(one, tile, 1000)).total_bytes == most


def test_values_by_hand() -> None:
    """One token of Llama-3-8B's layer: 8 key/value heads of 128 in bf16 are 4 KiB of cache."""
    assert shape().token_bytes == 2 * 8 * 128 * 2 == 4096
    assert shape(kv_heads=32).token_bytes == 16384
    assert shape(kv_heads=1).token_bytes == 512
    assert shape(kv_heads=1, head_dim=576, latent=True).token_bytes == 1152  # DeepSeek-V2, §2.1.4
    assert shape(fp8=True).token_bytes == 2048
    # 4096 keys of 4 KiB, q and out of 8 KiB each, lse.
    assert shape().compulsory_bytes == 4096 * 4096 + 2 * 8192 + 128
    assert decode.hbm_seconds(shape(), H200) == pytest.approx(16793728 / 4.8e12)
    assert shape().flops == 4 * 32 * 128 * 4096


def test_the_ridge() -> None:
    """Where tensor cores take as long as HBM: 295 rows of bf16 on an H100, half of that in fp8."""
    rows = decode.rows_at_the_ridge(shape(), H100_SXM)
    assert rows == pytest.approx(989.4 / 3.35, rel=1e-6)
    assert decode.rows_at_the_ridge(shape(fp8=True), H100_SXM) == pytest.approx(rows / 2)
    assert decode.rows_at_the_ridge(shape(latent=True), H100_SXM) == pytest.approx(rows / 2)
    long = 10**7  # q and out vanish beside the cache
    for group in (256, 320):
        one = shape(heads=group, kv_heads=1, seqlens=(long,))
        bound_by_hbm = decode.hbm_seconds(one, H100_SXM) > decode.tensor_seconds(one, H100_SXM)
        assert bound_by_hbm == (group < rows)
        times = decode.hbm_seconds(one, H100_SXM), decode.tensor_seconds(one, H100_SXM)
        assert decode.seconds(one, H100_SXM) == max(times)


def test_passes_over_the_cache() -> None:
    """One, if the rows fit on chip: then the theorem's Nq·Nk·d²/M is below the cache itself."""
    for rows, head_dim, fast in ((1, 128, 128), (16, 128, 2048), (16, 128, 10**6)):
        assert passes(rows, head_dim, fast) == 1
        assert rows * head_dim**2 / fast <= head_dim
    assert passes(17, 128, 2048) == 2
    one = shape(heads=512, kv_heads=1)
    tile = Tile(64, 64)
    assert Traffic(flash_decode(one, tile, 1)).by_tensor()["k", "read"] == passes(512, 128, 64 * 128) * 4096 * 128 * 2


PROBLEMS = st.fixed_dictionaries(
    {
        "blocks": st.integers(1, 600),
        "tiles": st.integers(1, 600),
        "at_once": st.integers(1, 400),
        "tile_bytes": st.just(32768),
        "partial_bytes": st.sampled_from([516, 8256, 33024]),
    }
)


def waves(blocks: int, splits: int, at_once: int) -> int:
    return -(-blocks * splits // at_once)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(PROBLEMS)
def test_the_rule_for_splits(problem: dict[str, int]) -> None:
    splits = best_splits(**problem)
    blocks, tiles, at_once = (problem[name] for name in ("blocks", "tiles", "at_once"))
    assert 1 <= splits <= tiles
    if tiles == 1:
        assert splits == 1
    # In tiles one after the other: no worse than one block a sequence, nor than a filled card.
    longest = waves(blocks, splits, at_once) * -(-tiles // splits)
    assert longest <= waves(blocks, 1, at_once) * tiles
    cheap = best_splits(**problem | {"partial_bytes": 0})
    longest = waves(blocks, cheap, at_once) * -(-tiles // cheap)
    for other in range(1, tiles + 1):
        assert longest <= waves(blocks, other, at_once) * -(-tiles // other)
    # Dearer parts never ask for more of them.
    assert best_splits(**problem | {"partial_bytes": 10**9}) <= splits


def test_splits_of_well_known_shapes() -> None:
    """8 key/value heads on 132 SMs of three blocks: about 49 splits fill the card; 64 sequences
    fill it nearly by themselves."""
    card = {"at_once": 396, "tile_bytes": 32768, "partial_bytes": 2064}
    alone = best_splits(blocks=8, tiles=1024, **card)
    assert 396 * 0.9 <= 8 * alone <= 396
    assert best_splits(blocks=396, tiles=1024, **card) == 1
    assert best_splits(blocks=8, tiles=2, **card) == 2


def test_splits_without_end_are_least() -> None:
    for keys, rows, per_key in ((65536, 8, 512), (4096, 1, 256), (1000, 16, 1024)):
        best = splits_without_end(keys, rows, 128, per_key)

        times = [
            keys * per_key / splits + 4 * 129 * rows * splits
            for splits in (best, 0.5 * best, 0.9 * best, 1.1 * best, 2.0 * best)
        ]
        assert times[0] == min(times)
        assert splits_without_end(4 * keys, rows, 128, per_key) == pytest.approx(2 * best)


def test_the_default_fills_the_backend_it_runs_on() -> None:
    """The host backend has two multiprocessors: one long sequence is split for both."""
    problem = Problem(seqlens=(3000,), heads=1, kv_heads=1, splits=None)
    _, counted = problem.counted()
    assert "flash_decode_merge" in counted
    several = Problem(seqlens=(50,) * 8, heads=8, kv_heads=8, splits=None)
    _, counted = several.counted()
    assert "flash_decode_merge" not in counted


def test_wrong_shapes_are_refused() -> None:
    for changes, message in (
        ({"kv_heads": 5}, "heads=32 is not a multiple of kv_heads=5"),
        ({"seqlens": (1, 2)}, r"seqlens=\(1, 2\) differ, but ragged=False"),
        ({"seqlens": (-1,)}, r"seqlens\[0\]=-1 is below 0"),
        ({"dtype": "fp8"}, "dtype='fp8' is not one of"),
        ({"page_size": 0}, "page_size=0 is below 1"),
        ({"seqlen_q": 0}, "seqlen_q=0 is below 1"),
    ):
        with pytest.raises(ValueError, match=message):
            shape(**changes)
    with pytest.raises(ValueError, match="splits=0 is below 1"):
        flash_decode(shape(), Tile(16, 64), 0)


def test_forms_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="an fp8 cache is multiplied in 16 bits, q is fp32"):
        DecodeConfig("fp32", 64, Tile(16, 64), fp8=True)
    with pytest.raises(ValueError, match=r"tile \(17, 64\)"):
        DecodeConfig("fp16", 64, Tile(17, 64))
    with pytest.raises(ValueError, match="padded head_dim=65"):
        DecodeConfig("fp16", 65, Tile(16, 64))
    with pytest.raises(TypeError, match="dtype 'fp64'"):
        configure("fp64", 64, 1)
    with pytest.raises(ValueError, match="shared memory, the limit is 1000"):
        configure("fp16", 64, 1, limit=1000)
    # Cards with less shared memory get smaller tiles.
    assert configure("fp32", 256, 64, limit=99 * 1024).shared_bytes <= 99 * 1024


def test_what_a_hopper_form_could_gain_is_what_the_page_says() -> None:
    """docs/pages/decoding.md, "Why there is no Hopper form"."""
    text = (Path(__file__).parents[2] / "docs/pages/decoding.md").read_text(encoding="utf-8")
    page = " ".join(text.split("## Why there is no Hopper form")[1].split())
    gqa = DecodeShape(32, 8, 1, (65536,), 128)
    ridge = rows_at_the_ridge(gqa, H100_SXM)
    assert f"the ridge is {ridge:.0f} rows" in page
    assert f"{gqa.rows} rows works on tiles of 16 with `mma.sync`: {16 / ridge:.1%}".replace("%", " %") in page
    assert f"64 rows, {64 / ridge:.1%}".replace("%", " %") in page
    for width, said in (
        (1, "HBM asks for {hbm:.0f} µs and the products for {made:.0f}"),
        (2, "any kernel: {made:.0f} µs, and {ours:.0f} for ours"),
    ):
        mla = DecodeShape(128, 1, width, (4096,) * 128, 576, latent=True, value_dim=512)
        made = tensor_seconds(mla, H100_SXM) * 1e6
        ours = made * (2 * 576 + 512) / (576 + 512)  # both warps make the scores
        hbm = hbm_seconds(mla, H100_SXM) * 1e6
        assert said.format(hbm=hbm, made=made, ours=ours) in page
        if width == 1:
            assert f"bring that to {ours:.0f} µs" in page
            assert 1 - hbm / ours == pytest.approx(0.15, abs=0.01)
