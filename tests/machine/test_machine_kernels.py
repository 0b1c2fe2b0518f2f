"""The package's own compiled kernels, executed: results, and bytes equal to the host backend's.

The host backend's bytes are held to the sums of ``analysis`` elsewhere; here the machine code is
held to the same counts, and its results to float64 within twice the host backend's own error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flash_support import to_bits, to_float

from analysis.hardware import A100_80GB
from kernels import attention
from kernels.host import HostBackend
from kernels.launch import Array, Backend, from_numpy
from kernels.machine.backend import MachineBackend

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and the NVRTC wheel")

Results = dict[str, np.ndarray]


def problem(dtype: str, head_dim: int, n_q: int, n_k: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(7)
    shapes = {"q": n_q, "k": n_k, "v": n_k, "dout": n_q}
    return {
        name: to_bits(draw.standard_normal((1, 2, rows, head_dim)).astype(np.float32), dtype)
        for name, rows in shapes.items()
    }


def run(
    backend: Backend,
    algorithm: str,
    given: dict[str, np.ndarray],
    dtype: str,
    causal: bool,
    backward: bool,
    **options: Any,
) -> Results:
    """Both passes on one backend."""
    results = {
        "out": np.zeros_like(given["q"]),
        "dq": np.zeros_like(given["q"]),
        "dk": np.zeros_like(given["k"]),
        "dv": np.zeros_like(given["v"]),
    }
    scale = given["q"].shape[-1] ** -0.5

    def array(name: str, access: str) -> Array:
        values = given[name] if name in given else results[name]
        return from_numpy(name, values, access, dtype)

    q, k, v, out = array("q", "r"), array("k", "r"), array("v", "r"), array("out", "w")
    stats: dict[str, Array] = {}
    attention.forward(backend, algorithm, q, k, v, out, stats, scale=scale, causal=causal, **options)
    if backward:
        attention.backward(
            backend,
            algorithm,
            q,
            k,
            v,
            out.with_access("r"),
            array("dout", "r"),
            stats,
            array("dq", "w"),
            array("dk", "w"),
            array("dv", "w"),
            scale=scale,
            causal=causal,
            **options,
        )
    else:
        results = {"out": results["out"]}
    return results


def reference(given: dict[str, np.ndarray], dtype: str, causal: bool) -> Results:
    q, k, v, dout = (to_float(given[x], dtype).astype(np.float64) for x in ("q", "k", "v", "dout"))
    scale = q.shape[-1] ** -0.5
    s = q @ k.swapaxes(2, 3) * scale
    if causal:
        rows, columns = s.shape[2:]
        seen = np.arange(columns) <= np.arange(rows)[:, None] + columns - rows
        s = np.where(seen, s, -np.inf)
    p = np.exp(s - s.max(3, keepdims=True))
    p /= p.sum(3, keepdims=True)
    out = p @ v
    ds = p * (dout @ v.swapaxes(2, 3) - (dout * out).sum(3, keepdims=True)) * scale
    return {"out": out, "dq": ds @ k, "dk": ds.swapaxes(2, 3) @ q, "dv": p.swapaxes(2, 3) @ dout}


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
    arch, algorithm, dtype, head_dim, n_q, n_k, causal = case
    given = problem(dtype, head_dim, n_q, n_k)
    backward = not algorithm.endswith("optimistic")
    host, machine = HostBackend(), MachineBackend(arch)
    ours = run(machine, algorithm, given, dtype, causal, backward, **limits(arch))
    theirs = run(host, algorithm, given, dtype, causal, backward, **limits(arch))
    exact = reference(given, dtype, causal)
    for name, found in ours.items():
        error = np.abs(to_float(found, dtype) - exact[name]).max()
        bound = 2 * np.abs(to_float(theirs[name], dtype) - exact[name]).max()
        assert error <= bound, name
    assert machine.traffic == host.traffic


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[4]], ids=str)
def test_late_arrivals_and_drawn_order_change_nothing(case: tuple[Any, ...]) -> None:
    arch, algorithm, dtype, head_dim, n_q, n_k, causal = case
    given = problem(dtype, head_dim, n_q, n_k)
    at_once = run(MachineBackend(arch), algorithm, given, dtype, causal, False, **limits(arch))
    late = MachineBackend(arch, adversarial=True, seed=3)
    assert np.array_equal(run(late, algorithm, given, dtype, causal, False, **limits(arch))["out"], at_once["out"])


@pytest.mark.parametrize("mufu", ["above", "below"])
def test_attention_hangs_on_no_bit_of_the_special_function_unit(mufu: str) -> None:
    given = problem("bf16", 64, 70, 100)
    exact = reference(given, "bf16", False)["out"]
    plain, off = (
        run(MachineBackend("sm_80", mufu=m), "flash", given, "bf16", False, False)["out"] for m in ("rounded", mufu)
    )
    errors = [np.abs(to_float(x, "bf16") - exact).max() for x in (plain, off)]
    assert errors[1] <= 2 * errors[0]
