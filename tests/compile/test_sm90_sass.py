"""The Hopper kernels' machine code holds what the plan says, and nothing that slows its loop.

Per key tile of the forward: HEAD_DIM / 16 steps of Q Kᵀ and BLOCK_N / 16 of P V. Per query tile of
the backward: S and dP take HEAD_DIM / 16 each, dV and dK BLOCK_M / 16 each, dQ 128 / 16. A
descriptor that lives in a vector register costs an R2UR a use, a spill an LDL or STL.
"""

from __future__ import annotations

import pytest

from kernels import sass
from kernels.compile import compile_cubin
from kernels.hopper import BACKWARD_FORMS, FORWARD_FORMS, BackwardForm, ForwardForm
from kernels.launch import Kernel
from repro.experiments import Cell
from repro.experiments.sm_ceilings import SM80, cells, form_of, round_of

pytestmark = pytest.mark.skipif(sass.find_nvdisasm() is None, reason=sass.MISSING)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
SLOW = ("R2UR", "LDL", "STL")


def code_of(kernel: Kernel) -> tuple[sass.Code, list[sass.Instruction]]:
    compiled = compile_cubin(kernel, "sm_90a")
    code = sass.disassemble(compiled.cubin, kernel.entry)
    return code, code.main_loop("HGMMA")


@CAUSAL
@pytest.mark.parametrize("form", FORWARD_FORMS, ids=lambda f: f.name)
def test_forward(form: ForwardForm, causal: bool) -> None:
    code, loop = code_of(form.kernel("bf16", causal))
    steps = form.head_dim // 16 + form.block_n // 16
    counted, everywhere = sass.count(loop), sass.count(code.instructions)
    assert counted["HGMMA"] == steps
    # With overlap the first scores and the last product stand outside the loop; persistent, so do
    # the first scores of the next tile with the last product of this one.
    assert everywhere["HGMMA"] == steps * (1 + form.overlap + form.persistent)
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
        clearing = form.kernel("bf16", causal, "none_taken")
        cubin = compile_cubin(clearing, "sm_90a").cubin
        assert sass.count(sass.disassemble(cubin, clearing.entry).instructions)["PREEXIT"] == 1


@CAUSAL
@pytest.mark.parametrize(
    ("form", "deterministic"),
    [
        pytest.param(form, turns, id=f"{form.name}{', in turns' * turns}")
        for form in BACKWARD_FORMS
        for turns in (False, True)
        if not (turns and form.direct)
    ],
)
def test_backward(form: BackwardForm, deterministic: bool, causal: bool) -> None:
    head_dim = form.head_dim
    code, loop = code_of(form.kernel("", "bf16", causal, deterministic=deterministic))
    block_m = form.tile.block_m
    counted, everywhere = sass.count(loop), sass.count(code.instructions)
    assert counted["HGMMA"] == 2 * head_dim // 16 + 2 * block_m // 16 + 128 // 16
    assert everywhere["HGMMA"] == counted["HGMMA"]
    assert not any(counted[opcode] for opcode in SLOW)
    assert everywhere["LDL"] == everywhere["STL"] == 0
    assert counted["MUFU"] == block_m // 2
    # dQ leaves by bulk additions, or by additions of 16 bytes a thread, once for each 4 registers.
    additions = block_m * head_dim // (2 * 128) // 4
    wide = sum(i.opcode == "REDG" and "F32x4" in i.modifiers for i in loop)
    assert (everywhere["UBLKRED"] > 0, wide) == ((False, additions) if form.direct else (True, 0))
    # Who touches what the preprocess writes waits for it: the loader, and who adds dQ.
    assert (everywhere["ACQBULK"], everywhere["PREEXIT"]) == (2, 1)


def test_what_surrounds_the_backward_waits_and_lets_go() -> None:
    form = BACKWARD_FORMS[0]
    found = []
    for part in ("preprocess", "postprocess"):
        kernel = form.kernel(part, "bf16", False)
        opcodes = sass.count(sass.disassemble(compile_cubin(kernel, "sm_90a").cubin,
                                              kernel.entry).instructions)  # fmt: skip
        found.append((opcodes["ACQBULK"], opcodes["PREEXIT"]))
    assert found == [(0, 1), (1, 0)]


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
