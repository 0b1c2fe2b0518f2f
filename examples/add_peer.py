"""A new peer: a callable, timed in turn with the others, with a record per result.

Here on the CPU, with a clock in the place of device events. On a GPU ``TorchDevice`` takes its
place, and the peer goes into ``repro/instruments/gpu_work.py`` so that ``make measure`` times it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from repro.experiments import record
from repro.instruments.timing import Event, time_interleaved
from repro.measuring import machine, records
from repro.measuring.records import Scalar


@dataclass
class Moment:
    """An event of a device that works at once."""

    seconds: float = field(default=0.0)

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_ms(self, end: Moment) -> float:
        return (end.seconds - self.seconds) * 1e3


class Cpu:
    """The device protocol of ``repro.instruments.timing`` for this processor."""

    def __init__(self) -> None:
        self.buffer = torch.empty(64 << 20, dtype=torch.uint8)  # larger than most last-level caches

    def event(self) -> Event:
        return Moment()

    def flush_cache(self) -> None:
        self.buffer.zero_()

    def synchronize(self) -> None:
        """Nothing is ever pending."""


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Standard attention, (B, H, N, D)."""
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v


def main(path: Path = Path("my-records/example-peers.jsonl"), seqlen: int = 512) -> None:
    """Time both in turn, write records, and print them. ``compare`` reads the folder."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, seqlen, 64) for _ in range(3))
    peers: dict[str, Callable[..., torch.Tensor]] = {
        "standard-eager": written_out,
        "torch-sdpa": scaled_dot_product_attention,
    }
    torch.testing.assert_close(*(peer(q, k, v) for peer in peers.values()))
    timings = time_interleaved({name: partial(peer, q, k, v) for name, peer in peers.items()}, Cpu(), budget_ms=50.0)
    shape: dict[str, Scalar] = {
        "pass": "forward",
        "batch": 1,
        "heads": 4,
        "kv_heads": 4,
        "seqlen_q": seqlen,
        "seqlen_k": seqlen,
        "head_dim": 64,
        "dtype": "fp32",
        "causal": False,
    }
    rows = [
        record(
            shape | machine.provenance("cpu"),
            experiment=path.stem,
            implementation=name,
            source="measured",
            metric="time_ms",
            unit="ms",
            value=t.median_ms,
            spread_min=t.min_ms,
            spread_max=t.max_ms,
            spread_n=t.repeats,
            tool="perf_counter, median, cache flushed",
        )
        for name, t in timings.items()
    ]
    records.append(path, rows)
    for row in rows:
        print(
            f"{row.implementation:16} {row.value:.3f} ms ({row.spread_min:.3f} to "
            f"{row.spread_max:.3f}, {row.spread_n} times)"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1])) if sys.argv[1:] else main()
