"""One prediction with everything in it: FLOPs, bytes at both levels, memory and a time bound.

A thin layer over ``analysis`` that puts its answers for one pass of one algorithm side by side; the
command line, the notebook and the examples use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analysis import memory
from analysis.flops import executed_flops, products, useful_flops
from analysis.hardware import TENSOR_FLOPS_PER_CLOCK_PER_SM, Gpu
from analysis.hbm import HbmTraffic, compulsory_hbm, predict_hbm
from analysis.occupancy import occupancy, wave_efficiency
from analysis.shapes import AttentionShape, Tile
from analysis.sm_ceilings import warp_backward_round, warp_forward_round
from analysis.sums.flash_sm90 import COUNTER_BYTES
from analysis.tiles import backward_resources, best_tile, forward_resources, paper_tile
from analysis.time_model import (
    Ceilings,
    TimePrediction,
    Work,
    attention_work,
    datasheet_ceilings,
    predict_time,
)
from analysis.traffic import Traffic, predict_traffic
from kernels import attention, hopper

PASSES = ("forward", "backward")
#: Those with closed forms and a time model (``analysis.symbolic.FORMS``).
CLOSED = ("standard", "flash1-literal", "flash1", "flash", "flash-deterministic")
#: The Hopper kernels whose bytes and bound differ.
HOPPER = (hopper.ALGORITHM, hopper.DETERMINISTIC)
ALGORITHMS = CLOSED + HOPPER
#: Block sizes of the kernels that FlashAttention's authors released in 2022, at head_dim <= 64.
RELEASED_2022 = Tile(16, 256)


@dataclass(frozen=True)
class Prediction:
    """What one pass costs. Bytes and FLOPs are of the whole batch; times are lower bounds.

    ``saved`` lies between forward and backward; ``peak`` is alive at the pass's worst moment.
    ``form`` is the name of the compiled form, for kernels that come in several.
    """

    algorithm: str
    shape: AttentionShape
    tile: Tile
    pass_: str
    gpu: Gpu
    blocks_per_sm: int
    useful_flops: int
    executed_flops: int
    traffic: Traffic
    hbm: HbmTraffic
    compulsory: HbmTraffic
    saved: tuple[memory.LiveTensor, ...]
    peak: tuple[memory.LiveTensor, ...]
    time: TimePrediction
    ceilings: Ceilings
    form: str | None = None

    @property
    def saved_bytes(self) -> int:
        return memory.total(list(self.saved))

    @property
    def peak_bytes(self) -> int:
        return memory.total(list(self.peak))

    @property
    def fits(self) -> bool:
        """Whether the peak is within the GPU's memory, were nothing else on it."""
        return self.peak_bytes <= self.gpu.memory_bytes

    def row(self) -> dict[str, Any]:
        """The numbers as one flat row, units in the names."""
        shape = self.shape
        hbm_bytes = self.hbm.read_bytes + self.hbm.write_bytes
        return {
            "algorithm": self.algorithm,
            "pass": self.pass_,
            "batch": shape.batch,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "seqlen_q": shape.seqlen_q,
            "seqlen_k": shape.seqlen_k,
            "head_dim": shape.head_dim,
            "dtype": shape.dtype,
            "causal": shape.causal,
            "gpu": self.gpu.name,
            "form": self.form,
            "block_m": self.tile.block_m,
            "block_n": self.tile.block_n,
            "blocks_per_sm": self.blocks_per_sm,
            "useful_flops": self.useful_flops,
            "executed_flops": self.executed_flops,
            "sm_read_bytes": self.traffic.read_bytes,
            "sm_write_bytes": self.traffic.write_bytes,
            "hbm_read_bytes": self.hbm.read_bytes,
            "hbm_write_bytes": self.hbm.write_bytes,
            "hbm_compulsory_bytes": self.compulsory.read_bytes + self.compulsory.write_bytes,
            "flops_per_hbm_byte": self.useful_flops / hbm_bytes,
            "saved_bytes": self.saved_bytes,
            "peak_bytes": self.peak_bytes,
            "fits_memory": self.fits,
            **{
                f"{resource.replace(' ', '_').lower()}_s": seconds
                for resource, seconds in self.time.by_resource.items()
            },
            "time_bound_s": self.time.seconds,
            "bound_by": self.time.binding,
        }

    def tensors(self) -> list[dict[str, Any]]:
        """Bytes per kernel, tensor and direction at the SM boundary, and at HBM.

        An atomic addition is one row: at HBM its target is fetched and written back.
        """
        rows = []
        for kernel, entries in self.traffic.kernels.items():
            for (tensor, direction), count in entries.items():
                reads = self.hbm.reads[kernel].get(tensor, 0) if direction != "write" else 0
                writes = self.hbm.writes[kernel].get(tensor, 0) if direction != "read" else 0
                rows.append(
                    {
                        "kernel": kernel,
                        "tensor": tensor,
                        "direction": direction,
                        "sm_bytes": count,
                        "hbm_read_bytes": reads,
                        "hbm_write_bytes": writes,
                    }
                )
        return rows


def predict(
    algorithm: str,
    shape: AttentionShape,
    pass_: str,
    gpu: Gpu,
    *,
    tile: Tile | None = None,
    ceilings: Ceilings | None = None,
) -> Prediction:
    """Everything ``analysis`` says about one pass.

    tile: by default what the algorithm would use on this GPU (``default_tile``).
    ceilings: by default the GPU's datasheet.

    The Hopper kernels are predicted in the form that runs: that of the tile, or by their rule.

    Raises ValueError for an unknown algorithm or pass, a shape the algorithm does not handle, a
    tile that no SM of this GPU can hold, and Hopper kernels on another GPU.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is not one of {', '.join(ALGORITHMS)}")
    if pass_ not in PASSES:
        raise ValueError(f"pass_={pass_!r} is neither 'forward' nor 'backward'")
    if algorithm in HOPPER:
        _check_hopper(algorithm, shape, pass_, gpu)
    form = form_of(algorithm, shape, pass_, tile)
    options = sum_options(form)
    tile = form.tile if form else tile or default_tile(algorithm, shape, pass_, gpu)
    ceilings = ceilings or datasheet_ceilings(gpu)
    traffic = predict_traffic(algorithm, shape, tile, pass_, **options)
    blocks = 1 if form else _blocks_per_sm(algorithm, shape, tile, pass_, gpu)
    hbm = predict_hbm(algorithm, shape, tile, pass_, gpu, blocks, **options)
    if algorithm == "standard":
        works = _standard_work(shape, tile, pass_, gpu, traffic, hbm)
        pairs = shape.batch * shape.heads * shape.seqlen_q * shape.seqlen_k
        executed = products(pass_, recompute=False) * 2 * pairs * shape.head_dim
    else:
        works = attention_work(
            algorithm, shape, tile, pass_, gpu, blocks,
            shared_per_tensor=shared_per_tensor(algorithm, shape, tile, pass_, gpu), **options,
        )  # fmt: skip
        executed = executed_flops(shape, tile, pass_)
    return Prediction(
        algorithm=algorithm,
        shape=shape,
        tile=tile,
        pass_=pass_,
        gpu=gpu,
        blocks_per_sm=blocks,
        useful_flops=useful_flops(shape, pass_, recompute=algorithm != "standard"),
        executed_flops=executed,
        traffic=traffic,
        hbm=hbm,
        compulsory=compulsory_hbm(traffic, shape),
        saved=tuple(_saved(algorithm, shape)),
        peak=tuple(_peak(algorithm, shape, tile, pass_, options)),
        time=predict_time(works, ceilings),
        ceilings=ceilings,
        form=form.name if form else None,
    )


def form_of(
    implementation: str, shape: AttentionShape, pass_: str, tile: Tile | None = None
) -> hopper.ForwardForm | hopper.BackwardForm | None:
    """The compiled form that runs under a name: an algorithm of ``kernels.attention`` or a form of
    ``kernels.hopper.FORMS``. None for kernels that are no Hopper kernels.

    tile: asked for by the caller; by default the Hopper kernels' rule decides.
    """
    if implementation in hopper.FORMS:
        return hopper.FORMS[implementation]
    if implementation not in attention.HOPPER:
        return None
    if pass_ == "forward":
        return hopper.forward_form(shape.head_dim, shape.causal, shape.seqlen_q, tile)
    return hopper.backward_form(shape.head_dim, shape.causal, tile)


def shared_per_tensor(
    algorithm: str, shape: AttentionShape, tile: Tile, pass_: str, gpu: Gpu
) -> float | None:
    """Clocks of shared memory for each clock of the tensor cores in the sm_80 kernels' main loop;
    None for other kernels, and where it is not modelled: fp32, a backward beyond head_dim 128,
    tiles that the kernels do not take."""
    flops = TENSOR_FLOPS_PER_CLOCK_PER_SM.get(gpu.compute_capability)
    if algorithm not in ("flash", "flash-deterministic") or shape.dtype == "fp32" or flops is None:
        return None
    of_warps = warp_forward_round if pass_ == "forward" else warp_backward_round
    try:
        config = attention.configure(pass_, shape.dtype, shape.head_dim, tile=tile)
        found = of_warps(config.head_dim, tile.block_m, tile.block_n, config.num_warps)
    except ValueError:
        return None
    return found.shared_per_tensor(flops)


def sum_options(form: hopper.ForwardForm | hopper.BackwardForm | None) -> dict[str, bool]:
    """The options of ``analysis.traffic.predict_traffic`` that select a form's sum."""
    persistent = isinstance(form, hopper.ForwardForm) and form.persistent
    return {"persistent": True} if persistent else {}


def _check_hopper(algorithm: str, shape: AttentionShape, pass_: str, gpu: Gpu) -> None:
    if gpu.compute_capability != (9, 0):
        major, minor = gpu.compute_capability
        raise ValueError(
            f"{algorithm} needs compute capability 9.0, {gpu.name} has {major}.{minor}"
        )
    keys = shape.seqlen_k if pass_ == "forward" else min(shape.seqlen_k, shape.seqlen_q)
    reason = hopper.why_not(shape.dtype, shape.head_dim, scale=1.0, pass_=pass_, keys=keys)
    if reason is not None:
        raise ValueError(f"{algorithm} does not cover {reason}")


def default_tile(algorithm: str, shape: AttentionShape, pass_: str, gpu: Gpu) -> Tile:
    """The tile an algorithm would use: our rule for the query-outer kernels (``best_tile``), the
    form's for the Hopper kernels, the paper's for its literal form (Alg. 1, line 1), the released
    one for "flash1", 128 × 128 for the products of standard attention."""
    form = form_of(algorithm, shape, pass_)
    if form is not None:
        return form.tile
    if algorithm == "standard":
        return Tile(128, 128)
    if algorithm == "flash1":
        return RELEASED_2022
    if algorithm == "flash1-literal":
        return paper_tile(shape.head_dim, gpu.on_chip_elements)
    return best_tile(shape, gpu, pass_)


def _blocks_per_sm(algorithm: str, shape: AttentionShape, tile: Tile, pass_: str, gpu: Gpu) -> int:
    """Blocks of the main kernel an SM holds, from the estimate of ``analysis.tiles``.

    FlashAttention 2022's one block per head and the plain products are taken as one per SM. The
    Hopper kernels do not come here: their warpgroups share out all registers of an SM.
    """
    if not algorithm.startswith("flash") or algorithm.startswith("flash1"):
        return 1
    estimate = forward_resources if pass_ == "forward" else backward_resources
    need = estimate(tile, shape.head_dim, shape.itemsize)
    shown = f"tile {tile.block_m}x{tile.block_n} at head_dim={shape.head_dim}, {shape.dtype}"
    if need.registers_per_thread > 255 or need.threads > 1024:
        raise ValueError(
            f"{shown} needs about {need.registers_per_thread} registers a thread (limit 255) and "
            f"{need.threads} threads (limit 1024)"
        )
    fit = occupancy(
        gpu,
        threads=need.threads,
        registers_per_thread=need.registers_per_thread,
        shared_bytes=need.shared_bytes,
    )
    if fit.blocks_per_sm < 1:
        raise ValueError(
            f"{shown} needs {need.shared_bytes} bytes of shared memory, a block of {gpu.name} has "
            f"{gpu.shared_bytes_per_block}"
            if need.shared_bytes > gpu.shared_bytes_per_block
            else f"{shown} does not fit an SM of {gpu.name}: {fit.limited_by}"
        )
    return fit.blocks_per_sm


def _standard_work(
    shape: AttentionShape, tile: Tile, pass_: str, gpu: Gpu, traffic: Traffic, hbm: HbmTraffic
) -> dict[str, Work]:
    """Our unfused kernels: those that read or write an operand of head_dim columns are products."""
    heads = shape.batch * shape.heads
    pairs = heads * shape.seqlen_q * shape.seqlen_k
    query_tiles = -(-shape.seqlen_q // tile.block_m)
    key_tiles = -(-shape.seqlen_k // tile.block_n)
    works = {}
    for kernel, entries in traffic.kernels.items():
        is_product = any(tensor not in ("s", "p", "dp", "ds") for tensor, _ in entries)
        writes = {tensor for tensor, direction in entries if direction == "write"}
        if writes & {"s", "dp"}:
            blocks = query_tiles * key_tiles
        elif writes & {"dk", "dv"}:
            blocks = key_tiles
        else:
            blocks = query_tiles
        works[kernel] = Work(
            flops=2 * pairs * shape.head_dim if is_product else 0,
            exponentials=pairs if kernel == "standard_softmax" else 0,
            sm_bytes=sum(entries.values()),
            hbm_bytes=sum(hbm.reads[kernel].values()) + sum(hbm.writes[kernel].values()),
            efficiency=wave_efficiency(gpu, heads * blocks, 1) if is_product else 1.0,
        )
    return works


def _saved(algorithm: str, shape: AttentionShape) -> list[memory.LiveTensor]:
    if algorithm == "standard":
        return memory.saved_for_backward("standard", shape)
    statistics = "m, l" if algorithm.startswith("flash1") else "lse"
    return memory.saved_for_backward("flash", shape, statistics=statistics)


def _peak(
    algorithm: str, shape: AttentionShape, tile: Tile, pass_: str, options: Mapping[str, bool]
) -> list[memory.LiveTensor]:
    if pass_ == "forward":
        if options.get("persistent"):
            return [*_saved(algorithm, shape), memory.LiveTensor("taken", COUNTER_BYTES)]
        if algorithm == "standard":
            return memory.saved_for_backward("standard-with-scores", shape)
        return _saved(algorithm, shape)
    if algorithm == "standard":
        return memory.standard_backward_peak(shape)
    if algorithm.startswith("flash1"):
        return memory.flash1_backward_peak(shape)
    if algorithm in HOPPER:
        deterministic = algorithm == hopper.DETERMINISTIC
        return memory.flash_sm90_backward_peak(shape, tile, deterministic=deterministic)
    tiles = -(-shape.seqlen_k // tile.block_n) if algorithm == "flash-deterministic" else 0
    return memory.flash_backward_peak(shape, deterministic_key_tiles=tiles)


__all__ = ["PASSES", "Prediction", "default_tile", "form_of", "predict", "sum_options"]
