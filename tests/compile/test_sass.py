"""Reading machine code: loops, ways between waits, registers by role, control fields."""

from __future__ import annotations

import pytest

from kernels.building.compile import compile_cubin
from kernels.hopper import BACKWARD_FORMS
from kernels.sass import code as sass

LOOPS = """
.text.k:
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/                   SYNCS.PHASECHK P0, [R2], R3 ;
        /*0020*/              @!P0 BRA `(.L_x_9) ;
.L_x_1:
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0040*/              @P1  LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0050*/              @P2  BRA `(.L_x_0) ;
        /*0060*/                   BRA.U UP0, `(.L_x_2) ;
        /*0070*/                   LDL R1, [R1] ;
.L_x_2:
        /*0080*/                   EXIT ;
.L_x_9:
        /*0090*/                   NOP ;
        /*00a0*/                   BRA `(.L_x_1) ;
.L_x_3:
        /*00b0*/                   BRA `(.L_x_3);
"""


def test_loops_are_found_by_the_flow_of_control() -> None:
    """The out-of-line retry jumps backwards and closes no loop of its own."""
    code = sass.parse("\n" + LOOPS, "k")
    loop = code.main_loop("HGMMA")
    assert sorted(i.address for i in loop) == [0x10, 0x20, 0x30, 0x40, 0x50, 0x90, 0xA0]
    assert sass.wide_accesses(loop) == 1
    assert [len(found) for found in code.loops()] == [1, 7]
    # Once around without the retry: the wait passes, the product, and back.
    assert [i.address for i in code.shortest_round("HGMMA")] == [0x10, 0x20, 0x30, 0x40, 0x50]
    with pytest.raises(ValueError, match="no loop contains LDL"):
        code.main_loop("LDL")
    with pytest.raises(RuntimeError, match="no entry point 'other'"):
        sass.parse(LOOPS, "other")


WAITS = """
.text.k:
        /*0000*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0010*/                   FADD R0, R1, R2 ;
.L_x_0:
        /*0020*/                   SYNCS.PHASECHK P0, [R2], R3 ;
        /*0030*/              @!P0 BRA `(.L_x_0) ;
        /*0040*/                   FMUL R0, R1, R2 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/                   MUFU.EX2 R0, R1 ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0080*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0090*/                   EXIT ;
"""


def test_work_between_waits_is_found() -> None:
    """From a wait that leaves a group running to the next one, if that leaves none."""
    code = sass.parse("\n" + WAITS, "k")
    ways = code.between_waits(1)
    assert [[i.opcode for i in way] for way in ways] == [["FADD", "SYNCS", "BRA", "FMUL"]]
    assert [[i.opcode for i in way] for way in code.between_waits(0, 1)] == [["MUFU"]]
    assert code.between_waits(1, 1) == [[]]


ROLES = """
.text.k:
        /*0000*/               @P0 BRA `(.L_x_0) ;
        /*0010*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8 ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, R180, gdesc[UR8].tnspB, R24 ;
        /*0030*/                   EXIT ;
.L_x_0:
        /*0040*/                   USETMAXREG.DEALLOC.CTAPOOL 0x18 ;
        /*0050*/                   ATOMG.E.ADD.STRONG.GPU PT, R2, desc[UR34][R18.64], R13 ;
        /*0060*/                   STS.128 [R4+UR24+0x10], R8 ;
        /*0070*/                   EXIT ;
"""


def test_registers_are_counted_by_role() -> None:
    code = sass.parse("\n" + ROLES, "k")
    assert code.registers_by_role() == [(232, 184), (24, 20)]
    wide = ROLES.replace("STS.128 [R4+UR24+0x10], R8", "STS.128 [R4+UR24+0x10], R20")
    assert sass.parse("\n" + wide, "k").registers_by_role()[1] == (24, 24)
    wide = ROLES.replace("R24, R180", "R124, R180")
    assert sass.parse("\n" + wide, "k").registers_by_role()[0] == (232, 188)


ENCODED = """
.text.k:
        /*0190*/                   LOP3.LUT R0, R6, R9, R0, 0xfe, !PT ;   /* 0x0000000906007212 */
                                                                          /* 0x008fc800078efe00 */
        /*01a0*/                   LDS R0, [R1] ;                         /* 0x0000000001007984 */
                                                                          /* 0x000e220000000800 */
"""


def test_control_fields_are_decoded() -> None:
    """By hand, from the bits that Jia et al. (2018) describe: stall, yield, barriers, waits."""
    first, second = sass.parse("\n" + ENCODED, "k").instructions
    # 0x008fc8: waits 0b001000, barriers 7 and 7, bit of yield 0, stall 4.
    assert first.control == sass.Control(4, True, None, None, (3,))
    # 0x000e22: waits none, read 7, write 0, bit of yield 1, stall 1.
    assert second.control == sass.Control(1, False, 0, None, ())


@pytest.mark.skipif(sass.find_nvdisasm() is None, reason=sass.MISSING)
def test_every_compiled_instruction_has_its_control() -> None:
    form = BACKWARD_FORMS[0]
    kernel = form.kernel("preprocess", "bf16", False)
    code, found = sass.disassemble(compile_cubin(kernel, "sm_90a").cubin, kernel.entry), set()
    for instruction in code.instructions:
        assert instruction.control is not None
        found.add(instruction.control.write_barrier)
        # Who sets a barrier for its result has no fixed latency.
        if instruction.control.write_barrier is not None:
            assert instruction.opcode not in ("FADD", "FMUL", "FFMA", "IADD3", "LOP3")
    assert len(found) > 2
