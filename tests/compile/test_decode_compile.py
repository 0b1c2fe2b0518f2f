"""The decoding kernels compile for sm_80 and sm_90 without a GPU, spill nothing, and fit."""

from __future__ import annotations

import itertools

import pytest

from analysis.hardware import A100_80GB, H100_SXM
from analysis.occupancy import occupancy
from kernels.building.compile import compile_cubin
from kernels.decode_config import DecodeConfig, configure
from kernels.flash_config import SHARED_LIMIT_BYTES

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and the NVRTC wheel")

REGISTERS = 65536  # of a multiprocessor
CARDS = {"sm_80": A100_80GB, "sm_90": H100_SXM}
ARCH = pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90", marks=pytest.mark.thorough)])


#: (fp8, a scale a block of keys)
CACHES = ((False, False), (True, False), (True, True))


def forms(rows: tuple[int, ...], dtypes: tuple[str, ...]) -> list[DecodeConfig]:
    """Paged, ragged and split, which asks for the most registers."""
    return [
        configure(
            dtype, head_dim, count, seqlens=True, paged=True, split=True, fp8=fp8, scale_blocks=blocks, latent=latent
        )
        for dtype, head_dim, count, (fp8, blocks), latent in itertools.product(
            dtypes, (32, 64, 128, 256), rows, CACHES, (False, True)
        )
        if not (fp8 and dtype == "fp32")
    ]


def name(config: DecodeConfig) -> str:
    flags = [flag for flag in ("fp8", "scale_blocks", "latent") if getattr(config, flag)]
    tile = f"{config.tile.block_m}x{config.tile.block_n}"
    return "-".join([config.dtype, str(config.head_dim), tile, *flags])


def core(config: DecodeConfig) -> bool:
    """Of the caches of each width and tile the plainest, and the one that asks for most."""
    return config.fp8 == config.scale_blocks == config.latent and config.head_dim >= 128


BF16 = forms((1, 64), ("bf16",))
MAIN = list(filter(core, BF16))
REST = [form for form in forms((1, 32, 64), ("fp16", "bf16", "fp32")) if form not in MAIN]


@ARCH
@pytest.mark.parametrize("config", [*MAIN, *(pytest.param(c, marks=pytest.mark.thorough) for c in REST)], ids=name)
def test_no_spills(config: DecodeConfig, arch: str) -> None:
    for kernel in (config.kernel(), config.merge_kernel()):
        facts = compile_cubin(kernel, arch)
        assert (facts.spill_bytes, facts.stack_bytes) == (0, 0)
        assert facts.registers * kernel.threads <= REGISTERS
        assert facts.shared_bytes == 0  # all of it is dynamic
    assert config.shared_bytes <= SHARED_LIMIT_BYTES


@ARCH
@pytest.mark.parametrize(
    "config", [c if c in MAIN else pytest.param(c, marks=pytest.mark.thorough) for c in BF16], ids=name
)
def test_the_estimate_of_registers_tells_how_many_blocks_fit(config: DecodeConfig, arch: str) -> None:
    """The rule for splits counts on it; the compiler is told, and may do better by one."""
    facts = compile_cubin(config.kernel(), arch)
    compiled = occupancy(
        CARDS[arch], threads=config.threads, registers_per_thread=facts.registers, shared_bytes=config.shared_bytes
    )
    assert compiled.blocks_per_sm - config.fit(CARDS[arch]).blocks_per_sm in (0, 1)
    limit = CARDS[arch].shared_bytes_per_block
    assert config.blocks_per_sm(limit) == config.fit(CARDS[arch]).blocks_per_sm


@ARCH
@pytest.mark.parametrize("rows", [1, pytest.param(32, marks=pytest.mark.thorough), 128])
@pytest.mark.parametrize(
    ("fp8", "blocks"), [CACHES[0], pytest.param(*CACHES[1], marks=pytest.mark.thorough), CACHES[2]]
)
def test_wide_latents_spill_nothing(rows: int, fp8: bool, blocks: bool, arch: str) -> None:
    limit = CARDS[arch].shared_bytes_per_block
    config = configure(
        "bf16", 576, rows, latent=True, seqlens=True, paged=True, split=True, fp8=fp8, scale_blocks=blocks, limit=limit
    )
    for kernel in (config.kernel(), config.merge_kernel()):
        facts = compile_cubin(kernel, arch)
        assert (facts.spill_bytes, facts.stack_bytes) == (0, 0)
        assert facts.registers * kernel.threads <= REGISTERS
    assert config.shared_bytes <= limit


def test_contiguous_and_unsplit_forms_compile() -> None:
    for features in ({"causal": False}, {"seqlens": True, "split": True}):
        config = configure("fp16", 64, 1, **features)
        assert compile_cubin(config.kernel(), "sm_80").spill_bytes == 0
