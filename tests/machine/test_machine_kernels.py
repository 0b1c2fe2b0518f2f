"""The package's own compiled kernels, executed: results, and bytes equal to the host backend's.

The host backend's bytes are held to the sums of ``analysis`` elsewhere; here the machine code is
held to the same counts, and its results to float64 within twice the host backend's own error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flash_support import Problem, execute, reference

from analysis.hardware import A100_80GB
from kernels.host import HostBackend
from kernels.machine.backend import MachineBackend

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and the NVRTC wheel")


def problem(dtype: str, head_dim: int, n_q: int, n_k: int, causal: bool) -> Problem:
    return Problem(1, 2, n_q, n_k, head_dim, dtype, causal, seed=7)


def limits(arch: str) -> dict[str, int]:
    """Tiles and stages as an A100 has them, where that is the architecture."""
    return {"shared_limit_bytes": A100_80GB.shared_bytes_per_block} if arch == "sm_80" else {}


CASES = [
    ("sm_80", "standard", "fp16", 64, 70, 100, False),
    ("sm_80", "flash", "bf16", 64, 100, 100, True),
    ("sm_90", "flash", "fp16", 128, 70, 130, False),
    ("sm_80", "flash", "fp16", 128, 150, 333, True),
    ("sm_90a", "flash-sm90", "bf16", 64, 200, 200, True),
]
MORE = [
    ("sm_80", "flash1-literal", "fp32", 32, 70, 70, False),
    ("sm_80", "flash", "fp32", 64, 70, 70, True),
    ("sm_90", "flash-split", "bf16", 64, 70, 70, True),
    ("sm_80", "flash-deterministic", "bf16", 128, 70, 70, False),
    ("sm_90a", "flash-sm90", "fp16", 128, 200, 333, False),
    ("sm_90a", "flash-sm90", "bf16", 128, 200, 200, True),
    ("sm_90a", "flash-sm90-deterministic", "bf16", 128, 300, 300, False),
    ("sm_90a", "flash-sm90-optimistic", "bf16", 64, 300, 300, False),
]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.thorough) for case in MORE)], ids=str)
def test_machine_code_is_right_and_moves_what_the_host_counts(case: tuple[Any, ...]) -> None:
    arch, algorithm, *sizes = case
    p, backward = problem(*sizes), not algorithm.endswith("optimistic")
    machine: Any = MachineBackend(arch)
    ours, moved = execute(p, algorithm=algorithm, backward=backward, backend=machine, **limits(arch))
    theirs, counted = execute(p, algorithm=algorithm, backward=backward, backend=HostBackend(), **limits(arch))
    exact = reference(p)
    for name in ("out", "dq", "dk", "dv") if backward else ("out",):
        error = np.abs(ours[name] - exact[name]).max()
        assert error <= 2 * np.abs(theirs[name] - exact[name]).max(), name
    assert moved == counted


@pytest.mark.parametrize("case", [CASES[1], *CASES[3:]], ids=str)
def test_late_arrivals_and_drawn_order_change_nothing(case: tuple[Any, ...]) -> None:
    arch, algorithm, *sizes = case
    backends: list[Any] = [MachineBackend(arch), MachineBackend(arch, adversarial=True, seed=3)]
    at_once, late = (
        execute(problem(*sizes), algorithm=algorithm, backward=False, backend=each, **limits(arch))[0]
        for each in backends
    )
    assert np.array_equal(late["out"], at_once["out"])


@pytest.mark.parametrize("mufu", ["above", "below"])
def test_attention_hangs_on_no_bit_of_the_special_function_unit(mufu: str) -> None:
    p = problem("bf16", 64, 70, 100, False)
    backends: list[Any] = [MachineBackend("sm_80", mufu=m) for m in ("rounded", mufu)]
    exact = reference(p)["out"]
    errors = [np.abs(execute(p, backward=False, backend=b)[0]["out"] - exact).max() for b in backends]
    assert errors[1] <= 2 * errors[0]
