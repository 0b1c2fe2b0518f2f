"""One pass over sequences of different lengths, packed or padded, executed and counted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from analysis.packed import Lengths
from analysis.traffic import Traffic
from repro.experiments import Context
from repro.instruments.run_pass import run_pass

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("q", "k", "v", "dout")


def run_packed(lengths: Lengths, head_dim: int, pass_: str, *, seed: int, context: Context) -> tuple[Traffic, float]:
    """Bytes of one head, all sequences one after another, and the largest error."""
    import torch

    from kernels.packed import Packed
    from repro.attention.views import array_of

    sequences = _inputs(lengths, head_dim, seed)
    tensors = {name: torch.cat([each[name] for each in sequences], 2) for name in NAMES}
    table = torch.tensor(lengths.tables[0], dtype=torch.int32)
    of_q, of_k = (array_of(name, table) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    ran = run_pass("flash", pass_, tensors, context.host(), packed=Packed(of_q, of_k, lengths))
    starts = accumulate(lengths.queries, initial=0)
    of_each = [
        {name: x[:, :, start : start + rows] for name, x in ran.tensors.items() if name != "lse"}
        for start, rows in zip(starts, lengths.queries, strict=False)
    ]
    return ran.traffic, _error(sequences, of_each)


def run_padded(lengths: Lengths, head_dim: int, pass_: str, *, seed: int, context: Context) -> tuple[Traffic, float]:
    """Bytes of one head, each sequence an item padded to the longest, whose padding a key mask
    takes out, and the largest error of the rows that are no padding."""
    import torch
    from torch.nn.functional import pad

    sequences, rows = _inputs(lengths, head_dim, seed), lengths.longest_q
    tensors = {name: torch.cat([pad(x[name], (0, 0, 0, rows - x[name].shape[2])) for x in sequences]) for name in NAMES}
    real = torch.arange(rows)[None] < torch.tensor(lengths.keys)[:, None]
    mask = real.contiguous().view(torch.uint8)
    ran = run_pass("flash", pass_, tensors, context.host(), key_mask=mask)
    of_each = [
        {name: x[at : at + 1, :, :length] for name, x in ran.tensors.items() if name != "lse"}
        for at, length in enumerate(lengths.queries)
    ]
    return ran.traffic, _error(sequences, of_each)


def _inputs(lengths: Lengths, head_dim: int, seed: int) -> list[dict[str, Tensor]]:
    """N(0, 1) numbers of each sequence, in fp16."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(1, 1, n, head_dim, generator=generator).half() for name in NAMES} for n in lengths.queries
    ]


def _error(sequences: Sequence[dict[str, Tensor]], results: Sequence[dict[str, Tensor]]) -> float:
    from repro.attention.reference import attention_reference, max_error

    off = 0.0
    for given, got in zip(sequences, results, strict=True):
        want = attention_reference(*(given[name] for name in NAMES))
        off = max(off, *(max_error(x, getattr(want, name)) for name, x in got.items()))
    return off
