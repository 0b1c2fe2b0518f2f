"""The compiled forms that ship: what the compile tests and the audit of registers go through.

``python -m repro dev variants --arch sm_90`` compiles all of them and prints registers, spilled
bytes and shared memory of each. No GPU and no driver is needed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product
from typing import Any

from tabulate import tabulate

from analysis.hardware import A100_80GB
from kernels.building.compile import compile_cubin
from kernels.flash_config import DTYPE_CODE, HEAD_DIMS, configure
from kernels.launch import Kernel

# The backward pass comes in three forms, for three ways to sum dQ.
_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "forward": ("forward", {}),
    "backward": ("backward", {}),
    "backward deterministic": ("backward", {"deterministic": True}),
    "backward without dq": ("backward", {"query_gradient": False}),
    "backward dq": ("backward-dq", {}),
}
# Of head_dim 128 in 16 bits, on an A100: as much shared memory as it has.
_ON_A100 = {"forward in turn": ("forward", {"limit": A100_80GB.shared_bytes_per_block})}
_FEATURES: dict[str, dict[str, Any]] = {
    "key mask": {"key_mask": True},
    "dropout": {"dropout": True},
    "window": {"window": True},
    "block sparse": {"block_sparse": True},
    "all masks": {"key_mask": True, "dropout": True, "block_sparse": True},
}

#: Bytes a thread that NVRTC 13.0 spills, by name and architecture.
SPILLS = {
    ("backward without dq fp16 64 full", "sm_90"): 68,
    ("backward without dq fp16 64 causal", "sm_80"): 56,
    ("backward without dq fp16 64 causal", "sm_90"): 48,
    ("backward without dq bf16 64 full", "sm_90"): 68,
    ("backward without dq bf16 64 causal", "sm_80"): 56,
    ("backward without dq bf16 64 causal", "sm_90"): 48,
    ("forward in turn fp16 128 full", "sm_80"): 72,
    ("forward in turn fp16 128 full", "sm_90"): 152,
    ("forward in turn fp16 128 causal", "sm_90"): 156,
    ("forward in turn bf16 128 full", "sm_80"): 72,
    ("forward in turn bf16 128 full", "sm_90"): 152,
    ("forward in turn bf16 128 causal", "sm_90"): 156,
    ("forward fp32 256 causal", "sm_80"): 124,
    ("forward fp32 256 causal window", "sm_80"): 84,
    ("backward dq fp32 256 causal window", "sm_90"): 24,
}
#: The same of 13.5.
NEWER_SPILLS = {
    (f"forward in turn {dtype} 128 {mask}", arch): spilled
    for dtype in ("fp16", "bf16")
    for mask, arch, spilled in (
        ("full", "sm_80", 112),
        ("full", "sm_90", 184),
        ("causal", "sm_80", 32),
        ("causal", "sm_90", 268),
    )
}


@dataclass(frozen=True)
class Variant:
    """One form of one kernel, at the default tile."""

    form: str
    dtype: str
    head_dim: int
    causal: bool
    features: str
    """"" for the plain kernel."""
    kernel: Kernel
    shared_bytes: int
    """Dynamic shared memory a block."""

    @property
    def name(self) -> str:
        """Readable and unique."""
        mask = "causal" if self.causal else "full"
        return " ".join(part for part in (self.form, self.dtype, str(self.head_dim), mask, self.features) if part)

    def spill_bytes(self, arch: str, version: str | None = None) -> int:
        """Bytes that a thread stores to and loads from local memory, for want of registers: by this
        version of NVRTC, or the most of any."""
        found = {"13.0": SPILLS.get((self.name, arch), 0), "13.5": NEWER_SPILLS.get((self.name, arch), 0)}
        return max(found.values()) if version is None else found["13.0" if version.startswith("13.0") else "13.5"]


def _variant(form: str, dtype: str, head_dim: int, causal: bool, features: str) -> Variant:
    pass_, options = (_FORMS | _ON_A100)[form]
    wanted = options | _FEATURES.get(features, {})
    if features == "any scale":
        wanted |= {"any_scale": True}
    block_size = None
    if wanted.pop("block_sparse", False):
        block_size = (128, 128)  # every default tile divides it
    config = configure(pass_, dtype, head_dim, tile=None, causal=causal, block_size=block_size, **wanted)
    return Variant(form, dtype, head_dim, causal, features, config.kernel(), config.shared_bytes)


def _row_variants(dtype: str, head_dim: int, causal: bool) -> list[Variant]:
    """The preprocess and both postprocesses."""
    found = []
    for deterministic in (False, True):
        config = configure("backward", dtype, head_dim, causal=causal, deterministic=deterministic, dlse=True)
        suffix = " deterministic" if deterministic else ""
        for kernel in config.row_kernels():
            form = kernel.entry.removeprefix("flash_backward_") + suffix
            found.append(Variant(form, dtype, head_dim, causal, "", kernel, 0))
    return found


def shipped_variants() -> tuple[Variant, ...]:
    """Every form of the sm_80 flash kernels that the defaults can lead to, without duplicates.

    Features other than causal masks are listed for causal kernels alone: there they meet the most
    register pressure. Block masks have blocks of 128 x 128.
    """
    variants: list[Variant] = []
    for dtype in DTYPE_CODE:
        for head_dim in HEAD_DIMS:
            for causal in (False, True):
                variants += [_variant(form, dtype, head_dim, causal, "") for form in _FORMS]
                variants += _row_variants(dtype, head_dim, causal)
            for form in _FORMS:
                variants += [_variant(form, dtype, head_dim, True, name) for name in _FEATURES]
            variants.append(_variant("forward", dtype, head_dim, True, "any scale"))
    for dtype, causal in product(("fp16", "bf16"), (False, True)):
        variants += [_variant(form, dtype, 128, causal, "") for form in _ON_A100]
    seen: dict[tuple[str, tuple[tuple[str, int], ...]], Variant] = {}
    for variant in variants:
        seen.setdefault((variant.kernel.entry, variant.kernel.macros), variant)
    return tuple(seen.values())


def table(variants: tuple[Variant, ...], arch: str) -> str:
    """Registers, spilled bytes and shared memory as a table. Raises as ``compile_cubin`` does."""
    rows = []
    for variant in variants:
        facts = compile_cubin(variant.kernel, arch)
        rows.append(
            (variant.name, arch, variant.kernel.threads, facts.registers, facts.spill_bytes, variant.shared_bytes)
        )
    headers = ("kernel", "arch", "threads", "registers", "spilled [B]", "shared memory [B]")
    return tabulate(rows, headers=headers)


def main() -> None:
    """Compile and print; ``--only TEXT`` keeps the variants whose name holds the text."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--arch", default="sm_80")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    chosen = tuple(v for v in shipped_variants() if arguments.only in v.name)
    if not chosen:
        raise ValueError(f"--only {arguments.only!r}: no variant has this in its name")
    print(table(chosen, arguments.arch))
