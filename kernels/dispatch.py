"""Which kernels run a problem on a device: one rule, and the reason it gives.

The Hopper kernels run where all of these hold, in this order; the sm_80 form runs everything else.

1. the device has compute capability 9.0 (their instructions exist nowhere else);
2. no tile was asked for (tiles of the operator are tiles of the sm_80 form), and no sawtooth with a
   dq in a fixed order;
3. :func:`kernels.hopper.unsupported_reason` has no objection: type, head dimension, scale, an option
   whose row in ``analysis.features`` does not name them, options that do not go together;
4. TMA can address every array: rows, heads and batches lie a positive multiple of 16 bytes apart;
5. no run on this card has found its kernels wrong, hung or slower than the sm_80 form, as the file
   that REPRO_HOPPER_CHECKED names would say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from analysis.algorithms import Family, find
from analysis.arguments import checked, items
from analysis.features import FEATURES, features_of
from analysis.problem import Problem
from analysis.shapes import Tile
from kernels import hopper
from kernels.flash_config import SHARED_LIMIT_BYTES, configure
from kernels.flash_config import default_tile as sm80_tile
from kernels.launch import Array, Pass, Size
from kernels.launching.plan import Device

HOPPER = "90"
OLDEST = 80
"""The least compute capability of the flash kernels: cp.async, and mma.sync of 16 x 8 x 16."""
#: Tiles tried under a block mask whose own blocks no kernel can hold, largest first.
_DIVISORS = tuple(Tile(m, n) for m in (128, 64, 32, 16) for n in (128, 64, 32, 16))
#: The kernels that a pass may launch with one tile.
_KERNELS = {"forward": ("forward",), "backward": ("backward", "backward-dq")}
#: Names the file in which a run keeps what it has found out about the Hopper kernels:
#: {"right": [name, ...], "refused": {name: reason}}.
CHECKED_VARIABLE = "REPRO_HOPPER_CHECKED"


@dataclass(frozen=True)
class Choice:
    """An algorithm of ``kernels.attention`` and why it is that one."""

    algorithm: str
    reason: str


@checked
def choose(
    backend: Device,
    arrays: Iterable[Array],
    features: Collection[str] = (),
    *,
    scale: float = 1.0,
    pass_: Pass = "forward",
    tile: Tile | None = None,
) -> Choice:
    """ "flash-sm90" or "flash", by the rule above.

    arrays: all (B, H, N, D) arrays of the pass, q first.
    features: names of ``analysis.features``. With "deterministic" dq must be the same bit for bit
        in every run: "flash-sm90-deterministic" or "flash-split", which a sawtooth leaves as the
        only one.
    pass_: "forward" or "backward", chosen each for itself: both forms keep the same lse.

    Raises ValueError for a GPU that is too old for any of them.
    """
    listed = items("arrays", arrays, Array)
    if not listed:
        raise ValueError("arrays=[] has no q")
    used, q = features, listed[0]
    deterministic = "deterministic" in used
    capability = getattr(backend, "compute_capability", None)
    if capability is not None and not has_flash(capability):
        raise ValueError(
            f"the flash kernels need compute capability {_dotted(str(OLDEST))} or newer, "
            f"this GPU has {_dotted(capability)}"
        )
    objection = None
    if capability != HOPPER:
        has = "is the host backend" if capability is None else f"has {_dotted(capability)}"
        objection = f"the Hopper kernels need compute capability {_dotted(HOPPER)}, this {has}"
    elif tile is not None:
        objection = f"tile ({tile.block_m}, {tile.block_n}) was asked for"
    else:
        keys = min(array.shape[2] for array in listed)
        objection = hopper.unsupported_reason(q.dtype, q.shape[3], used, scale=scale, pass_=pass_, keys=keys)
        objection = objection or next(filter(None, map(_unreachable, listed)), None)
    algorithm = hopper.DETERMINISTIC if deterministic else hopper.ALGORITHM
    if objection is None and deterministic and pass_ == "backward" and "sawtooth" in used:
        objection = "dq in a fixed order and a sawtooth (the turns of two waves would cross)"
    if objection is None:
        form = form_name(q.shape[3], pass_, q.shape[2], used)
        named = (name for name in (algorithm, form) if name in left_out())
        objection = next((f"{name} is left out: {left_out()[name]}" for name in named), None)
    if objection is None:
        return Choice(algorithm, "the Hopper kernels cover it")
    return Choice("flash-split" if deterministic else "flash", objection)


def _dotted(capability: str) -> str:
    return f"{capability[:-1]}.{capability[-1]}"


@checked
def has_flash(compute_capability: str | None) -> bool:
    """Whether a GPU ("80"; None is none of NVIDIA's) can run the flash kernels at all."""
    return compute_capability is not None and int(compute_capability) >= OLDEST


@cache
def left_out() -> Mapping[str, str]:
    """Hopper algorithms and forms that a run on this card leaves out, and why.

    Read once by each process. ValueError names a file that is damaged.
    """
    where = os.environ.get(CHECKED_VARIABLE)
    if where is None or not Path(where).exists():
        return {}
    try:
        found: dict[str, str] = json.loads(Path(where).read_text(encoding="utf-8"))["refused"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{CHECKED_VARIABLE}={where}: {error}") from None
    return found


@checked
def form_name(head_dim: int, pass_: Pass, seqlen_q: Size, features: Collection[str] = ()) -> str:
    """The name in ``hopper.FORMS`` of the form that the rule picks for a pass.

    features: names of ``analysis.features``.
    """
    return f"{hopper.ALGORITHM} {hopper.form_for(head_dim, pass_, seqlen_q, features).name}"


def _unreachable(array: Array) -> str | None:
    """Why no tensor map describes the array, or None."""
    for size, stride in zip(array.shape[:3], array.strides[:3], strict=True):
        if size > 1 and (stride == 0 or stride * array.itemsize % 16):
            return f"{array.name} has a stride of {stride * array.itemsize} bytes"
    if array.pointer % 16:
        return f"{array.name} starts at {array.pointer:#x}, no multiple of 16"
    return None


@checked
def default_tile(
    algorithm: str,
    head_dim: int,
    dtype: str,
    pass_: str,
    *,
    causal: bool,
    seqlen_q: Size,
    limit: Size = SHARED_LIMIT_BYTES,
) -> Tile:
    """The tile a flash algorithm runs with when none is asked for."""
    if find(algorithm).family is Family.HOPPER:
        return hopper.default_tile(head_dim, pass_, causal, seqlen_q)
    return sm80_tile(head_dim, dtype, pass_, limit)


@checked
def kernel_tile(pass_: Pass, problem: Problem, limit: Size = SHARED_LIMIT_BYTES) -> Tile | None:
    """The tile that the sm_80 kernels of a pass run with where the problem asks for one.

    With a block mask the caller's tile is the block; a block too large for the kernels is walked
    in the largest tile that divides it.

    Raises ValueError with both numbers if the tile does not fit some kernel of the pass.
    """
    tile = problem.tile
    if tile is None:
        return None
    sparse = problem.block_mask is not None
    shape, block_size = problem.shape.padded, (tile.block_m, tile.block_n) if sparse else None
    features = {name for name in features_of(problem) if FEATURES[name].macro} - {"sawtooth"}
    complaint: ValueError | None = None
    for candidate in (tile, *_DIVISORS) if sparse else (tile,):
        try:
            for kernel in _KERNELS[pass_]:
                configure(
                    kernel,
                    shape.dtype,
                    shape.head_dim,
                    tile=candidate,
                    limit=limit,
                    block_size=block_size,
                    features=features,
                )
            return candidate
        except ValueError as error:
            complaint = complaint or error
    assert complaint is not None
    raise complaint
