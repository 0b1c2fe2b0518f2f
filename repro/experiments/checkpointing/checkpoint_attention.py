"""What a checkpoint around attention adds to its traffic, for standard and for flash attention.

Standard attention leaves P (N² elements) for the backward pass; a checkpoint drops it and runs the
forward kernels again. Flash attention leaves O and one fp32 statistic a row, so the same checkpoint
frees little and costs a forward all the same: recomputation is inside its backward already.
"""

from collections.abc import Iterator
from functools import partial

from analysis.shapes import ITEMSIZE, Tile
from analysis.traffic import predict_traffic
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.attention import cell, predicted_traffic, shape_of, traffic_rows
from repro.experiments.shared.host import counted_traffic

HEAD_DIM = 64
STEP = "step"
"""Forward and backward in one cell: the forward under torch's checkpoint."""
ALGORITHMS = ("standard", "flash")
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
    """Both passes of both algorithms at lengths that the host backend executes, and a whole step
    under a checkpoint."""
    return [*_cells(COUNTED), *_steps(COUNTED)]


def _steps(lengths: tuple[int, ...]) -> Iterator[Cell]:
    for seqlen in lengths:
        for algorithm in ALGORITHMS:
            yield cell(algorithm, STEP, seqlen=seqlen, head_dim=HEAD_DIM)


def _predicted_step(one: Cell) -> Iterator[Row]:
    """The forward twice and the backward once, for each kernel and tensor."""
    algorithm = str(one["implementation"])
    for times, pass_ in ((2, "forward"), (1, "backward")):
        traffic = predict_traffic(algorithm, shape_of(one), TILES[algorithm, pass_], pass_)
        yield from traffic_rows(traffic.kernels, times=times)


def kept_bytes(algorithm: str, seqlen: int, checkpointed: bool, dtype: str = "fp16") -> int:
    """Bytes per head that attention adds to what is kept anyway (q, k, v and its output)."""
    if checkpointed:
        return 0
    return seqlen**2 * ITEMSIZE[dtype] if algorithm == "standard" else seqlen * 4


def predict(one: Cell) -> Iterator[Row]:
    """Exact sums over the tile loop; with the forward pass, the bytes kept per head."""
    if one["pass"] == STEP:
        yield from _predicted_step(one)
        return
    yield from predicted_traffic(one)
    if one["pass"] == "forward":
        for again in (False, True):
            kept = kept_bytes(str(one["implementation"]), int(one["seqlen_q"]), again)
            yield row("kept_bytes", kept, tool="sum of saved tensors", checkpointed=again)


def also() -> list[Cell]:
    """The sums at lengths that are not executed."""
    return [*_cells(SUMMED), *_steps(SUMMED)]


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """The kernels, executed and counted."""
    if one["pass"] != STEP:
        return counted_traffic(one, context)
    from repro.experiments.shared.checkpointed_run import run_checkpointed

    tiles = {p: TILES[str(one["implementation"]), p] for p in ("forward", "backward")}
    return counted_traffic(one, context, partial(run_checkpointed, tiles=tiles))


EXPERIMENT = Experiment("checkpoint-attention", cells, predict, measure, device="host", also=also, seconds=10)
