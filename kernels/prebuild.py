"""Compile ahead of time every kernel that the GPU experiments and tests launch, on all cores.

    python -m kernels.prebuild [--list]

On a machine with a GPU the compiled modules go to CuPy's cache, so that no later process waits for
a compiler; without one, cubins for sm_80 and sm_90a go to our own cache. One line per source that
is done; a kernel that does not compile is one line on standard error and a non-zero exit.

The kernels are found by running the drivers on arrays that do not exist, with a backend that only
writes down what it is asked to launch.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from analysis.algorithms import ORDERS
from analysis.packed import Lengths
from analysis.problem import Problem
from analysis.shapes import AttentionShape, Tile
from kernels import attention, decode_config, dispatch, hopper, ladder
from kernels.command_line import program
from kernels.launch import Kernel
from kernels.launches import launches_of
from kernels.launching.plan import Launch

PASSES = ("forward", "backward")
#: That ``gpu-l2-order`` asks for.
PROGRESS_TILES = 16


#: Of a problem, by the name that ``gpu-features`` has for it; kernels know that an option is there,
#: not its value.
FEATURED: dict[str, dict[str, Any]] = {
    "": {},
    **{name: {name: True} for name in hopper.MASKS_AND_SCORES},
    "window": {"window": (512, None)},
    "packed": {"lengths": Lengths.equal([1024])},
}


@dataclass(frozen=True)
class Shipped:
    """A problem whose kernels are compiled ahead, and the algorithm that it is solved by.

    passes: of both, the forward walks in rows whatever the order.
    progress_tiles: key tiles between two notes of the forward's progress; 0: no notes.
    """

    algorithm: str
    problem: Problem
    passes: tuple[str, ...] = PASSES
    progress_tiles: int = 0

    def launches(self) -> list[Launch]:
        """What is launched, as far as the driver accepts it."""
        found: list[Launch] = []
        for pass_ in self.passes:
            problem = self.problem
            if pass_ == "forward" and "backward" in self.passes:
                problem = replace(problem, order="rows")
            try:
                found += launches_of(self.algorithm, problem, pass_, progress_tiles=self.progress_tiles).launches
            except ValueError:
                break  # a tile too large for the device, refused there in the same words
        return found

    def kernels(self) -> list[Kernel]:
        """Their kernels."""
        return [launch.kernel for launch in self.launches()]


def shipped(
    algorithm: str,
    head_dim: int = 64,
    dtype: str = "fp16",
    causal: bool = False,
    passes: tuple[str, ...] = PASSES,
    seqlen: int = 1024,
    feature: str = "",
    progress_tiles: int = 0,
    **options: Any,
) -> Shipped:
    """One head of a square problem. feature: one of ``FEATURED``. options: of the problem."""
    options = FEATURED[feature] | options
    masks = {name: options.pop(name) for name in ("window",) if name in options}
    shape = AttentionShape(1, 1, seqlen, seqlen, head_dim, dtype=dtype, causal=causal, **masks)
    return Shipped(algorithm, Problem(shape, scale=1.0, **options), passes, progress_tiles)


def problems() -> Iterator[Shipped]:
    """The problems of plain attention, of all steps of the ladder, the most valuable first."""
    both = (False, True)
    # Throughput and the Hopper kernels' own checks.
    for head_dim in (128, 64):
        for causal in both:
            for algorithm in (*attention.HOPPER, "flash"):
                for seqlen in (1024, 16384):
                    yield shipped(algorithm, head_dim, "bf16", causal, seqlen=seqlen)
    # The ladder at the shape of FlashAttention 2022, Fig. 2.
    yield shipped(hopper.ALGORITHM)
    for pass_ in PASSES:
        for m in (64, 128):
            for n in (32, 64, 128):
                yield shipped("flash", tile=Tile(m, n), passes=(pass_,))
    yield shipped("flash-deterministic", tile=Tile(64, 64), passes=("backward",))
    for block_n in (64, 128, 256, 512):
        for pass_ in PASSES:
            yield shipped("flash1-released", tile=Tile(16, block_n), passes=(pass_,))
    for pass_ in PASSES:
        yield shipped("flash1-literal", tile=Tile(16, 256), passes=(pass_,))
        yield shipped("flash1-skip-first", tile=Tile(16, 256), passes=(pass_,))
        yield shipped("standard", tile=Tile(64, 64), passes=(pass_,))
    # Ragged shapes and long heads of the counted traffic; peak memory.
    for causal in both:
        yield shipped("flash", 128, "bf16", causal, tile=Tile(64, 64))
        yield shipped("flash-deterministic", 64, "bf16", causal)
        yield shipped("flash-split", 64, "bf16", causal)
    # What L2 absorbs: keys in a sawtooth, and a forward that notes its progress.
    long: dict[str, Any] = {"head_dim": 128, "dtype": "bf16", "tile": Tile(128, 64), "passes": ("forward",)}
    for order in ORDERS:
        for tiles in (0, PROGRESS_TILES):
            yield shipped("flash", order=order, progress_tiles=tiles, **long)
    yield shipped("flash", 128, "bf16", passes=("backward",), order="sawtooth")
    yield shipped(hopper.ALGORITHM, 128, "bf16", passes=("forward",), order="sawtooth", seqlen=65536)


def later_problems() -> Iterator[Shipped]:
    """Those of the features, in the order of their turns, and the small cases of tests/gpu."""
    for algorithm in (hopper.ALGORITHM, "flash"):
        for head_dim in (128, 64):
            for feature in list(FEATURED)[1:]:
                yield shipped(algorithm, head_dim, "bf16", True, feature=feature)
    both = (False, True)
    for dtype in ("fp16", "bf16", "fp32"):
        for causal in both:
            for algorithm in ("flash", *ladder.ALGORITHMS):
                yield shipped(algorithm, 64, dtype, causal, seqlen=128)
    for dtype in ("fp16", "bf16"):
        for causal in both:
            for head_dim in (64, 128):
                yield shipped(hopper.ALGORITHM, head_dim, dtype, causal, seqlen=128)


def plain() -> list[Kernel]:
    """What the stages before ``gpu-features`` launch, the guard's included, most valuable first."""
    listed = [kernel for problem in problems() for kernel in problem.kernels()]
    listed += [
        form.kernel(dtype, causal)
        for form in hopper.FORWARD_FORMS
        for dtype in ("bf16", "fp16")
        for causal in (False, True)
    ]
    listed += [
        form.kernel(part, "bf16", causal)
        for form in hopper.BACKWARD_FORMS
        for causal in (False, True)
        for part in ("preprocess", "", "postprocess")
    ]
    return listed


def kernels() -> list[Kernel]:
    """Every kernel to compile, once, those of plain attention first."""
    found: dict[tuple[str, str, tuple[tuple[str, int], ...]], Kernel] = {}
    listed = plain()
    listed += [kernel for problem in later_problems() for kernel in problem.kernels()]
    listed += [
        form.kernel(dtype, causal)
        for form in hopper.PACKED_FORMS
        for dtype in ("bf16", "fp16")
        for causal in (False, True)
    ]
    # The GPU tests' windows, caps and slopes.
    asked = [("window",), hopper.MASKS_AND_SCORES]
    listed += [
        hopper.forward_form(head_dim, causal, 1, featured=True).kernel("bf16", causal, features=features)
        for head_dim in (64, 128)
        for causal in (False, True)
        for features in asked
    ]
    listed += [
        hopper.backward_form(128, causal, featured=True).kernel(
            "", "bf16", causal, deterministic=deterministic, features=features
        )
        for causal in (False, True)
        for deterministic in (False, True)
        for features in asked
    ]
    # Their gradient of lse.
    listed += [
        hopper.backward_form(head_dim, causal).kernel("preprocess", "bf16", causal, dlse=True)
        for head_dim in (64, 128)
        for causal in (False, True)
    ]
    # The GPU tests' packed sequences.
    listed += [
        hopper.backward_form(head_dim, True).kernel(part, dtype, True, deterministic=deterministic, features=["packed"])
        for head_dim in hopper.HEAD_DIMS["backward"]
        for dtype in ("bf16", "fp16")
        for deterministic in (False, True)
        for part in ("preprocess", "", "postprocess")
    ]
    listed += _decoding()
    for kernel in listed:
        found.setdefault((kernel.source, kernel.entry, kernel.macros), kernel)
    return list(found.values())


def _decoding() -> Iterator[Kernel]:
    """What ``gpu-decode`` and the GPU tests of decoding launch: paged, ragged, split or not."""
    found: list[dict[str, Any]] = [
        {"head_dim": 128, "rows": rows, "fp8": fp8} for rows in (1, 32) for fp8 in (False, True)
    ]
    found.append({"head_dim": 128, "rows": 1, "fp8": True, "scale_blocks": True})
    found += [{"head_dim": columns, "rows": 32, "latent": True} for columns in (256, 576)]
    for options in found:
        for split in (True, False):
            form = decode_config.configure("bf16", seqlens=True, paged=True, split=split, **options)
            yield form.kernel()
            if split:
                yield form.merge_kernel()


def is_hopper(kernel: Kernel) -> bool:
    """Whether the kernel needs sm_90a."""
    return "sm90" in kernel.source


def modules(listed: Sequence[Kernel]) -> list[Kernel]:
    """One kernel of each compilation: the entry points of a source share it."""
    return list({(kernel.source, kernel.macros): kernel for kernel in listed}.values())


def build_on_gpu(kernel: Kernel) -> None:
    """Compile and load through CuPy, which keeps the module on disk."""
    from kernels.launching.cupy_backend import CupyBackend

    backend = CupyBackend()
    if not is_hopper(kernel) or backend.compute_capability == dispatch.HOPPER:
        backend.function(kernel)


def build_cubin(kernel: Kernel) -> None:
    """Compile to our own cache."""
    from kernels.building.compile import compile_cubin

    compile_cubin(kernel, "sm_90a" if is_hopper(kernel) else "sm_80")


def main() -> None:
    """Build all; SystemExit with the number of failures."""
    parser = argparse.ArgumentParser(description="compile every kernel of the GPU run")
    parser.add_argument("--list", action="store_true", help="print what would be compiled")
    parser.add_argument("--only", default="", help="only sources whose name holds this")
    parser.add_argument("--plain", action="store_true", help="only those of plain attention")
    arguments = parser.parse_args()
    listed = plain() if arguments.plain else kernels()
    chosen = [kernel for kernel in modules(listed) if arguments.only in kernel.source]
    if not chosen:
        raise ValueError(f"--only {arguments.only!r}: no source has this in its name")
    if arguments.list:
        for kernel in chosen:
            print(describe(kernel))
        return
    try:
        from kernels.launching.cupy_backend import CupyBackend

        CupyBackend()
        build = build_on_gpu
    except RuntimeError:
        build = build_cubin
    failures = build_all(chosen, build)
    if failures:
        raise SystemExit(f"{failures} of {len(chosen)} kernels failed")


def build_all(chosen: Sequence[Kernel], build: Any, workers: int | None = None) -> int:
    """Run ``build`` on every kernel in processes of their own; returns how many failed."""
    workers = workers or max(1, min(len(chosen), len(os.sched_getaffinity(0))))
    started, failures = time.monotonic(), 0
    # Spawned, not forked: a CUDA context does not survive a fork.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(build, kernel): kernel for kernel in chosen}
        for done, future in enumerate(as_completed(waiting), 1):
            kernel, error = waiting[future], future.exception()
            if error is not None:
                failures += 1
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                print(f"error: {describe(kernel)}: {reason}", file=sys.stderr, flush=True)
            else:
                spent = time.monotonic() - started
                line = f"[{done}/{len(chosen)}] {spent:.0f} s  {describe(kernel)}"
                print(line, flush=True)
    return failures


def describe(kernel: Kernel) -> str:
    """Source and macros in one line."""
    macros = " ".join(f"{name}={value}" for name, value in kernel.macros)
    return f"{kernel.entry if kernel.path is None else kernel.source} {macros}"


if __name__ == "__main__":
    sys.exit(program(main))
