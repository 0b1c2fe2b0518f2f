"""``repro.flash_attention``: the operator users call, registered with torch.

Two operators stand behind it, so that a compiler sees both as single nodes:

``repro::flash_attention``
    (q, k, v, …) → (out, lse). FlashAttention-2, Alg. 1 (2023); the mask, dropout and block-sparse
    forms are those of FlashAttention 2022, Alg. 2 and 5.
``repro::flash_attention_backward``
    (dout, q, k, v, out, lse, …) → (dq, dk, dv). FlashAttention-2, Alg. 2.

Saved between them: q, k, v, out and lse, and the key mask, block mask or seed where there is one.
All of it goes through torch's saved-tensor mechanism and is unpacked once, so checkpointing and
offloading see everything; nothing saved is quadratic in the sequence length.

The backward operator is itself registered with autograd, with a backward that raises. This is
what makes a second derivative an error: marking the backward once-differentiable would not do,
because with a constant incoming gradient (``out.sum()``) the first gradient would carry no graph
and the second-order term would be missing without a word.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from repro.attention import engine
from repro.attention.validation import DTYPES, check_arguments, resolve_scale

__all__ = ["flash_attention"]

_OPTIONS = (
    "Tensor? key_mask, Tensor? block_mask, Tensor? seed, bool causal, float scale, "
    "float dropout_p, int[]? tile, bool deterministic"
)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
    block_mask: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    tile: tuple[int, int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(scale · q kᵀ) v``, without storing the (Nq, Nk) matrices.

    FlashAttention (Dao et al. 2022) with the loop order of FlashAttention-2 (Dao 2023). CUDA
    tensors run the kernels on torch's current stream, CPU tensors run the same sources on the
    host.

    Args:
        q: (B, H, Nq, D), float16, bfloat16 or float32, any strides.
        k: (B, Hkv, Nk, D); Hkv divides H, query head h reads key head ``h // (H / Hkv)``.
        v: (B, Hkv, Nk, D).
        causal: query i sees key j when ``j <= i + Nk - Nq`` (aligned bottom-right).
        key_mask: boolean (B, Nk), **True = the key takes part**. (torch's
            ``key_padding_mask`` has the opposite sign.)
        dropout_p: probability in [0, 1] with which a weight is dropped; the rest is scaled by
            ``1 / (1 - dropout_p)``. The mask depends on (seed, batch, head, row, column) only.
        seed: of the dropout mask, 0 ≤ seed < 2⁶³ or a 0-d int64 CPU tensor. Drawn from torch's
            default generator when left out, so checkpointing replays it.
        scale: default 1/sqrt(D), with the D of the arguments.
        block_mask: boolean (rows, columns), (H, rows, columns) or (B, H, rows, columns), True =
            the block is computed; one entry a ``tile``. Combines with ``causal``, ``key_mask``.
        deterministic: accumulate dq in a fixed order instead of with atomic additions: bitwise
            the same gradients in every run, for more bytes.
        return_lse: also return the logarithm of the row sums.
        tile: (block_m, block_n), rows of q and of k a tile, multiples of 16 that fit into shared
            memory; default: the kernels' choice, made for each pass. With ``block_mask`` it is
            the size of a block, and a block no kernel can hold is walked in smaller tiles.

    Returns:
        ``out`` (B, H, Nq, D) in the type of q, or ``(out, lse)`` with ``lse`` (B, H, Nq) in
        float32, natural logarithm. A row that sees no key has ``out = 0``, ``lse = -inf`` and
        takes part in no gradient; that is a definition, not an error.

    Raises:
        TypeError: wrong tensor type, device, mask type or scale type.
        ValueError: shapes that disagree, head dimension outside 1…256, dropout_p outside [0, 1].
            Both are raised before anything is launched.
        RuntimeError: a second or a forward-mode derivative is asked for; none is implemented.

    Complexity: 4·B·H·Nq·Nk·D operations forward, 10·B·H·Nq·Nk·D backward (half of each when
    causal), O(B·H·Nq) memory beyond inputs and outputs. A head dimension that is no multiple of
    8 is padded by a copy. Under autocast floating inputs are cast to its type, as torch's own
    ``scaled_dot_product_attention`` does.
    """
    q, k, v = _autocast(q, k, v)
    check_arguments(
        q, k, v, key_mask=key_mask, dropout_p=dropout_p, block_mask=block_mask, tile=tile
    )
    _refuse_forward_mode(q, k, v)
    out, lse = torch.ops.repro.flash_attention(
        q,
        k,
        v,
        key_mask,
        block_mask,
        _seed_tensor(seed) if dropout_p > 0.0 else None,
        bool(causal),
        resolve_scale(scale, q.shape[3]),
        float(dropout_p),
        None if tile is None else list(tile),
        bool(deterministic),
    )
    return (out, lse) if return_lse else out


def _refuse_forward_mode(*tensors: Tensor) -> None:
    """Forward-mode derivatives would be silent zeros: the operator has no rule for tangents."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError("repro.flash_attention: forward-mode derivatives are not supported")


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast the tensors in its type, as torch's own attention gets them."""
    first = tensors[0]
    kind = first.device.type if isinstance(first, Tensor) else "cpu"
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        tensor.to(dtype) if isinstance(tensor, Tensor) and tensor.dtype in DTYPES else tensor
        for tensor in tensors
    )


def _seed_tensor(seed: int | Tensor | None) -> Tensor:
    """The seed as a 0-d tensor: drawn here, outside the operator, it is replayed by checkpoints."""
    if seed is None:
        return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu")
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.dim() != 0 or seed.device.type != "cpu":
            raise TypeError(
                "seed must be a 0-d int64 tensor on the CPU, "
                f"got {seed.dtype} {tuple(seed.shape)} on {seed.device}"
            )
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, a 0-d int64 tensor or None, got {type(seed)}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must lie in [0, 2**63), got {seed}")
    return torch.tensor(seed, dtype=torch.int64, device="cpu")


def _like(tensor: Tensor) -> Tensor:
    """An uninitialised tensor laid out like ``tensor`` where kernels can write that layout."""
    if tensor.stride(-1) == 1:
        return torch.empty_like(tensor)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _row_statistics(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


@torch.library.custom_op(
    "repro::flash_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
)
def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    chosen = engine.Options(*options)
    engine.check_tile(q, chosen)
    out, lse = _like(q), _row_statistics(q)
    engine.forward(q, k, v, out, lse, chosen)
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    engine.check_tile(q, engine.Options(*options))
    return _like(q), _row_statistics(q)


@torch.library.custom_op(
    "repro::flash_attention_backward",
    mutates_args=(),
    schema=(
        "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        f"{_OPTIONS}, bool[] needed) -> (Tensor, Tensor, Tensor)"
    ),
)
def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _gradients(q, k, v, options[-1])
    engine.backward(
        dout, dlse, q, k, v, out, lse, grads, engine.Options(*options[:-1]), options[-1]
    )
    return grads


@_backward.register_fake
def _(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(q, k, v, options[-1])


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for dq, dk, dv. One that nobody needs has no elements: a schema has no optional
    results, so :func:`_vjp` turns it into None."""
    dq, dk, dv = (
        _like(tensor) if wanted else tensor.new_empty(0)
        for tensor, wanted in zip((q, k, v), needed, strict=True)
    )
    return dq, dk, dv


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, key_mask, block_mask, seed, *rest = inputs
    ctx.save_for_backward(q, k, v, *output, key_mask, block_mask, seed)
    ctx.rest = rest  # plain numbers: a tensor kept here would dodge offloading and checkpoints
    ctx.set_materialize_grads(False)


def _vjp(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *options = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[:3])
    nothing = (None,) * 8
    if dout is None and dlse is None:
        return (None, None, None, *nothing)
    if dout is None:
        dout = torch.zeros_like(out)
    grads = torch.ops.repro.flash_attention_backward(
        dout, dlse, q, k, v, out, lse, *options, *ctx.rest, needed
    )
    kept = [grad if wanted else None for grad, wanted in zip(grads, needed, strict=True)]
    return (*kept, *nothing)


def _second_derivative(ctx: Any, *_: Tensor | None) -> NoReturn:
    raise RuntimeError(
        "repro.flash_attention: second derivatives are not supported. Its backward recomputes "
        "the attention matrix and has no derivative of its own; use "
        "repro.attention.variants.standard where one is needed."
    )


_forward.register_autograd(_vjp, setup_context=_setup_context)
_backward.register_autograd(_second_derivative)
