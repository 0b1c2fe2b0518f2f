"""The Hopper kernels' machine code holds what the plan says, and nothing that slows its loop.

Per key tile of the forward: HEAD_DIM / 16 steps of Q Kᵀ and BLOCK_N / 16 of P V. Per query tile of
the backward: S and dP take HEAD_DIM / 16 each, dV and dK BLOCK_M / 16 each, dQ 128 / 16. A
descriptor that lives in a vector register costs an R2UR a use, a spill an LDL or STL.

What is to run under a product stands between two waits for products. ptxas moves arithmetic over
waits, and differently from version to version: every version of NVRTC at hand is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from kernels.building.compile import compile_cubin
from kernels.hopper import BACKWARD_FORMS, FORWARD_FORMS, PACKED_FORMS, BackwardForm, ForwardForm, backward_form
from kernels.launch import Kernel
from kernels.sass import code as sass
from repro.experiments import Cell
from repro.experiments.bytes.sm_ceilings import SM80, cells, form_of, round_of

pytestmark = pytest.mark.skipif(sass.find_nvdisasm() is None, reason=sass.MISSING)
CAUSAL = pytest.mark.parametrize(
    "causal", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["dense", "causal"]
)
SLOW = ("R2UR", "LDL", "STL")
EXACT = (*FORWARD_FORMS, *PACKED_FORMS)


@cache
def code_of(kernel: Kernel, nvrtc: str | None = None) -> tuple[sass.Code, list[sass.Instruction]]:
    compiled = compile_cubin(kernel, "sm_90a", nvrtc)
    code = sass.disassemble(compiled.cubin, kernel.entry)
    return code, code.main_loop("HGMMA")


def forms_and_parts(forms: Sequence[ForwardForm]) -> pytest.MarkDecorator:
    """Each form exact and, thorough and where it has that, optimistic."""
    exact = [pytest.param(form, "", id=f"{form.name}, exact") for form in forms]
    optimistic = [
        pytest.param(form, part, id=f"{form.name}, {part}", marks=pytest.mark.thorough)
        for part in ("optimistic",)
        for form in forms
        if not form.packed
    ]
    return pytest.mark.parametrize(("form", "part"), exact + optimistic)


def check_registers(code: sass.Code) -> None:
    """Each role keeps within the registers that it asks for."""
    roles = code.registers_by_role()
    assert len(roles) == 2  # producer and consumers
    assert all(0 < used <= had for had, used in roles), roles


@CAUSAL
@forms_and_parts([*FORWARD_FORMS, *PACKED_FORMS])
def test_the_softmax_runs_under_a_product(form: ForwardForm, part: str, causal: bool, nvrtc: str) -> None:
    """Between the wait for Q Kᵀ and that for P V lies all of the softmax but P's rounding and O's
    rescaling, which need P V's end. One exponential may be late, and in exact forms with one block
    a tile a third of the sums' additions."""
    code, _ = code_of(form.kernel("bf16", causal, part), nvrtc)
    counted = sass.count(code.between_waits(1)[0])
    scores = form.block_n // 2  # a thread's
    assert counted["MUFU"] >= scores - 1
    assert counted["FFMA"] >= scores
    whole = part or form.persistent or form.head_dim == 256
    assert counted["FADD"] >= (scores - 2 if whole else 2 * scores // 3)
    assert counted["FMNMX"] >= (0 if part else scores)
    assert counted["HGMMA"] == 0


@CAUSAL
@forms_and_parts([f for f in EXACT if f.persistent])
def test_so_does_that_of_the_next_tile(form: ForwardForm, part: str, causal: bool, nvrtc: str) -> None:
    """Where a block goes on to its next query tile, which looks for its maximum in any case: all
    exponentials, those of two rescalings among them."""
    code, _ = code_of(form.kernel("bf16", causal, part), nvrtc)
    _, step = (sass.count(way) for way in code.between_waits(1))
    scores = form.block_n // 2
    assert step["FMNMX"] >= scores
    assert step["MUFU"] == scores + 2
    assert step["FFMA"] >= scores
    assert step["HGMMA"] == 0


@CAUSAL
@pytest.mark.parametrize("form", EXACT, ids=lambda f: f.name)
def test_a_round_without_a_mask_rescales_nothing(form: ForwardForm, causal: bool, nvrtc: str) -> None:
    """Up to head_dim 128, unless a maximum grows: a multiplication for each row's sum and scale."""
    code, _ = code_of(form.kernel("bf16", causal), nvrtc)
    outputs = form.head_dim // 2
    multiplied = sass.count(code.shortest_round("HGMMA"))["FMUL"]
    assert multiplied >= outputs if form.head_dim == 256 else multiplied <= 6


@CAUSAL
@pytest.mark.parametrize("form", EXACT, ids=lambda f: f.name)
def test_forward(form: ForwardForm, causal: bool, nvrtc: str) -> None:
    code, loop = code_of(form.kernel("bf16", causal), nvrtc)
    check_registers(code)
    steps = form.head_dim // 16 + form.block_n // 16
    counted, everywhere = sass.count(loop), sass.count(code.instructions)
    assert counted["HGMMA"] == steps
    # The first scores and the last product stand outside the loop; persistent, so do
    # the first scores of the next tile with the last product of this one.
    assert everywhere["HGMMA"] == steps * (2 + form.persistent)
    if form.head_dim == 256:
        # Descriptors of 16 steps of Q are more than the uniform registers hold.
        assert counted["R2UR"] <= 24
        counted["R2UR"] = 0
    assert not any(counted[opcode] for opcode in SLOW)
    assert everywhere["LDL"] == everywhere["STL"] == 0
    # An exponential for each score a thread holds, and one for each of its two rows' rescaling.
    assert counted["MUFU"] == form.block_n // 2 + 2
    assert everywhere["USETMAXREG"] == 2
    # A persistent form waits for its counter, whose kernel lets it start.
    assert (everywhere["ACQBULK"] > 0) == form.persistent
    if form.persistent:
        clearing = form.kernel("bf16", causal, "clear_counter")
        cubin = compile_cubin(clearing, "sm_90a", nvrtc).cubin
        assert sass.count(sass.disassemble(cubin, clearing.entry).instructions)["PREEXIT"] == 1


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("form", [BackwardForm(64, 128), BackwardForm(128, 64)], ids=lambda f: f.name)
def test_a_round_of_packed_sequences_is_that_of_others(
    form: BackwardForm, deterministic: bool, causal: bool, nvrtc: str
) -> None:
    """The same products and exponentials, and neither a spill nor a descriptor in a register."""
    counts = []
    for packed in (False, True):
        kernel = form.kernel("", "bf16", causal, deterministic=deterministic, features=["packed"] * packed)
        code, loop = code_of(kernel, nvrtc)
        check_registers(code)
        counts.append(sass.count(loop))
        everywhere = sass.count(code.instructions)
        assert everywhere["LDL"] == everywhere["STL"] == 0
    plain, ours = counts
    for opcode in ("HGMMA", "MUFU", "R2UR"):
        assert ours[opcode] == plain[opcode]


@CAUSAL
@pytest.mark.parametrize(
    ("form", "deterministic"),
    [
        pytest.param(form, turns, id=f"{form.name}{', in turns' * turns}")
        for form in BACKWARD_FORMS
        for turns in (False, True)
        if not (turns and form.dq_from_registers)
    ],
)
def test_backward(form: BackwardForm, deterministic: bool, causal: bool, nvrtc: str) -> None:
    head_dim = form.head_dim
    code, loop = code_of(form.kernel("", "bf16", causal, deterministic=deterministic), nvrtc)
    check_registers(code)
    block_m = form.tile.block_m
    counted, everywhere = sass.count(loop), sass.count(code.instructions)
    assert counted["HGMMA"] == 2 * head_dim // 16 + 2 * block_m // 16 + 128 // 16
    assert everywhere["HGMMA"] == counted["HGMMA"]
    assert counted["R2UR"] == 0
    assert 4 * (everywhere["LDL"] + everywhere["STL"]) == form.spill_bytes(causal)
    assert counted["MUFU"] == block_m // 2
    # P is made between the wait for S and that for dP: while dP, issued behind S, is multiplied.
    under_dp, under_dk = (sass.count(way) for way in code.between_waits(1))
    assert under_dp["MUFU"] == under_dp["FFMA"] == block_m // 2
    assert under_dk["MUFU"] == 0
    # dQ leaves by bulk additions, or by additions of 16 bytes a thread, once for each 4 registers.
    additions = block_m * head_dim // (2 * 128) // 4
    wide = sum(i.opcode == "REDG" and "F32x4" in i.modifiers for i in loop)
    assert (everywhere["UBLKRED"] > 0, wide) == ((False, additions) if form.dq_from_registers else (True, 0))
    # Who touches what the preprocess writes waits for it: the loader, and who adds dQ.
    assert (everywhere["ACQBULK"], everywhere["PREEXIT"]) == (2, 1)


@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_window_costs_a_round_that_it_does_not_cut_little(head_dim: int, causal: bool, nvrtc: str) -> None:
    """A few instructions say that the tile is whole; the exponentials stay under dP."""
    form = backward_form(head_dim, causal=True)
    plain, _ = code_of(form.kernel("", "bf16", causal), nvrtc)
    code, _ = code_of(form.kernel("", "bf16", causal, features=["window"]), nvrtc)
    check_registers(code)
    whole = code.shortest_round("HGMMA")
    assert len(whole) <= 1.06 * len(plain.shortest_round("HGMMA"))
    counted = sass.count(whole)
    assert counted["LDL"] == counted["STL"] == 0
    assert counted["R2UR"] <= 1  # the edge of the window; a descriptor would be many
    under_dp, under_dk = (sass.count(way) for way in code.between_waits(1))
    assert under_dp["MUFU"] == under_dp["FFMA"] == form.block_m // 2
    assert under_dk["MUFU"] == 0


def test_what_surrounds_the_backward_waits_and_lets_go() -> None:
    form = BACKWARD_FORMS[0]
    found = []
    for part in ("preprocess", "postprocess"):
        kernel = form.kernel(part, "bf16", False)
        opcodes = sass.count(sass.disassemble(compile_cubin(kernel, "sm_90a").cubin, kernel.entry).instructions)
        found.append((opcodes["ACQBULK"], opcodes["PREEXIT"]))
    assert found == [(0, 1), (1, 0)]


PAGE = Path(__file__).resolve().parents[2] / "docs" / "pages" / "hopper-code.md"
VERSIONS = ("13.0", "13.5")  # of the page's pairs of numbers


def listed_kernel(name: str) -> Kernel:
    """The kernel of a row of the page's table, without a mask."""
    exact = name.removesuffix(", optimistic")
    for form in BACKWARD_FORMS:
        if form.name == name:
            return form.kernel("", "bf16", False)
    (forward,) = (form for form in FORWARD_FORMS if form.name == exact)
    return forward.kernel("bf16", False, "" if exact == name else "optimistic")


def test_the_page_s_numbers_are_the_code_s(nvrtc: str) -> None:
    """``docs/pages/hopper-code.md``: every form, and what its round consists of."""
    if nvrtc not in VERSIONS:
        pytest.skip(f"the page has no numbers of NVRTC {nvrtc}")
    table = PAGE.read_text().split("<!-- rounds:")[0]
    rows = re.findall(r"^\| (d\d+ \d+x\d+[^|]*) \|(.*)\|$", table, re.M)
    listed = {name: shown.split(" | ") for name, shown in rows}
    assert {form.name for form in (*FORWARD_FORMS, *BACKWARD_FORMS)} <= set(listed)
    for name, row in listed.items():
        code, _ = code_of(listed_kernel(name), nvrtc)
        path = code.shortest_round("HGMMA")
        counted, under = sass.count(path), sass.count(code.between_waits(1)[0])
        uniform = sum(n for opcode, n in counted.items() if opcode.startswith("U"))
        ours = [len(path), uniform + counted["R2UR"], counted["HGMMA"], counted["MUFU"]]
        numbers = [cell.strip().split(" / ") for cell in row]
        place = VERSIONS.index(nvrtc)
        assert [int(cell[place % len(cell)]) for cell in numbers[:4]] == ours, name
        shares = [f"{under[opcode]} of {counted[opcode]}" for opcode in ("FMNMX", "MUFU")]
        assert [cell[place % len(cell)] for cell in numbers[4:6]] == shares, name


def products(code: list[sass.Instruction]) -> tuple[int, int]:
    """FLOPs of a warpgroup's products, and bytes they read of shared memory."""
    flops = bytes_ = 0
    for product in (i for i in code if i.opcode == "HGMMA"):
        m, n, k = (int(size) for size in product.modifiers[0].split("x"))
        flops += 2 * m * n * k
        _, first, *_ = product.operands.split(", ")
        bytes_ += 2 * n * k + (2 * m * k if first.startswith("gdesc") else 0)
    return flops, bytes_


@pytest.mark.parametrize("cell", [c for c in cells() if c["implementation"] != SM80], ids=str)
def test_a_round_is_the_predicted_one(cell: Cell) -> None:
    """The compiled products do the FLOPs and read the bytes of ``analysis.sm_ceilings``, and each
    thread of the consumers makes its share of the exponentials."""
    form, found = form_of(cell), round_of(cell)
    if isinstance(form, ForwardForm):
        kernel = form.kernel("bf16", False, "optimistic" if "optimistic" in str(cell) else "")
    else:
        kernel = form.kernel("", "bf16", False)
    code, loop = code_of(kernel)
    path = code.shortest_round("HGMMA")
    assert {i.address for i in path} <= {i.address for i in loop}
    flops, read = products(path)
    assert flops * found.consumers == found.flops
    by_products = {"Q for S", "K for S", "V for O", "V for dP", "dO for dP", "dO for dV"}
    by_products |= {"Q for dK", "dS for dQ", "K for dQ"}
    assert read * found.consumers == sum(
        count for purpose, count in found.shared_bytes.items() if purpose in by_products
    )
    assert sass.count(path)["MUFU"] * found.consumers * 128 == found.exponentials
    assert len(path) < len(loop)  # the masks and repeated waits are out of the way


def test_a_register_descriptor_would_be_seen() -> None:
    """The loop of a kernel that takes its descriptor from memory has R2UR in it."""
    source = """
#define DTYPE 1
#include "device_sm90.cuh"
extern "C" __global__ void __launch_bounds__(128) wandering(float* out, uint64* where, int n) {
    float d[32];
    for (int i = 0; i < 32; ++i) d[i] = 0.0f;
    for (int it = 0; it < n; ++it) {
        wgmma_fence();
        Wgmma<64>::ss<0, 0>(d, where[it * 128 + threadIdx.x], where[it]);
        wgmma_commit();
        wgmma_wait<0>();
        keep(d);
    }
    for (int i = 0; i < 32; ++i) out[threadIdx.x * 32 + i] = d[i];
}
"""
    _, loop = code_of(Kernel(source, "wandering", (), 128))
    assert sass.count(loop)["R2UR"] > 0
