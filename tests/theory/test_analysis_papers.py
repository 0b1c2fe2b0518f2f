"""Published and measured numbers, reproduced from formulas: the acceptance test of the theory.

Nothing here is fitted. Published values and counters are read from results/, where they stand with
their origin.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from analysis import memory
from analysis.flops import executed_flops, useful_flops
from analysis.lower_bounds import compulsory_read_bytes
from analysis.shapes import AttentionShape, Tile
from analysis.standard_passes import (
    ALGORITHM_0_AND_3,
    EAGER,
    EAGER_MASKED_DROPOUT,
    PAPER_MASKED_DROPOUT,
    PAPER_MASKED_FILL,
    PAPER_MASKED_SPLIT_SOFTMAX,
    KernelPasses,
    total_bytes,
    total_passes,
)
from analysis.tiles import paper_tile
from analysis.traffic import predict_traffic

RESULTS = Path(__file__).parents[2] / "results"
GPT2_MEDIUM = AttentionShape(batch=64, heads=16, seqlen_q=1024, seqlen_k=1024, head_dim=64)
RELEASED_BR = 16


def _records(path: str, **wanted: object) -> list[dict[str, Any]]:
    lines = (RESULTS / path).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [r for r in records if all(r.get(key) == value for key, value in wanted.items())]


# ---- FlashAttention 2022, Fig. 2 -----------------------------------------------------------------


def test_fig2_middle_accesses_against_column_block() -> None:
    """All four points within 1.5 %, counting as the paper does: matrices, not row statistics."""
    published = {r["block_n"]: r["value"] for r in _records("published/fig2-middle.jsonl", metric="hbm_bytes")}
    assert sorted(published) == [64, 128, 256, 512]
    for block_n, value in published.items():
        traffic = predict_traffic("flash1-skip-first", GPT2_MEDIUM, Tile(RELEASED_BR, block_n), "forward")
        assert traffic.of_matrices().total_bytes == pytest.approx(value, rel=0.015)


def test_fig2_left_flash_attention_moves_4_43_gb() -> None:
    """13 + 20 = 33 operand passes at Bc = 256."""
    tile = Tile(RELEASED_BR, 256)
    both = predict_traffic("flash1-skip-first", GPT2_MEDIUM, tile, "forward") + predict_traffic(
        "flash1-skip-first", GPT2_MEDIUM, tile, "backward"
    )
    units = Fraction(both.of_matrices().total_bytes, GPT2_MEDIUM.query_bytes)
    assert units == 33
    assert both.of_matrices().total_bytes / 1e9 == pytest.approx(4.43, abs=0.005)
    published = _records("published/fig2-left.jsonl", implementation="flash1", metric="hbm_bytes")
    for r in published:  # 4.4 in both versions of the paper
        assert both.of_matrices().total_bytes == pytest.approx(r["value"], rel=0.01)
    assert published


@pytest.mark.parametrize(
    ("kernels", "scores", "operands", "gigabytes"),
    [
        (ALGORITHM_0_AND_3, 11, 12, 25.23),
        (PAPER_MASKED_FILL, 15, 12, 33.82),
        (PAPER_MASKED_SPLIT_SOFTMAX, 16, 12, 35.97),
        (PAPER_MASKED_DROPOUT, 18, 12, 40.27),
        (EAGER, 18, 14, 40.53),
        (EAGER_MASKED_DROPOUT, 25, 14, 55.57),
    ],
)
def test_standard_attention_pass_counts(
    kernels: tuple[KernelPasses, ...], scores: int, operands: int, gigabytes: float
) -> None:
    total = total_passes(kernels)
    assert (total.score_units(), total.operands) == (scores, operands)
    assert total_bytes(kernels, GPT2_MEDIUM) / 1e9 == pytest.approx(gigabytes, abs=0.005)
    assert total == total_passes(kernels, "forward") + total_passes(kernels, "backward")


def test_fig2_left_standard_attention_is_the_papers_40_3_gb() -> None:
    published = [
        r["value"]
        for r in _records("published/fig2-left.jsonl", metric="hbm_bytes")
        if r["implementation"] == "standard"
    ]
    assert total_bytes(PAPER_MASKED_DROPOUT, GPT2_MEDIUM) == pytest.approx(max(published), rel=0.002)
    # The NeurIPS number lies between the two lists without dropout and equals neither.
    low, high = (total_bytes(k, GPT2_MEDIUM) for k in (PAPER_MASKED_FILL, PAPER_MASKED_SPLIT_SOFTMAX))
    assert low < min(published) < high


@pytest.mark.parametrize(
    ("path", "kernels"),
    [
        ("nvidia-h200/fig2-left-traffic.jsonl", EAGER),
        ("nvidia-h200/fig2-left-traffic-masked.jsonl", EAGER_MASKED_DROPOUT),
    ],
)
def test_every_eager_kernel_moves_what_its_passes_say(path: str, kernels: tuple[KernelPasses, ...]) -> None:
    """Kernel by kernel against the H200's counters, in order of launch.

    Reads within 0.3 %. Writes: up to one L2 (60 MB) may still be dirty when the kernel ends.
    """
    counted: dict[str, dict[str, float]] = {}
    for r in _records(path, implementation="standard-eager"):
        counted.setdefault(r["kernel"], {})[r["metric"]] = r["value"]
    in_order = sorted(counted.items(), key=lambda item: int(item[0].split(":")[0]))
    assert len(in_order) == len(kernels)
    for (name, values), kernel in zip(in_order, kernels, strict=True):
        reads, writes = kernel.reads.bytes(GPT2_MEDIUM), kernel.writes.bytes(GPT2_MEDIUM)
        assert values["hbm_read_bytes"] == pytest.approx(reads, rel=0.003), (name, kernel)
        assert writes - 60 * 2**20 < values["hbm_write_bytes"] <= writes * 1.001, (name, kernel)


# ---- Table 21 and the H200's memory --------------------------------------------------------------


@pytest.mark.parametrize(
    ("implementation", "peak", "lengths"),
    [("standard", memory.standard_backward_peak_2022, 6), ("flash1", memory.flash1_backward_peak, 10)],
)
def test_table_21_to_the_megabyte(
    implementation: str, peak: Callable[[AttentionShape], list[memory.LiveTensor]], lengths: int
) -> None:
    published = _records("published/fig3-memory.jsonl", implementation=implementation)
    published = [r for r in published if r.get("value")]
    assert len(published) == lengths
    for r in published:
        n = r["seqlen_q"]
        predicted = memory.total(peak(AttentionShape(16, 8, n, n, 64))) / 2**20
        # Printed as whole megabytes, cut or rounded: 104.5 appears as 104.
        assert abs(predicted - r["value"] / 2**20) <= 0.5, n


@pytest.mark.parametrize(
    ("implementation", "peak"),
    [("standard-eager", memory.standard_backward_peak), ("sdpa-flash2", memory.flash2_pytorch_backward_peak)],
)
def test_h200_peak_memory_less_the_workspace(
    implementation: str, peak: Callable[[AttentionShape], list[memory.LiveTensor]]
) -> None:
    """Exact but for the 64 MiB that the matrix library keeps and a few KiB of small buffers."""
    records = _records("nvidia-h200/fig3-memory.jsonl", implementation=implementation, dropout=0.0, key_mask=False)
    records = [r for r in records if r.get("value")]
    assert len(records) >= 7
    for r in records:
        n = r["seqlen_q"]
        predicted = memory.total(peak(AttentionShape(16, 8, n, n, 64)))
        assert 0 <= r["value"] - 64 * 2**20 - predicted <= 4096, n


# ---- Theorem 2 -----------------------------------------------------------------------------------


def _accesses(n: int, head_dim: int, on_chip: int, pass_: str) -> int:
    shape = AttentionShape(1, 1, n, n, head_dim)
    tile = paper_tile(head_dim, on_chip)
    return predict_traffic("flash1-skip-first", shape, tile, pass_).of_matrices().total_bytes


def test_theorem_2_does_not_hold_once_everything_fits() -> None:
    """Beyond M = 4Nd one tile holds all keys: accesses stop falling, as Prop. 3 demands."""
    n = 1024
    at_bound, beyond = (_accesses(n, 64, m, "forward") for m in (4 * n * 64, 64 * n * 64))
    assert at_bound == beyond == 4 * n * 64 * 2


# ---- Anchors -------------------------------------------------------------------------------------


def test_flop_anchors() -> None:
    shape = GPT2_MEDIUM
    causal = AttentionShape(64, 16, 1024, 1024, 64, causal=True)
    assert useful_flops(shape, "forward") == 274_877_906_944
    assert useful_flops(shape, "backward") == 687_194_767_360
    assert useful_flops(causal, "forward") == 137_573_171_200
    assert executed_flops(shape, Tile(64, 64), "forward") == 274_877_906_944
    # 16·17/2 of 16² tiles are visited, half of each diagonal tile for nothing.
    executed = executed_flops(causal, Tile(64, 64), "forward")
    assert Fraction(executed, 274_877_906_944) == Fraction(17, 32)


def test_saved_bytes_anchors() -> None:
    shape = AttentionShape(batch=1, heads=32, seqlen_q=4096, seqlen_k=4096, head_dim=256)
    saved = {t.name: t.bytes for t in memory.saved_for_backward("flash", shape)}
    assert sum(saved[name] for name in ("q", "k", "v", "out")) == 268_435_456
    assert saved["lse"] == 524_288
    two = memory.saved_for_backward("flash", shape, statistics="m, l")
    assert sum(t.bytes for t in two if t.name in "ml") == 1_048_576
    dense = memory.saved_for_backward("standard", shape)
    assert [t.bytes for t in dense if t.name == "p"] == [1_073_741_824]


def test_lower_bound_counts_keys_per_kv_head() -> None:
    assert compulsory_read_bytes(AttentionShape(1, 1, 65, 65, 64)) == 24_960
    grouped = AttentionShape(1, 8, 65, 65, 64, kv_heads=2)
    assert compulsory_read_bytes(grouped) == (8 + 2 * 2) * 65 * 64 * 2
