"""Clocks and seconds of the Hopper kernels, predicted from their machine code.

``python -m kernels.timing hopper`` follows single blocks of small problems through the model
of an SM (``kernels.timing.followed_blocks``). What a tile takes is a line in the rounds of its
loop, recorded in ``hopper_lines.csv`` with a digest of the source. The tiles of a shape then fill
the card in the order in which they start, which takes neither compiler nor time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from analysis.arguments import checked
from analysis.flops import useful_flops
from analysis.hardware import H200
from analysis.l2.attention import hopper_heads_per_group
from analysis.loop_model import card
from analysis.shapes import AttentionShape
from analysis.tile_loop import tile_loop
from kernels import hopper
from kernels.building.compile import nvrtc_version
from kernels.launch import ITEMSIZE
from kernels.timing import records
from kernels.timing.followed_blocks import ROUNDS, Features, Form, dtype_of, points_of, repair_of
from kernels.timing.records import Recorded, clock_columns, digest_of_source

LINES = Path(__file__).with_name("hopper_lines.csv")
"""Recorded clocks, so that a prediction needs neither compiler nor disassembler."""
COLUMNS = ("pass", "form", "causal", "nvrtc", "digest", "beside", "repair", "repair_tile", *clock_columns(ROUNDS))

FEATURES_ON_RECORD: tuple[Features, ...] = (
    ("window",),
    ("softcap",),
    ("alibi",),
    ("window", "softcap"),
    ("softcap", "fp16"),
    ("window", "softcap", "fp16"),
)
"""What a form may have for there to be clocks: the others would take as long again to record."""


def digest_of(form: Form, causal: bool, optimistic: bool = False, features: Features = ()) -> str:
    """Of all that the main kernel's machine code follows from, but for the compiler."""
    dtype = dtype_of(features)
    if isinstance(form, hopper.BackwardForm):
        kernel = form.kernel("", dtype, causal, features=features)
    else:
        part = "optimistic" if optimistic else ""
        kernel = form.kernel(dtype, causal, part, features=features)
    return digest_of_source(kernel)


def options_of(features: Features) -> list[str]:
    """Those that are options of a kernel, not its type."""
    return [name for name in features if name != "fp16"]


def name_of(form: Form, optimistic: bool = False, features: Features = ()) -> str:
    """What the form's clocks are recorded under."""
    return ", ".join((form.name, *["optimistic"] * optimistic, *features))


def refusal(form: Form, deterministic: bool = False) -> str | None:
    """Why the model predicts no time of a form, or None."""
    if isinstance(form, hopper.ForwardForm):
        return None
    if form.dq_from_registers:
        return "what additions to memory from registers cost on their way nobody has published"
    if deterministic:
        return "blocks wait for the additions of other blocks, and the model follows one block at a time"
    return None


def pass_of(form: Form) -> str:
    """ "forward" or "backward"."""
    return "backward" if isinstance(form, hopper.BackwardForm) else "forward"


def recorded(form: Form, causal: bool, optimistic: bool = False, features: Features = ()) -> Recorded:
    """What is on record of a form.

    features: in the order of ``kernels.timing.followed_blocks.Features``.

    Raises LookupError when the model does not cover the form, when nothing is recorded for it, or
    for another state of its source.
    """
    pass_, name = pass_of(form), name_of(form, optimistic, features)
    refused = refusal(form)
    if refused is not None:
        raise LookupError(f"the {pass_} {name}: {refused}")
    row = records.find(LINES, **{"pass": pass_, "form": name, "causal": causal})
    again = "python -m kernels.timing hopper records it"
    if row is None:
        raise LookupError(f"no clocks on record for the {pass_} {name}: {again}")
    if row["digest"] != digest_of(form, causal, optimistic, features):
        raise LookupError(f"the source of the {pass_} {name} has changed: {again}")
    return Recorded.read(row)


@checked
def clocks(form: Form, shape: AttentionShape, sms: int, optimistic: bool = False, features: Features = ()) -> float:
    """Clocks of the main kernel on a card of ``sms`` multiprocessors. Errors as :func:`recorded`.

    optimistic: with those of its repair, on data of which it has nothing to do again.
    features: a window leaves each tile the rounds that it has; of these as many are masked as in
    the middle of a sequence, and sinks are taken for keys like others.
    """
    found = recorded(form, shape.causal, optimistic, features)
    walk = _query_tiles if isinstance(form, hopper.BackwardForm) else _key_tiles
    tiles = shape.batch * shape.heads * -(-shape.seqlen_q // form.tile.block_m)
    repair = found.repair + (-(-tiles // sms) - 1) * found.repair_tile if optimistic else 0.0
    return repair + found.clocks(walk(form, shape), sms)


def _key_tiles(form: Form, shape: AttentionShape) -> Iterator[int]:
    """Per query tile, in the order they start, the key tiles it walks."""
    visits = tile_loop(shape, form.tile).visits_of_query_tile
    group = hopper_heads_per_group(shape, "forward")
    tiles = reversed(range(len(visits)))
    heads = shape.batch * shape.heads
    return (int(visits[m]) for m in longest_first(tiles, heads, group))


def _query_tiles(form: Form, shape: AttentionShape) -> Iterator[int]:
    """Per key tile, in the order they start, the query tiles it walks."""
    visits = tile_loop(shape, form.tile).visits_of_key_tile
    group = hopper_heads_per_group(shape, "backward")
    heads = shape.batch * shape.kv_heads
    order = longest_first(range(len(visits)), heads, group)
    return (shape.group * int(visits[n]) for n in order)


def longest_first(tiles: Iterable[int], heads: int, group: int) -> Iterator[int]:
    """Of tiles of ``heads`` heads, ``group`` of them side by side."""
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
    features: Features = (),
) -> float:
    """Time of a pass: its main kernel, and around a backward two that only move bytes.

    Raises LookupError when the form's clocks are not on record (:func:`recorded`).
    """
    main = clocks(form, shape, sms, optimistic, features) / clock.hz
    if isinstance(form, hopper.ForwardForm):
        return main + seconds_around("forward", shape, 1 + form.persistent + optimistic, hbm_bytes_per_s)
    return main + seconds_around("backward", shape, 1, hbm_bytes_per_s)


def seconds_around(pass_: str, shape: AttentionShape, launches: int, hbm_bytes_per_s: float) -> float:
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
    """What is recorded, form and whether optimistic: exact all, optimistic those that differ. And
    :func:`featured`."""
    picked = [form for form in hopper.FORWARD_FORMS if form.pingpong or form.head_dim == 256]
    return [*((form, False) for form in predictable()), *((form, True) for form in picked)]


def featured() -> list[tuple[Form, Features]]:
    """What is recorded beside :func:`kinds`: the forms with a window, a softcap or ALiBi."""
    forms: list[Form] = [
        hopper.forward_form(head_dim, False, 1, featured=True) for head_dim in hopper.HEAD_DIMS["forward"]
    ]
    forms += [hopper.backward_form(head_dim, False, featured=True) for head_dim in hopper.HEAD_DIMS["backward"]]
    return [
        (form, features)
        for form in forms
        for features in FEATURES_ON_RECORD
        if isinstance(form, hopper.ForwardForm) or form.takes(dtype_of(features), options_of(features))
    ]


def form_table() -> str:
    """What the model says of the choice of forms: TFLOP/s on an H200, bf16, 16,384 tokens, no mask,
    2,048 columns of heads side by side, as a Markdown table."""
    rows = ["| form | N = 2,048 | N = 16,384 |", "|---|---|---|"]
    for form, optimistic in kinds():
        backward = isinstance(form, hopper.BackwardForm)
        rates = []
        for seqlen in (2048, 16384):
            shape = AttentionShape(16384 // seqlen, 2048 // form.head_dim, seqlen, seqlen, form.head_dim, dtype="bf16")
            flops = useful_flops(shape, "backward" if backward else "forward")
            took = seconds(
                form, shape, sms=H200.sms, hbm_bytes_per_s=H200.hbm_bandwidth_bytes_per_s, optimistic=optimistic
            )
            rates.append(f"{flops / took / 1e12:.0f} TFLOP/s")
        name = f"{'backward' if backward else 'forward'} {name_of(form, optimistic)}"
        rows.append(f"| {name} | {' | '.join(rates)} |")
    return "\n".join(rows)


def feature_table() -> str:
    """Clocks that one more round costs a tile of 8 rounds, dense and causal, plain and with each of
    :data:`FEATURES_ON_RECORD` that it has, as a Markdown table."""
    kinds = ((), *FEATURES_ON_RECORD)
    titles = ((" and ".join(options_of(features)) or "plain") + ", fp16" * ("fp16" in features) for features in kinds)
    rows = [f"| form | {' | '.join(titles)} |", "|---" * (len(kinds) + 1) + "|"]
    for form in dict.fromkeys(form for form, _ in featured()):
        cells = []
        for features in kinds:
            if features and (form, features) not in featured():
                cells.append("–")
                continue
            lines = [recorded(form, mask, features=features).line for mask in (False, True)]
            cells.append(" / ".join(f"{(line(16) - line(8)) / 8:.0f}" for line in lines))
        pass_ = "backward" if isinstance(form, hopper.BackwardForm) else "forward"
        rows.append(f"| {pass_} {form.name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _row(form: Form, optimistic: bool, features: Features, causal: bool) -> dict[str, object]:
    points, beside = points_of(form, causal, optimistic, features=features)
    repair = (0.0, 0.0)
    if optimistic and isinstance(form, hopper.ForwardForm):
        repair = repair_of(form, causal)
    names = ("beside", "repair", "repair_tile", *clock_columns(ROUNDS))
    values = (beside, *repair, *(value for _, value in points))
    return {
        "pass": pass_of(form),
        "form": name_of(form, optimistic, features),
        "causal": causal,
        "nvrtc": nvrtc_version(),
        "digest": digest_of(form, causal, optimistic, features),
        **dict(zip(names, map(round, values), strict=True)),
    }


def record() -> None:
    """Records the clocks of every form, bf16. Minutes."""
    forms: list[tuple[Form, bool, Features]] = [
        *((form, optimistic, ()) for form, optimistic in kinds()),
        *((form, False, features) for form, features in featured()),
    ]
    records.write(LINES, COLUMNS, (_row(*of, mask) for of in forms for mask in (False, True)))
