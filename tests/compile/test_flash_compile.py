"""The flash kernels compile for sm_80 and sm_90 without a GPU: no spilled byte, and they fit.

A core of the shipped forms by default; all of them, a few hundred, with
``REPRO_COMPILE_ALL=1``.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kernels.building.compile import compile_cubin, nvrtc_version
from kernels.flash_config import BIAS_GRADIENTS, DTYPE_CODE, SHARED_LIMIT_BYTES, configure
from kernels.launch import Kernel
from kernels.variants import Variant, shipped_variants, table

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and the NVRTC wheel")

REGISTERS = 65536  # of a multiprocessor
THOROUGH = pytest.mark.thorough
ARCH = pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90", marks=THOROUGH)])
#: 128 needs the registers of two products at a time.
HEAD_DIM = pytest.mark.parametrize(
    "head_dim", [pytest.param(64, marks=THOROUGH), 128, pytest.param(256, marks=THOROUGH)]
)


def core(v: Variant) -> bool:
    """fp16 in depth; of the other types, which share its code, the heaviest. Of the rest, the audit has
    registers and spills (docs/kernel-audit.csv, which a test holds to the sources)."""
    main = v.form in ("forward", "backward")
    if v.dtype != "fp16" or v.head_dim not in (64, 128):
        heaviest = v.head_dim == (128 if v.dtype == "bf16" else 256)
        return main and v.causal and heaviest and v.features == ("all masks" if v.dtype == "fp16" else "")
    return (v.features == "" and v.causal) or (main and v.causal and v.features == "all masks")


VARIANTS = shipped_variants()
CHOSEN = VARIANTS if os.environ.get("REPRO_COMPILE_ALL") else tuple(filter(core, VARIANTS))


@ARCH
@pytest.mark.parametrize("variant", CHOSEN, ids=lambda v: v.name.replace(" ", "-"))
def test_no_spills(variant: Variant, arch: str) -> None:
    facts = compile_cubin(variant.kernel, arch)
    assert facts.spill_bytes == variant.spill_bytes(arch, nvrtc_version())
    assert bool(facts.stack_bytes) == bool(facts.spill_bytes)
    assert facts.registers * variant.kernel.threads <= REGISTERS
    assert facts.shared_bytes == 0  # all of it is dynamic
    assert variant.shared_bytes <= SHARED_LIMIT_BYTES


@pytest.mark.parametrize(
    ("pass_", "option"),
    [
        ("forward", {"sawtooth": True}),
        ("forward", {"progress": 16}),
        ("backward", {"sawtooth": True}),
        ("backward-dq", {"sawtooth": True}),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_orders_and_notes_spill_nothing(pass_: str, option: dict[str, Any]) -> None:
    config = configure(pass_, "bf16", 128, **option)
    plain = compile_cubin(configure(pass_, "bf16", 128).kernel(), "sm_90")
    facts = compile_cubin(config.kernel(), "sm_90")
    assert (facts.spill_bytes, facts.stack_bytes) == (0, 0)
    # As many blocks fit an SM, so that what is learnt holds for the plain kernel.
    blocks, as_before = (REGISTERS // (f.registers * config.threads) for f in (facts, plain))
    assert blocks == as_before


@ARCH
@pytest.mark.parametrize("causal", [pytest.param(False, marks=THOROUGH), True])
@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=THOROUGH), 128])
@pytest.mark.parametrize("pass_", ["forward", "backward", "backward-dq"])
@pytest.mark.parametrize("feature", ["window", "packed"])
def test_windows_and_packed_sequences_spill_nothing(
    feature: str, pass_: str, head_dim: int, causal: bool, arch: str
) -> None:
    config = configure(pass_, "bf16", head_dim, causal=causal, **{feature: True})
    facts = compile_cubin(config.kernel(), arch)
    assert (facts.spill_bytes, facts.stack_bytes) == (0, 0)
    assert facts.registers * config.threads <= REGISTERS


@ARCH
@HEAD_DIM
def test_keys_and_values_of_e4m3_spill_nothing(head_dim: int, arch: str) -> None:
    for dtype, features in (("fp16", {}), ("bf16", {"causal": True, "key_mask": True})):
        config = configure("forward", dtype, head_dim, fp8=True, **features)
        facts = compile_cubin(config.kernel(), arch)
        assert (facts.spill_bytes, facts.stack_bytes) == (0, 0), dtype
        assert REGISTERS // (facts.registers * config.threads) == config.blocks_per_sm()


@pytest.mark.parametrize(
    ("pass_", "form"),
    [("forward", {}), ("backward", {}), ("backward", {"query_gradient": False}), ("backward-dq", {})],
    ids=["forward", "backward", "backward-without-dq", "backward-dq"],
)
@HEAD_DIM
def test_changed_scores_spill_nothing(pass_: str, form: dict[str, Any], head_dim: int) -> None:
    config = configure(pass_, "bf16", head_dim, causal=True, softcap=True, alibi=True, **form)
    facts = compile_cubin(config.kernel(), "sm_80")
    assert (facts.spill_bytes, facts.stack_bytes) == (0, 0)


@pytest.mark.parametrize("pass_", ["forward", "backward", "backward-dq"])
@HEAD_DIM
def test_a_bias_spills_nothing(pass_: str, head_dim: int) -> None:
    """Nor does its gradient, in any form; only the backward without dq does, at head_dim 128."""
    config = configure(pass_, "bf16", head_dim, causal=True, bias=True)
    for gradient in BIAS_GRADIENTS if pass_ == "backward" else ("",):
        facts = compile_cubin(replace(config, bias_gradient=gradient).kernel(), "sm_80")
        assert (facts.spill_bytes, facts.stack_bytes) == (0, 0), gradient


def test_the_kernels_around_a_bias_gradient_compile() -> None:
    for entry in ("flash_bias_zero", "flash_bias_sum"):
        for code in DTYPE_CODE.values():
            kernel = Kernel("flash_bias_gradient.cu", entry, (("DTYPE", code),), 128)
            assert compile_cubin(kernel, "sm_80").spill_bytes == 0


def test_the_list_names_every_form_once() -> None:
    assert max(Counter(v.name for v in VARIANTS).values()) == 1
    chosen = {(v.dtype, v.head_dim) for v in CHOSEN if v.form == "backward"}
    assert chosen >= {("fp16", 64), ("fp16", 128), ("fp16", 256), ("bf16", 128), ("fp32", 256)}


def test_the_table_reports_registers_and_shared_memory() -> None:
    chosen = tuple(v for v in VARIANTS if v.name == "forward fp16 64 causal")
    text = table(chosen, "sm_80")
    facts = compile_cubin(chosen[0].kernel, "sm_80")
    assert "registers" in text
    assert f" {facts.registers} " in text
    assert str(chosen[0].shared_bytes) in text
