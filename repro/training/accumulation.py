"""Gradient accumulation: the gradient of one large batch from several small ones.

A mean loss must be weighted by what it averages over. Dividing each micro-batch's mean by the
number of micro-batches, as the study notes do, is right only when all micro-batches count the same
number of terms; a ragged last batch or ignored tokens break it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import TypeVar

import torch
from torch import Tensor

from analysis.arguments import methods, whole

Batch = TypeVar("Batch")


def accumulate_gradients(
    micro_batches: Sequence[Batch],
    loss_sum: Callable[[Batch], Tensor],
    count: Callable[[Batch], int],
    scaler: torch.amp.GradScaler | None = None,
) -> Tensor:
    """Add to ``.grad`` the gradient of the mean loss over all micro-batches taken together.

    Args:
        micro_batches: each is passed to the two functions; one graph is alive at a time, so saved
            bytes fall with the micro-batch while gradients stay.
        loss_sum: the **sum** of a micro-batch's loss terms (``reduction="sum"``).
        count: how many terms that sum has (examples, or tokens that are not ignored).
        scaler: scales the loss before the backward, for fp16. Unscaling stays with the caller.

    Returns:
        The mean loss over all terms, detached.

    Raises:
        TypeError: micro-batches that cannot be gone through twice (a generator, a tensor), a count
            that is no whole number, a loss that is no tensor.
        ValueError: no micro-batches, a negative count, no term in any of them, or a loss of several
            elements.

    In exact arithmetic this equals the large batch. In floating point the sums are taken in another
    order; the result is bitwise the same only where every partial sum is exact.
    """
    if isinstance(micro_batches, (str, bytes, Tensor)) or not (
        isinstance(micro_batches, Sized) and isinstance(micro_batches, Iterable)
    ):
        found = f"{reprlib.repr(micro_batches)} is a {type(micro_batches).__name__}"
        raise TypeError(f"micro_batches={found}, not a sequence of micro-batches")
    methods("loss_sum", loss_sum, "__call__")
    methods("count", count, "__call__")
    if scaler is not None:
        methods("scaler", scaler, "scale")
    if not len(micro_batches):
        raise ValueError("no micro-batches to accumulate over")
    counts = [whole("count of a micro-batch", count(batch)) for batch in micro_batches]
    total = sum(counts)
    if min(counts) < 0 or total == 0:
        raise ValueError(f"micro-batches count {counts} loss terms; need at least one in total")
    mean: Tensor | None = None
    for batch, terms in zip(micro_batches, counts, strict=True):
        if terms == 0:
            continue  # nothing to learn from: a mean over it would be 0/0
        loss = loss_sum(batch)
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss_sum gave {loss!r}, a {type(loss).__name__}, not a tensor")
        if loss.numel() != 1:
            raise ValueError(f"loss_sum gave a tensor {tuple(loss.shape)}, not one number")
        loss = loss / total
        (loss if scaler is None else scaler.scale(loss)).backward()
        mean = loss.detach() if mean is None else mean + loss.detach()
        del loss  # free this graph before the next micro-batch builds its own
    assert mean is not None
    return mean
