"""Predicted times of the sm_80 kernels on an A100: the model of its SM, the record, the card."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from analysis.hardware import gpu_named
from analysis.loop_model import ampere
from analysis.loop_model.card import fill_shared
from analysis.loop_model.native import simulate
from analysis.loop_model.program import Event, Program, Step, Way, side_by_side
from analysis.shapes import AttentionShape, Tile
from kernels.building.compile import nvrtc_version
from kernels.sass import loops
from kernels.sass.code import Control, Instruction, find_nvdisasm
from kernels.sass.listing import parse_listing
from kernels.sass.operands import Launch
from kernels.sass.run import ways
from kernels.timing import followed_warps, records, sm80_time
from kernels.timing.followed_warps import Kind
from kernels.timing.sm80_time import ON_A100, ON_H200, TARGETS, Target
from repro.prediction import NoTime, predict
from repro.prediction.time import WAITS_FOR_MEMORY
from repro.timing import ampere_tiles, tables


def plain(opcode: str, stall: int = 1, **fields: object) -> Step:
    return Step(opcode, ampere.OPERATIONS[opcode], stall, **fields)  # type: ignore[arg-type]


def straight(steps: list[Step], warps: int) -> Program:
    """All warps execute the same steps."""
    found = []
    for warp in range(warps):
        way = Way(warp)
        for index in range(len(steps)):
            way.add(index)
        found.append(way)
    return Program(tuple(steps), tuple(found), {})


def clocks(program: Program, **options: object) -> int:
    return simulate(program, parameters=ampere.SM80, **options).clocks  # type: ignore[arg-type]


# The SM


@pytest.mark.parametrize(
    ("opcode", "interval"), [("HMMA", 8), ("FFMA", 2), ("IMAD", 2), ("FMNMX", 2), ("F2FP", 2), ("MUFU", 8)]
)
def test_pipes_take_an_instruction_every_so_many_clocks(opcode: str, interval: int) -> None:
    """Four warps, one a scheduler, run side by side; eight share the pipes."""
    for warps, share in ((4, 1), (8, 2)):
        found = clocks(straight([plain(opcode)] * 50, warps))
        assert found == pytest.approx(50 * interval * share, rel=0.05, abs=10)


def test_products_of_a_scheduler_reach_the_rate_of_the_white_paper() -> None:
    """312 TFLOP/s over 108 SMs at 1.41 GHz: 2,048 FLOP a clock."""
    flops = 8 * 50 * 2 * 16 * 8 * 16
    assert flops / clocks(straight([plain("HMMA")] * 50, 8)) == pytest.approx(2048, rel=0.02)


def of(opcode: str, *modifiers: str, operands: str, write: int | None = None) -> Instruction:
    return Instruction(0, "", opcode, modifiers, operands, Control(1, False, write, None, ()))


def test_products_read_their_fragments_from_both_banks() -> None:
    """A of four registers, B of two, an accumulator of four, and no more than is not kept."""
    first = of("HMMA", "16816", "F32", operands="R24, R80.reuse, R144, R24")
    same = of("HMMA", "16816", "F32", operands="R76, R80, R146, RZ")
    assert loops.step(first, None, ampere.OPERATIONS).reads == (5, 5)
    assert loops.step(same, first, ampere.OPERATIONS).reads == (1, 1)


def test_products_of_another_shape_and_what_nobody_waits_for_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no rate is known for products of shape HMMA\.884"):
        loops.step(of("HMMA", "884", operands="R0, R2, R4, R0"), None, ampere.OPERATIONS)
    with pytest.raises(ValueError, match=r"no counter for LDGDEPBAR"):
        loops.step(of("LDGDEPBAR", operands=""), None, ampere.OPERATIONS)
    with pytest.raises(ValueError, match=r"no unit is known for instruction HGMMA\.64x64x16"):
        loops.step(of("HGMMA", "64x64x16", operands=""), None, ampere.OPERATIONS)


def waits_for_copies(copies: int) -> Program:
    """A warp that copies so many times 512 bytes, ends the group and waits for it."""
    table = (plain("LDGSTS"), plain("LDGDEPBAR", write_barrier=0), plain("DEPBAR"), plain("NOP"))
    way = Way(0)
    for _ in range(copies):
        way.add(0, Event.WARP_COPY, 0, 512)
    way.add(1, Event.WARP_COPIES_END)
    way.add(2)
    way.add(3)
    return Program(table, (way,), {})


def test_a_group_of_copies_is_over_when_its_last_byte_has_come() -> None:
    for copies in (1, 8, 40):
        found = clocks(waits_for_copies(copies), copy_far=203)
        assert found == pytest.approx(203 + copies * -(-512 // 47), abs=16)


def test_additions_hold_their_sources_until_they_are_sent() -> None:
    table = (plain("RED", read_barrier=1), plain("NOP", wait=0b10))
    way = Way(0)
    for _ in range(20):
        way.add(0, Event.ADD, 0, 256)
    way.add(1)
    assert clocks(Program(table, (way,), {})) == pytest.approx(20 * (256 // 47), abs=6)


def test_blocks_beside_each_other_have_their_own_barriers_and_share_the_pipes() -> None:
    table = (plain("BAR", stall=1), plain("HMMA"))
    found = []
    for warp in range(4):
        way = Way(warp)
        way.add(0, Event.BARRIER_SYNC, 0, 4)
        for _ in range(100):
            way.add(1)
        found.append(way)
    block = Program(table, tuple(found), {})
    assert len(side_by_side(block, 3).ways) == 12
    alone = clocks(block)
    assert clocks(side_by_side(block, 2)) - alone == pytest.approx(800, abs=8)
    assert clocks(side_by_side(block, 1, times=3)) - alone == pytest.approx(2 * alone, abs=40)


# Machine code


def run(*lines: str) -> list[tuple[int, int, int]]:
    launch = Launch(32, (1, 1, 1), ((8, 5),), architecture="sm_80")
    (way,), _ = ways(parse_listing(lines), launch)
    return list(zip(way.steps, way.kinds, way.values, strict=True))


def test_copies_whose_predicate_is_false_fetch_nothing() -> None:
    found = run(
        "1---000 ISETP.EQ.AND P0, PT, RZ, RZ, PT",
        "1---000 ISETP.NE.AND P1, PT, RZ, RZ, PT",
        "1--1000 LDGSTS.E.BYPASS.128 [R4], [R8.64], P0",
        "1--1000 LDGSTS.E.BYPASS.128 [R4], [R8.64], P1",
        "1-0-000 LDGDEPBAR ",
        "1---000 EXIT ",
    )
    assert [value for _, kind, value in found if kind == Event.WARP_COPY] == [512, 0]
    assert [kind for _, kind, _ in found][4] == Event.WARP_COPIES_END


def test_a_far_jump_is_followed_and_a_function_is_not() -> None:
    found = run(
        "1---000 CALL.REL.NOINC `($__internal_0_$__cuda_sm20_rcp_rn_f32_slowpath)",
        "1---000 CALL.REL.NOINC `(.L_x_0)",
        "1---000 NOP ",
        ".L_x_0:",
        "1---000 EXIT ",
    )
    assert [step for step, _, _ in found] == [0, 1, 3]


@pytest.mark.parametrize(("selector", "skips"), [("0x7610", True), ("0x7611", False)])
def test_bytes_are_permuted(selector: str, skips: bool) -> None:
    """The flag of a first round is a byte of a register: 5, from the argument, or 0."""
    found = run(
        "1---000 MOV R0, c[0x0][0x160]",
        f"1---000 PRMT R0, R0, {selector}, RZ",
        "1---000 LOP3.LUT P0, RZ, R0, 0xff, RZ, 0xc0, !PT",
        "1---000 @P0 BRA `(.L_x_0)",
        "1---000 NOP ",
        ".L_x_0:",
        "1---000 EXIT ",
    )
    assert (len(found) == 5) is skips


# The card


def test_blocks_that_share_slow_each_other_down_as_long_as_they_do() -> None:
    """Two of 10 clocks at 1.5 times; a third beside the second of 30 is alone at the end."""
    assert fill_shared([10, 10], 1, 2, 1.5) == 15
    assert fill_shared([10, 30], 1, 2, 1.5) == 15 + 20
    assert fill_shared([10, 30, 10], 1, 2, 1.5) == 15 + 15 + 10
    assert fill_shared([10, 10], 2, 2, 1.5) == 10
    assert fill_shared([12] * 3, 1, 3, 2.0) == 24
    assert fill_shared([12] * 2, 1, 3, 2.0) == 18
    assert fill_shared([], 4, 2, 1.5) == 0


# The record


def shape_of(seqlen: int, head_dim: int, causal: bool = False, **options: object) -> AttentionShape:
    values = {"batch": 2, "heads": 4, "seqlen_q": seqlen, "seqlen_k": seqlen, "dtype": "fp16"}
    return AttentionShape(head_dim=head_dim, causal=causal, **{**values, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_all_that_runs_by_default_is_on_record(target: Target) -> None:
    """A change of a source needs ``python -m kernels.timing``, minutes."""
    listed = list(followed_warps.kinds(target))
    for kind in listed:
        found = sm80_time.recorded(kind.config.kernel(), target)
        assert found.tile == kind.config.tile
        assert found.blocks_per_sm == kind.blocks_per_sm
        assert 1 <= found.slowdown <= found.blocks_per_sm
    digests = [row["digest"] for row in records.rows(target.lines)]
    assert len(set(digests)) == len(digests) == len(listed)


@pytest.mark.parametrize(
    "kind",
    [
        Kind(ON_A100, "forward", 64, causal=True),
        Kind(ON_H200, "backward", 64, False, ("alibi",)),
        Kind(ON_H200, "forward", 64, False, packed=True),
    ],
    ids=str,
)
def test_recorded_clocks_are_what_the_model_says(kind: Kind) -> None:
    """From compiler to clocks. Another compiler orders instructions otherwise."""
    if find_nvdisasm() is None:
        pytest.skip("needs nvdisasm")
    wanted = records.find(kind.target.lines, digest=sm80_time.digest_of(kind.config.kernel()))
    assert wanted is not None
    if wanted["nvrtc"] != nvrtc_version():
        pytest.skip(f"recorded with NVRTC {wanted['nvrtc']}, here is {nvrtc_version()}")
    found = followed_warps.columns_of(kind)
    assert {name: wanted[name] for name in found} == {n: str(x) for n, x in found.items()}


@given(
    shape=st.builds(
        AttentionShape,
        st.sampled_from([1, 3]),
        st.sampled_from([4, 32]),
        st.sampled_from([1, 17, 512, 4096]),
        st.sampled_from([1, 64, 3000]),
        st.sampled_from([40, 64, 100, 128, 256]),
        dtype=st.sampled_from(["fp16", "bf16"]),
        causal=st.booleans(),
        window=st.sampled_from([(None, None), (64, 64), (100, 0)]),
    ),
    pass_=st.sampled_from(["forward", "backward"]),
    gpu=st.sampled_from(["A100", "H100", "H200"]),
)
@example(AttentionShape(1, 32, 17, 3000, 256), "backward", "A100")  # K and V from HBM
@example(AttentionShape(3, 32, 512, 512, 128, causal=True, window=(64, 64)), "backward", "H100")
@example(AttentionShape(1, 32, 4096, 64, 100, causal=True), "backward", "A100")  # padded
@settings(max_examples=60)
def test_a_predicted_time_is_none_rather_than_below_the_bound(shape: AttentionShape, pass_: str, gpu: str) -> None:
    point = predict("auto", shape, pass_, gpu, once=True)
    if point.predicted == NoTime(WAITS_FOR_MEMORY):
        assert point.time.by_resource["HBM"] > 0.5 * point.time.seconds
    elif point.predicted_s is not None:
        assert point.predicted_s >= point.time.seconds


def test_the_copies_of_a_padded_head_dimension_take_their_time() -> None:
    """q, k, v in and 4 columns wider out, 100 columns of out back: at HBM's sustained rate."""
    odd, wide = (
        predict("auto", AttentionShape(2, 16, 4096, 4096, d), "forward", "A100", once=True) for d in (100, 104)
    )
    assert odd.predicted_s is not None
    assert wide.predicted_s is not None
    moved = 2 * 16 * 4096 * (3 * (100 + 104) + 100 + 100) * 2
    assert odd.copy_bytes == moved
    added = moved / (0.87 * gpu_named("A100").hbm_bandwidth_bytes_per_s)
    assert odd.predicted_s == pytest.approx(wide.predicted_s + added)


def test_other_kernels_and_other_gpus_are_not_predicted() -> None:
    shape = shape_of(1024, 64)

    def predicted(
        algorithm: str = "flash",
        pass_: str = "forward",
        gpu: str = "A100",
        of: AttentionShape = shape,
        **options: object,
    ) -> float | None:
        point = predict(algorithm, of, pass_, gpu, waves=True, **options)  # type: ignore[arg-type]
        assert point.row()["time_predicted_s"] == point.predicted_s
        return point.predicted_s

    assert predicted() is not None
    assert predicted(gpu="L4") is None
    assert predicted(gpu="H200") is not None, "it has clocks of its own"
    assert predicted(of=shape_of(1024, 64, dtype="fp32")) is None
    assert predicted(tile=Tile(64, 64)) is None
    assert predicted(softcap=True) is None
    assert predicted(dropout_p=0.5) is None
    assert predicted("flash-deterministic", "backward") is None
    assert predicted("standard") is None


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_rounds_are_the_visits_of_the_tile_loop(pass_: str) -> None:
    shape = shape_of(700, 64, True, kv_heads=2, seqlen_k=900)
    found = list(sm80_time.rounds_of(pass_, Tile(128, 64), shape))
    if pass_ == "forward":
        last = [min((m + 1) * 128, 700) + 200 for m in range(6)]
        of_head = [-(-min(900, keys) // 64) for keys in last][::-1]
        assert found == of_head * 8
    else:
        first = [max(0, n * 64 - 200) // 128 for n in range(15)]
        assert found == [2 * (6 - m) for m in first] * 4


# The choice of tile


@pytest.mark.parametrize("asked", [("forward", 128, 64, 64), ("backward", 128, 32, 64)])
def test_the_page_says_what_the_model_says_of_a_tile(asked: tuple[str, int, int, int]) -> None:
    if find_nvdisasm() is None:
        pytest.skip("needs nvdisasm")
    if records.rows(ON_A100.lines)[0]["nvrtc"] != nvrtc_version():
        pytest.skip(f"written with another NVRTC than {nvrtc_version()}")
    page = tables.block("tiles").path.read_text(encoding="utf-8")
    line = ampere_tiles.row(ampere_tiles.choice(*asked))
    assert line in page, "run `python -m repro.timing tables tiles`"
