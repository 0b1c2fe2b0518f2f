"""``repro.flash_attention``: what users call. Arguments are checked here, before any work."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from analysis.arguments import flag, whole
from analysis.window import sides
from repro.attention import registered
from repro.attention.options import Options
from repro.attention.validation import DTYPES, FP8, check_arguments, resolve, resolve_scale

__all__ = ["flash_attention"]


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
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    tile: tuple[int, int] | None = None,
    order: str = "rows",
    window: tuple[int | None, int | None] | None = None,
    sinks: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale_block: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(scale · q kᵀ) v``, without storing the (Nq, Nk) matrices.

    FlashAttention (Dao et al. 2022) with the loop order of FlashAttention-2 (Dao 2023). CUDA
    tensors run the kernels on torch's current stream, CPU tensors run the same sources on the
    host.

    Args:
        q: (B, H, Nq, D), float16, bfloat16 or float32, any strides.
        k: (B, Hkv, Nk, D); Hkv divides H, query head h reads key head ``h // (H / Hkv)``.
            Type of q, or float8_e4m3fn with 16-bit q: half the bytes, forward alone, D a multiple
            of 16. An e4m3 NaN is a NaN, as in any other type.
        v: (B, Hkv, Nk, D), type of k.
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
        softcap: above 0: a score s = scale · q·k enters the softmax as ``softcap · tanh(s /
            softcap)``, which never passes softcap (Gemma 2; FlashAttention-2's option).
        alibi_slopes: float32 (H,) or (B, H): ``slope · |i + Nk - Nq - j|`` is taken off the score
            of query i and key j, after the cap (ALiBi, Press et al. 2022; FlashAttention-2's
            option). The distance is computed where it is needed: 4 bytes a tile are read instead
            of a bias of Nq · Nk. The slopes have no gradient.
        bias: (1 or B, 1 or H, Nq, Nk) in the type of q, added to the scores last, after scale, cap
            and ALiBi, as Gemma 2 adds its mask; -inf takes a pair out. It has a gradient, summed
            over the items and heads that share it. Reading it brings N² back: an element a visible
            pair in each pass, and once more for the gradient. Any strides; a last dimension with
            gaps is copied first.
        deterministic: accumulate dq in a fixed order instead of with atomic additions: bitwise
            the same gradients in every run, for more bytes. So with the gradient of a bias that
            items or heads share, by way of all of dS in fp32.
        return_lse: also return the logarithm of the row sums.
        tile: (block_m, block_n), rows of q and of k a tile, multiples of 16 that fit into shared
            memory; default: the kernels' choice, made for each pass. With ``block_mask`` it is
            the size of a block, and a block no kernel can hold is walked in smaller tiles.
        order: "rows", or "sawtooth": thread blocks of every second wave walk the other way round
            and find in L2 what the wave before read last. As many bytes to the multiprocessors,
            fewer from HBM where what the blocks of a head share outgrows L2
            (``python -m repro predict --order sawtooth`` says how many), none fewer elsewhere. In
            those waves sums are added the other way round too: results differ from those of "rows"
            in the last bits, and between cards that run another number of blocks at a time; runs
            on one card agree as they do with "rows". On Hopper, forwards of up to 4096 queries
            run as longer ones do, and a ``deterministic`` backward on the sm_80 kernels.

        window: (left, right): query i sees key j when
            ``i + Nk - Nq - left <= j <= i + Nk - Nq + right``; None on a side is unlimited. With
            ``causal``, right counts as 0 however large. Tiles outside are neither loaded nor
            multiplied. A window that hides nothing changes nothing, the choice of kernels
            included; one that does has compiled forms of its own.
        sinks: the first keys, as many as this, are seen whatever the window (by all queries, or
            with ``causal`` by those that they do not lie ahead of). Without a window no change.
        k_scale, v_scale: float32, what the e4m3 numbers of k and v are multiplied with: (Hkv,), one
            a head, or with ``scale_block`` (B, Hkv, ceil(Nk / scale_block)); any finite numbers,
            default 1 where there is no ``scale_block``. Scales multiply scores and weights in
            float32, so that nothing else is rounded (``repro.attention.quantize`` makes numbers
            and scales).
        scale_block: keys that share a scale, a multiple of 16, whatever the tile: an outlier then
            coarsens the numbers of its block alone. Both scales are needed then.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32 on the device of q, both or neither:
            sequences of different lengths packed without padding. All tokens then lie one after
            another along N with B = 1, (1, H, total, D) (``x.transpose(0, 1)[None]`` of a tensor
            (total, H, D)), and sequence s has the queries ``cu_seqlens_q[s] … cu_seqlens_q[s + 1]
            - 1`` and the keys between the same entries of ``cu_seqlens_k``; either may be none.
            Each sequence is what it would be by itself: ``causal``, ``window``, ``sinks`` and
            ALiBi count from its own ends, slopes may be (sequences, H), and dropout draws the mask
            of item s of a batch. out, lse, dk and dv equal those of separate calls bit for bit,
            and so does dq where ``deterministic`` or where no sequence has more keys than a tile;
            elsewhere its atomic additions come in any order. (On Hopper where both take the same
            tiles: those with a window, a softcap or ALiBi, and forwards with head_dim 256, run the
            sm_80 kernels, and ``docs/pages/packed.md`` names two more cases.) Each pass reads the
            tables on the host once, which waits for a GPU. Not with key_mask, block_mask, bias, a
            sawtooth or e4m3.

        sink_logits: float32 (H,), learned attention sinks (gpt-oss; not ``sinks``, which are keys): each
            head's logit joins the denominator of its rows as the score of one more key of value 0
            that every query sees, and is in lse. A row that sees no key then has ``lse`` equal to
            it. It has a gradient, added up in a fixed order. Not with cu_seqlens_q.

    Returns:
        ``out`` (B, H, Nq, D) in the type of q, or ``(out, lse)`` with ``lse`` (B, H, Nq) in
        float32, natural logarithm. A row that sees no key has ``out = 0``, ``lse = -inf`` and
        takes part in no gradient; that is a definition, not an error.

    Raises:
        TypeError: wrong tensor type, layout (sparse, nested) or device, wrong type of an option.
        ValueError: shapes that disagree, head dimension outside 1…256, dropout_p outside [0, 1],
            a scale that is not finite in float32, a softcap that is not above 0, slopes that
            require a gradient, tables that do not start at 0, fall, or do not end at the number of
            rows, options that exclude each other.
            Both are raised before anything is launched.
        RuntimeError: a second or a forward-mode derivative is asked for, or any of a call with
            e4m3 keys and values; none is implemented.

    Complexity: 4·B·H·Nq·Nk·D operations forward, 10·B·H·Nq·Nk·D backward (half of each when
    causal). Memory beyond inputs and outputs: O(B·H·Nq), and in a backward in 16 bits dq in
    float32, 4·B·H·Nq·D bytes. A head dimension that is no multiple of 8 is padded by a copy.
    Scores and lse are float32: in a backward a weight errs by 10⁻⁷ of its score, 10⁻³ of itself
    at a score of 10⁴. A forward in 16 bits is for scores below 10⁸: from there on the rounding of
    the largest one in the exponents makes weights that fp16 does not hold.
    Meta and fake tensors give the shapes of results and gradients.
    Under autocast floating inputs are cast to its type, as torch's own
    ``scaled_dot_product_attention`` does. It goes through torch.compile as one node a pass, and
    through torch.func's grad, vjp, jacrev and vmap (a loop over calls).
    """
    q, k, v, bias = _autocast(q, k, v, bias)
    return_lse = flag("return_lse", return_lse)
    tensors = [q, k, v]
    if alibi_slopes is not None or bias is not None or sink_logits is not None:
        tensors += [each for each in (alibi_slopes, bias, sink_logits) if each is not None]
    strangers = [each for each in tensors if not isinstance(each, Tensor)]
    usual = not strangers and q.dim() == 4 and q.numel() != 0
    if usual and scale is None:
        scale = resolve_scale(None, q.shape[3])
    # What is left of the checks where layouts and values are those of an earlier call: a bool is no
    # number, and the slopes have no gradient.
    usual = (
        usual
        and key_mask is block_mask is seed is tile is k_scale is v_scale is None
        and cu_seqlens_q is cu_seqlens_k is None
        and type(causal) is type(deterministic) is bool
        and type(sinks) is int
        and type(dropout_p) is type(scale) is float
        and type(softcap) is not bool
        and (alibi_slopes is None or not alibi_slopes.requires_grad)
    )
    left, right = (None, None) if window is None else sides(window)
    given = Options(
        causal=causal,
        scale=scale,
        dropout_p=dropout_p,
        tile=tile,
        deterministic=deterministic,
        order=order,
        softcap=softcap,
        left=left,
        right=right,
        sinks=sinks,
        scale_block=scale_block,
        key_mask=key_mask,
        block_mask=block_mask,
        alibi_slopes=alibi_slopes,
        bias=bias,
        k_scale=k_scale,
        v_scale=v_scale,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        sink_logits=sink_logits,
    )
    found = registered.attention_again(tensors, given) if usual else None
    if found is None:
        check_arguments(q, k, v, given)
        if k.dtype == FP8:
            _refuse_gradient(q=q, k=k, v=v, k_scale=k_scale, v_scale=v_scale, bias=bias, sink_logits=sink_logits)
            ones = torch.ones(k.shape[1], dtype=torch.float32, device=k.device)
            given = given._replace(
                k_scale=ones if k_scale is None else k_scale, v_scale=ones if v_scale is None else v_scale
            )
        _refuse_forward_mode(*(tensor for tensor in (q, k, v, bias, sink_logits) if tensor is not None))
        given = given._replace(seed=_seed_tensor(seed, dropout_p))
        found = registered.attention(q, k, v, *resolve(given, q.shape[3]))
    return found if return_lse else found[0]


def _refuse_gradient(**tensors: Tensor | None) -> None:
    """A kernel for e4m3 keys and values exists for the forward alone."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise RuntimeError(
                f"repro.flash_attention has no gradient with k and v of {FP8}, and {name} requires "
                "one: train in 16 bits, or call it under torch.no_grad()"
            )


def _refuse_forward_mode(*tensors: Tensor) -> None:
    """Forward-mode derivatives would be silent zeros: the operator has no rule for tangents."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError("repro.flash_attention: forward-mode derivatives are not supported")


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Under autocast the tensors in its type, as torch's own attention gets them."""
    first = tensors[0]
    kind = first.device.type if isinstance(first, Tensor) else "cpu"
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        tensor.to(dtype) if isinstance(tensor, Tensor) and tensor.dtype in DTYPES else tensor for tensor in tensors
    )


def _seed_tensor(seed: int | Tensor | None, dropout_p: float) -> Tensor | None:
    """The seed as a 0-d tensor: drawn here, outside the operator, it is replayed by checkpoints.
    None without dropout; a seed that cannot be one is an error there too."""
    if dropout_p == 0.0:
        if seed is not None:
            _given_seed(seed)
        return None
    if seed is None:
        return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu")
    return _given_seed(seed)


def _given_seed(seed: int | Tensor) -> Tensor:
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.dim() != 0 or seed.device.type != "cpu":
            raise TypeError(
                f"seed must be a 0-d int64 tensor on the CPU, got {seed.dtype} {tuple(seed.shape)} on {seed.device}"
            )
        return seed
    value = whole("seed", seed)
    if not 0 <= value < 2**63:
        raise ValueError(f"seed must lie in [0, 2**63), got {value}")
    return torch.tensor(value, dtype=torch.int64, device="cpu")
