"""Where Hopper's forward pays for packed sequences: predicted times for published lengths.

``python -m repro.packed_time`` writes the table of ``docs/pages/packed.md`` for an H200, a batch of
each dataset of ``packed_sequences``. Beside the Hopper form, predicted from its machine code
(``kernels.hopper_packed_time``), stand two numbers of the sm_80 form, of whose machine code on this
card there is no model: the roofline, which it cannot beat, and the time that its blocks would take
on as many SMs of an A100 at this card's clock, which it should.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tabulate import tabulate

from analysis.hardware import A100_80GB, H200
from analysis.loop_model import card
from analysis.packed import Lengths
from analysis.shapes import AttentionShape
from kernels import ampere_time, hopper_time
from kernels.launches import Device, launches_of
from kernels.pages import Block
from repro import cli
from repro.experiments.packed_sequences import LIMITS, drawn
from repro.prediction import predict

BLOCK = Block("packed.md", "hopper", "repro.packed_time")
SEQUENCES, HEADS, DTYPE = 64, 16, "fp16"
HEAD_DIMS = (64, 128)
A100 = Device(A100_80GB.architecture, A100_80GB.shared_bytes_per_block, A100_80GB.sms)


def batch(dataset: str, head_dim: int, causal: bool = False) -> tuple[AttentionShape, Lengths]:
    """The packed arrays of ``SEQUENCES`` drawn sequences, and their lengths."""
    lengths = Lengths.equal(drawn(dataset, SEQUENCES))
    some = AttentionShape(1, HEADS, 1, 1, head_dim, dtype=DTYPE, causal=causal)
    return lengths.packed_shape(some), lengths


def on_ampere_sms(shape: AttentionShape, lengths: Lengths) -> float:
    """Seconds of the sm_80 forward on this card, were its SMs those of an A100: the recorded clocks
    of the plain kernel, a block for each tile of each sequence."""
    main = launches_of("flash", shape, "forward", A100).main
    found = ampere_time.recorded(main.kernel)

    def rounds() -> Iterator[int]:
        for each in lengths.shapes(shape):
            yield from ampere_time.rounds_of("forward", found.tile, each)

    clocks = found.clocks(rounds(), H200.sms)
    around = hopper_time.seconds_around("forward", shape, 1, H200.hbm_bandwidth_bytes_per_s)
    return clocks / card.H200_SUSTAINED.hz + around


def rows() -> Iterator[tuple[str, int, float, float, float]]:
    """Dataset, head dimension and seconds: Hopper, the sm_80 form's roofline, and its blocks on the
    SMs of an A100."""
    for dataset in LIMITS:
        for head_dim in HEAD_DIMS:
            shape, lengths = batch(dataset, head_dim)
            hopper = predict("flash-sm90", shape, "forward", H200, lengths=lengths).predicted_s
            assert hopper is not None, "python -m kernels.hopper_packed_time first"
            least = predict("flash", shape, "forward", H200, lengths=lengths).time.seconds
            yield dataset, head_dim, hopper, least, on_ampere_sms(shape, lengths)


def table() -> str:
    """The page's table."""
    headers = ("lengths", "head dimension", "Hopper, predicted", "sm_80, roofline",
               "sm_80, an A100's SMs")  # fmt: skip
    shown = [
        (name, head_dim, *(f"{1e6 * seconds:.0f} µs" for seconds in times))
        for name, head_dim, *times in rows()
    ]
    return tabulate(shown, headers, tablefmt="pipe", disable_numparse=True)


def main() -> None:
    """Writes the page's table."""
    BLOCK.write(table())


if __name__ == "__main__":
    sys.exit(cli.program(main))
