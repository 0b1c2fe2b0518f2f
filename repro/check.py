"""Check one kernel while it is being written: compile, run, count, registers and spills.

    make check K=flash_forward            (or: python -m repro dev check flash_forward)
    make check K=flash_backward HEAD_DIM=128

Runs every pass of the attention ladder that launches a kernel of ``kernels/NAME.cu``, causal and
not, at one small ragged shape on the host backend with all checks on (``flash_decode``: steps of
decoding in all its forms). Each result is held to
float64 within the bound of ``beyond_bound``, and every byte to its prediction. Then the kernels are
compiled for a GPU, where NVRTC is installed: registers, spilled bytes, remarks. Exit status 1 if
anything is wrong. The whole suite is still ``make test``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tabulate import tabulate

from analysis.hardware import H200
from analysis.shapes import AttentionShape
from kernels import attention
from kernels.launch import KERNELS_DIR, Kernel
from kernels.launches import launches_of
from kernels.prebuild import is_hopper
from repro import check_decode

__all__ = ["Subject", "compiled", "main", "subjects", "wrong"]

PASSES = ("forward", "backward")
#: Ragged in every tile, and more than one tile a side.
SEQLEN_Q, SEQLEN_K = 200, 330


@dataclass(frozen=True)
class Subject:
    """A pass that launches the kernel under test."""

    algorithm: str
    pass_: str
    shape: AttentionShape
    kernels: tuple[Kernel, ...]

    @property
    def name(self) -> str:
        """As in "flash backward d=64 bf16 causal"."""
        mask = " causal" if self.shape.causal else ""
        return f"{self.algorithm} {self.pass_} d={self.shape.head_dim} {self.shape.dtype}{mask}"


def subjects(source: str, head_dim: int, dtype: str) -> Iterator[Subject]:
    """Passes that launch a kernel of ``source``, causal and not, one for each set of kernels.

    Raises ValueError for a source that no pass launches at this head dimension and type.
    """
    sources: set[str] = set()
    found: set[tuple[bool, tuple[Kernel, ...]]] = set()
    for algorithm in attention.ALGORITHMS:
        for pass_ in PASSES:
            for causal in (False, True):
                shape = AttentionShape(1, 1, SEQLEN_Q, SEQLEN_K, head_dim, dtype=dtype, causal=causal)
                try:
                    launched = launches_of(algorithm, shape, pass_).launches
                except (TypeError, ValueError):  # an algorithm that does not take this shape
                    continue
                kernels = tuple(dict.fromkeys(launch.kernel for launch in launched))
                sources |= {kernel.source for kernel in kernels}
                if source in {k.source for k in kernels} and (causal, kernels) not in found:
                    found.add((causal, kernels))
                    yield Subject(algorithm, pass_, shape, kernels)
    if not found:
        raise ValueError(
            f"no attention pass launches {source} at head_dim {head_dim} in {dtype}; "
            f"one launches each of: {', '.join(sorted(sources))}"
        )


def wrong(subject: Subject) -> list[str]:
    """What is wrong with a pass on the host backend: results beyond their bound, bytes not as
    predicted. A fault that the backend finds itself (a race, a read out of bounds) is raised."""
    import torch

    from kernels.host import HostBackend
    from repro.attention.launcher import HOST_GPU
    from repro.attention.reference import attention_reference, beyond_bound, framework_result, visible
    from repro.attention.views import TORCH_TYPES
    from repro.instruments.run_pass import run_pass
    from repro.prediction import predict

    shape = subject.shape
    generator = torch.Generator().manual_seed(0)
    dtype, scale = TORCH_TYPES[shape.dtype], 1.0 / math.sqrt(shape.head_dim)

    def draw(rows: int) -> torch.Tensor:
        return torch.randn(1, 1, rows, shape.head_dim, generator=generator).to(dtype)

    q, k, v = draw(shape.seqlen_q), draw(shape.seqlen_k), draw(shape.seqlen_k)
    dout = draw(shape.seqlen_q)
    given = {"q": q, "k": k, "v": v, "dout": dout}
    ran = run_pass(subject.algorithm, subject.pass_, given, HostBackend(), causal=shape.causal)
    want = attention_reference(q, k, v, dout, causal=shape.causal)
    seen = visible(1, 1, shape.seqlen_q, shape.seqlen_k, causal=shape.causal)
    theirs = framework_result(q, k, v, dout, seen=seen, scale=scale)
    found = [beyond_bound(name, result, want, theirs, dtype) for name, result in ran.tensors.items() if name != "lse"]
    gpu = H200 if any(map(is_hopper, subject.kernels)) else HOST_GPU
    predicted = predict(subject.algorithm, shape, subject.pass_, gpu).traffic.kernels
    for kernel in dict.fromkeys((*ran.traffic.kernels, *predicted)):
        counted = dict(ran.traffic.kernels.get(kernel, {}))
        for key in dict.fromkeys((*counted, *predicted.get(kernel, {}))):
            pair = counted.get(key, 0), predicted.get(kernel, {}).get(key, 0)
            if pair[0] != pair[1]:
                found.append(f"{kernel} {' '.join(key)}: {pair[0]} B counted, {pair[1]} predicted")
    return [complaint for complaint in found if complaint]


def compiled(kernel: Kernel) -> tuple[str, ...]:
    """Entry, architecture, registers, spilled bytes and remarks of a kernel for GPUs."""
    from kernels.building.compile import compile_cubin

    facts = compile_cubin(kernel, "sm_90a" if is_hopper(kernel) else "sm_80")
    remarks = "; ".join(facts.wgmma_remarks) or "-"
    return (kernel.entry, facts.arch, str(facts.registers), str(facts.spill_bytes), remarks)


def _judged(source: str, head_dim: int, dtype: str) -> Iterator[tuple[Subject | check_decode.DecodeSubject, list[str]]]:
    """What launches a source, and what is wrong with it."""
    if source in check_decode.SOURCES:
        for step in check_decode.subjects(head_dim, dtype):
            yield step, check_decode.wrong(step)
        return
    for subject in subjects(source, head_dim, dtype):
        yield subject, wrong(subject)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 1 if anything is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m repro dev check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kernel", help="a source in kernels/, with or without .cu")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="bf16", choices=("fp16", "bf16", "fp32"))
    chosen = parser.parse_args(arguments)
    source = chosen.kernel if chosen.kernel.endswith(".cu") else f"{chosen.kernel}.cu"
    if not (KERNELS_DIR / source).exists():
        known = ", ".join(sorted(path.stem for path in KERNELS_DIR.glob("*.cu")))
        print(f"error: no kernels/{source}; there are {known}", file=sys.stderr)
        return 1
    failures, seen = 0, dict[Kernel, None]()
    try:
        for subject, complaints in _judged(source, chosen.head_dim, chosen.dtype):
            failures += bool(complaints)
            said = "right, bytes as predicted" if not complaints else "WRONG"
            print(f"{subject.name}: {said}", flush=True)
            for complaint in complaints:
                print(f"    {complaint}", flush=True)
            seen |= {kernel: None for kernel in subject.kernels if kernel.source == source}
        rows = [compiled(kernel) for kernel in seen]
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(tabulate(rows, ("kernel", "arch", "registers", "spilled [B]", "remarks")))
    failures += sum(row[3] != "0" or row[4] != "-" for row in rows)
    return int(failures > 0)
