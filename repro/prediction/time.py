"""The time that a pass is predicted to take, from machine code, or why there is none.

A bound says what no kernel can beat (``analysis.time_model``); this is about how long ours take.
The model (docs/pages/time.md) follows the machine code of the kernels that run on an A100 and on
Hopper; for all else :class:`NoTime` says why nothing is predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from analysis.algorithms import Family, find
from analysis.loop_model import card
from analysis.loop_model.card import H200_SUSTAINED, Clock
from kernels.timing import ampere_time, hopper_packed_time, hopper_time, sm80_on_hopper

if TYPE_CHECKING:
    from analysis.hardware import Gpu
    from repro.prediction import Prediction

WAITS_FOR_MEMORY = "its bytes take longer than its instructions, which is all that the model knows"
"""Why a time is not predicted that would be below its bound."""
FEATURES = ("window", "softcap", "alibi")
"""Of the Hopper kernels; macros, in the order of ``kernels.timing.followed_blocks``."""
FOLLOWED = ((8, 0), (9, 0))
"""Compute capabilities whose SM the model knows."""


@dataclass(frozen=True)
class Time:
    """A predicted time of a pass in seconds, copies included."""

    seconds: float


@dataclass(frozen=True)
class NoTime:
    """Why no time of a pass is predicted."""

    reason: str


def time_of(point: Prediction, clock: Clock) -> Time | NoTime:
    """The predicted time of a pass at a clock."""
    reason = _not_followed(point)
    if reason is not None:
        return NoTime(reason)
    try:
        found = _of_instructions(point, clock)
    except LookupError as error:
        return NoTime(str(error))
    found += point.copy_bytes / (card.HBM_SUSTAINED * point.gpu.hbm_bandwidth_bytes_per_s)
    return NoTime(WAITS_FOR_MEMORY) if found < point.time.seconds else Time(found)


def _not_followed(point: Prediction) -> str | None:
    """Why the model knows nothing of what runs there, or None."""
    gpu, family = point.gpu, find(point.algorithm).family
    if point.theory is not None:
        return "none of our kernels runs it"
    if family not in (Family.FLASH, Family.HOPPER):
        return "machine code is followed of the flash kernels alone"
    if gpu.compute_capability not in FOLLOWED:
        return (
            f"the model knows the SMs of compute capability 8.0 and 9.0, {gpu.name} has "
            f"{gpu.capability_text}"
        )
    if point.shape.dtype == "fp32":
        return "machine code is followed of products in half precision alone"
    return None


def _of_instructions(point: Prediction, clock: Clock) -> float:
    """Seconds of the kernels without copies, as if none of them waited for HBM. LookupError says
    what is not on record."""
    gpu, shape = point.gpu, point.padded
    sms, hbm = gpu.sms, gpu.hbm_bandwidth_bytes_per_s
    assert point.main is not None
    if find(point.algorithm).family is Family.FLASH:
        on = ampere_time if gpu.compute_capability == (8, 0) else sm80_on_hopper
        return on.seconds(
            point.main, point.pass_, shape, lengths=point.lengths, sms=sms, hbm_bytes_per_s=hbm,
            clock=clock,
        )  # fmt: skip
    form = point.hopper_form
    assert form is not None
    refused = hopper_time.refusal(form, "deterministic" in point.algorithm)
    if refused is not None:
        raise LookupError(refused)
    if point.lengths is not None:
        return hopper_packed_time.seconds(
            form, shape, point.lengths, sms=sms, hbm_bytes_per_s=hbm, clock=clock
        )
    macros = dict(point.main.macros)
    features = tuple(name for name in FEATURES if name.upper() in macros)
    if "softcap" in features and shape.dtype == "fp16":
        features += ("fp16",)
    optimistic = find(point.algorithm).optimistic and point.pass_ == "forward"
    return hopper_time.seconds(
        form, shape, sms=sms, hbm_bytes_per_s=hbm, clock=clock, optimistic=optimistic,
        features=features,
    )  # fmt: skip


def clock_of(gpu: Gpu) -> Clock:
    """What an H200 holds under load, elsewhere the highest of the datasheet."""
    if gpu.name.startswith("H200"):
        return H200_SUSTAINED
    return Clock(gpu.boost_clock_hz, "boost clock of the datasheet")
