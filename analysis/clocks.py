"""At what clock a card's rates hold: one rule for all cards.

What its SMs hold under load, where somebody published it (``analysis/gpus.toml``). Elsewhere a
range: from the lowest share of the boost clock that any card of the package is known to fall to, up
to the boost clock. A bound of time and a predicted time are of one clock, the highest of the range.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.gpu import EXP_PER_CLOCK_PER_SM, Gpu
from analysis.hardware import GPUS
from analysis.time_model import Ceilings


@dataclass(frozen=True)
class Clocks:
    """Lowest and highest clock of the SMs under load, and how they are known."""

    low_hz: float
    high_hz: float
    origin: str

    def __str__(self) -> str:
        ends = dict.fromkeys(f"{hz / 1e9:.2f}" for hz in (self.low_hz, self.high_hz))
        return f"{' to '.join(ends)} GHz"


def clocks_of(gpu: Gpu) -> Clocks:
    """What a card holds under load."""
    if gpu.load_clocks_hz is not None:
        return Clocks(*gpu.load_clocks_hz, f"under load: {gpu.sources['load_clocks_hz']}")
    share, name = min(
        (known.load_clocks_hz[0] / known.boost_clock_hz, known.name)
        for known in GPUS.values()
        if known.load_clocks_hz is not None
    )
    return Clocks(
        share * gpu.boost_clock_hz,
        gpu.boost_clock_hz,
        f"under load not published: from {share:.0%} of the boost clock, the least known of "
        f"any card ({name}), to all of it",
    )


def ceilings_of(gpu: Gpu) -> Ceilings:
    """Rates of a card's units at the highest clock of :func:`clocks_of`; HBM's of the datasheet."""
    clocks = clocks_of(gpu)
    share = clocks.high_hz / gpu.boost_clock_hz
    l2 = gpu.l2_bandwidth_bytes_per_s

    def rate(per_clock: int | None, printed: float) -> float:
        return printed * share if per_clock is None else per_clock * gpu.sms * clocks.high_hz

    return Ceilings(
        rate(gpu.tensor_flops_per_clock, gpu.fp16_tensor_flops),
        EXP_PER_CLOCK_PER_SM * gpu.sms * clocks.high_hz,
        None if l2 is None else l2 * share,
        gpu.hbm_bandwidth_bytes_per_s,
        origin=f"datasheet of {gpu.name}, units at {clocks.high_hz / 1e9:.2f} GHz",
        fma_flops=rate(gpu.fma_flops_per_clock, gpu.fp32_flops),
    )
