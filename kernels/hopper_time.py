"""Clocks and seconds of the Hopper kernels, predicted from their machine code.

``python -m kernels.hopper_time`` compiles the main kernels, disassembles them, and follows single
blocks of small problems through the model of an SM (``analysis.loop_model``); it needs NVRTC,
nvdisasm and a C compiler, no GPU. What a tile takes is a line in the rounds of its loop, recorded
in ``hopper_lines.csv`` with a digest of the source. The tiles of a shape then fill the card in the
order in which they start, which takes neither compiler nor time.
"""

from __future__ import annotations

import csv
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean

from analysis.arguments import checked
from analysis.flops import useful_flops
from analysis.hardware import H200
from analysis.l2.attention import hopper_heads_per_group
from analysis.loop_model import card
from analysis.loop_model.native import simulate
from analysis.loop_model.parameters import SM90
from analysis.shapes import AttentionShape
from kernels import hopper
from kernels.building.cache import digest, headers
from kernels.building.compile import compile_cubin, nvrtc_version
from kernels.command_line import program
from kernels.launch import (
    ITEMSIZE,
    KERNELS_DIR,
    Argument,
    Array,
    Kernel,
    TensorMap,
    contiguous_strides,
    encode,
)
from kernels.launching.plan import Launch as Recorded
from kernels.launching.plan import Recorder
from kernels.sass import loops
from kernels.sass.code import Code
from kernels.sass.kept import disassembled
from kernels.sass.operands import Launch, TensorMapArgument

ARCH = "sm_90a"
ROUNDS = (2, 4, 8, 16)
"""Lengths of the loop that blocks are followed through."""
HEADS = 8
"""Of the small problems: as many tiles of one length lie side by side."""
SEEDS, START = 3, 400
"""Starts that are tried, as for the prototype (``repro.prototype``)."""
NEVER = 1_000_000
UNFLAGGED = 0
DTYPE = "bf16"
"""fp16 has the same instructions but for the conversion."""
SMS = 132
"""That share L2."""
LINES = Path(__file__).with_name("hopper_lines.csv")
"""Recorded clocks, so that a prediction needs neither compiler nor disassembler."""
PAGE = KERNELS_DIR.parent / "docs" / "pages" / "time.md"
MARKERS = ("<!-- forms: written by `python -m kernels.hopper_time` -->", "<!-- end of forms -->")


@dataclass(frozen=True)
class Single:
    """Device that a recorder is told of: one multiprocessor, so that block 0 takes all tiles."""

    multiprocessors: int = 1
    compute_capability: str = "90"


Line = Callable[[float], float]
Form = hopper.ForwardForm | hopper.BackwardForm


@cache
def code_of(kernel: Kernel, arch: str = ARCH) -> Code:
    """The machine code that the compiler makes of a kernel."""
    return disassembled(compile_cubin(kernel, arch).cubin, kernel.entry)


def launch_of(recorded: Recorded, taken: Sequence[int] = (), loaded: int | None = None) -> Launch:
    """A recorded launch as block 0 sees it."""
    return Launch(
        recorded.kernel.threads,
        recorded.grid,
        [_argument(argument) for argument in recorded.args],
        (0, 0, 0),
        taken,
        loaded=loaded,
    )


def _argument(argument: Argument) -> tuple[int, int | TensorMapArgument]:
    if isinstance(argument, TensorMap):
        row = argument.array.shape[-1] * argument.array.itemsize
        return 128, TensorMapArgument(argument.box_rows * row)
    data = encode(argument)
    return len(data), int.from_bytes(data, "little")


def _array(name: str, shape: tuple[int, ...], dtype: str, number: int) -> Array:
    return Array(name, number << 36, shape, contiguous_strides(shape), dtype, "rw")


def _arrays(seqlen: int, head_dim: int) -> dict[str, Array]:
    full, rows = (1, HEADS, seqlen, head_dim), (1, HEADS, seqlen)
    names = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    found = {name: _array(name, full, DTYPE, n + 1) for n, name in enumerate(names)}
    return found | {"lse": _array("lse", rows, "fp32", len(names) + 1)}


def _clocks(recorded: Recorded, taken: Sequence[int] = (), loaded: int | None = None) -> float:
    """Mean clocks of block 0 over starts."""
    launch = launch_of(recorded, taken, loaded)
    found = loops.program(code_of(recorded.kernel), launch)
    copied = card.copy_bytes_per_clock(SM90["copy_bytes"].value, card.H200_SUSTAINED, SMS)
    found_clocks = []
    for seed in range(SEEDS):
        draw = random.Random(seed)
        groups = [draw.randrange(START) if seed else 0 for _ in range(len(found.ways) // 4 + 1)]
        starts = [groups[warp // 4] for warp in range(len(found.ways))]
        of = simulate(found, seed=seed, start=starts, copy_bytes=copied)
        found_clocks.append(of.clocks)
    return mean(found_clocks)


def _points(
    form: Form, causal: bool, optimistic: bool = False, lengths: Sequence[int] = ROUNDS
) -> tuple[list[tuple[float, float]], float]:
    """Clocks of a tile by its rounds, and those that a block costs once beside its tiles.

    A form with one block a tile has nothing beside.
    """
    alone: list[tuple[float, float]] = []
    beside = []
    for rounds in lengths:
        recorder = Recorder(Single())
        if isinstance(form, hopper.BackwardForm):
            arrays = _arrays(rounds * form.block_m, form.head_dim)
            names = ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")
            operands = [arrays[n] for n in names]
            hopper.backward(recorder, *operands, scale=1.0, causal=causal, form=form)
        else:
            arrays = _arrays(rounds * form.block_n, form.head_dim)
            operands = [arrays[n] for n in ("q", "k", "v", "out", "lse")]
            hopper.forward(
                recorder, *operands, scale=1.0, causal=causal, form=form, optimistic=optimistic
            )
            if optimistic:
                recorder.launches.pop()  # the repair
        main = max(recorder.launches, key=lambda launch: launch.shared_bytes)
        if isinstance(form, hopper.BackwardForm) or not form.persistent:
            alone.append((rounds, _clocks(main)))
            continue
        few, more = (_clocks(main, (*range(tiles - 1), NEVER)) for tiles in (2, 4))
        alone.append((rounds, (more - few) / 2))
        beside.append(few - (more - few))
    return alone, max(0.0, mean(beside)) if beside else 0.0


def _repair(form: hopper.ForwardForm, causal: bool) -> tuple[float, float]:
    """Clocks of a block of the repair that finds one tile unflagged, and of each more."""
    points = []
    for rounds in (ROUNDS[0], ROUNDS[-1]):
        recorder = Recorder(Single())
        arrays = _arrays(rounds * form.block_n, form.head_dim)
        operands = [arrays[n] for n in ("q", "k", "v", "out", "lse")]
        hopper.forward(recorder, *operands, scale=1.0, causal=causal, form=form, optimistic=True)
        tiles = HEADS * -(-rounds * form.block_n // form.tile.block_m)
        points.append((tiles, _clocks(recorder.launches[-1], loaded=UNFLAGGED)))
    (few, first), (many, last) = points
    each = (last - first) / (many - few)
    return first - each * (few - 1), each


def digest_of(form: Form, causal: bool, optimistic: bool = False) -> str:
    """Of all that the main kernel's machine code follows from, but for the compiler."""
    kernel = form.kernel("", DTYPE, causal) if isinstance(form, hopper.BackwardForm) else (
        form.kernel(DTYPE, causal, "optimistic" if optimistic else "")
    )  # fmt: skip
    return digest(kernel.text(), headers(kernel.text()), repr(kernel.macros))[:16]


@cache
def _recorded() -> dict[tuple[str, str, str], dict[str, str]]:
    with LINES.open(encoding="utf-8") as file:
        return {(r["pass"], r["form"], r["causal"]): r for r in csv.DictReader(file)}


def name_of(form: Form, optimistic: bool = False) -> str:
    """What the form's clocks are recorded under."""
    return f"{form.name}{', optimistic' * optimistic}"


def refusal(form: Form, deterministic: bool = False) -> str | None:
    """Why the model predicts no time of a form, or None."""
    if isinstance(form, hopper.ForwardForm):
        return None
    if form.dq_from_registers:
        return "what additions to memory from registers cost on their way nobody has published"
    if deterministic:
        return (
            "blocks wait for the additions of other blocks, and the model follows one block at a "
            "time"
        )
    return None


def line_of(form: Form, causal: bool, optimistic: bool = False) -> tuple[Line, float]:
    """Clocks of a tile by its rounds, and what a block costs beside, as recorded.

    Raises LookupError when the model does not cover the form, when nothing is recorded for it, or
    for another state of its source.
    """
    pass_ = "backward" if isinstance(form, hopper.BackwardForm) else "forward"
    name = name_of(form, optimistic)
    refused = refusal(form)
    if refused is not None:
        raise LookupError(f"the {pass_} {name}: {refused}")
    row = _recorded().get((pass_, name, str(causal)))
    again = "python -m kernels.hopper_time records it"
    if row is None:
        raise LookupError(f"no clocks on record for the {pass_} {name}: {again}")
    if row["digest"] != digest_of(form, causal, optimistic):
        raise LookupError(f"the source of the {pass_} {name} has changed: {again}")
    points = [(float(n), float(row[f"clocks_{n}"])) for n in ROUNDS]
    return card.through(points), float(row["beside"])


@checked
def clocks(form: Form, shape: AttentionShape, sms: int, optimistic: bool = False) -> float:
    """Clocks of the main kernel on a card of ``sms`` multiprocessors. Errors as :func:`line_of`.

    optimistic: with those of its repair, on data of which it has nothing to do again.
    """
    line, beside = line_of(form, shape.causal, optimistic)
    if optimistic:
        row = _recorded()["forward", name_of(form, True), str(shape.causal)]
        tiles = shape.batch * shape.heads * -(-shape.seqlen_q // form.tile.block_m)
        beside += float(row["repair"]) + (-(-tiles // sms) - 1) * float(row["repair_tile"])
    if isinstance(form, hopper.BackwardForm):
        return card.fill((line(n) for n in _query_tiles(form, shape)), sms)
    return beside + card.fill((line(n) for n in _key_tiles(form, shape)), sms)


def _key_tiles(form: hopper.ForwardForm, shape: AttentionShape) -> Iterator[int]:
    """Per query tile, in the order they start, the key tiles it walks."""
    block_m, block_n = form.tile.block_m, form.block_n
    heads = shape.batch * shape.heads

    def rounds(m: int) -> int:
        keys = shape.seqlen_k
        if shape.causal:
            last = min((m + 1) * block_m, shape.seqlen_q)
            keys = min(keys, last + shape.seqlen_k - shape.seqlen_q)
        return max(1, -(-keys // block_n))

    group = hopper_heads_per_group(shape, "forward")
    tiles = range(-(-shape.seqlen_q // block_m))
    return (rounds(m) for m in _longest_first(reversed(tiles), heads, group))


def _query_tiles(form: hopper.BackwardForm, shape: AttentionShape) -> Iterator[int]:
    """Per key tile, in the order they start, the query tiles it walks."""
    block_m, block_n = form.tile.block_m, form.tile.block_n
    query_tiles, per_head = -(-shape.seqlen_q // block_m), shape.heads // shape.kv_heads
    heads = shape.batch * shape.kv_heads

    def rounds(n: int) -> int:
        first = 0
        if shape.causal:
            first = max(0, n * block_n - (shape.seqlen_k - shape.seqlen_q)) // block_m
        return max(1, per_head * (query_tiles - first))

    group = hopper_heads_per_group(shape, "backward")
    tiles = range(-(-shape.seqlen_k // block_n))
    return (rounds(n) for n in _longest_first(tiles, heads, group))


def _longest_first(tiles: Iterable[int], heads: int, group: int) -> Iterator[int]:
    """``group`` heads side by side."""
    order = list(tiles)
    for start in range(0, heads, group):
        for tile in order:
            yield from [tile] * min(group, heads - start)


@checked
def seconds(
    form: Form,
    shape: AttentionShape,
    *,
    sms: int,
    hbm_bytes_per_s: float,
    clock: card.Clock = card.H200_SUSTAINED,
    optimistic: bool = False,
) -> float:
    """Time of a pass: its main kernel, and around a backward two that only move bytes.

    Raises LookupError when the form's clocks are not on record (:func:`line_of`).
    """
    main = clocks(form, shape, sms, optimistic) / clock.hz
    if isinstance(form, hopper.ForwardForm):
        return main + seconds_around(
            "forward", shape, 1 + form.persistent + optimistic, hbm_bytes_per_s
        )
    return main + seconds_around("backward", shape, 1, hbm_bytes_per_s)


def seconds_around(
    pass_: str, shape: AttentionShape, launches: int, hbm_bytes_per_s: float
) -> float:
    """What comes to a main kernel's clocks: ``launches``, and around a backward two kernels that
    only move bytes, with a launch each."""
    if pass_ == "forward":
        return launches * card.LAUNCH_S
    tensor = shape.batch * shape.heads * shape.seqlen_q * shape.head_dim * ITEMSIZE[shape.dtype]
    # O and dO in, an fp32 dQ set to zero; that dQ in, dQ out.
    moved = (2 * tensor + 2 * tensor) + (2 * tensor + tensor)
    return moved / (card.HBM_SUSTAINED * hbm_bytes_per_s) + (launches + 2) * card.LAUNCH_S


def predictable() -> list[Form]:
    """Forms that the model covers (:func:`refusal`)."""
    forms: list[Form] = [*hopper.FORWARD_FORMS, *hopper.BACKWARD_FORMS]
    return [form for form in forms if refusal(form) is None]


def kinds() -> list[tuple[Form, bool]]:
    """What is recorded, form and whether optimistic: exact all, optimistic those that differ."""
    picked = [
        form for form in hopper.FORWARD_FORMS
        if not form.late_wait and (form.pingpong or form.head_dim == 256)
    ]  # fmt: skip
    return [*((form, False) for form in predictable()), *((form, True) for form in picked)]


def form_table() -> str:
    """What the model says of the choice of forms: TFLOP/s on an H200, bf16, 16,384 tokens, no mask,
    2,048 columns of heads side by side, as a Markdown table."""
    rows = ["| form | N = 2,048 | N = 16,384 |", "|---|---|---|"]
    for form, optimistic in kinds():
        backward = isinstance(form, hopper.BackwardForm)
        rates = []
        for seqlen in (2048, 16384):
            shape = AttentionShape(
                16384 // seqlen, 2048 // form.head_dim, seqlen, seqlen, form.head_dim, dtype="bf16"
            )
            flops = useful_flops(shape, "backward" if backward else "forward")
            took = seconds(
                form, shape, sms=H200.sms, hbm_bytes_per_s=H200.hbm_bandwidth_bytes_per_s,
                optimistic=optimistic,
            )  # fmt: skip
            rates.append(f"{flops / took / 1e12:.0f} TFLOP/s")
        name = f"{'backward' if backward else 'forward'} {name_of(form, optimistic)}"
        rows.append(f"| {name} | {' | '.join(rates)} |")
    return "\n".join(rows)


def page_with(table: str, text: str) -> str:
    """The page's text with this table between its markers."""
    before, rest = text.split(MARKERS[0])
    return f"{before}{MARKERS[0]}\n\n{table}\n\n{MARKERS[1]}{rest.split(MARKERS[1])[1]}"


def main() -> None:
    """Records the clocks of every form, bf16, and the table of the page. Minutes."""
    columns = ["pass", "form", "causal", "nvrtc", "digest", "beside", "repair", "repair_tile"]
    with LINES.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*columns, *(f"clocks_{n}" for n in ROUNDS)])
        for form, optimistic in kinds():
            for causal in (False, True):
                points, beside = _points(form, causal, optimistic)
                repair = (0.0, 0.0)
                if optimistic and isinstance(form, hopper.ForwardForm):
                    repair = _repair(form, causal)
                pass_ = "backward" if isinstance(form, hopper.BackwardForm) else "forward"
                writer.writerow(
                    [pass_, name_of(form, optimistic), causal, nvrtc_version(),
                     digest_of(form, causal, optimistic), round(beside), *map(round, repair),
                     *(round(value) for _, value in points)]
                )  # fmt: skip
                file.flush()
    _recorded.cache_clear()
    PAGE.write_text(page_with(form_table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(program(main))
