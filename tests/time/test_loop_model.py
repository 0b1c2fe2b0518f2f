"""The model of an SM: what it makes of small programs, and of the prototype's machine code."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from analysis.loop_model.card import through
from analysis.loop_model.native import simulate
from analysis.loop_model.parameters import GROUP_WAIT, OPERATIONS, TensorOrder
from analysis.loop_model.program import Event, Program, Step, Way
from kernels.sass import kept, loops
from kernels.sass.code import Code, Control, Instruction, parse
from kernels.sass.listing import listing, parse_listing
from kernels.sass.operands import Launch
from kernels.sass.run import ways
from repro.timing import prototype, time_validation

HEX = """
.text.kernel:
        /*0000*/                   S2R R2, SR_TID.X ;                 /* 0x0000000000027919 */
                                                                      /* 0x000e620000002100 */
.L_x_0:
        /*0010*/                   R2UR UR8, R2 ;                     /* 0x00000000020872ca */
                                                                      /* 0x002fce00000e0000 */
        /*0020*/               @P0 BRA `(.L_x_0) ;                    /* 0x00000000007c0947 */
                                                                      /* 0x000ff00003800000 */
        /*0030*/                   FFMA R0, R24, UR48, -R20.reuse ;   /* 0x0000003018007c23 */
                                                                      /* 0x100fe20008000814 */
"""


def plain(opcode: str, stall: int = 1, **fields: object) -> Step:
    return Step(opcode, OPERATIONS[opcode], stall, **fields)  # type: ignore[arg-type]


def straight(steps: list[Step], warps: int, arrivals: dict[int, int] | None = None) -> Program:
    """All warps execute the same steps."""
    ways_ = []
    for warp in range(warps):
        way = Way(warp)
        for index in range(len(steps)):
            way.add(index)
        ways_.append(way)
    return Program(tuple(steps), tuple(ways_), arrivals or {})


def product(columns: int, shared: int = 0, **fields: object) -> Step:
    return plain("HGMMA", amount=columns, from_shared=shared, **fields)


def wait(pending: int = 0) -> Step:
    return Step("WARPGROUP.DEPBAR", GROUP_WAIT, 1, pending=pending)


# Control words


def test_control_fields_are_those_of_the_word() -> None:
    code = parse(HEX, "kernel")
    assert [i.control for i in code.instructions] == [
        Control(1, False, 1, None, (), 0),
        Control(7, True, None, None, (1,), 0),
        Control(8, False, None, None, (), 0),
        Control(1, False, None, None, (), 0b0100),
    ]
    assert code.labels == {".L_x_0": 1}


def test_a_listing_says_what_the_disassembly_said() -> None:
    code = parse(HEX, "kernel")
    again = parse_listing(listing(code).splitlines())
    assert again == code


# The SM


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_one_product_takes_half_its_columns_and_the_tail(columns: int) -> None:
    found = simulate(straight([product(columns, last_of_group=True), wait(), plain("NOP")], 4))
    # Issued at 0, taken at 1; the instruction behind the wait issues one clock after the wait.
    assert found.clocks == pytest.approx(columns / 2 + 43, abs=4)


@pytest.mark.parametrize("count", [2, 8, 20])
def test_products_follow_each_other_without_a_gap(count: int) -> None:
    steps = [product(128, last_of_group=k == count - 1) for k in range(count)]
    found = simulate(straight([*steps, wait(), plain("NOP")], 4))
    assert found.clocks == pytest.approx(count * 64 + 43, abs=4)
    assert found.busy["TENSOR"] == pytest.approx(count * 64, abs=2)


def test_products_wait_for_their_operands() -> None:
    """Both operands of 64 x 64 x 16 from shared memory: 4096 bytes in 32 clocks; 8192 in 64."""
    for bytes_, clocks in ((4096, 32), (8192, 64)):
        steps = [product(64, bytes_, last_of_group=k == 9) for k in range(10)]
        found = simulate(straight([*steps, wait(), plain("NOP")], 4))
        assert found.clocks == pytest.approx(10 * clocks + 43, abs=6)


def test_two_warpgroups_share_the_tensor_cores_in_turn() -> None:
    """12 clocks from one to the next, as compiled code has them."""
    steps = [dataclasses.replace(product(128, last_of_group=k == 7), stall=12) for k in range(8)]
    program = straight([*steps, wait(), plain("NOP")], 8)
    groups = simulate(program).products[2]
    assert list(groups[:6]) in ([0, 1] * 3, [1, 0] * 3)
    one_by_one = simulate(program, tensor_order=TensorOrder.SAME_GROUP).products[2]
    assert np.count_nonzero(np.diff(one_by_one)) < np.count_nonzero(np.diff(groups))


@pytest.mark.parametrize(("opcode", "interval"), [("FFMA", 1), ("FMNMX", 2), ("MUFU", 8)])
def test_pipes_take_an_instruction_every_so_many_clocks(opcode: str, interval: int) -> None:
    """Four warps, one a scheduler, run side by side; eight share the pipes."""
    steps = [plain(opcode) for _ in range(50)]
    for warps, share in ((4, 1), (8, 2)):
        found = simulate(straight(steps, warps))
        assert found.clocks == pytest.approx(50 * interval * share, rel=0.05, abs=10)


def test_register_banks_hold_up_arithmetic_under_products() -> None:
    """Two reads of one bank take two clocks, four while products read half of each bank."""
    arithmetic = [plain("FFMA", reads=(2, 0)) for _ in range(100)]
    alone = simulate(straight(arithmetic, 4)).clocks
    assert alone == pytest.approx(200, abs=5)
    under = [product(256, accumulates=True, last_of_group=k == 4) for k in range(5)]
    together = simulate(straight([*under, *arithmetic], 4)).clocks
    assert together == pytest.approx(400, rel=0.05)


def test_stall_counts_and_counters_hold_back_the_next_instruction() -> None:
    assert simulate(straight([plain("NOP", stall=15), plain("NOP")], 1)).clocks == 16
    load = plain("LDS", write_barrier=2)
    use = plain("FADD", wait=0b100)
    found = simulate(straight([load, use], 1))
    assert found.issued[0][1] - found.issued[0][0] == OPERATIONS["LDS"].latency


def test_an_arrival_is_seen_52_clocks_later() -> None:
    wait_step = plain("SYNCS", write_barrier=0)
    table = (plain("SYNCS"), wait_step, plain("NOP", wait=1), plain("NOP", stall=15))
    waiter, arriver = Way(0), Way(1)
    waiter.add(1, Event.WAIT, 8, 0)
    waiter.add(2)
    for _ in range(10):
        arriver.add(3)
    arriver.add(0, Event.ARRIVE, 8, 0)
    found = simulate(Program(table, (waiter, arriver), {8: 1}))
    assert found.issued[0][1] - found.issued[1][-1] == pytest.approx(52 + 2, abs=1)


def test_a_named_barrier_passes_a_turn_in_its_release() -> None:
    """Two warps that wait for each other in turn: a ring of two hops a round."""
    table = (plain("BAR", stall=6), plain("BAR", stall=1))
    first, second = Way(0), Way(1)
    rounds = 20
    for _ in range(rounds):
        first.add(0, Event.BARRIER_ARRIVE, 1, 2)
        first.add(1, Event.BARRIER_SYNC, 2, 2)
        second.add(1, Event.BARRIER_SYNC, 1, 2)
        second.add(0, Event.BARRIER_ARRIVE, 2, 2)
    found = simulate(Program(table, (first, second), {}))
    assert found.clocks / (2 * rounds) == pytest.approx(30, abs=1)


def test_a_copy_takes_its_latency_and_its_bytes() -> None:
    table = (plain("SYNCS"), plain("UTMALDG"), plain("SYNCS", write_barrier=0), plain("NOP", wait=1))
    way = Way(0)
    way.add(0, Event.ARRIVE, 8, 32768)
    way.add(1, Event.COPY_IN, 8, 32768)
    way.add(2, Event.WAIT, 8, 0)
    way.add(3)
    found = simulate(Program(table, (way,), {8: 1}), copy_far=369)
    expected = 33 + 369 + 32768 / 64 + 52
    assert found.clocks == pytest.approx(expected, abs=8)


def test_warps_that_wait_for_ever_are_an_error() -> None:
    table = (plain("BAR"), plain("NOP"))
    way = Way(0)
    way.add(0, Event.BARRIER_SYNC, 1, 2)
    way.add(1)
    with pytest.raises(ValueError, match="wait for each other for ever"):
        simulate(Program(table, (way,), {}))


def test_more_than_there_is_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="65 warps, the model of an SM takes at most 64"):
        simulate(straight([plain("NOP")], 65))
    with pytest.raises(ValueError, match=r"9 products fetched ahead, .* at most 4"):
        simulate(straight([plain("NOP")], 1), tensor_ahead=9)


# Machine code


def test_machine_code_is_disassembled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another cubin or another entry point is disassembled anew, and what is damaged too."""
    monkeypatch.setenv("REPRO_CACHE_DIR", str(tmp_path))
    asked = []

    def once(cubin: bytes, entry: str) -> Code:
        asked.append((cubin, entry))
        return parse(HEX, entry)

    monkeypatch.setattr(kept, "disassemble", once)
    first = kept.disassembled(b"cubin", "kernel")
    assert kept.disassembled(b"cubin", "kernel") == first
    assert first.instructions == parse(HEX, "kernel").instructions
    assert asked == [(b"cubin", "kernel")]
    kept.disassembled(b"another", "kernel")
    assert len(asked) == 2
    for path in (tmp_path / "sass").iterdir():
        path.write_bytes(b"damaged")
    assert kept.disassembled(b"cubin", "kernel") == first
    assert len(asked) == 3


def test_machine_code_that_is_not_at_hand_needs_the_disassembler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPRO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("kernels.sass.code.find_nvdisasm", lambda: None)
    with pytest.raises(RuntimeError, match="reading machine code needs nvdisasm"):
        kept.disassembled(b"cubin", "kernel")


def code_of(*lines: str):
    return parse_listing(lines)


def run(*lines: str, threads: int = 32, arguments: tuple = (), **options: object):
    launch = Launch(threads, (1, 1, 1), arguments, **options)  # type: ignore[arg-type]
    return ways(code_of(*lines), launch)


@pytest.mark.parametrize(("less", "carries"), [(0, True), (5, True), (6, False)])
def test_a_difference_carries_where_nothing_is_borrowed(less: int, carries: bool) -> None:
    lines = f"""1---000 MOV R1, 0x5
    1---000 MOV R2, {hex(less)}
    1---000 IADD3 R0, P0, R1, -R2, RZ
    1---000 @P0 NOP
    1---000 EXIT """
    (way,), _ = run(*(line.strip() for line in lines.split("\n")))
    assert (way.kinds[3] != Event.OFF) == carries


@pytest.mark.parametrize(("dividend", "divisor"), [(1000, 8), (1407, 11), (7, 9), (123456, 77)])
def test_integer_division_as_it_is_compiled(dividend: int, divisor: int) -> None:
    """Compiled division goes through a reciprocal and corrects; the loop runs quotient times."""
    lines = f"""1---000 UMOV UR4, {hex(divisor)}
    1---000 IMAD.U32 R4, RZ, RZ, UR4
    1---000 MOV R8, {hex(dividend)}
    1---000 I2F.RP R5, R4
    1---000 MUFU.RCP R5, R5
    1---000 VIADD R2, R5, 0xffffffe
    1---000 F2I.FTZ.U32.TRUNC.NTZ R3, R2
    1---000 IMAD.MOV.U32 R2, RZ, RZ, RZ
    1---000 IMAD.MOV R9, RZ, RZ, -R3
    1---000 IMAD R9, R9, R4, RZ
    1---000 IMAD.HI.U32 R9, R3, R9, R2
    1---000 IMAD.HI.U32 R2, R9, R8, RZ
    1---000 IMAD.MOV R5, RZ, RZ, -R2
    1---000 IMAD R5, R4, R5, R8
    1---000 ISETP.GT.U32.AND P0, PT, R4, R5, PT
    1---000 @!P0 IMAD.IADD R5, R5, 0x1, -R4
    1---000 @!P0 VIADD R2, R2, 0x1
    1---000 ISETP.GE.U32.AND P1, PT, R5, R4, PT
    1---000 @P1 VIADD R2, R2, 0x1
    .L_x_0:
    1---000 ISETP.GE.AND P0, PT, RZ, R2, PT
    1---000 @P0 EXIT
    1---000 VIADD R2, R2, 0xffffffff
    1---000 BRA `(.L_x_0)"""
    found, _ = run(*(line.strip() for line in lines.splitlines()))
    assert found[0].steps.count(22) == dividend // divisor


def test_an_unknown_instruction_is_named() -> None:
    with pytest.raises(ValueError, match="instruction FROB R1, R2 at 0x10 is not known"):
        run("1---000 NOP ", "1---000 FROB R1, R2", "1---000 EXIT ")
    with pytest.raises(ValueError, match=r"no unit is known for instruction FROB\.X R1"):
        loops.step(Instruction(0, "", "FROB", ("X",), "R1", Control(1, False, None, None, ())))


def test_an_argument_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"no argument at c\[0x0\]\[0x218\]: the launch has fewer"):
        run("1---000 ULDC UR4, c[0x0][0x218]", "1---000 EXIT ", arguments=((8, 0),))


def test_a_warp_that_waits_for_ever_is_named() -> None:
    with pytest.raises(ValueError, match="warp 0 waits for ever at BAR 0x1, 0x40"):
        run("1---000 BAR.SYNC 0x1, 0x40", "1---000 EXIT ")


@pytest.mark.parametrize("name", sorted(prototype.variants()))
def test_copies_in_the_machine_code_are_the_tile_loops_bytes(name: str) -> None:
    """Q once and K and V once a key tile; backward K and V once, Q and dO once a query tile with
    their row statistics. Counted in what the warps execute, for a block in the middle of N = 1024.
    """
    v = prototype.variants()[name]
    row, seqlen, block = 2 * v.head_dim, 1024, 2
    taken = (prototype.NEVER,) if v.persistent == 2 else ()
    tiles = 1 + block if v.persistent == 1 else None
    found, _ = ways(prototype.code(name), prototype.launch(v, seqlen, block, tiles=tiles, taken=taken))
    copied = sum(
        value for way in found for kind, value in zip(way.kinds, way.values, strict=True) if kind == Event.COPY_IN
    )
    if v.backward:
        left = seqlen - (block * prototype.KEYS if v.causal else 0)
        query_tiles = -(-left // v.block_m)
        statistics = 2 * 4 * v.block_m
        expected = 2 * prototype.KEYS * row + query_tiles * (2 * v.block_m * row + statistics)
    else:
        query_tiles = -(-seqlen // v.block_m)
        tile = query_tiles - 1 if v.longest_first else block
        keys = min(seqlen, (tile + 1) * v.block_m) if v.causal else seqlen
        expected = v.block_m * row + 2 * -(-keys // v.block_n) * v.block_n * row
    assert copied == expected


# The card


def test_a_line_is_prolonged() -> None:
    line = through([(1, 10.0), (2, 20.0), (4, 30.0)])
    assert [line(x) for x in (1, 1.5, 3, 8)] == [10, 15, 25, 50]
    with pytest.raises(ValueError, match="two points, not 1"):
        through([(1, 1.0)])


# The prototype


@pytest.mark.parametrize("cell", [("d64_optimistic", 2048), ("C1", 2048), ("backward_64", 2048)])
def test_recorded_predictions_are_what_the_model_says(cell: tuple[str, int]) -> None:
    recorded = time_validation.predicted()[cell]
    assert round(prototype.clocks(*cell)) == recorded["clocks"]
    assert prototype.seconds(*cell) == pytest.approx(recorded["seconds"], rel=1e-4)
    assert prototype.spread(cell[0]) == pytest.approx(recorded["spread"], abs=1e-4)


def test_stated_errors_are_those_of_the_records() -> None:
    """docs/pages/time.md prints these; at the sustained clock."""
    rows = time_validation.comparisons()

    def of(first: bool, seqlen: int, call_1: bool = False) -> tuple[float, float]:
        found = time_validation.errors(
            r
            for r in rows
            if r.first_half is first and r.seqlen == seqlen and (r.call == time_validation.FIRST_CALL) is call_1
        )
        return tuple(round(100 * x, 1) for x in found)  # type: ignore[return-value]

    assert of(True, 2048) == (8.2, 16.1)
    assert of(True, 16384) == (2.7, 12.0)
    assert of(False, 2048) == (2.7, 23.5)
    assert of(False, 16384) == (6.1, 28.6)
    assert of(True, 2048, call_1=True) == (12.9, 19.0)
    assert of(True, 16384, call_1=True) == (12.8, 21.9)
    assert of(False, 2048, call_1=True) == (9.0, 16.2)
    assert of(False, 16384, call_1=True) == (8.2, 20.2)
