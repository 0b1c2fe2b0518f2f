"""From torch tensors to kernels: memory views, scratch, streams, and who runs them.

CUDA tensors go to the CuPy launcher on torch's current stream; CPU tensors go to the host
backend. Tensors cross by address (``data_ptr``), never through an array library, so bfloat16
needs no support from one. Scratch memory comes from torch's allocator on the current stream: no
second memory pool has to be told when a stream is done with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels.cupy_backend import CupyBackend

from analysis.shapes import Tile
from kernels import attention, dispatch
from kernels.launch import Array, Backend
from repro.attention.validation import DTYPES

__all__ = [
    "CHECKS_VARIABLE",
    "Options",
    "array_of",
    "backward",
    "check_tile",
    "forward",
    "launcher_for",
    "scratch_bytes",
]

#: Set to 1 to run CPU tensors with the host backend's memory and race checks on.
CHECKS_VARIABLE = "REPRO_HOST_CHECKS"
ALIGNMENT_BYTES = 16
#: Tiles tried under a block mask whose own blocks no kernel can hold, largest first.
_DIVISORS = tuple(Tile(m, n) for m in (128, 64, 32, 16) for n in (128, 64, 32, 16))

#: The kernels that a pass may launch with one tile.
_KERNELS = {"forward": ("forward",), "backward": ("backward", "backward-dq")}

#: Every type that kernels take, masks and scratch included.
_NAMES = DTYPES | {torch.uint8: "uint8", torch.int32: "int32", torch.int64: "int64"}
_TORCH_TYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Options:
    """What shapes the computation beside q, k and v; the operator's schema in the same order."""

    key_mask: Tensor | None
    block_mask: Tensor | None
    seed: Tensor | None
    causal: bool
    scale: float
    dropout_p: float
    tile: Sequence[int] | None
    deterministic: bool


def check_tile(q: Tensor, options: Options) -> None:
    """Raise ``ValueError`` with both numbers if the tile asked for does not fit some kernel."""
    for pass_ in _KERNELS:
        _kernel_tile(pass_, q, options)


def _padded(head_dim: int) -> int:
    """Kernels move rows 16 bytes at a time: 8 elements of a 16-bit type."""
    return -(-head_dim // 8) * 8


def _kernel_tile(pass_: str, q: Tensor, options: Options) -> Tile | None:
    """The tile a pass runs with: the caller's, or None for the kernels' own choice.

    With a block mask the caller's tile is the block; a block too large for the kernels is walked
    in the largest tile that divides it.
    """
    if options.tile is None:
        return None
    block = Tile(*options.tile)
    sparse = options.block_mask is not None
    complaint: ValueError | None = None
    for tile in (block, *_DIVISORS) if sparse else (block,):
        try:
            for kernel in _KERNELS[pass_]:
                attention.configure(
                    kernel, DTYPES[q.dtype], _padded(int(q.shape[3])), tile=tile,
                    block_size=(block.block_m, block.block_n) if sparse else None,
                    causal=options.causal, key_mask=options.key_mask is not None,
                    dropout=options.dropout_p > 0.0,
                )  # fmt: skip
            return tile
        except ValueError as error:
            complaint = complaint or error
    assert complaint is not None
    raise complaint


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options) -> None:
    """Fill ``out`` and ``lse``."""
    if q.numel() == 0 or k.numel() == 0:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    with launcher_for(q) as backend, _written(out) as out_view:
        arrays = (
            _readable("q", q),
            _readable("k", k),
            _readable("v", v),
            array_of("out", out_view),
        )
        attention.forward(
            backend,
            _choose("forward", backend, arrays, options).algorithm,
            *arrays,
            {"lse": array_of("lse", lse)},
            tile=_kernel_tile("forward", q, options),
            **_features(q, k, options),
        )


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: Sequence[Tensor],
    options: Options,
    needed: Sequence[bool],
) -> None:
    """Fill those of ``grads`` = (dq, dk, dv) that are ``needed``."""
    if q.numel() == 0 or k.numel() == 0:
        for grad in grads:
            grad.zero_()
        return
    need_dq, need_kv = needed[0], needed[1] or needed[2]
    with launcher_for(q) as backend, ExitStack() as results:

        def target(name: str, grad: Tensor, like: Tensor, wanted: bool) -> Array:
            # dk and dv come together: if only one is asked for, the other goes to scratch.
            memory = grad if wanted else torch.empty(like.shape, dtype=like.dtype, device=q.device)
            return array_of(name, results.enter_context(_written(memory)))

        dq, dk, dv = (
            target(name, grad, like, wanted) if made else None
            for name, grad, like, wanted, made in zip(
                ("dq", "dk", "dv"), grads, (q, k, v), needed, (need_dq, need_kv, need_kv),
                strict=True,
            )
        )  # fmt: skip
        operands = (
            _readable("q", q),
            _readable("k", k),
            _readable("v", v),
            _readable("out", out),
            _readable("dout", dout),
        )
        # A fused pass makes all three; where dq, or both dk and dv, are not wanted, neither is it.
        algorithm = "flash-split"
        if dq is not None and dk is not None and dv is not None:
            arrays = (*operands, dq, dk, dv)
            algorithm = _choose("backward", backend, arrays, options).algorithm
        attention.backward(
            backend,
            algorithm,
            *operands,
            {"lse": array_of("lse", lse.contiguous())},
            dq,
            dk,
            dv,
            tile=_kernel_tile("backward", q, options),
            dlse=None if dlse is None else array_of("dlse", dlse.contiguous()),
            **_features(q, k, options),
        )


def _choose(
    pass_: str, backend: Backend, arrays: Sequence[Array], options: Options
) -> dispatch.Choice:
    """The kernels for a pass. The forward is deterministic whichever it is.

    Where Hopper's kernels do not run, of the two deterministic backwards the split one: at most as
    many bytes as the ordered workspace, and none of its memory, which grows with Nq · Nk (the price
    of determinism is a figure of its own).
    """
    return dispatch.choose(
        backend,
        arrays,
        scale=options.scale,
        pass_=pass_,
        tile=None if options.tile is None else Tile(*options.tile),
        key_mask=options.key_mask is not None,
        dropout=options.dropout_p > 0.0,
        block_mask=options.block_mask is not None,
        deterministic=options.deterministic and pass_ == "backward",
    )


def _features(q: Tensor, k: Tensor, options: Options) -> dict[str, Any]:
    features: dict[str, Any] = {
        "scale": options.scale,
        "causal": options.causal,
        "dropout_p": options.dropout_p,
        "stream": _stream(q.device),
    }
    if q.device.type == "cuda":
        features["shared_limit_bytes"] = _cuda(q.device.index).shared_limit_bytes
    if options.seed is not None:
        features["seed"] = int(options.seed)
    if options.key_mask is not None:
        features["key_mask"] = array_of("key_mask", options.key_mask.contiguous().view(torch.uint8))
    if options.block_mask is not None:
        assert options.tile is not None
        mask = options.block_mask.contiguous().view(torch.uint8)
        mask = mask.expand(*q.shape[:2], *mask.shape[-2:])
        features["block_mask"] = array_of("block_mask", mask)
        features["block_size"] = tuple(options.tile)
    return features


# ---- memory --------------------------------------------------------------------------------------


def array_of(name: str, tensor: Tensor) -> Array:
    """The tensor's memory as kernels take it. Dimensions of size 1 have no stride to respect."""
    strides = [s if n > 1 else 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    strides[-1] = 1
    dtype = _NAMES[tensor.dtype]
    return Array(name, tensor.data_ptr(), tuple(tensor.shape), tuple(strides), dtype, "rw", tensor)


def _fits(tensor: Tensor) -> bool:
    """Whether kernels can move rows of the tensor 16 bytes at a time where it lies."""
    if tensor.shape[-1] % 8 or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
        return False
    size = tensor.element_size()
    rows = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return tensor.data_ptr() % ALIGNMENT_BYTES == 0 and all(
        n == 1 or stride * size % ALIGNMENT_BYTES == 0 for n, stride in rows
    )


def _fresh(tensor: Tensor) -> Tensor:
    """Memory of the tensor's shape, rows padded to a multiple of 8 elements."""
    return tensor.new_empty(*tensor.shape[:-1], _padded(tensor.shape[-1]))


def _readable(name: str, tensor: Tensor) -> Array:
    """The tensor itself, or a padded and aligned copy where kernels cannot read it in place."""
    if _fits(tensor):
        return array_of(name, tensor)
    copy = _fresh(tensor)
    copy[..., tensor.shape[-1] :].zero_()
    copy[..., : tensor.shape[-1]].copy_(tensor)
    return array_of(name, copy)


@contextmanager
def _written(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor itself, or aligned memory whose content is copied to it at the end."""
    if _fits(tensor):
        yield tensor
        return
    fresh = _fresh(tensor)
    yield fresh
    tensor.copy_(fresh[..., : tensor.shape[-1]])


# ---- backends ------------------------------------------------------------------------------------


class _Launcher:
    """A backend whose scratch is counted and, for CUDA, comes from torch's allocator."""

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self.name = backend.name
        self.multiprocessors = backend.multiprocessors
        self.compute_capability: str | None = getattr(backend, "compute_capability", None)
        self.device = device
        self.scratch_bytes = 0
        self._backend = backend
        self.launch: Callable[..., None] = backend.launch

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        """Uninitialised scratch, safe to drop once the launches that use it are queued."""
        if self.device.type == "cpu":
            scratch = self._backend.empty(name, shape, dtype)  # knows what has been written
        else:
            memory = torch.empty(shape, dtype=_TORCH_TYPES[dtype], device=self.device)
            scratch = array_of(name, memory)
        self.scratch_bytes += scratch.size * scratch.itemsize
        return scratch


_scratch_bytes = 0


def scratch_bytes() -> int:
    """Bytes of scratch that the latest call took beside its inputs and results."""
    return _scratch_bytes


@contextmanager
def launcher_for(q: Tensor) -> Iterator[Backend]:
    """The backend for q's device, with that device current."""
    global _scratch_bytes
    if q.device.type == "cpu":
        launcher = _Launcher(_host(os.environ.get(CHECKS_VARIABLE, "0") == "1"), q.device)
        yield launcher
    else:
        with torch.cuda.device(q.device):
            launcher = _Launcher(_cuda(q.device.index), q.device)
            yield launcher
    _scratch_bytes = launcher.scratch_bytes


@cache
def _host(checks: bool) -> Backend:
    from kernels.host import HostBackend

    return HostBackend(checks=checks)


@cache
def _cuda(index: int) -> CupyBackend:
    from kernels.cupy_backend import CupyBackend

    return CupyBackend(index)


def _stream(device: torch.device) -> int | None:
    """torch's current stream, as kernels are queued behind the operations before them."""
    if device.type == "cpu":
        return None
    return torch.cuda.current_stream(device).cuda_stream
