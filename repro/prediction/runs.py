"""What runs under a name on a GPU: the kernels' own answer, in the terms of ``analysis``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from analysis import memory
from analysis.algorithms import DqSum, Family, find
from analysis.features import FEATURES, features_of, specials_of
from analysis.flops import BACKWARD_PRODUCTS, DQ_PRODUCTS, KV_PRODUCTS, executed_exponentials, executed_flops
from analysis.hardware import Gpu
from analysis.hbm import HbmTraffic
from analysis.occupancy import wave_efficiency
from analysis.problem import Problem
from analysis.shapes import AttentionShape, Tile, bias_elements
from analysis.sm_ceilings import warp_backward_round, warp_forward_round
from analysis.sums.copies import KERNEL as COPY
from analysis.sums.packed import working_blocks
from analysis.tile_loop import tile_loop
from analysis.tiles import paper_tile
from analysis.time_model import Work, attention_work, blocks_alike, on_fma_units
from analysis.traffic import Traffic, traffic_options
from kernels import attention, dispatch, hopper, ladder
from kernels.launch import Kernel
from kernels.launches import AUTO, Device, Launched, launches_of


@dataclass(frozen=True)
class Run:
    """The kernels of a pass. ``options``: of ``analysis.traffic.predict_traffic``; the rest as in
    :class:`repro.prediction.Prediction`."""

    algorithm: str
    tile: Tile
    columns: int
    blocks: int
    blocks_per_sm: int = 1
    dq_tile: Tile | None = None
    dq_blocks: int = 0
    reason: str | None = None
    theory: str | None = None
    warning: str | None = None
    main: Kernel | None = None
    """The kernel that walks the tile loop, as it is compiled; None for theory."""
    kernels: frozenset[str] | None = None
    """Those that are launched; None for all that the sums know."""
    scratch: tuple[memory.LiveTensor, ...] = ()
    specials: int = 0
    """Special-function operations a score, of the options."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def form(self) -> hopper.ForwardForm | hopper.BackwardForm | None:
        """The compiled form, for kernels that come in several."""
        config = None if self.main is None else self.main.config
        return config if isinstance(config, hopper.ForwardForm | hopper.BackwardForm) else None


def find_run(algorithm: str, problem: Problem, pass_: str, gpu: Gpu) -> Run:
    """What runs, or what would if there were a kernel for it. Errors as of ``predict``."""
    shape, tile = problem.shape, problem.tile
    gpu.require_dtype(shape.dtype)
    family = None if algorithm == AUTO else find(algorithm).family
    if family is Family.HOPPER and gpu.compute_capability != (9, 0):
        raise ValueError(
            f"{algorithm} needs compute capability 9.0, {gpu.name} has "
            f"{gpu.capability_text}; auto picks what runs there"
        )
    theory = None
    capability: str | None = gpu.architecture
    ours = family in (None, Family.FLASH, Family.HOPPER)  # others are theory where nothing runs
    if ours and not dispatch.has_flash(gpu.architecture):
        theory = f"our flash kernels need compute capability 8.0 or newer, {gpu.name} has {gpu.capability_text}"
        capability = None
    device = Device(capability, gpu.shared_bytes_per_block, gpu.sms)
    try:
        launched = launches_of(algorithm, problem, pass_, device)
    except ValueError as error:
        more = features_of(problem) - {"causal", "deterministic"}
        if ours or any(pass_ == "backward" or "forward" in FEATURES[name].passes for name in more):
            raise
        return _theory(algorithm, shape, pass_, gpu, tile, str(error))
    options = traffic_options(problem, pass_)
    main = launched.main
    blocks_per_sm, warning = _blocks_per_sm(launched, shape, gpu)
    run = Run(
        algorithm=launched.algorithm,
        reason=launched.reason if algorithm == AUTO else None,
        theory=theory,
        tile=main.kernel.config.tile,
        columns=main.kernel.config.head_dim,
        blocks=main.grid[0],
        blocks_per_sm=blocks_per_sm,
        warning=warning,
        main=main.kernel,
        kernels=frozenset(launch.kernel.entry for launch in launched.launches),
        scratch=tuple(
            memory.LiveTensor(array.name, array.size * array.itemsize) for array in launched.scratch if array.size
        ),
        specials=specials_of(problem),
        options=options | sum_options(main.kernel.config),
    )
    if "persistent" in run.options:  # its blocks share the tiles
        tiles = -(-shape.seqlen_q // run.tile.block_m)
        run = replace(run, blocks=shape.batch * shape.heads * tiles)
    if problem.lengths is not None:  # the others leave at once
        keys_outside = main.kernel.entry in ("flash_backward", "flash_backward_sm90")
        blocks = working_blocks(problem.lengths, shape, run.tile, keys_outside=keys_outside)
        run = replace(run, blocks=blocks)
    if launched.dq is not None:
        dq_tile = launched.dq.kernel.config.tile
        run = replace(run, dq_tile=dq_tile, dq_blocks=launched.dq.grid[0], options={**run.options, "dq_tile": dq_tile})
    return run


def _theory(algorithm: str, shape: AttentionShape, pass_: str, gpu: Gpu, tile: Tile | None, why: str) -> Run:
    """An algorithm of the papers beyond what our kernels of it run."""
    tile = tile or ladder_tile(algorithm, shape.head_dim, shape.dtype, pass_, gpu)
    tiles = 1 if find(algorithm).tiled else -(-shape.seqlen_q // tile.block_m)
    return Run(algorithm, tile, shape.padded.head_dim, shape.batch * shape.heads * tiles, theory=why)


def ladder_tile(algorithm: str, head_dim: int, dtype: str, pass_: str, gpu: Gpu) -> Tile:
    """The tile of a textbook algorithm ("standard" and the forms of flash1) where none is asked
    for: our kernels', or the paper's where none of ours fits."""
    columns = -(-head_dim // 8) * 8
    own = _own_ladder_tile(algorithm, columns, dtype, pass_, gpu.shared_bytes_per_block)
    return own or paper_tile(head_dim, gpu.on_chip_elements)


@cache
def _own_ladder_tile(algorithm: str, columns: int, dtype: str, pass_: str, limit: int) -> Tile | None:
    """Our kernels' tile, None where none fits."""
    try:
        return ladder.default_tile(algorithm, columns, dtype, pass_, limit)
    except ValueError:
        return None


def form_of(
    implementation: str, problem: Problem | AttentionShape, pass_: str
) -> hopper.ForwardForm | hopper.BackwardForm | None:
    """The compiled form that runs under a name: an algorithm of ``kernels.attention`` or a form of
    ``kernels.hopper.FORMS``. None for kernels that are no Hopper kernels.

    A tile that the problem does not ask for is by the Hopper kernels' rule.
    """
    if implementation in hopper.FORMS:
        return hopper.FORMS[implementation]
    if find(implementation).family is not Family.HOPPER:
        return None
    problem = Problem.of(problem)
    shape, features = problem.shape, features_of(problem)
    return hopper.form_for(shape.head_dim, pass_, shape.seqlen_q, features, problem.tile)


def sum_options(form: Any) -> dict[str, Any]:
    """The options of ``analysis.traffic.predict_traffic`` that select a form's sum."""
    persistent = isinstance(form, hopper.ForwardForm) and form.persistent
    return {"persistent": True} if persistent else {}


def shared_per_tensor(algorithm: str, shape: AttentionShape, tile: Tile, pass_: str, gpu: Gpu) -> float | None:
    """Clocks of shared memory for each clock of the tensor cores in the sm_80 kernels' main loop;
    None for other kernels, and where it is not modelled: fp32, a backward beyond head_dim 128,
    tiles that the kernels do not take."""
    flops = gpu.tensor_flops_per_clock
    chosen = find(algorithm)
    modelled = pass_ == "forward" or chosen.dq is not DqSum.SEPARATE_PASS
    if chosen.family is not Family.FLASH or not modelled or shape.dtype == "fp32" or flops is None:
        return None
    of_warps = warp_forward_round if pass_ == "forward" else warp_backward_round
    try:
        config = attention.configure(
            pass_, shape.dtype, shape.padded.head_dim, tile=tile, window=shape.windowed, fp8=shape.fp8
        )
        found = of_warps(config.head_dim, tile.block_m, tile.block_n, config.num_warps)
    except ValueError:
        return None
    return found.shared_per_tensor(flops)


def _blocks_per_sm(launched: Launched, shape: AttentionShape, gpu: Gpu) -> tuple[int, str | None]:
    """Blocks of the main kernel an SM holds, and a warning where registers will be spilled.

    FlashAttention 2022's one block per head and the plain products are taken as one per SM; the
    Hopper kernels' warpgroups share out all registers of an SM. ValueError where none fits.
    """
    if find(launched.algorithm).family is not Family.FLASH:
        return 1, None
    config: attention.FlashConfig = launched.main.kernel.config
    tile = config.tile
    shown = f"tile {tile.block_m}x{tile.block_n} at head_dim={shape.head_dim}, {shape.dtype}"
    fit = config.fit(gpu)
    if fit.blocks_per_sm < 1:
        raise ValueError(f"{shown} does not fit an SM of {gpu.name}: {fit.limited_by}")
    most = config.most_registers(gpu)
    # What the accumulators alone need is no estimate.
    spilled = config.registers_per_thread - attention.OTHER_REGISTERS > most
    warning = (
        f"{shown} needs more than {most} registers a thread: what the compiler spills moves bytes "
        "that are not in this prediction"
    )
    return fit.blocks_per_sm, warning if spilled else None


def works_of(
    run: Run, shape: AttentionShape, pass_: str, gpu: Gpu, traffic: Traffic, hbm: HbmTraffic
) -> tuple[dict[str, Work], int]:
    """Work of every kernel, copies included, and the FLOPs that the kernels execute."""
    padded = replace(shape.padded, head_dim=run.columns)
    if find(run.algorithm).tiled:
        works = attention_work(
            run.algorithm,
            shape.padded,
            run.tile,
            pass_,
            gpu,
            run.blocks_per_sm,
            shared_per_tensor=shared_per_tensor(run.algorithm, shape, run.tile, pass_, gpu),
            traffic=traffic,
            hbm=hbm,
            specials=run.specials,
            **run.options,
        )
        works = _with_columns(works, run, padded, pass_, gpu)
    else:
        works = _standard_work(padded, run.tile, gpu, traffic, hbm)
    return works, sum(int(work.flops) for work in works.values())


def _with_columns(works: dict[str, Work], run: Run, padded: AttentionShape, pass_: str, gpu: Gpu) -> dict[str, Work]:
    """The works with the FLOPs of all columns of a tile, and of the tiles that a mask leaves."""
    share = _share_of_tiles(padded, run)
    works = dict(works)
    main = next((name for name, work in works.items() if work.flops), None)
    if main is not None:
        flops = round(executed_flops(padded, run.tile, pass_) * share)
        if pass_ == "backward" and find(run.algorithm).dq is DqSum.SEPARATE_PASS:
            flops = flops * KV_PRODUCTS // BACKWARD_PRODUCTS
        exponentials = works[main].exponentials * share
        works[main] = replace(works[main], flops=flops, exponentials=exponentials)
    if run.dq_tile is not None:
        flops = executed_flops(padded, run.dq_tile, pass_) * DQ_PRODUCTS // BACKWARD_PRODUCTS
        works["flash_backward_dq"] = replace(
            works["flash_backward_dq"],
            flops=round(flops * share),
            exponentials=share * executed_exponentials(padded, run.dq_tile, pass_, run.specials),
            efficiency=share_of_sms(run, padded, gpu, run.dq_blocks),
            fma=on_fma_units(run.algorithm, padded.dtype),
        )
    return works


def share_of_sms(run: Run, shape: AttentionShape, gpu: Gpu, blocks: int) -> float:
    """Share of the SMs' time that so many blocks of a kernel of the run keep busy at best; 0 of
    none. Sequences that are all of one length are a batch, and bound as one."""
    if not blocks:
        return 0.0
    lengths = run.options.get("lengths")
    shapes = [shape] if lengths is None else lengths.shapes(shape)
    alike = "block_mask" not in run.options and (lengths is None or lengths.alike)
    alike = alike and all(blocks_alike(run.algorithm, each) for each in shapes)
    return wave_efficiency(gpu, blocks, alike=alike)


def _share_of_tiles(shape: AttentionShape, run: Run) -> float:
    """Visited tiles over those that the causal mask alone leaves."""
    if "block_mask" not in run.options:
        return 1.0
    whole = tile_loop(shape, run.tile)
    masked = tile_loop(shape, run.tile, run.options["block_mask"], run.options["mask_block"])
    visited = masked.copies * int(masked.visits_of_query_tile.sum())
    return visited / (whole.copies * int(whole.visits_of_query_tile.sum()))


def _standard_work(shape: AttentionShape, tile: Tile, gpu: Gpu, traffic: Traffic, hbm: HbmTraffic) -> dict[str, Work]:
    """Our unfused kernels: those that read or write an operand of head_dim columns are products."""
    heads = shape.batch * shape.heads
    pairs = heads * shape.seqlen_q * shape.seqlen_k
    query_tiles = -(-shape.seqlen_q // tile.block_m)
    key_tiles = -(-shape.seqlen_k // tile.block_n)
    works = {}
    for kernel, entries in traffic.kernels.items():
        if kernel == COPY:
            moved = sum(entries.values())
            works[kernel] = Work(sm_bytes=moved, hbm_bytes=moved)
            continue
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
            efficiency=wave_efficiency(gpu, heads * blocks) if is_product else 1.0,
            fma=shape.dtype == "fp32",
        )
    return works


def saved_tensors(
    algorithm: str, shape: AttentionShape, bias: tuple[int, int] | None = None
) -> list[memory.LiveTensor]:
    """What lies between forward and backward."""
    chosen = find(algorithm)
    if bias is not None:
        kept = memory.LiveTensor("bias", bias_elements(shape, bias) * shape.itemsize)
        return [*saved_tensors(algorithm, shape), kept]
    if chosen.family is Family.STANDARD:
        return memory.saved_for_backward("standard", shape)
    statistics = "m, l" if chosen.form in ("literal", "skip-first") else "lse"
    return memory.saved_for_backward("flash", shape, statistics=statistics)


def peak_tensors(run: Run, shape: AttentionShape, pass_: str) -> list[memory.LiveTensor]:
    """What is alive at the worst moment; where rows are padded, the tensors as given too."""
    padded = shape.padded
    peak = _peak(run, padded, pass_)
    if padded.head_dim == shape.head_dim:
        return peak
    names = {tensor.name for tensor in peak}
    sizes = dict.fromkeys(("q", "out", "dout", "dq"), shape.query_bytes)
    sizes |= dict.fromkeys(("k", "v", "dk", "dv"), shape.key_bytes)
    given = [memory.LiveTensor(f"{n}, as given", size) for n, size in sizes.items() if n in names]
    return peak + given


def _peak(run: Run, shape: AttentionShape, pass_: str) -> list[memory.LiveTensor]:
    family = find(run.algorithm).family
    if family is Family.STANDARD:  # a framework's, whose kernels are not ours
        if pass_ == "forward":
            return memory.saved_for_backward("standard-with-scores", shape)
        return memory.standard_backward_peak(shape)
    if family is Family.FLASH1:
        if pass_ == "forward":
            return saved_tensors(run.algorithm, shape)
        return memory.flash1_backward_peak(shape)
    bias = run.options.get("bias")
    peak = [*saved_tensors(run.algorithm, shape, bias), *run.scratch]
    if shape.fp8:
        peak += [memory.LiveTensor(name, shape.scale_bytes) for name in ("k_scale", "v_scale")]
    if bias is not None and run.options.get("bias_gradient"):
        peak.append(memory.LiveTensor("dbias", bias_elements(shape, bias) * shape.itemsize))
    if pass_ == "backward":
        peak += [memory.LiveTensor(name, shape.query_bytes) for name in ("dout", "dq")]
        peak += [memory.LiveTensor(name, shape.key_bytes) for name in ("dk", "dv")]
    return peak
