"""Traffic against tile size, 16 to 512, with what each rule for choosing a tile picks.

One head, N = 4096, forward, fp16, d = 64 and 128. FlashAttention 2022 keeps keys outside, so its
traffic falls with the key block Bc; the later loop order keeps queries outside and its traffic
falls with the query block. What stops both is shared memory, per card.
"""

from collections.abc import Iterator

from analysis.hardware import A100_40GB, H200, T4, Gpu
from analysis.shapes import AttentionShape, Tile
from analysis.tiles import best_tile, paper_tile, study_note_tile, study_note_tile_corrected
from analysis.traffic import predict_traffic
from kernels.flash1 import flash1_shared_bytes
from kernels.flash_config import configure, default_tile
from repro.experiments import Cell, Experiment, Row, row
from repro.experiments.shared.attention import cell, shape_of, tile_of

SEQLEN = 4096
HEAD_DIMS = (64, 128)
SIZES = (16, 32, 64, 128, 256, 512)
GPUS = (T4, A100_40GB, H200)
#: The other side of the tile while one side varies.
OTHER = {"flash1-released": 16, "flash": 64}


def tile(algorithm: str, size: int) -> Tile:
    """The tile whose outer side is ``size``."""
    other = OTHER[algorithm]
    return Tile(other, size) if algorithm == "flash1-released" else Tile(size, other)


def largest(algorithm: str, head_dim: int, gpu: Gpu) -> int:
    """The largest outer side of a power of two whose tile fits a thread block of this card."""
    fitting = 0
    for size in SIZES:
        try:
            if algorithm == "flash1-released":
                needed = flash1_shared_bytes(tile(algorithm, size), head_dim, "fp16", "forward")
            else:
                limit = gpu.shared_bytes_per_block
                config = configure("forward", "fp16", head_dim, tile=tile(algorithm, size), limit=limit)
                needed = config.shared_bytes
        except ValueError:  # too large for the kernel or the card
            break
        if needed <= gpu.shared_bytes_per_block:
            fitting = size
    return fitting


def rules(algorithm: str, head_dim: int) -> Iterator[tuple[str, Tile]]:
    """What every rule picks on an H200 (M = its shared memory); a rule may pick nothing."""
    shape = AttentionShape(1, 1, SEQLEN, SEQLEN, head_dim)
    note_bytes = H200.shared_bytes_per_block
    if algorithm == "flash1-released":
        yield "paper: Bc = M/4d", paper_tile(head_dim, H200.on_chip_elements)
        yield "released, 2022", Tile(16, 256)
        try:
            side = study_note_tile(head_dim, note_bytes).block_n
        except ValueError:  # F7: the printed rule gives no tile at all
            side = 0
        if side:
            yield "study notes", Tile(16, side)
        yield ("study notes, corrected", Tile(16, study_note_tile_corrected(head_dim, note_bytes).block_n))
    else:
        yield "ours: least traffic, busy SMs", best_tile(shape, H200)
        yield "our kernel's default", default_tile(head_dim, "fp16", "forward")
        yield "released, FlashAttention-2", Tile(128, 128 if head_dim == 64 else 64)


def points() -> Iterator[Cell]:
    """The curve over sizes, the size each card allows, and the rules' choices on the curve."""
    for head_dim in HEAD_DIMS:
        for algorithm in OTHER:
            for size in SIZES:
                yield point(algorithm, head_dim, tile(algorithm, size), "curve")
            for gpu in GPUS:
                fits = largest(algorithm, head_dim, gpu)
                if fits:
                    yield point(algorithm, head_dim, tile(algorithm, fits), f"limit: {gpu.name}")
            for rule, choice in rules(algorithm, head_dim):
                yield point(algorithm, head_dim, choice, f"rule: {rule}")


def point(algorithm: str, head_dim: int, choice: Tile, what: str) -> Cell:
    """A tile, and why it is looked at."""
    return cell(algorithm, "forward", choice, seqlen=SEQLEN, head_dim=head_dim, note=what)


def predict(one: Cell) -> Iterator[Row]:
    """All bytes of the pass."""
    traffic = predict_traffic(str(one["implementation"]), shape_of(one), tile_of(one), "forward")
    yield row("traffic_bytes", traffic.total_bytes, level="sm", tool="sum over the tile loop")


EXPERIMENT = Experiment("tile-rules", predict=predict, also=points)
