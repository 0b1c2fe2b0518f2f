"""The time that a pass is predicted to take, from machine code, or why there is none.

A bound says what no kernel can beat (``analysis.time_model``); this is about how long ours take.
The model (docs/pages/time.md) follows the machine code of the kernels that run on an A100 and on
Hopper; for all else :class:`NoTime` says why nothing is predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from analysis.algorithms import Family, find
from analysis.clocks import Clocks, clocks_of
from analysis.features import features_of
from analysis.hardware import find_gpu
from analysis.loop_model import card
from analysis.loop_model.card import Clock
from kernels import hopper
from kernels.timing import hopper_packed_time, hopper_time, sm80_time
from repro.measuring.records import load

if TYPE_CHECKING:
    from repro.prediction import Prediction

WAITS_FOR_MEMORY = "its bytes take longer than its instructions, which is all that the model knows"
"""Why a time is not predicted that would be below its bound."""
FOLLOWED = ((8, 0), (9, 0))
"""Compute capabilities whose SM the model knows."""


ERRORS = {(8, 0): 0.10, (9, 0): 0.14}
"""Capability -> how far the model is off on kernels of others: nine of ten predictions are within
this share of the time on record (``repro.timing.ampere_validation``, ``repro.timing.peers``)."""
_TIMED = ("gpu-throughput", "gpu-features", "ampere-time")
"""Experiments that time our kernels on a card."""


@dataclass(frozen=True)
class Time:
    """A predicted time of a pass in seconds, copies included.

    seconds, slowest: at the highest and at the lowest of ``clocks``. bound: no time is shorter.
    error: nine of ten times are within this share of the true one. timed: whether a card has run
    the kernel.
    """

    seconds: float
    slowest: float
    bound: float
    clocks: Clocks
    error: float
    timed: bool

    @property
    def low(self) -> float:
        """The shortest time to be expected."""
        return max(self.bound, self.seconds / (1 + self.error))

    @property
    def high(self) -> float:
        """The longest time to be expected."""
        return self.slowest / (1 - self.error)


@dataclass(frozen=True)
class NoTime:
    """Why no time of a pass is predicted."""

    reason: str


def time_of(point: Prediction) -> Time | NoTime:
    """The predicted time of a pass, or why there is none."""
    reason = _not_followed(point)
    if reason is not None:
        return NoTime(reason)
    clocks = clocks_of(point.gpu)
    try:
        fast, slow = (_seconds(point, hz) for hz in (clocks.high_hz, clocks.low_hz))
    except LookupError as error:
        return NoTime(str(error))
    if fast < point.time.bytes_seconds:
        return NoTime(WAITS_FOR_MEMORY)
    # Measured ceilings are what some kernel reached, which ours may beat.
    bound = point.time.seconds if point.time.seconds <= fast else 0.0
    capability = point.gpu.compute_capability
    assert capability is not None
    timed = point.gpu.name in timed_on(point.algorithm, point.pass_)
    return Time(fast, slow, bound, clocks, ERRORS[capability], timed)


@cache
def timed_on(algorithm: str, pass_: str) -> frozenset[str]:
    """Names of the cards that are on record with a time of a pass of ours."""
    rows = load(_TIMED)
    cards = (
        find_gpu(str(row.device))
        for row in rows
        if row.source == "measured" and (row.implementation, row.pass_) == (algorithm, pass_) and row.value is not None
    )
    return frozenset(card.name for card in cards if card is not None)


def _seconds(point: Prediction, hz: float) -> float:
    """Kernels and copies at a clock, as if no kernel waited for HBM.

    LookupError says what is not on record.
    """
    copied = point.copy_bytes / (card.HBM_SUSTAINED * point.gpu.hbm_bandwidth_bytes_per_s)
    return _of_instructions(point, Clock(hz, "")) + copied


def _not_followed(point: Prediction) -> str | None:
    """Why the model knows nothing of what runs there, or None."""
    gpu, family = point.gpu, find(point.algorithm).family
    if point.theory is not None:
        return "none of our kernels runs it"
    if family not in (Family.FLASH, Family.HOPPER):
        return "machine code is followed of the flash kernels alone"
    if gpu.compute_capability not in FOLLOWED:
        return f"the model knows the SMs of compute capability 8.0 and 9.0, {gpu.name} has {gpu.capability_text}"
    if point.shape.dtype == "fp32":
        return "machine code is followed of products in half precision alone"
    return None


def _of_instructions(point: Prediction, clock: Clock) -> float:
    """Seconds of the kernels without copies."""
    gpu, shape = point.gpu, point.padded
    sms, hbm = gpu.sms, gpu.hbm_bandwidth_bytes_per_s
    assert point.main is not None
    if find(point.algorithm).family is Family.FLASH:
        target = sm80_time.target_of(gpu)
        assert target is not None
        return sm80_time.seconds(
            point.main,
            point.pass_,
            shape,
            target,
            lengths=point.problem.lengths,
            sms=sms,
            hbm_bytes_per_s=hbm,
            clock=clock,
        )
    form = point.main.config
    refused = hopper_time.refusal(form, "deterministic" in point.algorithm)
    if refused is not None:
        raise LookupError(refused)
    lengths, used = point.problem.lengths, features_of(point.problem)
    if lengths is not None:
        return hopper_packed_time.seconds(form, shape, lengths, sms=sms, hbm_bytes_per_s=hbm, clock=clock)
    features: tuple[str, ...] = tuple(name for name in hopper.MASKS_AND_SCORES if name in used)
    if "softcap" in features and shape.dtype == "fp16":
        features += ("fp16",)
    optimistic = find(point.algorithm).optimistic and point.pass_ == "forward"
    return hopper_time.seconds(
        form, shape, sms=sms, hbm_bytes_per_s=hbm, clock=clock, optimistic=optimistic, features=features
    )
