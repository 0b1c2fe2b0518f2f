"""Time of one step of decoding on a card, beside the cache at the bandwidth of HBM.

The ways to share K and V of ``decode-bytes``, and fp8 with a scale for every page, at three loads
from one long sequence to many short ones; GQA also with drafts. Nothing is used twice, so the
roofline is the cache over HBM's bandwidth and should hold within a few percent: if it does not,
the kernel leaves something lying (but for the wide latent, whose scores are made twice). The rule's
number of splits and other numbers take turns, L2 is flushed before each step, and results are held
to float64 first.
"""

from __future__ import annotations

from collections.abc import Iterator

from analysis import decode
from analysis.decode import DecodeShape
from analysis.hardware import H100_SXM, H200
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.bytes import decode_bytes
from repro.experiments.bytes.decode_bytes import PAGE_SIZE, Sharing

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


def cells() -> list[Cell]:
    """Every way at every load; drafts last."""
    found = [way.cell(batch, context, sharing=name) for batch, context in LOADS for name, way in SHARING.items()]
    return found + [SHARING["gqa"].cell(*LOADS[0], width, sharing="gqa") for width in WIDTHS]


def shape_of(cell: Cell) -> DecodeShape:
    """The step that a cell names: all sequences as long, though the kernels are told each."""
    way = SHARING[str(cell["sharing"])]
    return way.step(int(cell["seqlen_q"]), (int(cell["seqlen_k"]),) * int(cell["batch"]))


def predict(cell: Cell) -> Iterator[Row]:
    """The roofline on the cards that it may be measured on, from datasheets."""
    shape = shape_of(cell)
    for gpu in CARDS:
        tool = f"cache once, ceilings: datasheet of {gpu.name}"
        yield row("time_ms", decode.seconds(shape, gpu) * 1e3, splits=RULE, device=gpu.name, tool=tool)


def measure(cell: Cell, context: Context) -> Iterator[Row]:
    """Milliseconds by number of splits, in turn; what is wrong is a row that says so."""
    from repro.instruments.decode_work import DecodeOperands
    from repro.instruments.timing import IN_TURN, TorchDevice, time_interleaved

    operands = DecodeOperands(shape_of(cell))
    numbers: dict[str, int | None] = {RULE: None} | {str(n): n for n in SPLITS}
    calls = {}
    for name, splits in numbers.items():
        call = operands.call(splits)
        operands.out.fill_(float("nan"))
        call()
        error = operands.error()
        if error <= BOUND:
            calls[name] = call
        else:  # a NaN is no number below
            yield row("time_ms", error=f"wrong: out is off by {error:.3g}, more than {BOUND:g}", splits=name)
    for name, timing in time_interleaved(calls, TorchDevice(), budget_ms=BUDGET_MS).items():
        yield timing.row(IN_TURN, splits=name)


EXPERIMENT = Experiment(
    "gpu-decode",
    cells,
    predict,
    measure,
    device="cuda",
    seconds=len(cells()) * (0.5 + 2 * (1 + len(SPLITS)) * BUDGET_MS / 1e3),
)
