"""One pass over sequences of different lengths, packed or padded, executed and counted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from analysis.packed import Lengths
from analysis.traffic import Traffic
from repro.experiments import Context

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("q", "k", "v", "dout")


def run_packed(
    lengths: Lengths, head_dim: int, pass_: str, *, seed: int, context: Context
) -> tuple[Traffic, float]:
    """Bytes of one head, all sequences one after another, and the largest error."""
    import torch

    from kernels.packed import Packed
    from repro.attention.views import array_of

    sequences = _inputs(lengths, head_dim, seed)
    tensors = {name: torch.cat([each[name] for each in sequences], 2) for name in NAMES}
    table = torch.tensor(lengths.tables[0], dtype=torch.int32)
    of_q, of_k = (array_of(name, table) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    results, counted = _run(tensors, pass_, context, packed=Packed(of_q, of_k, lengths))
    starts = accumulate(lengths.queries, initial=0)
    of_each = [
        {name: x[:, :, start : start + rows] for name, x in results.items()}
        for start, rows in zip(starts, lengths.queries, strict=False)
    ]
    return counted, _error(sequences, of_each)


def run_padded(
    lengths: Lengths, head_dim: int, pass_: str, *, seed: int, context: Context
) -> tuple[Traffic, float]:
    """Bytes of one head, each sequence an item padded to the longest, whose padding a key mask
    takes out, and the largest error of the rows that are no padding."""
    import torch
    from torch.nn.functional import pad

    from repro.attention.views import array_of

    sequences, rows = _inputs(lengths, head_dim, seed), lengths.longest_q
    tensors = {
        name: torch.cat([pad(x[name], (0, 0, 0, rows - x[name].shape[2])) for x in sequences])
        for name in NAMES
    }
    real = torch.arange(rows)[None] < torch.tensor(lengths.keys)[:, None]
    mask = array_of("key_mask", real.contiguous().view(torch.uint8))
    results, counted = _run(tensors, pass_, context, key_mask=mask)
    of_each = [
        {name: x[at : at + 1, :, :length] for name, x in results.items()}
        for at, length in enumerate(lengths.queries)
    ]
    return counted, _error(sequences, of_each)


def _inputs(lengths: Lengths, head_dim: int, seed: int) -> list[dict[str, Tensor]]:
    """N(0, 1) numbers of each sequence, in fp16."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(1, 1, n, head_dim, generator=generator).half() for name in NAMES}
        for n in lengths.queries
    ]


def _run(
    tensors: dict[str, Tensor], pass_: str, context: Context, **options: Any
) -> tuple[dict[str, Tensor], Traffic]:
    """Results of the pass, and what it alone moves."""
    import torch

    from kernels import attention
    from repro.attention.views import array_of

    q = tensors["q"]
    results = {name: torch.empty_like(q) for name in ("out", "dq", "dk", "dv")}
    at = {name: array_of(name, x) for name, x in (tensors | results).items()}
    stats = {"lse": array_of("lse", torch.empty(q.shape[:3]))}
    options["scale"] = q.shape[3] ** -0.5
    backend = context.host()
    names: tuple[str, ...] = ("out",)
    attention.forward(backend, "flash", at["q"], at["k"], at["v"], at["out"], stats, **options)
    if pass_ == "backward":
        names = ("dq", "dk", "dv")
        backend.reset()
        attention.backward(
            backend, "flash", at["q"], at["k"], at["v"], at["out"], at["dout"], stats,
            at["dq"], at["dk"], at["dv"], **options,
        )  # fmt: skip
    counted = Traffic({kernel: dict(entries) for kernel, entries in backend.traffic.items()})
    return {name: results[name] for name in names}, counted


def _error(sequences: Sequence[dict[str, Tensor]], results: Sequence[dict[str, Tensor]]) -> float:
    from repro.attention.reference import attention_reference, max_error

    off = 0.0
    for given, got in zip(sequences, results, strict=True):
        want = attention_reference(*(given[name] for name in NAMES))
        off = max(off, *(max_error(x, getattr(want, name)) for name, x in got.items()))
    return off
