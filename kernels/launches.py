"""What a pass launches on a device that need not be at hand.

The drivers themselves are run, on a recorder instead of a backend (``kernels.launching.plan``). So
there is one rule for the algorithm, the tile and the scratch memory, whoever asks: the operator,
the command line or a figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from analysis.algorithms import Family, find
from analysis.arguments import check_fields, checked
from analysis.features import FEATURES, features_of
from analysis.problem import GRADIENTS, Problem
from analysis.shapes import AttentionShape
from kernels import attention, dispatch, flash
from kernels.flash_config import HEAD_DIMS, SHARED_LIMIT_BYTES
from kernels.launch import Array, Count, Pass, Size, contiguous_strides
from kernels.launching.plan import Launch, Recorder, record
from kernels.options import ARRAYS, VALUES
from kernels.packed import Packed

AUTO = "auto"
"""The algorithm that ``kernels.dispatch`` picks."""
OPERANDS = {"forward": ("q", "k", "v", "out"), "backward": ("q", "k", "v", "out", "dout", "dq", "dk", "dv")}
"""(B, H, N, D) arrays of a pass."""
#: Arrays that a driver takes by name.
OPTIONAL = (*ARRAYS, "progress")
#: Endings of the kernels around the one that walks the tile loop.
_AROUND = ("_init", "_clear_counter", "_preprocess", "_postprocess", "_repair", "_dq", "_bias_zero", "_bias_sum")


@dataclass(frozen=True)
class Device:
    """What the choice of kernels depends on.

    compute_capability: as "80"; None for the host backend.
    shared_limit_bytes: shared memory that a block may have.
    """

    compute_capability: str | None = None
    shared_limit_bytes: Size = SHARED_LIMIT_BYTES
    multiprocessors: Count = 2

    def __post_init__(self) -> None:
        check_fields(self)
        if self.compute_capability is not None and not self.compute_capability.isdigit():
            raise ValueError(f"compute_capability={self.compute_capability!r} is no number such as '80'")


HOST = Device()


@dataclass(frozen=True)
class Launched:
    """The launches of a pass. ``reason``: why dispatch picked this algorithm, if it was asked."""

    algorithm: str
    reason: str | None
    launches: tuple[Launch, ...]
    scratch: tuple[Array, ...]

    @property
    def main(self) -> Launch:
        """The launch that walks the tile loop; of standard attention the first of its products."""
        walking = (x for x in self.launches if not x.kernel.entry.endswith(_AROUND))
        found = next(walking, self.dq)
        assert found is not None  # every pass has one
        return found

    @property
    def dq(self) -> Launch | None:
        """The second pass of "flash-split"."""
        return next((x for x in self.launches if x.kernel.entry == "flash_backward_dq"), None)


@checked
def launches_of(
    algorithm: str,
    problem: Problem | AttentionShape,
    pass_: Pass,
    device: Device = HOST,
    *,
    progress_tiles: Size = 0,
    **options: Any,
) -> Launched:
    """What ``kernels.attention`` launches for contiguous arrays of a problem.

    algorithm: one of ``kernels.attention.ALGORITHMS``, or :data:`AUTO` for dispatch's choice.
    problem: the caller's; arrays have its ``padded`` shape, as the operator makes them.
    progress_tiles: key tiles between two notes of a forward's progress; 0: no notes.
    options: fields of the problem to be changed.

    Raises ValueError or TypeError as the drivers do for what they cannot run.
    """
    problem, asked = Problem.of(problem, **options), algorithm
    shape = problem.shape
    tensor_cores = algorithm == AUTO or find(algorithm).family in (Family.FLASH, Family.HOPPER)
    if tensor_cores and shape.head_dim > HEAD_DIMS[-1]:
        raise ValueError(f"head_dim={shape.head_dim} is outside 1…{HEAD_DIMS[-1]}")
    if shape.fp8 and pass_ == "backward":
        raise ValueError(f"{algorithm}: k and v of e4m3 have no gradient, so no backward")
    problem = problem.padded
    arrays = _arrays(problem, pass_)
    reason = None
    if algorithm == AUTO:
        algorithm, reason = choose(device, arrays, problem, pass_)
    limit, tile = device.shared_limit_bytes, problem.tile
    if asked == AUTO:  # as the operator does
        tile = dispatch.kernel_tile(pass_, problem, limit)

    more: dict[str, Any] = {"tile": tile, "shared_limit_bytes": limit}
    if progress_tiles and pass_ == "forward" and tile is not None:
        notes = flash.progress_notes(shape.seqlen_k, tile.block_n, progress_tiles)
        blocks = shape.batch * shape.heads * -(-shape.seqlen_q // tile.block_m)
        arrays["progress"] = _array("progress", (blocks, notes), "int64")
        more["progress_tiles"] = progress_tiles

    def driver(backend: Recorder, at: dict[str, Array]) -> None:
        run(backend, algorithm, at, problem, pass_, **more)

    plan = record(device, arrays, driver)
    return Launched(algorithm, reason, plan.launches, plan.scratch)


def choose(backend: Any, arrays: Mapping[str, Array], problem: Problem, pass_: str) -> tuple[str, str]:
    """The algorithm that runs a problem on these arrays, and why.

    A fused backward makes all gradients; where dq, or both dk and dv, are not wanted, it is the
    split one. So it is where a fixed order of dq is asked for and Hopper's kernels do not run: at
    most as many bytes as the ordered workspace, and none of its memory, which grows with Nq · Nk.
    """
    if pass_ == "backward" and problem.made != set(GRADIENTS):
        return "flash-split", f"only {', '.join(sorted(problem.made))} are asked for"
    operands = [arrays[name] for name in OPERANDS[pass_] if name in arrays]
    features = features_of(problem) - ({"deterministic"} if pass_ == "forward" else set())
    choice = dispatch.choose(backend, operands, features, scale=problem.softmax_scale, pass_=pass_, tile=problem.tile)
    return choice.algorithm, choice.reason


def run(backend: Any, algorithm: str, at: Mapping[str, Array], problem: Problem, pass_: str, **more: Any) -> None:
    """A pass of an algorithm on the arrays of a problem, by their names in this package.

    more: of ``kernels.attention.forward`` and ``backward``, beside what the problem says.
    """
    options: dict[str, Any] = {"scale": problem.softmax_scale}
    for each in (problem.shape, problem):
        options |= {name: getattr(each, name) for name in VALUES if hasattr(each, name)}
    options |= {name: at[name] for name in OPTIONAL if name in at} | more
    if problem.lengths is not None:
        tables = (at["cu_seqlens_q"], at["cu_seqlens_k"])
        options["packed"] = Packed(*tables, problem.lengths)
    if problem.block_mask is not None and problem.tile is not None:
        options["block_size"] = (problem.tile.block_m, problem.tile.block_n)
    operands = (at["q"], at["k"], at["v"], at["out"])
    keeps_lse = find(algorithm).family in (Family.FLASH, Family.HOPPER)
    if pass_ == "forward":
        stats = {"lse": at["lse"]} if keeps_lse else {}
        attention.forward(backend, algorithm, *operands, stats, **options)
        return
    stats = {name: at[name] for name in ("lse", "m", "l", "p") if name in at}
    made = (at[name] if name in problem.made else None for name in GRADIENTS)
    attention.backward(
        backend, algorithm, *operands, at["dout"], stats, *made, dlse=at.get("dlse"), dbias=at.get("dbias"), **options
    )


def _array(name: str, shape: tuple[int, ...], dtype: str) -> Array:
    return Array(name, 0, shape, contiguous_strides(shape), dtype, "rw")


def _arrays(problem: Problem, pass_: str) -> dict[str, Array]:
    """Stand-ins for the caller's arrays, q first."""
    shape = problem.shape
    queries = (shape.batch, shape.heads, shape.seqlen_q, shape.head_dim)
    keys = (shape.batch, shape.kv_heads, shape.seqlen_k, shape.head_dim)
    scores = (shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k)
    sizes = {"q": queries, "k": keys, "v": keys, "out": queries}
    rows = ["lse"]
    if pass_ == "backward":
        sizes |= {"dout": queries, "dq": queries, "dk": keys, "dv": keys}
        rows += ["m", "l"]
    arrays = {name: _array(name, size, shape.dtype) for name, size in sizes.items()}
    arrays |= {name: _array(name, queries[:3], "fp32") for name in rows}
    if pass_ == "backward":
        p = _array("p", (*scores[:3], -(-scores[3] // 8) * 8), shape.dtype)
        arrays["p"] = replace(p, shape=scores)
    for option in FEATURES.values():
        if option.used(problem) and pass_ in option.passes:
            arrays |= {name: _array(name, *of) for name, of in option.arrays(problem).items()}
    return arrays
