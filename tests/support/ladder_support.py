"""Run the first two steps of the kernel ladder on the host, checked and counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from flash_support import Problem, aligned, to_bits, to_float, view

from analysis.shapes import Tile
from analysis.traffic import predict_traffic
from kernels import attention
from kernels.host import HostBackend
from kernels.launch import Array

Counted = dict[str, dict[tuple[str, str], int]]


@dataclass
class Run:
    """Results as float64, and the bytes of each pass."""

    values: dict[str, np.ndarray]
    forward: Counted
    backward: Counted


def read_back(array: Array) -> np.ndarray:
    """Scratch of the host backend, (B, H, N) fp32, as float64."""
    return array.owner.values.view(np.float32).reshape(array.shape).astype(np.float64)


def execute(p: Problem, algorithm: str, tile: Tile | None, *, backward: bool = True, checks: bool = True) -> Run:
    """Both passes. Outputs hold NaN beforehand: what is read too early or never written shows."""
    backend = HostBackend(checks=checks)
    arrays: dict[str, Array] = {}
    results: dict[str, np.ndarray] = {}
    for name in ("q", "k", "v", "dout"):
        memory = aligned(p.data[name].shape, p.dtype)
        memory[...] = to_bits(p.data[name], p.dtype)
        arrays[name] = view(name, memory, p.dtype)
    for name, like in (("out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        results[name] = aligned(p.data[like].shape, p.dtype)
        results[name][...] = to_bits(np.full(p.data[like].shape, np.nan), p.dtype)
        arrays[name] = view(name, results[name], p.dtype)
    stats: dict[str, Array] = {}
    inputs = [arrays[name] for name in ("q", "k", "v", "out")]
    options = {"scale": p.scale, "causal": p.causal, "tile": tile}
    attention.forward(backend, algorithm, *inputs, stats, **options)
    names, forward = ["out"], backend.traffic
    if backward:
        backend.reset()
        gradients = [arrays[name] for name in ("dq", "dk", "dv")]
        attention.backward(backend, algorithm, *inputs, arrays["dout"], stats, *gradients, **options)
        names += ["dq", "dk", "dv"]
    values = {name: to_float(results[name], p.dtype) for name in names}
    if "l" in stats:
        values["l"], values["m"] = read_back(stats["l"]), read_back(stats["m"])
        with np.errstate(divide="ignore"):
            values["lse"] = values["m"] + np.log(values["l"])
    return Run(values, forward, backend.traffic if backward else {})


def predicted(p: Problem, algorithm: str, tile: Tile, pass_: str) -> Counted:
    """The exact sums of ``analysis.traffic``."""
    traffic = predict_traffic(algorithm, p.shape, tile, pass_)
    return {kernel: dict(entries) for kernel, entries in traffic.kernels.items()}
