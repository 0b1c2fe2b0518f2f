"""FlashAttention-3's machine code on the model of a Hopper SM: what is read, recorded, compared."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median

import pytest

from kernels.sass.listing import parse_listing
from kernels.sass.operands import TensorMapArgument
from repro.timing import flash3_time, tables
from repro.timing.round_counts import Key, read_counts

FINDINGS = Path(__file__).resolve().parents[2] / "docs/pages/findings.md"
KEYS = list(flash3_time.FORMS)
NAME = (
    "_ZN7cutlass13device_kernelIN5flash11enable_sm90INS1_16FlashAttnFwdSm90INS1_25Collective"
    "MainloopFwdSm90ILi2EN4cute5tupleIJNS5_1CILi{}EEES8_S8_EEENS6_IJNS7_ILi192EEENS7_ILi128EEENS7_"
    "ILi64EEEEEELi64ENS_10bfloat16_tEfNS_4arch4Sm90ELb{}ELb0ELb0ELb{}ELb0ELb0ELb0ELb1ELb1ELb0ELb0"
    "ELb0EEENS1_21CollectiveEpilogueFwdIEEEEvNT_6ParamsE"
)


def cubin_of(name: str) -> bytes:
    return b"\0.text." + name.encode() + b"\0"


def test_an_entry_is_found_by_tile_mask_and_switches() -> None:
    key = ("forward", 64, True)
    assert flash3_time.entry_in(cubin_of(NAME.format(1, 1, 0)), key) == NAME.format(1, 1, 0)
    for other in (NAME.format(2, 1, 0), NAME.format(1, 0, 0), NAME.format(1, 1, 1)):
        assert flash3_time.entry_in(cubin_of(other), key) is None
    assert flash3_time.entry_in(cubin_of(NAME.format(1, 1, 0)), ("forward", 128, True)) is None


def test_divisions_are_those_of_the_kernels() -> None:
    """q is the upper half of x times the factor, shifted; x itself where the divisor is one."""
    draw = random.Random(1)
    for by in (2, 3, 4, 7, 8, 12, 96, 1000):
        divisor, factor, shift = flash3_time._divisor(by)
        assert divisor == by
        for x in [draw.randrange(1 << 31) for _ in range(50)]:
            assert x * factor >> 32 >> shift == x // by
    assert flash3_time._divisor(1) == (1, 0, 0)


@pytest.mark.parametrize("key", KEYS)
def test_lengths_and_maps_lie_where_the_kernels_read_them(key: Key) -> None:
    """A map's box has the rows of its tensor's tile, 128 bytes each."""
    at, words, maps = 0x210, {}, {}
    for size, value in flash3_time.arguments(key, 1536, tiles=3):
        if isinstance(value, TensorMapArgument):
            assert at % 64 == 0
            maps[at] = value.box_bytes // 128
        else:
            words[at] = value
        at += size
    tile = flash3_time.FORMS[key].tile
    assert list(maps.values()) == [tile.block_m, tile.block_n, tile.block_n, tile.block_m]
    assert words[0x288] == words[0x2E0] == 1536
    of_head = -(-1536 // tile.block_m)
    assert words[0xDA8 if key[2] else 0xDA4] == (8 * of_head if key[2] else 3)


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_a_block_walks_as_many_tiles_as_it_is_asked_for(rounds: int) -> None:
    """A loop over the length of the keys."""
    code = parse_listing(
        [
            "1---000 MOV R0, c[0x0][0x2e0]",
            ".L_x_0:",
            "1---000 IADD3 R0, R0, -0x80, RZ",
            "1---000 ISETP.GT.AND P0, PT, R0, RZ, PT",
            "1---000 @P0 BRA `(.L_x_0)",
            "1---000 EXIT ",
        ]
    )
    found = flash3_time.program(code, ("forward", 128, True), rounds, tiles=1)
    assert len(found.ways) == 12
    assert found.ways[0].steps.count(1) == rounds


@pytest.mark.parametrize("key", KEYS)
def test_a_round_multiplies_what_its_tile_needs_and_is_no_faster(key: Key) -> None:
    """Q Kᵀ and P V, a quarter of an instruction's products for each of its four warps; 2,048 of
    them a clock, and a special function of a scheduler every 8."""
    of, tile = read_counts(flash3_time.COUNTS)[key], flash3_time.FORMS[key].tile
    products = 0.0
    for name, count in of.items():
        if name.startswith("HGMMA."):
            rows, columns, depth = map(int, name.removeprefix("HGMMA.").split("x"))
            products += count * rows * columns * depth / 4
    assert products == 2 * tile.block_m * tile.block_n * key[1]
    line = flash3_time.recorded(key[1], key[2]).line
    a_round = (line(16) - line(8)) / 8
    busiest = max(products / 2048, of["MUFU"] / 4 * 8)
    assert busiest < a_round < 2 * busiest


def test_the_page_says_what_the_record_says() -> None:
    page = tables.block("fa3-code").path.read_text(encoding="utf-8")
    found = flash3_time.points()
    assert len(found) == 24
    errors = [abs(point.ratio - 1) for point in found]
    assert f"error of all 24 is {100 * median(errors):.1f} %" in page
    short = f"a known clock with {100 * median(errors):.1f} %, at worst {100 * max(errors):.0f} %"
    assert short in " ".join(FINDINGS.read_text(encoding="utf-8").split())
    assert max(errors) < 0.25
    assert max(abs(p.ratio - 1) for p in found if p.shape.seqlen_q > 512) < 0.165
