"""``repro.flex_attention``: functions of a score and of indices, as torch's FlexAttention takes them.

Such a function is not compiled: it is called on all indices at once, and what it did is compared
with what the kernels have an option for, pair by pair. So a mask becomes ``causal``, ``window``,
``sinks``, ``key_mask``, packed sequences or ``block_mask``, and a change of scores ``scale``,
``softcap``, ``alibi_slopes`` or ``bias``, with the bytes that ``repro.predict`` has for these.
Anything else is refused, or stored as a bias where the caller says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from analysis.arguments import flag
from repro.attention.operator import flash_attention
from repro.attention.reference import visible
from repro.attention.validation import resolve_scale

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["flex_attention", "flex_options"]

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_PROBES = (-30.0, -1.5, 0.25, 1.0, 30.0)
"""Scores that a change is tried on, beside 0 and one so large that a cap holds it."""
_LARGE = 2.0**60
_ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Of a number that a function computes in float32, beside the largest of its terms."""


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    stored: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``torch.nn.attention.flex_attention.flex_attention``, computed by :func:`repro.flash_attention`.

    Args:
        query: (B, H, L, E). key, value: (B, Hkv, S, E).
        score_mod: (score, b, h, q_idx, kv_idx) -> score, of element-wise operations.
        block_mask: torch's; its ``mask_mod`` counts, and its block size where no option describes it.
        scale: default 1/sqrt(E).
        enable_gqa: whether key and value may have fewer heads than query.
        stored: as in :func:`flex_options`, which finds the options anew in each call: in a loop,
            call it once and give what it found to ``flash_attention``.

    Returns:
        (B, H, L, E), and with ``return_lse`` (B, H, L), the natural logarithm of the row sums.

    Raises:
        TypeError, ValueError: as :func:`flex_options` and :func:`repro.flash_attention`.
    """
    if not flag("enable_gqa", enable_gqa) and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query and key differ in heads: {query.shape[1]} and {key.shape[1]}; enable_gqa=True lets key have fewer"
        )
    options = flex_options(query, key, score_mod, block_mask, scale=scale, stored=stored)
    return flash_attention(query, key, value, return_lse=return_lse, **options)


def flex_options(
    query: Tensor,
    key: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    *,
    scale: float | None = None,
    stored: bool = False,
) -> dict[str, Any]:
    """The options of :func:`repro.flash_attention` that do what these functions do.

    Args:
        query, key: (B, H, L, E) and (B, Hkv, S, E), of which shape, type and device count.
        score_mod, block_mask, scale: as in :func:`flex_attention`.
        stored: whether what no option describes may become a bias in the type of query, rounded to
            it: L · S elements, read in each pass.

    Returns:
        Keywords, those with their default left out. Memory while they are found: O(L · S), times B
        and H where the functions depend on them.

    Raises:
        ValueError: a mask or a change of scores that no option describes, without ``stored``; a
            tensor that wants a gradient and is more than an addition to the scores.
    """
    items, heads, rows = query.shape[:3]
    keys = key.shape[2]
    grid = _grid(query, keys)
    seen = torch.ones(1, 1, rows, keys, dtype=torch.bool)
    block = (128, 128)
    if block_mask is not None:
        if tuple(block_mask.seq_lengths) != (rows, keys):
            raise ValueError(
                f"block_mask is of {tuple(block_mask.seq_lengths)} tokens, query and key of {(rows, keys)}"
            )
        seen = seen & torch.as_tensor(block_mask.mask_mod(*grid)).cpu()
        block_m, block_n = block_mask.BLOCK_SIZE
        block = (block_m, block_n)
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    added = None
    if score_mod is not None:
        changes, added = _changes(
            score_mod, grid, seen, scale if scale is not None else resolve_scale(None, query.shape[3])
        )
        options |= changes
    hidden = None if added is None else torch.isneginf(added)
    both = seen if hidden is None else seen & ~hidden
    size = (items, heads, rows, keys)
    found = _mask(both, size, block)
    if found is None and hidden is not None and hidden.any():
        found = _mask(seen, size, block)  # what the function takes out stays in the bias
    if found is None:
        if not flag("stored", stored):
            raise ValueError(
                "mask_mod hides pairs as no option of the kernels does: neither causal, a window with sinks, keys of "
                f"an item, sequences one after another nor blocks of {block[0]} x {block[1]}; stored=True reads it as "
                "a bias, an element a pair"
            )
        found = {}
        added = torch.where(both, torch.zeros(()) if added is None else added, -torch.inf)
        both = torch.ones_like(both)
    if added is not None:
        found |= _added(added, both, query.dtype, size, stored)
    if "bias" in found and "cu_seqlens_q" in found:
        raise ValueError("score_mod adds a bias and mask_mod separates sequences: the kernels take one of the two")
    options |= found
    return {name: each.to(query.device) if isinstance(each, Tensor) else each for name, each in options.items()}


def _grid(query: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Indices of item, head, query and key, each along its own dimension."""
    sizes = (*query.shape[:3], keys)

    def along(dim: int) -> Tensor:
        shape = [1] * len(sizes)
        shape[dim] = sizes[dim]
        return torch.arange(sizes[dim], device=query.device).view(shape)

    return along(0), along(1), along(2), along(3)


def _changes(
    score_mod: ScoreMod, grid: tuple[Tensor, ...], seen: Tensor, scale: float
) -> tuple[dict[str, Any], Tensor | None]:
    """``scale`` and ``softcap`` of a change, and what it adds (broadcast over the grid), None: nothing."""

    def at(score: float) -> Tensor:
        given = torch.tensor(score, dtype=torch.float64, device=grid[0].device)
        return torch.as_tensor(score_mod(given, *grid)).cpu()

    zero, one = at(0.0), at(1.0)
    _only_added(zero, one)
    with torch.no_grad():
        judged = seen & ~torch.isneginf(zero)
        if not judged.any():
            return {}, zero
        factor, cap = _slope_and_cap(at, zero, one, judged)
        for score in (*_PROBES, _LARGE):
            x = factor * score
            want = x if cap is None else cap * math.tanh(x / cap)
            size = abs(want) + (cap or 0.0) + zero.abs()
            off = ((at(score) - zero).double() - want).abs() > _ROUNDING * size
            if bool((off & judged).any()):
                raise ValueError(
                    "score_mod changes scores as no option of the kernels does: neither a factor, a cap "
                    "(softcap · tanh(score / softcap)) nor an addition, the same for all pairs but for the addition "
                    f"(seen at a score of {score:g})"
                )
    changes: dict[str, Any] = {} if cap is None else {"softcap": cap}
    if factor != 1.0:
        changes["scale"] = scale * factor
    nothing = not zero.requires_grad and not bool(((zero != 0) & judged).any())
    return changes, None if nothing and bool(judged.eq(seen).all()) else zero


def _slope_and_cap(
    at: Callable[[float], Tensor], zero: Tensor, one: Tensor, judged: Tensor
) -> tuple[float, float | None]:
    """Factor of a score and its cap, from one pair; whether all others agree is judged by the caller."""
    place = tuple(judged.nonzero()[0].tolist())

    def of_pair(found: Tensor) -> float:
        return float((found - zero).double().expand(judged.shape)[place])

    rise, most = of_pair(one), of_pair(at(_LARGE))
    if abs(most - rise * _LARGE) <= _ROUNDING * abs(most):
        return _rounded(rise), None
    if not 0 < most < _LARGE or not abs(rise) < most:
        return rise, None  # refused by the caller, who tries other scores
    cap = _rounded(most)
    return _rounded(cap * math.atanh(rise / cap)), cap


def _rounded(value: float) -> float:
    """To the number of six digits that it is next to, if float32 cannot tell them apart."""
    near = float(f"{value:.6g}")
    return near if abs(near - value) <= _ROUNDING * abs(near) else value


def _only_added(zero: Tensor, one: Tensor) -> None:
    """ValueError where a tensor that wants a gradient does more than being added."""
    if not one.requires_grad:
        return
    leaves, waiting, met = [], [one.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in met:
            continue
        met.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [each for each, _ in node.next_functions]
    rise = (one - zero).sum()
    found = torch.autograd.grad(rise, leaves, retain_graph=True, allow_unused=True) if rise.requires_grad else ()
    if any(each is not None and bool(each.any()) for each in found):
        raise ValueError("score_mod multiplies scores by a tensor that wants a gradient; kernels have none for that")


def _added(added: Tensor, seen: Tensor, dtype: torch.dtype, size: tuple[int, ...], stored: bool) -> dict[str, Any]:
    """``alibi_slopes`` or ``bias`` for what is added to the scores of pairs."""
    if not added.requires_grad:
        slopes = _slopes(added, seen, size)
        if slopes is not None:
            return {"alibi_slopes": slopes}
    added = added + torch.zeros(1, 1, *size[2:], dtype=added.dtype)
    with torch.no_grad():
        rounded = (added.to(dtype).to(added.dtype) != added) & seen
    if bool(rounded.any()) and not stored:
        raise ValueError(
            f"score_mod adds numbers that {dtype} does not hold: give query in float32, or stored=True to round them"
        )
    return {"bias": added.to(dtype)}


def _slopes(added: Tensor, seen: Tensor, size: tuple[int, ...]) -> Tensor | None:
    """ALiBi's slopes, (H,) or (B, H) float32, if that is what is added; None if not."""
    _, heads, rows, keys = size
    queries = torch.arange(rows)[:, None] + keys - rows
    distance = (queries - torch.arange(keys)).abs()
    far = seen & (distance > 0)
    if not bool(far.any()) or bool((torch.isneginf(added) & seen).any()):
        return None
    rise = torch.where(far, -added.double() / distance, -torch.inf).amax((2, 3))
    slopes = torch.where(torch.isneginf(rise), 0.0, rise)
    off = (added.double() + slopes[..., None, None] * distance).abs() > _ROUNDING * added.abs()
    if bool((off & seen).any()):
        return None
    found = slopes.float().expand(slopes.shape[0], heads)
    return found[0].contiguous() if len(found) == 1 else found.contiguous()


def _mask(seen: Tensor, size: tuple[int, int, int, int], block: tuple[int, int]) -> dict[str, Any] | None:
    """The options that hide what is not ``seen``, of the fewest bytes; None where there are none."""
    items, _, rows, keys = size
    if bool((seen == seen[:, :1]).all()):
        seen = seen[:, :1]
        some = seen.any(dim=(0, 1))
        for options in _bands(some):
            band = visible(1, 1, rows, keys, **options)[0, 0]
            key_mask = seen.any(dim=(1, 2)) | ~band.any(0)
            if bool((band & key_mask[:, None, None] == seen).all()):
                return options if bool(key_mask.all()) else options | {"key_mask": key_mask.expand(items, keys)}
        packed = _sequences(some) if items == 1 and rows == keys else None
        if packed is not None:
            return packed
    return _blocks(seen, size, block)


def _bands(some: Tensor, possible: Tensor | None = None) -> Iterator[dict[str, Any]]:
    """Causal masks, windows and sinks that would leave about these of the ``possible`` pairs (default:
    all), simple ones first."""
    rows, keys = some.shape
    offset = torch.arange(keys) - torch.arange(rows)[:, None] - keys + rows  # of a key from the diagonal
    most_sinks = 0
    if possible is None:
        possible = torch.ones_like(some)
        shown = (some | (offset > 0)).all(0)  # keys that every query sees which they do not lie ahead of
        most_sinks = int(shown.long().cumprod(0).sum())
    for sinks in dict.fromkeys((0, most_sinks)):
        inner = some.clone()
        inner[:, :sinks] = False
        if not bool(inner.any()):
            continue
        low, high = int(offset[inner].min()), int(offset[inner].max())
        if low > 0 or high < 0:
            continue
        left = None if low == int(offset[possible].min()) else -low
        right = None if high == int(offset[possible].max()) else high
        more = {"sinks": sinks} if sinks else {}
        window = {} if left is None else {"window": (left, None), **more}
        if right is None:
            yield window
        if high == 0:
            yield {"causal": True, **window}
        if right is not None:
            yield {"window": (left, right), **more}


def _sequences(some: Tensor) -> dict[str, Any] | None:
    """Packed sequences that do not see each other, and the mask inside them; None: there are none."""
    tokens = len(some)
    index = torch.arange(tokens)
    first = torch.where(some, index, tokens).amin(1).flip(0).cummin(0).values.flip(0)  # key, from this row on
    last = torch.where(some, index, -1).amax(1).cummax(0).values  # key, up to this row
    cuts = 1 + torch.nonzero((first[1:] >= index[1:]) & (last[:-1] < index[1:])).flatten()
    if not len(cuts):
        return None
    sequence = torch.searchsorted(cuts, index, right=True)
    same = sequence[:, None] == sequence
    tables = torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])]).int()
    for options in _bands(some, same):
        if bool((visible(1, 1, tokens, tokens, **options)[0, 0] & same == some).all()):
            return {**options, "cu_seqlens_q": tables, "cu_seqlens_k": tables}
    return None


def _blocks(seen: Tensor, size: tuple[int, ...], block: tuple[int, int]) -> dict[str, Any] | None:
    """Blocks that are computed or left out as a whole, under a causal mask or none."""
    items, heads, rows, keys = size
    padded = torch.nn.functional.pad(seen, (0, -keys % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(3, (-1, block[1])).unflatten(2, (-1, block[0])).any(dim=(3, 5))
    given = blocks[0, 0] if blocks.shape[:2] == (1, 1) else blocks.expand(items, heads, *blocks.shape[2:])
    for causal in (False, True):
        if bool(
            (
                visible(seen.shape[0], seen.shape[1], rows, keys, block_mask=given, block=block, causal=causal) == seen
            ).all()
        ):
            return {"block_mask": given, "tile": block} | ({"causal": True} if causal else {})
    return None
