"""What a checkpoint around attention adds to its traffic, for standard and for flash attention.

Standard attention leaves P (N² elements) for the backward pass; a checkpoint drops it and runs the
forward kernels again. Flash attention leaves O and one fp32 statistic a row, so the same checkpoint
frees little and costs a forward all the same: recomputation is inside its backward already.
"""

from collections.abc import Iterator

from analysis.shapes import ITEMSIZE, Tile
from repro.experiments import Cell, Context, Experiment
from repro.experiments.shared.attention import cell, predicted_traffic
from repro.measuring.records import Record, record

NAME = "checkpoint-attention"
HEAD_DIM = 64
COUNTED = (256, 512)
SUMMED = (1024, 2048, 4096, 8192, 16384)
TILES = {
    ("standard", "forward"): Tile(128, 128),
    ("standard", "backward"): Tile(128, 128),
    ("flash", "forward"): Tile(128, 64),
    ("flash", "backward"): Tile(64, 128),
}


def _cells(lengths: tuple[int, ...]) -> Iterator[Cell]:
    for seqlen in lengths:
        for (algorithm, pass_), tile in TILES.items():
            yield cell(algorithm, pass_, tile, seqlen=seqlen, head_dim=HEAD_DIM)


def cells() -> list[Cell]:
    """Both passes of both algorithms at lengths that the host backend executes."""
    return list(_cells(COUNTED))


def kept_bytes(algorithm: str, seqlen: int, checkpointed: bool, dtype: str = "fp16") -> int:
    """Bytes per head that attention adds to what is kept anyway (q, k, v and its output)."""
    if checkpointed:
        return 0
    return seqlen**2 * ITEMSIZE[dtype] if algorithm == "standard" else seqlen * 4


def predict(one: Cell) -> list[Record]:
    """Exact sums over the tile loop; with the forward pass, the bytes kept per head."""
    rows = list(predicted_traffic(NAME, one))
    if one["pass"] == "forward":
        for checkpointed in (False, True):
            value = kept_bytes(str(one["implementation"]), int(one["seqlen_q"]), checkpointed)
            rows.append(
                record(one, experiment=NAME, source="predicted", metric="kept_bytes", unit="B",
                       value=value, tool="sum of saved tensors", checkpointed=checkpointed,
                       cell=one.id)
            )  # fmt: skip
    return rows


def also() -> Iterator[Record]:
    """The sums at lengths that are not executed."""
    for one in _cells(SUMMED):
        yield from predict(one)


def measure(one: Cell, context: Context) -> list[Record]:
    """The kernels, executed and counted."""
    from repro.experiments.shared.host import counted_traffic

    return list(counted_traffic(NAME, one, context))


EXPERIMENT = Experiment(
    name=NAME,
    title="checkpointing attention: bytes added, bytes freed",
    cells=cells,
    predict=predict,
    measure=measure,
    device="host",
    also=also,
    seconds=10,
)
