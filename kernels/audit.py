"""What the compiler made of the kernels: a table of every shipped form and architecture.

    make audit           (or: python -m repro dev audit)

writes docs/kernel-audit.csv. Compiling needs NVRTC, counting instructions nvdisasm; neither a GPU
nor a driver. With a second NVRTC at hand (``kernels.building.nvrtc``) both versions' code is
listed: where it differs a cell has a value for each, in the order of the last column. A test fails
when a row is out of date or more is spilled than the kernels' lists allow.

Shared memory is static and dynamic together. Tensor ops are HMMA or, on Hopper, HGMMA instructions
in the code; 16-byte accesses are loads and stores of 16 bytes a thread, matrix loads and stores,
and the copies of whole tiles. Blocks an SM are predicted for an A100 (sm_80) or H200 (sm_90,
sm_90a). The Hopper kernels' registers are those at launch; their warpgroups trade them afterwards
(producer 24, 32 or 40, consumers 240, 160 or 232 a thread). ``code`` is a digest of source,
included headers and macros, comments apart: a row that is out of date is noticed without compiling.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from analysis.hardware import find_gpu
from analysis.occupancy import occupancy
from kernels import decode_config, hopper, ladder
from kernels.building import nvrtc
from kernels.building.cache import digest
from kernels.building.compile import compile_cubin
from kernels.hopper_forms import SEQUENCE_BYTES
from kernels.launch import INCLUDE_DIR, KERNELS_DIR, Kernel
from kernels.prebuild import shipped
from kernels.sass import code as sass
from kernels.sass.kept import disassembled
from kernels.variants import shipped_variants

TABLE = KERNELS_DIR.parent / "docs" / "kernel-audit.csv"
#: The card whose occupancy is predicted, by architecture.
CARDS = {"sm_80": "A100 80GB", "sm_90": "H200", "sm_90a": "H200"}
HEADER = (
    "kernel",
    "arch",
    "threads",
    "registers",
    "shared [B]",
    "spilled [B]",
    "tensor ops",
    "16-byte accesses",
    "blocks an SM",
    "limited by",
    "code",
)
VERSIONS = "NVRTC"


@dataclass(frozen=True)
class Subject:
    """A kernel to look at, with the dynamic shared memory of its launch."""

    name: str
    kernel: Kernel
    shared_bytes: int
    arch: str
    spill_bytes: int = 0
    """What a thread may spill."""

    @property
    def code(self) -> str:
        """Digest of the source with what it includes, and the macros; no comments, no spacing."""
        text = _essence(_with_headers(self.kernel.text(), set()))
        return digest(text, repr(self.kernel.macros), self.kernel.entry)[:8]


def _with_headers(text: str, seen: set[str]) -> str:
    parts = []
    for name in re.findall(r'^#include "([\w.]+)"', text, re.MULTILINE):
        if name not in seen:  # ours lie side by side; the host's are elsewhere and not compiled
            seen.add(name)
            parts.append(_with_headers((INCLUDE_DIR / name).read_text(encoding="utf-8"), seen))
    return "".join(parts) + text


def _essence(text: str) -> str:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", text)


def subjects() -> list[Subject]:
    """Hopper's forms; the sm_80 flash kernels in bf16 without features; the ladder's first steps.

    fp16 differs from bf16 in the names of the product and of the conversions. fp32 and the forms
    with masks and dropout are held to their registers by the compile tests.
    """
    listed: list[Subject] = []
    for form in (*hopper.FORWARD_FORMS, *hopper.PACKED_FORMS):
        for causal in (False, True):
            name = f"flash-sm90 forward bf16 {form.name} {_mask(causal)}"
            listed.append(Subject(name, form.kernel("bf16", causal), form.shared_bytes, "sm_90a"))
    listed += _featured_forward()
    listed += _featured_backward()
    listed += _optimistic_forward()
    listed += _hopper_backward()
    listed += _packed_backward()
    listed += _hopper_sawtooth()
    for variant in shipped_variants():
        if variant.features or variant.dtype != "bf16":
            continue
        for arch in ("sm_80", "sm_90"):
            name = f"flash {variant.name}"
            listed.append(Subject(name, variant.kernel, variant.shared_bytes, arch, variant.spill_bytes(arch)))
    listed += _decoding()
    for algorithm in ladder.ALGORITHMS:
        recorded = shipped(algorithm).launches()
        shared = {launch.kernel: launch.shared_bytes for launch in recorded}
        for kernel, shared_bytes in shared.items():
            for arch in ("sm_80", "sm_90"):
                name = f"{algorithm} fp16 64 {kernel.entry}"
                listed.append(Subject(name, kernel, shared_bytes, arch))
    return listed


def _mask(causal: bool) -> str:
    return "causal" if causal else "full"


def _decoding() -> list[Subject]:
    """One row and many, 16-bit and fp8 caches, in pages, ragged and split: the most there is."""
    listed = []
    for head_dim in (64, 128, 256):
        for rows, fp8 in product((1, 64), (False, True)):
            form = decode_config.configure("bf16", head_dim, rows, seqlens=True, paged=True, split=True, fp8=fp8)
            cache = " fp8" if fp8 else ""
            name = f"flash-decode bf16{cache} {head_dim} {form.tile.block_m} rows"
            for arch in ("sm_80", "sm_90"):
                listed.append(Subject(name, form.kernel(), form.shared_bytes, arch))
                if rows == 1 and not fp8:
                    merging = f"flash-decode merging bf16 {head_dim}"
                    listed.append(Subject(merging, form.merge_kernel(), 0, arch))
    return listed


_FEATURES = (*((name,) for name in hopper.MASKS_AND_SCORES), hopper.MASKS_AND_SCORES)


def _featured_forward() -> list[Subject]:
    """With a window, a softcap, ALiBi, and all of them, under a causal mask."""
    listed = []
    for head_dim in hopper.HEAD_DIMS["forward"]:
        form = hopper.forward_form(head_dim, True, 1, featured=True)
        for names in _FEATURES:
            kernel = form.kernel("bf16", True, features=names)
            name = f"flash-sm90 forward bf16 {form.name}, {', '.join(names)} {_mask(True)}"
            shared_bytes = form.bytes_of(alibi="alibi" in names)
            listed.append(Subject(name, kernel, shared_bytes, "sm_90a"))
    return listed


def _featured_backward() -> list[Subject]:
    """The same of the backward, as far as a form has them."""
    listed = []
    for head_dim in hopper.HEAD_DIMS["backward"]:
        form = hopper.backward_form(head_dim, True, featured=True)
        for names in _FEATURES:
            if not form.takes("bf16", names):
                continue
            kernel = form.kernel("", "bf16", True, features=names)
            name = f"flash-sm90 backward bf16 {form.name}, {', '.join(names)} {_mask(True)}"
            shared_bytes = form.bytes_of(alibi="alibi" in names)
            listed.append(Subject(name, kernel, shared_bytes, "sm_90a"))
    return listed


def _optimistic_forward() -> list[Subject]:
    """The two launches of every form that the rule picks for some length."""
    listed = {}
    for head_dim in hopper.HEAD_DIMS["forward"]:
        for causal in (False, True):
            for seqlen in (1024, 16384):
                form = hopper.forward_form(head_dim, causal, seqlen)
                for part in ("optimistic", "repair"):
                    name = f"flash-sm90 {part} forward bf16 {form.name} {_mask(causal)}"
                    kernel = form.kernel("bf16", causal, part)
                    shared_bytes = form.repair_shared_bytes if part == "repair" else form.shared_bytes
                    listed[name] = Subject(name, kernel, shared_bytes, "sm_90a")
    return list(listed.values())


def _hopper_backward() -> list[Subject]:
    """Every form; what runs around it without a mask, which it does not look at."""
    listed = []
    for form in hopper.BACKWARD_FORMS:
        for causal in (False, True):
            for algorithm in (hopper.ALGORITHM, hopper.DETERMINISTIC):
                if form.dq_from_registers and algorithm == hopper.DETERMINISTIC:
                    continue  # it takes no turns
                kernel = form.kernel("", "bf16", causal, deterministic=algorithm == hopper.DETERMINISTIC)
                name = f"{algorithm} backward bf16 {form.name} {_mask(causal)}"
                spilled = form.spill_bytes(causal)
                listed.append(Subject(name, kernel, form.shared_bytes, "sm_90a", spilled))
        if form.dq_from_registers:
            continue  # what runs around it is the same
        for part, shared_bytes in (("preprocess", 0), ("postprocess", form.post_shared_bytes)):
            name = f"{hopper.ALGORITHM} {part} bf16 {form.name} full"
            kernel = form.kernel(part, "bf16", False)
            listed.append(Subject(name, kernel, shared_bytes, "sm_90a"))
    return listed


def _packed_backward() -> list[Subject]:
    """The kernels of packed sequences: one form a head dimension."""
    listed = []
    for form in (hopper.backward_form(d, True) for d in hopper.HEAD_DIMS["backward"]):
        for causal, turns in product((False, True), repeat=2):
            algorithm = hopper.DETERMINISTIC if turns else hopper.ALGORITHM
            name = f"{algorithm} backward packed bf16 {form.name} {_mask(causal)}"
            kernel = form.kernel("", "bf16", causal, deterministic=turns, features=["packed"])
            listed.append(Subject(name, kernel, form.bytes_of(packed=True), "sm_90a"))
        around = (("preprocess", SEQUENCE_BYTES), ("postprocess", form.post_shared_bytes + SEQUENCE_BYTES))
        for part, shared_bytes in around:
            name = f"{hopper.ALGORITHM} {part} packed bf16 {form.name} full"
            kernel = form.kernel(part, "bf16", False, features=["packed"])
            listed.append(Subject(name, kernel, shared_bytes, "sm_90a"))
    return listed


def _hopper_sawtooth() -> list[Subject]:
    """The main kernels of every form that has this order."""
    listed = []
    for causal in (False, True):
        for forward in hopper.FORWARD_FORMS:
            if not forward.persistent:
                name = f"flash-sm90 forward sawtooth bf16 {forward.name} {_mask(causal)}"
                kernel = forward.kernel("bf16", causal, features=["sawtooth"])
                listed.append(Subject(name, kernel, forward.shared_bytes, "sm_90a"))
        for form in hopper.BACKWARD_FORMS:
            if not form.dq_from_registers:
                name = f"flash-sm90 backward sawtooth bf16 {form.name} {_mask(causal)}"
                kernel = form.kernel("", "bf16", causal, features=["sawtooth"])
                spilled = form.spill_bytes(causal)
                listed.append(Subject(name, kernel, form.shared_bytes, "sm_90a", spilled))
    return listed


def row(subject: Subject, versions: Sequence[str]) -> tuple[str, ...]:
    """The subject's line of the table; where versions of NVRTC differ a cell has a value each."""
    found = [_facts(subject, version) for version in versions]
    return tuple(cell[0] if len(set(cell)) == 1 else " / ".join(cell) for cell in zip(*found, strict=True))


def _facts(subject: Subject, version: str) -> tuple[str, ...]:
    compiled = compile_cubin(subject.kernel, subject.arch, version)
    if compiled.wgmma_remarks:
        raise RuntimeError(f"{subject.name}, NVRTC {version}: {compiled.wgmma_remarks[0]}")
    code = disassembled(compiled.cubin, subject.kernel.entry)
    counted = sass.count(code.instructions)
    gpu = find_gpu(CARDS[subject.arch])
    assert gpu is not None
    fit = occupancy(
        gpu,
        threads=subject.kernel.threads,
        registers_per_thread=compiled.registers,
        shared_bytes=subject.shared_bytes + compiled.shared_bytes,
    )
    return (
        subject.name,
        subject.arch,
        str(subject.kernel.threads),
        str(compiled.registers),
        str(subject.shared_bytes + compiled.shared_bytes),
        str(compiled.spill_bytes),
        str(counted["HGMMA"] + counted["HMMA"]),
        str(sass.wide_accesses(code.instructions)),
        str(fit.blocks_per_sm),
        fit.limited_by,
        subject.code,
    )


def rows(listed: Sequence[Subject], versions: Sequence[str], workers: int | None = None) -> list[tuple[str, ...]]:
    """All lines, compiled on all cores, in the order of ``listed``."""
    workers = workers or len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(row, subject, versions): subject for subject in listed}
        for done, future in enumerate(as_completed(waiting), 1):
            future.result()
            print(f"[{done}/{len(listed)}] {waiting[future].name}", file=sys.stderr, flush=True)
    return [future.result() for future in waiting]


def written(lines: Sequence[tuple[str, ...]], versions: Sequence[str]) -> str:
    """The table as CSV, with the compilers' versions in the last column."""
    out = io.StringIO()
    rows_of = csv.writer(out, lineterminator="\n")
    rows_of.writerow([*HEADER, VERSIONS])
    rows_of.writerows([*line, " / ".join(versions)] for line in lines)
    return out.getvalue()


def read(text: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The compilers' versions and the lines of a table."""
    head, *lines = list(csv.reader(io.StringIO(text))) or [[]]
    if head != [*HEADER, VERSIONS] or not lines:
        raise ValueError(f"no table of {', '.join(HEADER)} and {VERSIONS}")
    return tuple(lines[0][-1].split(" / ")), [tuple(line[:-1]) for line in lines]


def complaints(text: str) -> list[str]:
    """What is wrong with a table, without compiling: missing, unknown and stale lines, spills."""
    wanted = {(subject.name, subject.arch): subject for subject in subjects()}
    _, lines = read(text)
    there = {(line[0], line[1]): line for line in lines}
    found = [f"missing: {name} {arch}" for name, arch in wanted if (name, arch) not in there]
    for key, line in there.items():
        if key not in wanted:
            found.append(f"unknown: {key[0]} {key[1]}")
            continue
        if line[-1] != wanted[key].code:
            found.append(f"out of date: {key[0]} {key[1]}")
        if max(map(int, line[5].split(" / "))) > wanted[key].spill_bytes:
            found.append(f"spills {line[5]} bytes: {key[0]} {key[1]}")
    return found


def main() -> None:
    """Write the table. SystemExit names every form that spills."""
    parser = argparse.ArgumentParser(description="compile every kernel and write the audit")
    parser.add_argument("--out", type=Path, default=TABLE)
    arguments = parser.parse_args()
    versions = sorted(nvrtc.versions(), key=lambda version: [int(n) for n in version.split(".")])
    text = written(rows(subjects(), versions), versions)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text, encoding="utf-8")
    wrong = complaints(text)
    if wrong:
        raise SystemExit("\n".join(wrong))
