"""What the kernels' drivers launch, as tables for the calculator's JavaScript.

No rule is written here: each entry is the answer of the drivers, of dispatch or of the occupancy
estimate, for every type, padded head dimension, tile and kind of multiprocessor that can be asked
for. What the lengths of a problem decide, one length does (``PERSISTENT_SEQLEN``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any

from analysis import symbolic_costs
from analysis.algorithms import Family, find
from analysis.hardware import GPUS, Gpu
from analysis.shapes import ITEMSIZE, AttentionShape, Tile
from analysis.sm_ceilings import backward_round, forward_round
from analysis.window import Sides
from kernels import attention, hopper
from kernels.attention import configure
from kernels.flash_config import HEAD_DIMS, FlashConfig
from kernels.hopper_forms import PERSISTENT_SEQLEN
from kernels.launches import AUTO, Device, launches_of
from kernels.timing import ampere_time, hopper_time
from repro.commands.predict import rates_of
from repro.prediction import clock_of, predict
from repro.prediction.runs import ladder_tile, shared_per_tensor

PASSES = ("forward", "backward")
BLOCKS = tuple(range(16, 257, 16))
"""Rows and keys that a tile of the flash kernels can have."""
LARGEST, LARGEST_OF_LADDER = HEAD_DIMS[-1], 512
"""Head dimensions that the tables go up to; beyond, a textbook algorithm needs a tile."""
DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Blocks an SM holds, as one character; of a tile that spills, a small letter from a = 1 on."""
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {}, "changed": {"window": True}, "slopes": {"alibi": True},
}  # fmt: skip
"""What costs a block of the sm_80 kernels resources: nothing; a window, a softcap or a bias, which
leave a warp one group of 16 rows; ALiBi, whose slope lies in shared memory beside that."""
CEILINGS = ("datasheet", "measured")
LADDER = tuple(
    name for name in symbolic_costs.ALGORITHMS
    if find(name).family in (Family.STANDARD, Family.FLASH1)
)  # fmt: skip


def refusals() -> dict[str, dict[str, str]]:
    """GPU -> "algorithm dtype" -> why ``repro.predict`` refuses it there, whatever the shape."""
    found: dict[str, dict[str, str]] = {}
    for gpu in GPUS.values():
        for algorithm in (AUTO, *symbolic_costs.ALGORITHMS, hopper.ALGORITHM):
            for dtype in ITEMSIZE:
                shape = AttentionShape(1, 1, 64, 64, 64, dtype=dtype)
                try:
                    predict(algorithm, shape, "forward", gpu, once=True)
                except ValueError as error:
                    found.setdefault(gpu.name, {})[f"{algorithm} {dtype}"] = str(error)
    return found


def refused_options() -> dict[str, str]:
    """ "algorithm pass option" -> why ``repro.predict`` refuses the option, where it does; Hopper's
    kernels have :func:`refused_on_hopper`."""
    found = {}
    for algorithm, pass_ in product(symbolic_costs.ALGORITHMS, PASSES):
        for option, (shape, asked) in options(64).items():
            try:
                predict(algorithm, shape, pass_, GPUS["H200"], once=True, **asked)
            except ValueError as error:
                found[f"{algorithm} {pass_} {option}"] = str(error)
    return found


def options(head_dim: int) -> dict[str, tuple[AttentionShape, dict[str, Any]]]:
    """Option -> a shape and what ``repro.predict`` is asked for to have it."""
    plain = AttentionShape(1, 1, 64, 64, head_dim, dtype="fp16")
    return {
        "softcap": (plain, {"softcap": True}),
        "alibi": (plain, {"alibi": True}),
        "bias": (plain, {"bias": (1, 1), "bias_gradient": True}),
        "window": (replace(plain, window=(1, 1)), {}),
        "order": (plain, {"order": "sawtooth"}),
    }


Refusals = dict[str, list[tuple[tuple[str, ...], str]]]
""" "pass dtype head_dim" -> (options, reason) of options, alone or two together, that the Hopper
kernels do not have, the first that is named first."""


def refused_on_hopper() -> Refusals:
    """Why ``repro.predict`` refuses them of "flash-sm90"."""

    def refusal(shape: AttentionShape, pass_: str, asked: dict[str, Any]) -> str | None:
        try:
            predict(hopper.ALGORITHM, shape, pass_, GPUS["H200"], once=True, **asked)
        except ValueError as error:
            return str(error)
        return None

    return _refusals(refusal)


def reasons_against_hopper() -> Refusals:
    """Why dispatch leaves a Hopper GPU to the sm_80 kernels."""

    def reason(shape: AttentionShape, pass_: str, asked: dict[str, Any]) -> str | None:
        launched = launches_of(AUTO, shape, pass_, Device("90"), **asked)
        of_hopper = find(launched.algorithm).family is Family.HOPPER
        return None if of_hopper else launched.reason or ""

    return _refusals(reason)


def _refusals(
    why: Callable[[AttentionShape, str, dict[str, Any]], str | None],
) -> Refusals:
    found: Refusals = {}
    for pass_, dtype in product(PASSES, ("fp16", "bf16")):
        for head_dim in hopper.HEAD_DIMS[pass_]:
            reasons = found[f"{pass_} {dtype} {head_dim}"] = []
            known = options(head_dim)
            alone = sorted(known, key=lambda option: option != "bias")
            for names in [*((name,) for name in alone), *combinations(known, 2)]:
                if any(set(fewer) <= set(names) for fewer, _ in reasons):
                    continue
                windows = [known[name][0].window for name in names if name == "window"]
                shape = replace(known[names[0]][0], dtype=dtype, window=(*windows, (None, None))[0])
                asked = {key: value for name in names for key, value in known[name][1].items()}
                reason = why(shape, pass_, asked)
                if reason is not None:
                    reasons.append((names, reason))
    return found


def ceilings() -> dict[str, dict[str, Any]]:
    """GPU -> rates by the name of their origin, or why there are none."""
    found: dict[str, dict[str, Any]] = {}
    for gpu in GPUS.values():
        rates = found[gpu.name] = {}
        for kind in CEILINGS:
            try:
                of = rates_of(gpu, kind)
            except ValueError as error:
                rates[kind] = str(error)
                continue
            rates[kind] = {
                "F": of.tensor_flops, "X": of.exp_per_s, "S": of.sm_boundary_bytes_per_s,
                "W": of.hbm_bytes_per_s, "origin": of.origin,
            }  # fmt: skip
    return found


def picks() -> dict[str, dict[str, list[str]]]:
    """Architecture -> "pass dtype head_dim" -> the algorithm that dispatch picks where no tile is
    asked for, and its reason; head_dim is padded. "" is an architecture that runs none of them."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in sorted({architecture(gpu) for gpu in GPUS.values()}):
        device = Device(name or None)
        table = found[name] = {}
        for pass_, dtype, head_dim in product(PASSES, ITEMSIZE, range(8, LARGEST + 1, 8)):
            shape = AttentionShape(1, 1, 64, 64, head_dim, dtype=dtype)
            launched = launches_of(AUTO, shape, pass_, device)
            table[f"{pass_} {dtype} {head_dim}"] = [launched.algorithm, launched.reason or ""]
        if len({tuple(entry) for entry in table.values()}) == 1:
            found[name] = {"": next(iter(table.values()))}
    return found


def architecture(gpu: Gpu) -> str:
    """Compute capability as dispatch is told it: "" where our flash kernels do not run."""
    point = predict("flash", AttentionShape(1, 1, 64, 64, 64, dtype="fp16"), "forward", gpu,
                    once=True)  # fmt: skip
    return "" if point.theory else gpu.architecture or ""


def theories() -> dict[str, str]:
    """GPU -> why the flash kernels are theory there, where they are."""
    shape = AttentionShape(1, 1, 64, 64, 64, dtype="fp16")
    found = {g.name: predict("flash", shape, "forward", g, once=True).theory for g in GPUS.values()}
    return {name: theory for name, theory in found.items() if theory}


def default_tiles() -> dict[str, list[int]]:
    """ "pass dtype columns limit" -> the tile of the sm_80 kernels within that much shared memory;
    absent where none fits."""
    found = {}
    for gpu, pass_, dtype, columns in product(GPUS.values(), PASSES, ITEMSIZE, HEAD_DIMS):
        shape = AttentionShape(1, 1, 64, 64, columns, dtype=dtype)
        try:
            tile = predict("flash", shape, pass_, gpu, once=True).tile
        except ValueError:
            continue
        key = f"{pass_} {dtype} {columns} {gpu.shared_bytes_per_block}"
        found[key] = [tile.block_m, tile.block_n]
    return found


def ladder_tiles() -> dict[str, list[list[int]]]:
    """ "algorithm pass dtype limit" -> [largest head_dim, block_m, block_n] of the textbook
    algorithms' tiles, ascending."""
    found: dict[str, list[list[int]]] = {}
    for gpu in {gpu.shared_bytes_per_block: gpu for gpu in GPUS.values()}.values():
        for name, pass_, dtype in product(LADDER, PASSES, ITEMSIZE):
            runs = found[f"{name} {pass_} {dtype} {gpu.shared_bytes_per_block}"] = []
            for head_dim in range(1, LARGEST_OF_LADDER + 1):
                tile = ladder_tile(name, head_dim, dtype, pass_, gpu)
                if not runs or runs[-1][1:] != [tile.block_m, tile.block_n]:
                    runs.append([head_dim, tile.block_m, tile.block_n])
                runs[-1][0] = head_dim
    return found


def kind_of_sm(gpu: Gpu) -> str:
    """What decides how many blocks an SM holds."""
    turing = gpu.compute_capability is not None and gpu.compute_capability < (8, 0)
    return " ".join(
        map(str, (gpu.registers_per_sm, gpu.shared_bytes_per_sm, gpu.shared_bytes_per_block,
                  gpu.threads_per_sm, gpu.blocks_per_sm, gpu.shared_reserved_per_block,
                  int(turing)))
    )  # fmt: skip


def kinds_of_sm() -> list[Gpu]:
    """One GPU of each kind, in an order that does not change."""
    return list({kind_of_sm(gpu): gpu for gpu in GPUS.values()}.values())


def blocks_per_sm() -> dict[str, str]:
    """ "pass dtype columns kind features" -> one of ``DIGITS`` for each tile of BLOCKS x BLOCKS,
    block_m outside; 0 where the sm_80 kernels cannot have it. "auto backward": a tile asked of
    dispatch must do for both kinds of backward. features: of ``FEATURES``."""
    found = {}
    names = {"forward": ("forward",), "backward": ("backward",),
             "auto backward": ("backward", "backward-dq")}  # fmt: skip
    tiles = [Tile(m, n) for m, n in product(BLOCKS, BLOCKS)]
    for number, gpu in enumerate(kinds_of_sm()):
        for (name, kernels), dtype, columns in product(names.items(), ITEMSIZE, HEAD_DIMS):
            for features in FEATURES:
                digits = (_digit(kernels, dtype, columns, tile, gpu, features) for tile in tiles)
                found[f"{name} {dtype} {columns} {number} {features}"] = "".join(digits)
    return found


def _digit(
    kernels: tuple[str, ...], dtype: str, columns: int, tile: Tile, gpu: Gpu, features: str
) -> str:
    limit = gpu.shared_bytes_per_block
    configs = [_config(kernel, dtype, columns, tile, limit, features) for kernel in kernels]
    config = configs[0]
    if config is None or None in configs:
        return "0"
    blocks = config.fit(gpu).blocks_per_sm
    needed = config.registers_per_thread - attention.OTHER_REGISTERS
    spilled = needed > config.most_registers(gpu)
    return chr(ord("a") + blocks - 1) if spilled and blocks else DIGITS[blocks]


@cache
def _config(
    kernel: str, dtype: str, columns: int, tile: Tile, limit: int, features: str
) -> FlashConfig | None:
    """The compiled form, or None where there is none: GPUs of one limit share it."""
    try:
        return configure(kernel, dtype, columns, tile=tile, limit=limit, **FEATURES[features])
    except ValueError:
        return None


def shared_clocks() -> dict[str, dict[str, float]]:
    """ "pass columns" and "pass columns window" -> "block_m block_n" -> clocks of shared memory for
    each clock of tensor cores that do one FLOP a clock, in the sm_80 kernels' main loop; absent
    where not modelled."""
    gpu = GPUS["H200"]
    flops = gpu.tensor_flops_per_clock
    assert flops is not None
    found: dict[str, dict[str, float]] = {}
    windows: dict[str, Sides] = {"": (None, None), " window": (1, 1)}
    for pass_, columns, (name, window) in product(PASSES, HEAD_DIMS, windows.items()):
        table = found[f"{pass_} {columns}{name}"] = {}
        shape = AttentionShape(1, 1, 64, 64, columns, dtype="fp16", window=window)
        for m, n in product(BLOCKS, BLOCKS):
            clocks = shared_per_tensor("flash", shape, Tile(m, n), pass_, gpu)
            if clocks is not None:
                table[f"{m} {n}"] = clocks / flops
    return found


def hopper_tables() -> dict[str, Any]:
    """The Hopper kernels: `forms` by "pass name", the rule that picks one (`picked`, by
    "pass head_dim mask length", the length "sawtooth" for that order and "featured" for a window, a
    softcap or ALiBi), and those of a tile that is asked for (`of_tile`).

    A form has its tile, whether its blocks are persistent, clocks of shared memory for each of the
    tensor cores, and by "mask" or "mask, window, softcap", where on record, the clocks of a tile by
    rounds.
    """
    forms: dict[str, Any] = {}
    picked, of_tile = {}, {}
    lengths: dict[str, tuple[int, dict[str, Any]]] = {
        "short": (PERSISTENT_SEQLEN, {}), "long": (PERSISTENT_SEQLEN + 1, {}),
        "sawtooth": (PERSISTENT_SEQLEN, {"sawtooth": True}),
        "featured": (PERSISTENT_SEQLEN, {"featured": True}),
    }  # fmt: skip
    for pass_ in PASSES:
        for head_dim in hopper.HEAD_DIMS[pass_]:
            for (length, (rows, asked)), causal in product(lengths.items(), (False, True)):
                if pass_ == "forward":
                    form: Any = hopper.forward_form(head_dim, causal, rows, **asked)
                else:
                    featured = asked.get("featured", False)
                    form = hopper.backward_form(head_dim, causal, featured=featured)
                forms[f"{pass_} {form.name}"] = _form(form, pass_)
                mask = "causal" if causal else "dense"
                picked[f"{pass_} {head_dim} {mask} {length}"] = form.name
            for tile, form in _tiles_of(pass_, head_dim):
                forms[f"{pass_} {form.name}"] = _form(form, pass_)
                of_tile[f"{pass_} {head_dim} {tile.block_m} {tile.block_n}"] = form.name
    return {"forms": forms, "picked": picked, "of_tile": of_tile, "short": PERSISTENT_SEQLEN,
            "head_dims": hopper.HEAD_DIMS}  # fmt: skip


def _tiles_of(pass_: str, head_dim: int) -> Iterator[tuple[Tile, Any]]:
    forms = hopper.FORWARD_FORMS if pass_ == "forward" else hopper.BACKWARD_FORMS
    for tile in dict.fromkeys(form.tile for form in forms if form.head_dim == head_dim):
        try:
            if pass_ == "forward":
                yield tile, hopper.forward_form(head_dim, False, 1, tile)
            else:
                yield tile, hopper.backward_form(head_dim, False, tile)
        except ValueError:
            continue


def _form(form: Any, pass_: str) -> dict[str, Any]:
    m, n = form.tile.block_m, form.tile.block_n
    of_round = (
        forward_round(form.head_dim, m, n) if pass_ == "forward" else
        backward_round(form.head_dim, m)
    )  # fmt: skip
    clocks = {}
    for causal, features in product((False, True), ((), *hopper_time.FEATURES_ON_RECORD)):
        try:
            line, beside = hopper_time.line_of(form, causal, features=features)
        except LookupError:
            continue
        points = [[n, line(n)] for n in hopper_time.ROUNDS]
        name = ", ".join(("causal" if causal else "dense", *features))
        clocks[name] = {"points": points, "beside": beside}
    return {
        "block_m": m, "block_n": n, "persistent": getattr(form, "persistent", False),
        "shared_per_tensor": of_round.shared_per_tensor(), "clocks": clocks,
    }  # fmt: skip


def ampere_tables() -> dict[str, Any]:
    """ "pass columns mask" -> of the kernel that runs on an A100 by default its tile, the recorded
    clocks of a block alone by rounds, the blocks of an SM and how much longer each takes beside
    the others; absent where nothing is on record."""
    found = {}
    for pass_, columns, causal in product(PASSES, HEAD_DIMS, (False, True)):
        config = ampere_time.config_of(pass_, columns, causal)
        try:
            recorded = ampere_time.recorded(config.kernel())
        except LookupError:
            continue
        found[f"{pass_} {columns} {'causal' if causal else 'dense'}"] = {
            "block_m": recorded.tile.block_m, "block_n": recorded.tile.block_n,
            "points": [[n, recorded.line(n)] for n in ampere_time.ROUNDS],
            "blocks_per_sm": recorded.blocks_per_sm, "slowdown": recorded.slowdown,
        }  # fmt: skip
    return found


def gpu_rows() -> dict[str, dict[str, Any]]:
    """What the calculator needs of each GPU."""
    kinds = [kind_of_sm(gpu) for gpu in kinds_of_sm()]
    return {
        gpu.name: {
            "sms": gpu.sms, "memory": gpu.memory_bytes, "shared": gpu.shared_bytes_per_block,
            "hbm_bandwidth": gpu.hbm_bandwidth_bytes_per_s,
            "tensor_flops_per_clock": gpu.tensor_flops_per_clock, "clock": clock_of(gpu).hz,
            "clock_origin": clock_of(gpu).origin, "architecture": architecture(gpu),
            "hopper": gpu.compute_capability == (9, 0), "ampere": ampere_time.runs_on(gpu),
            "kind": kinds.index(kind_of_sm(gpu)),
        }
        for gpu in GPUS.values()
    }  # fmt: skip
