"""Time as a roofline over ceilings: tensor cores, FMA units, exponentials, SM boundary, HBM.

A kernel cannot be faster than the slowest of: its FLOPs at the rate of the tensor cores, or of the
FMA units where its products are those of fp32 or of FlashAttention 2022's kernels; its exponentials
at the special-function units' rate, its SM-boundary bytes at L2's rate, its HBM bytes at HBM's
rate. The prediction is that maximum, as if all of them overlapped perfectly, so it is a lower
bound: how far a measured time stands above it says what is left to gain, and which ceiling binds
says where. Kernels of one pass run one after another and their times add. Blocks that do the same
leave SMs idle in their last wave; under a mask blocks differ, and only SMs without a block are sure
to idle (:func:`~analysis.occupancy.wave_efficiency`).

The flash kernels of steps 3 and 4 have one more, shared memory at the tensor cores' clock: what one
iteration of their loops moves through it is known (``analysis.sm_ceilings``).

The ceilings should be those measured on the card in the same run; datasheet peaks are a fallback
for cards that are not at hand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from analysis import algorithms
from analysis.algorithms import Family
from analysis.flops import executed_exponentials, executed_flops
from analysis.hardware import Gpu
from analysis.hbm import HbmTraffic, main_kernel, predict_hbm
from analysis.occupancy import wave_efficiency
from analysis.shapes import AttentionShape, Tile
from analysis.sm_ceilings import backward_round, forward_round
from analysis.standard_passes import KernelPasses
from analysis.traffic import Traffic, predict_traffic

TENSOR_CORES, FMA_UNITS = "tensor cores", "FMA units"
RESOURCES = (TENSOR_CORES, FMA_UNITS, "exponentials", "SM boundary", "HBM")
SHARED_MEMORY = "shared memory"
"""One more, of kernels whose :class:`Work` says how much they ask of it."""


@dataclass(frozen=True)
class Ceilings:
    """Rates per second, and where they are from. None: unknown, left out of the maximum."""

    tensor_flops: float
    exp_per_s: float
    sm_boundary_bytes_per_s: float | None
    hbm_bytes_per_s: float
    origin: str
    fma_flops: float | None = None
    """Of fp32 units, outside tensor cores."""

    def __post_init__(self) -> None:
        for name in ("tensor_flops", "exp_per_s", "sm_boundary_bytes_per_s", "hbm_bytes_per_s", "fma_flops"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ValueError(f"{name}={rate} is not a positive rate")


def datasheet_ceilings(gpu: Gpu) -> Ceilings:
    """Peaks as printed; those of one clock are ``analysis.clocks.ceilings_of``."""
    return Ceilings(
        gpu.fp16_tensor_flops,
        gpu.exp_per_s,
        gpu.l2_bandwidth_bytes_per_s,
        gpu.hbm_bandwidth_bytes_per_s,
        origin=f"datasheet of {gpu.name}",
        fma_flops=gpu.fp32_flops,
    )


@dataclass(frozen=True)
class Work:
    """What one kernel does.

    efficiency: share of the SMs that its launch keeps busy, (0, 1].
    shared_per_tensor: clocks of shared memory for each clock of the tensor cores; 0 is unknown.
    fma: whether the FLOPs are those of FMA units, not of tensor cores.
    """

    flops: float = 0
    exponentials: float = 0
    sm_bytes: float = 0
    hbm_bytes: float = 0
    efficiency: float = 1.0
    shared_per_tensor: float = 0.0
    fma: bool = False


@dataclass(frozen=True)
class TimePrediction:
    """Seconds each ceiling alone would take, summed over kernels, and their roofline.

    Ceilings whose rate is unknown are left out.
    """

    seconds: float
    """Sum over kernels of each kernel's slowest ceiling."""
    by_resource: Mapping[str, float]
    """Sum over kernels of the time at each ceiling."""
    bound_by: Mapping[str, str]
    """Kernel -> the ceiling that binds it."""
    bytes_seconds: float = 0.0
    """Sum over kernels of the slower of SM boundary and HBM: what their bytes alone take."""

    @property
    def binding(self) -> str:
        """The ceiling with most time over all kernels."""
        return max(self.by_resource, key=lambda resource: self.by_resource[resource])


def predict_time(kernels: Mapping[str, Work], ceilings: Ceilings, *, without: Collection[str] = ()) -> TimePrediction:
    """Roofline of kernels that run one after another.

    Idle SMs slow what SMs do (tensor cores, exponentials, their boundary), not HBM.

    without: ceilings to leave out, to see what they do to the bound.
    """
    rates = {
        TENSOR_CORES: ceilings.tensor_flops,
        FMA_UNITS: ceilings.fma_flops,
        "exponentials": ceilings.exp_per_s,
        "SM boundary": ceilings.sm_boundary_bytes_per_s,
        "HBM": ceilings.hbm_bytes_per_s,
    }
    known = {name: rate for name, rate in rates.items() if rate is not None}
    total = bytes_seconds = 0.0
    by_resource = dict.fromkeys(known, 0.0)
    bound_by = {}
    for name, work in kernels.items():
        if not 0 < work.efficiency <= 1:
            raise ValueError(f"{name}: efficiency={work.efficiency} is outside (0, 1]")
        amounts = {
            TENSOR_CORES: 0.0 if work.fma else work.flops,
            FMA_UNITS: work.flops if work.fma else 0.0,
            "exponentials": work.exponentials,
            "SM boundary": work.sm_bytes,
            "HBM": work.hbm_bytes,
        }
        seconds = {
            resource: amounts[resource] / rate / (1 if resource == "HBM" else work.efficiency)
            for resource, rate in known.items()
        }
        if work.shared_per_tensor:
            seconds[SHARED_MEMORY] = seconds[TENSOR_CORES] * work.shared_per_tensor
        for resource in without:
            seconds.pop(resource, None)
        bound_by[name] = max(seconds, key=lambda resource: seconds[resource])
        total += seconds[bound_by[name]]
        bytes_seconds += max(seconds.get("SM boundary", 0.0), seconds.get("HBM", 0.0))
        for resource, value in seconds.items():
            by_resource[resource] = by_resource.get(resource, 0.0) + value
    return TimePrediction(total, MappingProxyType(by_resource), MappingProxyType(bound_by), bytes_seconds)


def on_fma_units(algorithm: str, dtype: str) -> bool:
    """Whether an algorithm's products are fused multiply-adds of fp32 units: in fp32, which no
    kernel here gives to tensor cores, and in those of FlashAttention 2022."""
    return dtype == "fp32" or algorithms.find(algorithm).family is Family.FLASH1


def attention_work(
    algorithm: str,
    shape: AttentionShape,
    tile: Tile,
    pass_: str,
    gpu: Gpu,
    blocks_per_sm: int = 1,
    *,
    shared_per_tensor: float | None = None,
    traffic: Traffic | None = None,
    hbm: HbmTraffic | None = None,
    specials: int = 0,
    fma: bool | None = None,
    **options: Any,
) -> dict[str, Work]:
    """Work of each kernel of a tiled algorithm ("flash…" or "flash1…").

    shared_per_tensor: of the main kernel, where its caller knows how its warps share a tile; that
        of the Hopper kernels is known here.
    traffic, hbm: bytes, where the caller has them (other kernels of the pass included).
    specials: of :func:`~analysis.flops.executed_exponentials`.
    fma: whether products run on FMA units; None: as in the kernels here (:func:`on_fma_units`).
    options: of :func:`~analysis.traffic.predict_traffic`.
    """
    if algorithm == "standard":
        raise ValueError("standard attention has its own kernels: use standard_work")
    if traffic is None:
        traffic = predict_traffic(algorithm, shape, tile, pass_, **options)
    if hbm is None:
        hbm = predict_hbm(algorithm, shape, tile, pass_, gpu, blocks_per_sm, **options)
    main = main_kernel(traffic)
    family = algorithms.find(algorithm).family
    if family is Family.FLASH1:
        blocks = shape.batch * shape.heads
    elif pass_ == "forward":
        blocks = shape.batch * shape.heads * -(-shape.seqlen_q // tile.block_m)
    else:
        blocks = shape.batch * shape.kv_heads * -(-shape.seqlen_k // tile.block_n)
    alike = blocks_alike(algorithm, shape) and options.get("block_mask") is None
    shared = shared_per_tensor or _hopper_shared_per_tensor(algorithm, shape, tile, pass_)
    works = {}
    for kernel, entries in traffic.kernels.items():
        bytes_ = sum(entries.values())
        hbm_bytes = sum(hbm.reads[kernel].values()) + sum(hbm.writes[kernel].values())
        if kernel == main:
            works[kernel] = Work(
                executed_flops(shape, tile, pass_),
                executed_exponentials(shape, tile, pass_, specials),
                bytes_,
                hbm_bytes,
                wave_efficiency(gpu, blocks, alike=alike),
                shared,
                on_fma_units(algorithm, shape.dtype) if fma is None else fma,
            )
        else:
            works[kernel] = Work(sm_bytes=bytes_, hbm_bytes=hbm_bytes)
    return works


def blocks_alike(algorithm: str, shape: AttentionShape | None = None) -> bool:
    """Whether the blocks of a launch all do the same, but for the rows of a last tile.

    They do unless the shape's masks take pairs out; FlashAttention 2022, with a head a block, and
    standard attention, which computes all pairs, do under any mask (shape None).
    """
    if algorithms.find(algorithm).family in (Family.FLASH1, Family.STANDARD):
        return True
    return shape is not None and shape.visible_pairs == shape.seqlen_q * shape.seqlen_k


def _hopper_shared_per_tensor(algorithm: str, shape: AttentionShape, tile: Tile, pass_: str) -> float:
    """Clocks of shared memory for each clock of the tensor cores; 0 for all but the Hopper kernels.

    Raises ValueError for a tile that these kernels cannot have.
    """
    if algorithms.find(algorithm).family is not Family.HOPPER:
        return 0.0
    if pass_ == "forward":
        return forward_round(shape.head_dim, tile.block_m, tile.block_n).shared_per_tensor()
    return backward_round(shape.head_dim, tile.block_m).shared_per_tensor()


def standard_work(
    kernels: tuple[KernelPasses, ...], shape: AttentionShape, pass_: str | None = None
) -> dict[str, Work]:
    """Work of an unfused implementation given by its list of kernels.

    Each kernel's bytes are its passes, at both levels (N × N matrices re-use nothing); a product
    does 2·Nq·Nk·d FLOPs, softmax one exponential an element. Nothing is skipped under a mask.
    """
    pairs = shape.batch * shape.heads * shape.seqlen_q * shape.seqlen_k
    works: dict[str, Work] = {}
    for kernel in kernels:
        if pass_ is not None and kernel.pass_ != pass_:
            continue
        moved = (kernel.reads + kernel.writes).bytes(shape)
        touches = kernel.reads + kernel.writes
        product = touches.operands > 0 and touches.scores > 0
        works[kernel.kernel] = Work(
            flops=2 * pairs * shape.head_dim if product else 0,
            exponentials=pairs if kernel.kernel == "softmax" else 0,
            sm_bytes=moved,
            hbm_bytes=moved,
            fma=shape.dtype == "fp32",
        )
    return works
