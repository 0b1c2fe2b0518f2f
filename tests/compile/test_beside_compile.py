"""The first ladder steps and the kernels beside attention compile for both architectures without spills."""

from __future__ import annotations

import pytest

from analysis.shapes import Tile
from kernels import ladder
from kernels.beside import elementwise, gemm, online_softmax
from kernels.beside.probes import all_probes
from kernels.building.compile import CompileError, compile_cubin
from kernels.flash1 import flash1_kernel
from kernels.launch import Kernel

ARCH = pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90", marks=pytest.mark.thorough)])
#: algorithm, dtype, head_dim, tile: the defaults, the largest sums a thread may hold, the tiles of
#: FlashAttention 2022's Fig. 2, and one that divides nothing.
ATTENTION = [
    ("standard", "fp16", 64, Tile(64, 64)),
    ("standard", "bf16", 128, Tile(128, 128)),
    ("standard", "fp32", 128, Tile(64, 64)),
    ("flash1-skip-first", "fp16", 64, Tile(16, 256)),
    ("flash1-skip-first", "bf16", 128, Tile(64, 64)),
    ("flash1-literal", "fp32", 40, Tile(13, 27)),
    ("flash1-released", "fp16", 64, Tile(16, 256)),
    ("flash1-released", "fp32", 40, Tile(13, 27)),
]


def hold(kernels: list[Kernel], arch: str) -> None:
    for kernel in kernels:
        compiled = compile_cubin(kernel, arch)
        assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0), kernel
        assert compiled.registers * kernel.threads <= 65536, kernel


@ARCH
@pytest.mark.parametrize("variant", ATTENTION, ids=lambda v: f"{v[0]}-{v[1]}-d{v[2]}-{v[3].block_m}x{v[3].block_n}")
def test_attention(variant: tuple[str, str, int, Tile], arch: str) -> None:
    algorithm, dtype, head_dim, tile = variant
    hold(ladder.all_kernels(algorithm, tile, head_dim, dtype), arch)


@ARCH
@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(gemm.all_kernels(), id="products"),
        pytest.param(elementwise.all_kernels(), id="chains"),
        pytest.param(all_probes(), id="probes"),
        pytest.param(online_softmax.all_kernels("fp32", 5), id="softmax, top 5"),
        pytest.param(online_softmax.all_kernels("fp32", 30), id="softmax, top 30"),
    ],
)
def test_beside_attention(kernels: list[Kernel], arch: str) -> None:
    hold(kernels, arch)


def test_the_launcher_and_the_kernel_agree_on_shared_memory() -> None:
    """A byte more or less than the kernel's struct, and it does not compile."""
    good = flash1_kernel("flash1_forward", Tile(16, 64), 64, "fp16", "forward", form="skip-first")
    macros = dict(good.macros)
    macros["SHARED_BYTES"] += 16
    bad = Kernel(good.source, good.entry, tuple(macros.items()), good.threads)
    with pytest.raises(CompileError, match="counts other bytes"):
        compile_cubin(bad, "sm_90")
