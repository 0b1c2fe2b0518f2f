"""Time of one step of decoding on a card, beside the cache at the bandwidth of HBM.

The ways to share K and V of ``decode-bytes``, and fp8 with a scale for every page, at three loads
from one long sequence to many short ones; GQA also with drafts. Nothing is used twice, so the
roofline is the cache over HBM's bandwidth and should hold within a few percent: if it does not,
the kernel leaves something lying (but for the wide latent, whose scores are made twice). The rule's
number of splits and other numbers take turns, L2 is flushed before each step, and results are held
to float64 first.
"""

from __future__ import annotations

from typing import Any

from analysis import decode
from analysis.decode import DecodeShape
from analysis.hardware import H100_SXM, H200
from repro.experiments import Cell, Context, Experiment
from repro.experiments.bytes import decode_bytes
from repro.experiments.bytes.decode_bytes import DTYPE, HEADS, PAGE_SIZE, Sharing
from repro.measuring.records import Record, record

NAME = "gpu-decode"
CARDS = (H100_SXM, H200)
#: (sequences, keys of each)
LOADS = ((16, 16384), (1, 65536), (64, 2048))
WIDTHS = (2, 4, 8)
#: GQA first, then how the others share.
SHARING = {
    name: decode_bytes.SHARING[name] for name in ("gqa", "mha", "gqa-fp8", "mqa", "latent-256", "latent-576")
} | {"gqa-fp8-pages": Sharing(8, 128, fp8=True, scale_block=PAGE_SIZE)}
#: Numbers of splits that take turns with the rule's (None).
SPLITS = (1, 4, 16, 64)
RULE = "rule"
BUDGET_MS = 40.0
#: Largest error of out for N(0, 1): bf16's bound of the kernels' tests.
BOUND = 2e-2


def _cell(sharing: str, batch: int, context: int, width: int = 1) -> Cell:
    way = SHARING[sharing]
    return Cell(
        implementation="flash-decode",
        pass_="forward",
        sharing=sharing,
        batch=batch,
        heads=HEADS,
        kv_heads=way.kv_heads,
        seqlen_q=width,
        seqlen_k=context,
        head_dim=way.head_dim,
        dtype=DTYPE,
        causal=True,
        page_size=PAGE_SIZE,
    )


def cells() -> list[Cell]:
    """Every way at every load; drafts last."""
    found = [_cell(sharing, *load) for load in LOADS for sharing in SHARING]
    return found + [_cell("gqa", *LOADS[0], width) for width in WIDTHS]


def shape_of(cell: Cell) -> DecodeShape:
    """The step that a cell names: all sequences as long, though the kernels are told each."""
    way = SHARING[str(cell["sharing"])]
    return way.step(int(cell["seqlen_q"]), (int(cell["seqlen_k"]),) * int(cell["batch"]))


def predict(cell: Cell) -> list[Record]:
    """The roofline on the cards that it may be measured on, from datasheets."""
    shape = shape_of(cell)
    return [
        record(
            cell,
            experiment=NAME,
            source="predicted",
            metric="time_ms",
            unit="ms",
            splits=RULE,
            value=decode.seconds(shape, gpu) * 1e3,
            device=gpu.name,
            tool=f"cache once, ceilings: datasheet of {gpu.name}",
        )
        for gpu in CARDS
    ]


def measure(cell: Cell, context: Context) -> list[Record]:
    """Milliseconds by number of splits, in turn; what is wrong is a row that says so."""
    from repro.instruments.decode_work import DecodeOperands
    from repro.instruments.timing import TorchDevice, time_interleaved

    operands = DecodeOperands(shape_of(cell))
    numbers: dict[str, int | None] = {RULE: None} | {str(n): n for n in SPLITS}
    calls, wrong = {}, {}
    for name, splits in numbers.items():
        calls[name] = operands.call(splits)
        operands.out.fill_(float("nan"))
        calls[name]()
        error = operands.error()
        if not error <= BOUND:  # a NaN is no number below
            wrong[name] = f"wrong: out is off by {error:.3g}, more than {BOUND:g}"
            del calls[name]

    def row(name: str, **values: Any) -> Record:
        return record(cell, experiment=NAME, source="measured", metric="time_ms", splits=name, **values)

    rows = [row(name, error=reason) for name, reason in wrong.items()]
    for name, timing in time_interleaved(calls, TorchDevice(), budget_ms=BUDGET_MS).items():
        rows.append(
            row(
                name,
                value=timing.median_ms,
                unit="ms",
                spread_min=timing.min_ms,
                spread_max=timing.max_ms,
                spread_n=timing.repeats,
                tool="CUDA events, median, in turn, L2 flushed",
            )
        )
    return rows


EXPERIMENT = Experiment(
    name=NAME,
    title="time of a step of decoding beside its roofline",
    cells=cells,
    predict=predict,
    measure=measure,
    device="cuda",
    seconds=len(cells()) * (0.5 + 2 * (1 + len(SPLITS)) * BUDGET_MS / 1e3),
)
