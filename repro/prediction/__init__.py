"""One prediction with everything in it: FLOPs, bytes at both levels, memory and a time bound.

A thin layer that puts the answers of ``analysis`` for one pass of one algorithm side by side; the
command line, the notebook and the examples use it. Which kernel runs, with which tile, is not
decided here: the kernels' own drivers say it (``kernels.launches``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from analysis import memory
from analysis.algorithms import find
from analysis.clocks import ceilings_of, clocks_of
from analysis.flops import BACKWARD_PRODUCTS, DQ_PRODUCTS, KV_PRODUCTS, pairs_in_blocks, useful_flops
from analysis.hardware import Gpu, gpu_named
from analysis.hbm import HbmTraffic, compulsory_hbm, compulsory_packed, predict_hbm
from analysis.loop_model.card import Clock
from analysis.packed import summed
from analysis.problem import GRADIENTS, Problem
from analysis.shapes import AttentionShape, Tile
from analysis.sums.copies import KERNEL as COPY
from analysis.sums.copies import copies
from analysis.time_model import RESOURCES, SHARED_MEMORY, Ceilings, TimePrediction, predict_time
from analysis.traffic import Traffic, predict_traffic
from kernels import attention
from kernels.launch import Kernel
from kernels.launches import AUTO
from repro.prediction.packed import packed_works
from repro.prediction.runs import (
    Run,
    find_run,
    form_of,
    peak_tensors,
    saved_tensors,
    share_of_sms,
    shared_per_tensor,
    sum_options,
    works_of,
)
from repro.prediction.time import NoTime, Time, time_of

PASSES = ("forward", "backward")
#: Those with closed forms and a time model (``analysis.symbolic.FORMS``).
CLOSED = ("standard", "flash1-literal", "flash1-skip-first", "flash1-released", "flash", "flash-deterministic")
ALGORITHMS = attention.ALGORITHMS


@dataclass(frozen=True)
class Prediction:
    """What one pass costs. Bytes and FLOPs are of the whole batch; times are lower bounds.

    problem: as asked for; of packed sequences ``blocks`` are those with rows.
    reason: why this algorithm, where the choice was left to dispatch.
    theory: why none of our kernels runs this, or None. The numbers are then those of the formulas.
    warning: what the numbers leave out (registers that the compiler will spill), or None.
    tile, dq_tile: of the kernel that walks the tile loop, and of the second pass of "flash-split".
    columns: of a tile; the kernels multiply all of them, those beyond head_dim are zeros.
    blocks: thread blocks of the main kernel (a persistent one: the query tiles its blocks share).
    busy: share of the SMs' time that these keep busy at best, (0, 1]; of blocks that differ, under
        a mask or of sequences of several lengths, the share of SMs that get one.
    traffic: the copies that padding takes are in it as kernel "copy".
    saved: lies between forward and backward, nothing where there is no backward; ``peak`` is alive
        at the pass's worst moment.
    form: the name of the compiled form, for kernels that come in several.
    main: the main kernel as it is compiled, or None for theory.
    """

    algorithm: str
    reason: str | None
    theory: str | None
    warning: str | None
    problem: Problem
    tile: Tile
    dq_tile: Tile | None
    columns: int
    pass_: str
    gpu: Gpu
    blocks: int
    busy: float
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
    main: Kernel | None = None

    @property
    def shape(self) -> AttentionShape:
        """As asked for."""
        return self.problem.shape

    @property
    def padded(self) -> AttentionShape:
        """What the kernels see: head_dim a multiple of 8."""
        return self.shape.padded

    @property
    def copy_bytes(self) -> int:
        """Bytes that copies around the kernels read and write."""
        return sum(self.traffic.kernels.get(COPY, {}).values())

    @property
    def idle_sms(self) -> int:
        """SMs that get no block of the main kernel at all."""
        return max(0, self.gpu.sms - self.blocks)

    def why(self) -> str:
        """One sentence: what binds, by how much, and which SMs have nothing to do."""
        first, *rest = sorted(self.time.by_resource.items(), key=lambda item: -item[1])
        text = f"bound by {first[0]}"
        others = [item for item in rest if item[1]]
        if others:
            text += f": {first[1] / others[0][1]:.2g} times the time of {others[0][0]}, the next"
        blocks = f"{self.blocks} blocks" if self.blocks > 1 else "one block"
        if self.idle_sms:
            text += f"; {blocks} leave {self.idle_sms} of {self.gpu.sms} SMs idle"
        elif self.busy < 0.95:
            text += f"; {blocks} keep the SMs busy {self.busy:.0%} of the time (the last wave)"
        return text

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

    @property
    def clock(self) -> Clock:
        """The highest clock under load: of the bound, and of :attr:`predicted_s`."""
        clocks = clocks_of(self.gpu)
        return Clock(clocks.high_hz, clocks.origin)

    @cached_property
    def predicted(self) -> Time | NoTime:
        """The time that follows from the kernels' machine code, not a bound, or why there is none.

        The optimistic softmax: on data of which its repair has nothing to do again.
        """
        return time_of(self)

    @property
    def predicted_s(self) -> float | None:
        """Seconds of :attr:`predicted` at the highest clock, None where there are none."""
        return self.predicted.seconds if isinstance(self.predicted, Time) else None

    def row(self) -> dict[str, Any]:
        """The numbers as one flat row, units in the names."""
        predicted = self.predicted_s
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
            "padded_head_dim": self.padded.head_dim,
            "dtype": shape.dtype,
            "kv_dtype": "e4m3" if shape.fp8 else shape.dtype,
            "scale_block": shape.scale_block,
            "causal": shape.causal,
            "window_left": shape.window[0],
            "window_right": shape.window[1],
            "sinks": shape.sinks,
            "sequences": None if self.problem.lengths is None else self.problem.lengths.sequences,
            "order": self.problem.order,
            "gpu": self.gpu.name,
            "theory": self.theory,
            "warning": self.warning,
            "form": self.form,
            "block_m": self.tile.block_m,
            "block_n": self.tile.block_n,
            "blocks": self.blocks,
            "blocks_per_sm": self.blocks_per_sm,
            "idle_sms": self.idle_sms,
            "useful_flops": self.useful_flops,
            "executed_flops": self.executed_flops,
            "sm_read_bytes": self.traffic.read_bytes,
            "sm_write_bytes": self.traffic.write_bytes,
            "copy_bytes": self.copy_bytes,
            "hbm_read_bytes": self.hbm.read_bytes,
            "hbm_write_bytes": self.hbm.write_bytes,
            "hbm_method": self.hbm.method,
            "hbm_compulsory_bytes": self.compulsory.read_bytes + self.compulsory.write_bytes,
            "flops_per_hbm_byte": self.useful_flops / hbm_bytes,
            "saved_bytes": self.saved_bytes,
            "peak_bytes": self.peak_bytes,
            "fits_memory": self.fits,
            **{
                f"{resource.replace(' ', '_').lower()}_s": self.time.by_resource.get(resource)
                for resource in (*RESOURCES, SHARED_MEMORY)
            },
            "time_bound_s": self.time.seconds,
            "tflops_bound": self.useful_flops / self.time.seconds / 1e12,
            "time_predicted_s": predicted,
            "tflops_predicted": predicted and self.useful_flops / predicted / 1e12,
            **self._expected(),
            "bound_by": self.time.binding,
        }

    def _expected(self) -> dict[str, Any]:
        """The range of the predicted time and whether a card has run the kernel, or why not."""
        if isinstance(self.predicted, NoTime):
            return {"time_low_s": None, "time_high_s": None, "time_state": None, "no_time": self.predicted.reason}
        state = "timed" if self.predicted.timed else "untimed"
        return {
            "time_low_s": self.predicted.low,
            "time_high_s": self.predicted.high,
            "time_state": state,
            "no_time": None,
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
    problem: Problem | AttentionShape,
    pass_: str,
    gpu: Gpu | str,
    *,
    ceilings: Ceilings | None = None,
    copied: Collection[str] = (),
    waves: bool = False,
    once: bool = False,
    **options: Any,
) -> Prediction:
    """What one pass of attention on contiguous tensors costs on a GPU.

    algorithm: one of ``ALGORITHMS``, or "auto": the kernels that ``repro.flash_attention`` runs
        there (``kernels.dispatch``).
    problem: or a shape without options.
    pass_: "forward" or "backward".
    gpu: a ``Gpu``, or the name of one (``analysis.hardware.gpu_named``).
    ceilings: by default the GPU's datasheet, at the clock under load (``analysis.clocks``).
    copied: tensors that are copied because kernels cannot read or write their layout; a head
        dimension that is no multiple of 8 copies all of them.
    waves: predict HBM bytes by whole waves of blocks instead of a simulated L2: for large sweeps.
    once: count each kernel's tensors once in HBM instead, the least there can be.
    options: fields of the problem to be changed, as ``softcap=30.0``: all of
        ``analysis.problem.Problem``. Of these the order of the walk changes HBM bytes alone, and on
        Hopper the form of a short forward; a cap moves no byte, but costs a special-function
        operation a score more in bf16, two in fp16 and fp32. Of packed sequences no L2 is
        simulated: each kernel moves each tensor once in HBM.

    Textbook algorithms ("standard" and the forms of flash1) are predicted beyond what our
    kernels of them run, and all on GPUs that cannot run ours: ``Prediction.theory`` says so.

    Raises ValueError for an unknown algorithm or pass, what a GPU cannot do (a type it lacks, a
    tile that does not fit, Hopper kernels elsewhere), and shapes and options that no kernel takes.
    """
    gpu = gpu_named(gpu) if isinstance(gpu, str) else gpu
    problem = Problem.of(problem, **options)
    if not isinstance(gpu, Gpu):
        raise TypeError(f"gpu={gpu!r} is a {type(gpu).__name__}, not Gpu")
    if algorithm not in (AUTO, *ALGORITHMS):
        raise ValueError(f"algorithm={algorithm!r} is not one of {AUTO}, {', '.join(ALGORITHMS)}")
    if pass_ not in PASSES:
        raise ValueError(f"pass_={pass_!r} is neither 'forward' nor 'backward'")
    if problem.bias_gradient:
        problem = replace(problem, gradients=GRADIENTS)  # they are made together
    run = find_run(algorithm, problem, pass_, gpu)
    shape, lengths, bias = problem.shape, problem.lengths, problem.bias
    ceilings = ceilings or ceilings_of(gpu)
    padded, algorithm = shape.padded, run.algorithm
    kernels = _launched(predict_traffic(algorithm, padded, run.tile, pass_, **run.options), run)
    if lengths is None:
        least = compulsory_hbm(kernels, padded, bias)
    else:
        least = compulsory_packed(algorithm, padded, run.tile, pass_, kernels, **run.options)
    if once or lengths is not None:
        hbm = replace(least, l2_bytes=gpu.l2_bytes)
    else:
        hbm = predict_hbm(
            algorithm, padded, run.tile, pass_, gpu, run.blocks_per_sm, order=problem.order, waves=waves, **run.options
        )
    hbm = _within(hbm, kernels, masked=problem.block_mask is not None)
    around = Traffic(copies(shape, pass_, copied, problem.gradients, bias))
    traffic, hbm = kernels + around, _with_copies(hbm, around)
    asked = (pass_, gpu, traffic, hbm)
    if lengths is None:
        works, executed = works_of(run, shape, *asked)
    else:
        works, executed = packed_works(run, shape, lengths, *asked)

    def useful(each: AttentionShape) -> int:
        return _useful_flops(run, each, pass_, problem)

    return Prediction(
        algorithm=algorithm,
        reason=run.reason,
        theory=run.theory,
        warning=run.warning,
        problem=problem,
        tile=run.tile,
        dq_tile=run.dq_tile,
        columns=run.columns,
        pass_=pass_,
        gpu=gpu,
        blocks=run.blocks,
        busy=share_of_sms(run, padded, gpu, run.blocks),
        blocks_per_sm=run.blocks_per_sm,
        useful_flops=useful(shape) if lengths is None else summed(useful, shape, lengths),
        executed_flops=executed,
        traffic=traffic,
        hbm=hbm,
        compulsory=_with_copies(least, around),
        saved=() if shape.fp8 else tuple(saved_tensors(algorithm, shape, bias)),
        peak=tuple(peak_tensors(run, shape, pass_)),
        time=predict_time(works, ceilings),
        ceilings=ceilings,
        form=run.form.name if run.form else None,
        main=run.main,
    )


def _useful_flops(run: Run, shape: AttentionShape, pass_: str, problem: Problem) -> int:
    whole = useful_flops(shape, pass_, recompute=find(run.algorithm).tiled)
    gradients = problem.gradients
    if problem.block_mask is not None and problem.tile is not None:
        pairs = pairs_in_blocks(shape, problem.block_mask, problem.tile)
        whole = whole // (shape.batch * shape.heads * shape.visible_pairs) * pairs
    if pass_ == "backward" and set(gradients) == {"dq"}:
        return whole * DQ_PRODUCTS // BACKWARD_PRODUCTS
    if pass_ == "backward" and "dq" not in gradients:
        return whole * KV_PRODUCTS // BACKWARD_PRODUCTS
    return whole


def _with_copies(hbm: HbmTraffic, around: Traffic) -> HbmTraffic:
    """Copies cross to HBM as they cross the SM boundary: no byte of theirs is used again."""
    if COPY not in around.kernels:
        return hbm
    reads, writes = (
        {tensor: n for (tensor, way), n in around.kernels[COPY].items() if way == direction}
        for direction in ("read", "write")
    )
    return replace(hbm, reads={**hbm.reads, COPY: reads}, writes={**hbm.writes, COPY: writes})


def _launched(traffic: Traffic, run: Run) -> Traffic:
    """Without the kernels that are not launched: a pass for a gradient that nobody asks for."""
    if run.kernels is None:
        return traffic
    return Traffic({k: entries for k, entries in traffic.kernels.items() if k in run.kernels})


def _within(hbm: HbmTraffic, traffic: Traffic, *, masked: bool) -> HbmTraffic:
    """Of the kernels that are launched. The wave model walks whole rows of tiles; a block-sparse
    pass gets no more from HBM than it reads."""
    reads = {
        kernel: {
            tensor: min(hbm.reads[kernel][tensor], entries.get((tensor, "read"), count)) if masked else count
            for tensor, count in hbm.reads[kernel].items()
        }
        for kernel, entries in traffic.kernels.items()
    }
    return replace(hbm, reads=reads, writes={k: hbm.writes[k] for k in traffic.kernels})


__all__ = [
    "ALGORITHMS",
    "AUTO",
    "CLOSED",
    "PASSES",
    "NoTime",
    "Prediction",
    "Time",
    "form_of",
    "predict",
    "shared_per_tensor",
    "sum_options",
]
