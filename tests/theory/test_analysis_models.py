"""Tiles, occupancy, time, memory, transformer FLOPs."""

from __future__ import annotations

import heapq
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from analysis import memory
from analysis.flops import executed_exponentials, executed_flops, paper_flops, useful_flops, visited_pairs
from analysis.hardware import A100_40GB, GPUS, H100_SXM, H200, RTX_3090, T4, Gpu
from analysis.occupancy import occupancy, wave_efficiency
from analysis.parallel_activations import LayerShape
from analysis.shapes import AttentionShape, Tile
from analysis.standard_passes import PAPER_MASKED_DROPOUT, Passes
from analysis.tile_loop import tile_loop
from analysis.tiles import backward_resources, best_tile, candidates, forward_resources, paper_tile, study_note_tile
from analysis.time_model import (
    Ceilings,
    Work,
    attention_work,
    blocks_alike,
    datasheet_ceilings,
    predict_time,
    standard_work,
)
from analysis.transformer import pipeline_stage_bytes

# ---- tiles ---------------------------------------------------------------------------------------


@given(d=st.integers(1, 512), ratio=st.integers(1, 4000))
def test_paper_tile_fits_the_memory_it_was_made_for(d: int, ratio: int) -> None:
    """K, V, Q, O blocks of at most Bc rows and the scores, each O(M): Theorem 2's conditions."""
    m = d * ratio
    tile = paper_tile(d, m)
    assert tile.block_m == min(tile.block_n, d)
    assert (tile.block_n - 1) * 4 * d < m <= tile.block_n * 4 * d
    assert tile.block_m * tile.block_n <= m // 4 + d


def test_paper_tile_numbers() -> None:
    """M = 100 KB of fp16, d = 64 (the paper's typical case), by hand."""
    assert paper_tile(64, 51200) == Tile(64, 200)
    assert paper_tile(128, 51200) == Tile(100, 100)
    with pytest.raises(ValueError, match="M=32"):
        paper_tile(64, 32)


def test_the_notes_rule_needs_twelve_megabytes_for_its_128() -> None:
    assert study_note_tile(64, 128 * 128 * 12 * 64) == Tile(128, 128)
    assert study_note_tile(64, 128 * 128 * 12 * 64 - 1) == Tile(96, 96)


def test_our_rule_picks_what_the_released_fast_kernels_use() -> None:
    """FlashAttention-2 as released: 128 query rows; 64 keys at d = 128 (A100 and H100)."""
    for head_dim in (64, 128):
        shape = AttentionShape(1, 16, 4096, 4096, head_dim)
        assert best_tile(shape, H100_SXM) == Tile(128, 64)


@pytest.mark.parametrize("gpu", [A100_40GB, H200, RTX_3090, T4], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_chosen_tile_fits_and_no_other_that_qualifies_moves_less(gpu, pass_, head_dim) -> None:  # type: ignore[no-untyped-def]
    shape = AttentionShape(2, 16, 2048, 2048, head_dim)
    tile = best_tile(shape, gpu, pass_)
    found = {choice.tile: choice for choice in candidates(shape, gpu, pass_)}
    chosen = found[tile]
    assert chosen.resources.shared_bytes <= gpu.shared_bytes_per_block
    assert (
        chosen.occupancy.blocks_per_sm * (chosen.resources.shared_bytes + gpu.shared_reserved_per_block)
        <= gpu.shared_bytes_per_sm
    )
    for choice in found.values():
        inner = choice.tile.block_n if pass_ == "forward" else choice.tile.block_m
        if inner >= 64 and choice.occupancy.blocks_per_sm >= 2:
            assert chosen.traffic_bytes <= choice.traffic_bytes


def test_resources_by_hand() -> None:
    """Q 128 x 64 and two stages of K, V 64 x 64 in fp16; 4 warps of 32 rows."""
    need = forward_resources(Tile(128, 64), 64, 2)
    assert (need.threads, need.shared_bytes) == (128, (128 + 4 * 64) * 64 * 2)
    assert need.registers_per_thread == 128 * (64 + 64) // 128 + 40
    assert backward_resources(Tile(64, 64), 64, 2).threads == 128


# ---- occupancy -----------------------------------------------------------------------------------


def test_occupancy_of_flash2_as_measured_on_an_h200() -> None:
    """d = 128, tile 128 x 64, 4 warps at 255 registers, 64 KiB: two blocks, held by registers.

    The wave counts in the H200's counters (1.94, 3.88, 7.76) are for 264 = 2 · 132 blocks.
    """
    fit = occupancy(H200, threads=128, registers_per_thread=255, shared_bytes=64 * 1024)
    assert fit.blocks_per_sm == 2
    assert fit.limited_by == "registers"
    assert fit.limits["shared memory"] == 3


def test_occupancy_limits() -> None:
    a100 = A100_40GB
    by_shared = occupancy(a100, threads=128, registers_per_thread=64, shared_bytes=81 * 1024)
    assert (by_shared.blocks_per_sm, by_shared.limited_by) == (2, "shared memory")
    # One KiB more per block: the reserved KiB of each no longer fits.
    more = occupancy(a100, threads=128, registers_per_thread=64, shared_bytes=82 * 1024)
    assert more.blocks_per_sm == 1
    too_much = occupancy(a100, threads=128, registers_per_thread=64, shared_bytes=164 * 1024)
    assert too_much.blocks_per_sm == 0
    # 152 registers a thread are 4864 a warp: three in each quarter of the file, not 13 in all.
    quarters = occupancy(H200, threads=32, registers_per_thread=152, shared_bytes=0)
    assert quarters.limits["registers"] == 12
    # A T4 gives shared memory in units of 256 bytes: seven times 73 units of 128 would fit.
    on_t4 = occupancy(T4, threads=32, registers_per_thread=1, shared_bytes=73 * 128)
    assert on_t4.limits["shared memory"] == 6
    threads = occupancy(RTX_3090, threads=1024, registers_per_thread=32, shared_bytes=0)
    assert (threads.blocks_per_sm, threads.limited_by) == (1, "threads")
    with pytest.raises(ValueError, match="threads=2048"):
        occupancy(a100, threads=2048, registers_per_thread=32, shared_bytes=0)
    with pytest.raises(ValueError, match="registers_per_thread=256"):
        occupancy(a100, threads=32, registers_per_thread=256, shared_bytes=0)


def test_wave_efficiency() -> None:
    """FlashAttention-2 §3.2: batch · heads blocks fill an A100 from about 80 on."""
    assert wave_efficiency(A100_40GB, 108) == 1
    assert wave_efficiency(A100_40GB, 80) == pytest.approx(0.74, abs=0.01)
    assert wave_efficiency(A100_40GB, 109) == pytest.approx(109 / 216)
    assert wave_efficiency(A100_40GB, 8) < 0.1
    assert wave_efficiency(A100_40GB, 324) == 1  # three an SM, however many run at a time


def ends(blocks: list[int], sms: int) -> int:
    """When the last block ends, each going to the SM that is free first."""
    free = [0] * sms
    for length in blocks:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


@given(
    shape=st.builds(
        AttentionShape,
        st.just(1),
        st.integers(1, 60),
        st.integers(1, 900),
        st.integers(1, 900),
        st.just(64),
        causal=st.booleans(),
        sinks=st.integers(0, 80),
        window=st.tuples(*[st.none() | st.integers(0, 500)] * 2),
    ),
    gpu=st.sampled_from(list(GPUS.values())),
    pass_=st.sampled_from(["forward", "backward"]),
)
@example(AttentionShape(1, 27, 5 * 64, 5 * 64, 64, causal=True), H200, "forward")
def test_no_schedule_beats_the_bound(shape: AttentionShape, gpu: Gpu, pass_: str) -> None:
    """Blocks as long as the tiles that they visit, in the order of the launch and longest first.

    The example: 135 blocks of 1 to 5 tiles on 132 SMs end after 5, where blocks of equal length
    would take twice 3.
    """
    tile = Tile(64, 64)
    loop = tile_loop(shape, tile)
    visits = loop.visits_of_query_tile if pass_ == "forward" else loop.visits_of_key_tile
    blocks = [int(n) for n in visits] * shape.heads
    alike = blocks_alike("flash", shape)
    bound = sum(blocks) / gpu.sms / wave_efficiency(gpu, len(blocks), alike=alike)
    soonest = min(ends(blocks, gpu.sms), ends(sorted(blocks, reverse=True), gpu.sms))
    assert bound <= soonest * (1 + 1e-12)
    if alike:
        assert bound == pytest.approx(soonest)


def test_blocks_that_differ_make_up_for_each_other() -> None:
    """Only SMs without a block are sure to idle: 135 causal blocks fill 132 SMs, 100 do not."""
    assert wave_efficiency(H200, 135, alike=False) == 1.0
    assert wave_efficiency(H200, 100, alike=False) == 100 / 132
    causal = AttentionShape(1, 1, 128, 128, 64, causal=True)
    assert not blocks_alike("flash", causal)
    assert not blocks_alike("flash", replace(causal, causal=False, window=(5, 5)))
    assert blocks_alike("flash", replace(causal, seqlen_q=1))  # it sees all keys
    assert blocks_alike("flash1-literal", causal)  # a head a block
    assert blocks_alike("standard", causal)  # computes all pairs


# ---- FLOPs ---------------------------------------------------------------------------------------


@given(
    nq=st.integers(1, 90),
    nk=st.integers(1, 90),
    causal=st.booleans(),
    tile=st.builds(Tile, st.integers(1, 40), st.integers(1, 40)),
)
def test_executed_covers_useful_and_small_tiles_waste_nothing(nq: int, nk: int, causal: bool, tile: Tile) -> None:
    shape = AttentionShape(1, 1, nq, nk, 16, causal=causal)
    assert shape.visible_pairs <= visited_pairs(shape, tile) <= nq * nk
    assert visited_pairs(shape, Tile(1, 1)) == shape.visible_pairs
    assert executed_flops(shape, Tile(1, 1), "backward") == useful_flops(shape, "backward")
    forward = executed_exponentials(shape, tile, "forward")
    assert forward >= executed_exponentials(shape, tile, "backward") == visited_pairs(shape, tile)


def test_the_papers_count_every_query_with_every_key() -> None:
    assert paper_flops(AttentionShape(1, 2, 3, 5, 8), "forward") == 4 * 2 * 3 * 5 * 8


def test_recomputation_adds_one_product() -> None:
    shape = AttentionShape(1, 1, 64, 64, 64)
    with_ = useful_flops(shape, "backward")
    without = useful_flops(shape, "backward", recompute=False)
    assert Fraction(with_, without) == Fraction(5, 4)
    with pytest.raises(ValueError, match="sideways"):
        useful_flops(shape, "sideways")


# ---- time ----------------------------------------------------------------------------------------

UNIT = Ceilings(1.0, 1.0, 1.0, 1.0, origin="test")


def test_roofline_takes_the_slowest_ceiling_per_kernel_and_adds_kernels() -> None:
    works = {
        "a": Work(flops=3, exponentials=1, sm_bytes=2, hbm_bytes=1),
        "b": Work(flops=1, hbm_bytes=5),
        "c": Work(flops=2, efficiency=0.5, hbm_bytes=3),
    }
    prediction = predict_time(works, UNIT)
    assert prediction.seconds == 3 + 5 + 4
    assert dict(prediction.bound_by) == {"a": "tensor cores", "b": "HBM", "c": "tensor cores"}
    assert prediction.by_resource["HBM"] == 9
    assert prediction.binding == "HBM"


def test_shared_memory_is_a_ceiling_where_a_kernel_says_what_it_asks_of_it() -> None:
    works = {"a": Work(flops=3, shared_per_tensor=1.2), "b": Work(flops=2, shared_per_tensor=0.5)}
    prediction = predict_time(works, UNIT)
    assert prediction.seconds == pytest.approx(3 * 1.2 + 2)
    assert dict(prediction.bound_by) == {"a": "shared memory", "b": "tensor cores"}
    assert prediction.by_resource["shared memory"] == pytest.approx(3 * 1.2 + 2 * 0.5)
    assert "shared memory" not in predict_time({"a": Work(flops=1)}, UNIT).by_resource
    # 64 queries a tile at d = 128: 3076 clocks against 2560 (test_sm_ceilings, by hand).
    shape = AttentionShape(1, 16, 16384, 16384, 128, dtype="bf16", causal=True)
    for algorithm, ratio in (("flash-sm90", 3076 / 2560), ("flash", 0)):
        work = attention_work(algorithm, shape, Tile(64, 128), "backward", H200)
        main = work.get("flash_backward_sm90") or work["flash_backward"]
        assert main.shared_per_tensor == ratio
        assert all(w.shared_per_tensor == 0 for w in work.values() if w is not main)


def test_unknown_ceiling_is_left_out_and_bad_ones_are_refused() -> None:
    blind = Ceilings(1.0, 1.0, None, 1.0, origin="test")
    assert predict_time({"a": Work(sm_bytes=10**9)}, blind).seconds == 0
    with pytest.raises(ValueError, match="exp_per_s=0"):
        Ceilings(1.0, 0, 1.0, 1.0, origin="test")
    with pytest.raises(ValueError, match="efficiency=0"):
        predict_time({"a": Work(efficiency=0)}, UNIT)


def test_the_papers_argument_bytes_bind_standard_attention_and_not_flash() -> None:
    """Fig. 2 left on an A100: 40.3 GB at 1.555 TB/s is 25.9 ms of the published 41.7 ms."""
    shape = AttentionShape(64, 16, 1024, 1024, 64)
    ceilings = datasheet_ceilings(A100_40GB)
    standard = predict_time(standard_work(PAPER_MASKED_DROPOUT, shape), ceilings)
    assert standard.binding == "HBM"
    assert standard.seconds == pytest.approx(40.27e9 / 1.555e12, rel=0.001)
    assert standard.seconds < 41.7e-3
    fast = predict_time(attention_work("flash", shape, Tile(128, 64), "forward", A100_40GB), ceilings)
    assert fast.bound_by["flash_forward"] == "tensor cores"


def test_work_of_a_pass_is_the_pass() -> None:
    shape = AttentionShape(2, 4, 256, 256, 64, causal=True)
    tile = Tile(64, 64)
    works = attention_work("flash", shape, tile, "backward", H200)
    assert list(works) == ["flash_backward_preprocess", "flash_backward", "flash_backward_postprocess"]
    assert works["flash_backward"].flops == executed_flops(shape, tile, "backward")
    assert works["flash_backward_preprocess"].flops == 0
    assert works["flash_backward"].efficiency == pytest.approx(2 * 4 * 4 / 132)
    with pytest.raises(ValueError, match="standard_work"):
        attention_work("standard", shape, tile, "forward", H200)


def test_pass_counts_refuse_unlike_operands() -> None:
    with pytest.raises(ValueError, match="seqlen_k=32"):
        Passes(operands=1).bytes(AttentionShape(1, 1, 64, 32, 64))


# ---- memory of chunked attention -----------------------------------------------------------------


def test_deterministic_backward_brings_back_a_quadratic_term() -> None:
    shape = AttentionShape(1, 1, 4096, 4096, 64)
    atomic = memory.total(memory.flash_backward_peak(shape))
    slabs = memory.total(memory.flash_backward_peak(shape, deterministic_key_tiles=64))
    assert slabs - atomic == 63 * 4096 * 64 * 4
    with pytest.raises(ValueError, match="statistics"):
        memory.saved_for_backward("flash", shape, statistics="l")
    with pytest.raises(ValueError, match="flash9"):
        memory.saved_for_backward("flash9", shape)


# ---- transformer FLOPs ---------------------------------------------------------------------------

GPT3 = LayerShape(2048, 1, 12288, 96)


def test_first_pipeline_stage_holds_all_layers_whatever_the_depth() -> None:
    one = pipeline_stage_bytes(GPT3, 96, ranks=8)
    assert pipeline_stage_bytes(GPT3, 96, ranks=8, pipeline=8) == one
    sbh = 2048 * 12288
    assert one == Fraction(sbh * 96, 8) * (34 + 80)  # 5as/h = 80 for GPT-3
    interleaved = pipeline_stage_bytes(GPT3, 96, ranks=8, pipeline=8, interleaved=3)
    assert interleaved == one * (1 + Fraction(7, 24))
    with pytest.raises(ValueError, match="pipeline=7"):
        pipeline_stage_bytes(GPT3, 96, ranks=8, pipeline=7)
