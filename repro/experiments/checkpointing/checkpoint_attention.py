"""What a checkpoint around attention adds to its traffic, for standard and for flash attention.

Standard attention leaves P (N² elements) for the backward pass; a checkpoint drops it and runs the
forward kernels again. Flash attention leaves O and one fp32 statistic a row, so the same checkpoint
frees little and costs a forward all the same: recomputation is inside its backward already.
"""

from collections.abc import Iterator
from functools import partial

from analysis.shapes import ITEMSIZE, Tile
from analysis.traffic import predict_traffic
from repro.experiments import Cell, Context, Experiment
from repro.experiments.shared.attention import cell, predicted_traffic, shape_of, traffic_rows
from repro.measuring.records import Record, record

NAME = "checkpoint-attention"
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
            yield Cell(
                implementation=algorithm,
                pass_=STEP,
                batch=1,
                heads=1,
                kv_heads=1,
                seqlen_q=seqlen,
                seqlen_k=seqlen,
                head_dim=HEAD_DIM,
                dtype="fp16",
                causal=False,
            )


def _predicted_step(one: Cell) -> Iterator[Record]:
    """The forward twice and the backward once, for each kernel and tensor."""
    algorithm = str(one["implementation"])
    for times, pass_ in ((2, "forward"), (1, "backward")):
        traffic = predict_traffic(algorithm, shape_of(one), TILES[algorithm, pass_], pass_)
        yield from traffic_rows(one, traffic.kernels, experiment=NAME, times=times)


def kept_bytes(algorithm: str, seqlen: int, checkpointed: bool, dtype: str = "fp16") -> int:
    """Bytes per head that attention adds to what is kept anyway (q, k, v and its output)."""
    if checkpointed:
        return 0
    return seqlen**2 * ITEMSIZE[dtype] if algorithm == "standard" else seqlen * 4


def predict(one: Cell) -> list[Record]:
    """Exact sums over the tile loop; with the forward pass, the bytes kept per head."""
    if one["pass"] == STEP:
        return list(_predicted_step(one))
    rows = list(predicted_traffic(NAME, one))
    if one["pass"] == "forward":
        for checkpointed in (False, True):
            value = kept_bytes(str(one["implementation"]), int(one["seqlen_q"]), checkpointed)
            rows.append(
                record(
                    one,
                    experiment=NAME,
                    source="predicted",
                    metric="kept_bytes",
                    unit="B",
                    value=value,
                    tool="sum of saved tensors",
                    checkpointed=checkpointed,
                    cell=one.id,
                )
            )
    return rows


def also() -> Iterator[Record]:
    """The sums at lengths that are not executed."""
    for one in (*_cells(SUMMED), *_steps(SUMMED)):
        yield from predict(one)


def measure(one: Cell, context: Context) -> list[Record]:
    """The kernels, executed and counted."""
    from repro.experiments.shared.host import counted_traffic

    if one["pass"] == STEP:
        from repro.experiments.shared.checkpointed_run import run_checkpointed

        tiles = {p: TILES[str(one["implementation"]), p] for p in ("forward", "backward")}
        return list(counted_traffic(NAME, one, context, partial(run_checkpointed, tiles=tiles)))
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
