"""Kernels of others on an H200: what is read of them, recorded, and compared with times."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median

import pytest

from analysis.flops import paper_flops
from analysis.loop_model import hopper_warps
from analysis.loop_model.native import simulate
from analysis.loop_model.program import Event, Program, Step, Way
from analysis.shapes import AttentionShape, Tile
from kernels.sass import loops
from kernels.sass.listing import parse_listing
from kernels.sass.operands import Launch
from repro.measuring.records import Record, load
from repro.timing import flash2_time, flash4_time, peers, tables
from repro.timing.flash2_time import ON_A100, ON_H200
from repro.timing.round_counts import executed, read_counts

FINDINGS = Path(__file__).resolve().parents[2] / "docs/pages/findings.md"
A100, H200, FLASH4 = "FlashAttention-2, sm_80", "FlashAttention-2, sm_90", "FlashAttention-4"
COUNTS = {A100: ON_A100.counts, H200: ON_H200.counts, FLASH4: flash4_time.COUNTS}
KEYS = [(code, *key) for code in COUNTS for key in flash4_time.FORMS]
WARP_INSTRUCTION_BYTES = 32 * 16


def tile_of(code: str, pass_: str, head_dim: int, causal: bool) -> Tile:
    if code == FLASH4:
        return flash4_time.FORMS[pass_, head_dim, causal].tile
    return flash2_time.FORMS[pass_, head_dim].tile


def products(of: dict[str, float]) -> float:
    """Multiply-adds of a round: a warp's HMMA, and a quarter of what four warps do with HGMMA."""
    total = of.get("HMMA.16816", 0) * 16 * 8 * 16
    for name, count in of.items():
        if name.startswith("HGMMA."):
            rows, columns, depth = map(int, name.removeprefix("HGMMA.").split("x"))
            total += count * rows * columns * depth / 4
    return total


# What was read


@pytest.mark.parametrize(("code", "pass_", "head_dim", "causal"), KEYS)
def test_a_round_multiplies_what_its_tile_needs(code: str, pass_: str, head_dim: int, causal: bool) -> None:
    """Q Kᵀ and P V; in the backward those of S, dP, dV, dK and dQ."""
    tile = tile_of(code, pass_, head_dim, causal)
    needed = (2 if pass_ == "forward" else 5) * tile.block_m * tile.block_n * head_dim
    assert products(read_counts(COUNTS[code])[pass_, head_dim, causal]) == needed


@pytest.mark.parametrize(("code", "pass_", "head_dim", "causal"), [key for key in KEYS if key[0] != FLASH4])
def test_a_round_copies_two_tiles_and_adds_one(code: str, pass_: str, head_dim: int, causal: bool) -> None:
    """K and V, or Q and dO; a backward adds an fp32 tile of dQ to memory, four bytes a thread."""
    tile = tile_of(code, pass_, head_dim, causal)
    rows = tile.block_n if pass_ == "forward" else tile.block_m
    found = read_counts(COUNTS[code])[pass_, head_dim, causal]
    assert found["LDGSTS"] * WARP_INSTRUCTION_BYTES == 2 * rows * head_dim * 2
    added = (found.get("REDG", 0) + found.get("RED", 0)) * 32 * 4
    assert added == (0 if pass_ == "forward" else rows * head_dim * 4)


@pytest.mark.parametrize(("code", "pass_", "head_dim", "causal"), KEYS)
def test_no_round_is_faster_than_its_units(code: str, pass_: str, head_dim: int, causal: bool) -> None:
    """Products of a scheduler's warps every 8 clocks on an A100 and every 6 on an H200, those of
    warpgroups at 2,048 multiply-adds a clock, special functions every 8: of as many blocks as share
    an SM."""
    key = (pass_, head_dim, causal)
    of = read_counts(COUNTS[code])[key]
    if code == FLASH4:
        line = flash4_time.recorded(key).line
        a_round, tensor = (line(16) - line(8)) / 8, products(of) / 2048
    else:
        found = flash2_time.recorded(key, ON_A100 if code == A100 else ON_H200)
        alone = (found.line(16) - found.line(8)) / 8
        a_round = alone * found.slowdown / found.blocks_per_sm
        tensor = of["HMMA.16816"] / 4 * (8 if code == A100 else 6)
    busiest = max(tensor, of["MUFU"] / 4 * 8)
    assert busiest < a_round < 3 * busiest


# An SM that runs code of warps


def test_products_of_warps_reach_two_thirds_of_the_full_rate() -> None:
    step = Step("HMMA", hopper_warps.OPERATIONS["HMMA"], 1)
    way = Way(0, [0] * 60, [0] * 60, [0] * 60, [0] * 60)
    found = Program((step,), tuple(Way(n, way.steps, way.kinds, way.objects, way.values) for n in range(8)), {})
    clocks = simulate(found, parameters=hopper_warps.SM90_WARPS).clocks
    assert 8 * 60 * 2 * 16 * 8 * 16 / clocks == pytest.approx(4096 * 2 / 3, rel=0.02)


def test_additions_and_copies_of_warps_are_followed_on_sm_90() -> None:
    code = parse_listing(
        [
            "1---000 LDGSTS.E.BYPASS.LTC128B.128 [R2], desc[UR4][R4.64]",
            "1-0-000 LDGDEPBAR",
            "1--1000 REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R4.64], R6",
            "1---000 HMMA.16816.F32.BF16 R8, R12, R16, R8",
            "1---000 EXIT ",
        ]
    )
    found = loops.program(code, Launch(32, (1, 1, 1), (), architecture="sm_90"))
    assert found.ways[0].kinds[:3] == [Event.WARP_COPY, Event.WARP_COPIES_END, Event.ADD]
    assert found.ways[0].values[2] == 8 * 32
    assert found.table[3].operation.interval == 6
    with pytest.raises(ValueError, match=r"no unit is known for instruction LDGSTS"):
        loops.program(code, Launch(32, (1, 1, 1), (), architecture="sm_90a"))


def test_counts_leave_out_what_did_not_happen() -> None:
    table = (
        Step("HGMMA.64x128x16 R0", hopper_warps.OPERATIONS["MOV"], 1),
        Step("MOV.64 R0", hopper_warps.OPERATIONS["MOV"], 1),
    )
    way = Way(0)
    way.add(0)
    way.add(1)
    way.add(1, Event.OFF)
    assert executed(Program(table, (way, way), {})) == {"HGMMA.64x128x16": 2, "MOV": 2}


# FlashAttention-4


def test_divisions_are_those_of_the_kernels() -> None:
    """q = (((x - h) >> s) + h) >> t with h the upper half of x times the factor."""
    draw = random.Random(1)
    for by in (1, 2, 3, 4, 7, 8, 12, 96, 1000):
        (size, packed), again = flash4_time._divisor(by)
        divisor, factor, shifts = (packed >> 32 * n & 0xFFFFFFFF for n in range(3))
        assert (size, divisor) == (12, by)
        assert again == (4, by)
        for x in [draw.randrange(1 << 31) for _ in range(50)]:
            high = x * factor >> 32
            assert (((x - high) >> (shifts & 255)) + high) >> (shifts >> 8) == x // by


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_of_flash_attention_4_walks_as_many_tiles_as_it_is_asked_for(causal: bool) -> None:
    """A loop over the length of the keys, which is the second shape's first word."""
    code = parse_listing(
        [
            "1---000 MOV R0, c[0x0][0x220]",
            ".L_x_0:",
            "1---000 IADD3 R0, R0, -0x80, RZ",
            "1---000 ISETP.GT.AND P0, PT, R0, RZ, PT",
            "1---000 @P0 BRA `(.L_x_0)",
            "1---000 EXIT ",
        ]
    )
    for rounds in (1, 2, 7):
        found = flash4_time.program(code, ("forward", 128, causal), rounds)
        assert len(found.ways) == 12
        assert found.ways[0].steps.count(1) == rounds


def test_heads_take_turns_under_a_causal_mask_as_far_as_l2_holds_them() -> None:
    """A head of N = 16,384 and d = 128 has 8 MiB of keys and values: 50 MiB hold four, by the power
    of two below."""
    shape = AttentionShape(1, 16, 16384, 16384, 128, dtype="bf16", causal=True)
    assert flash4_time.heads_side_by_side(shape) == 4
    small = AttentionShape(1, 3, 256, 256, 128, dtype="bf16", causal=True)
    order = list(flash4_time.rounds_of("forward", Tile(128, 128), small))
    assert order == [2, 2, 2, 1, 1, 1]
    assert list(flash4_time.rounds_of("backward", Tile(128, 128), small)) == [2, 1] * 3


# The comparison


def test_every_measured_time_has_its_prediction_as_recorded() -> None:
    """A model that changes by more records nothing anew: the predictions stay."""
    cells = peers.cells()
    assert len(cells) == len(peers.predicted()) == 66 + 32
    for cell in cells:
        assert cell.seconds() == pytest.approx(peers.predicted()[cell.fields], rel=0.05)


def test_rates_and_times_are_the_same_measurement() -> None:
    fields = {
        "experiment": "throughput",
        "implementation": peers.FLASH4,
        "source": "measured",
        "pass": "backward",
        "batch": 2,
        "heads": 4,
        "seqlen_q": 512,
        "seqlen_k": 512,
        "head_dim": 64,
        "dtype": "bf16",
        "causal": True,
    }
    time = Record.from_json(fields | {"metric": "time_ms", "value": 2.0, "unit": "ms"})
    flops = paper_flops(peers.cell_of(time).shape, "backward")
    rate = {"metric": "throughput_tflops", "value": flops / 2e-3 / 1e12, "unit": "TFLOP/s"}
    assert peers.measured_s(time) == 2e-3
    assert peers.measured_s(Record.from_json(fields | rate)) == pytest.approx(2e-3)


@pytest.mark.parametrize(
    "other",
    [
        {"torch": "2.12.0+cu130"},
        {"kv_heads": 1},
        {"seqlen_k": 1024},
        {"dropout": 0.1},
        {"key_mask": True},
        {"head_dim": 256},
        {"device": "NVIDIA H100 80GB HBM3"},
        {"source": "predicted"},
        {"pass": "forward+backward"},
        {"implementation": "sdpa-cudnn"},
        {"value": None, "error": "out of memory"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_times_of_other_code_and_other_problems_are_left_out(other: dict[str, object]) -> None:
    row = next(row for row in peers.rows() if row.implementation == peers.FLASH2)
    assert peers.is_predicted(row)
    assert not peers.is_predicted(Record.from_json(row.to_json() | other))


def test_a_shape_that_is_timed_later_has_the_prediction_of_today() -> None:
    row = next(row for row in peers.rows() if row.implementation == peers.FLASH2)
    new = Record.from_json(row.to_json() | {"batch": 3})
    assert peers.cell_of(new).fields not in peers.predicted()
    # Its name is in no half of those that were recorded.
    (found,) = peers.comparisons([new])
    assert (found.sustained_s, found.nominal_s) == found.cell.seconds()
    assert not found.first_half


def test_the_page_says_what_the_records_say() -> None:
    page = tables.block("peers").path.read_text(encoding="utf-8")
    found = peers.judged(peers.comparisons())
    errors = [abs(one.ratio - 1) for one in found]
    said = f"Over all {len(found)} the median is {100 * median(errors):.1f} % and "
    assert said + f"{sum(one.within for one in found)} lie in the range" in page
    short = f"a median error of {100 * median(errors):.1f} %, at worst {100 * max(errors):.0f} %"
    assert short in " ".join(FINDINGS.read_text(encoding="utf-8").split())
    assert max(errors) < 0.42
    slow = [
        one.ratio
        for one in found
        if one.cell.peer == peers.FLASH2 and one.cell.shape.seqlen_q >= (2048 if one.cell.pass_ == "forward" else 4096)
    ]
    assert 1 < min(slow) < max(slow) < 1.16
    fast = [one.ratio for one in found if (one.cell.peer, one.cell.pass_) == (peers.FLASH4, "backward")]
    assert 0.86 <= min(fast) < max(fast) < 0.97
    assert 1.70 * median(fast) == pytest.approx(1.52, abs=0.01)


def test_counted_clocks_of_small_problems_are_within_what_the_page_says() -> None:
    """No clock rate is involved; all are too fast, the first touches of HBM not being modelled."""
    ratios = []
    for row in load(("fa2-clocks",), local=False):
        shape = AttentionShape(
            row.batch or 0,
            row.heads or 0,
            row.seqlen_q or 0,
            row.seqlen_k or 0,
            row.head_dim or 0,
            dtype=str(row.dtype),
            causal=bool(row.causal),
        )
        predicted = flash2_time.clocks("forward", shape, ON_H200)
        ratios.append(predicted / float(row.value or 0))
    assert len(ratios) == 4
    page = tables.block("peers").path.read_text(encoding="utf-8")
    least, most = (100 * (1 - end(ratios)) for end in (max, min))
    assert f"predicted were {least:.1f} to {most:.1f} % less" in page
