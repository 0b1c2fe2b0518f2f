"""FlashAttention's L2 misses on a GB10, published by others, beside the simulated L2.

Sawtooth Wavefront Reordering (arXiv 2601.16032) counts L2 misses in 32-byte sectors on a card with
48 SMs and one L2 of 24 MiB: head_dim 64, fp16, batch 8, 128k tokens, tiles of 64, one persistent
block on each SM with a static schedule; keys walked upwards, and to and fro. No number of the
simulated L2 is fitted to these. One choice was made with them in sight: a hash that fills all sets
evenly. One that throws lines at random gives 339 and 116 million misses and begins to miss at 14
MiB of K and V instead of 20. The paper's body was not at hand: the published rows are from reading
notes, and say so.
"""

from collections.abc import Iterator
from typing import Any

from analysis.algorithms import ORDERS
from analysis.hardware import GPUS
from analysis.l2 import L2, available, simulate
from analysis.l2.attention import query_tiles_outside
from analysis.shapes import AttentionShape, Tile
from analysis.traffic import predict_traffic
from repro.experiments import Cell, Experiment
from repro.measuring.records import Record, record

NAME = "gb10-misses"
GB10 = GPUS["GB10"]
SECTOR = 32
SEQLEN, HEADS, TILE = 131072, 8, Tile(64, 64)
#: The sequence of the sectors that cross from L2 to the SMs.
SHORT, SHORT_TILE = 32768, Tile(80, 80)
#: Where misses begin: K and V of one head, and how much more than compulsory counts as begun.
ONSET_TILE, BEGUN, MIB = Tile(80, 80), 1.05, 1 << 20


def cells() -> list[Cell]:
    """None is measured here."""
    return []


def predict(one: Cell) -> list[Record]:
    """Nothing without cells; the rows are in ``also``."""
    return []


def misses(shape: AttentionShape, tile: Tile, order: str) -> float:
    """Sectors that a GB10 reads from memory, one persistent block on each SM."""
    launch = query_tiles_outside(shape, tile, order=order, wave=GB10.sms)
    found = simulate(launch, L2.of(GB10), GB10.sms, fixed=True)
    return sum(found[t].fetches * launch.sizes[t] for t in ("q", "k", "v")) / SECTOR


def onset_bytes() -> int:
    """The least K and V, in steps of 1 MiB, that are fetched more than once."""
    for mib in range(12, 25):
        shape = _shape(mib * MIB // (2 * 64 * 2), 1)
        once = (shape.query_bytes + 2 * shape.key_bytes) / SECTOR
        if misses(shape, ONSET_TILE, "rows") > BEGUN * once:
            return mib * MIB
    raise AssertionError("K and V that fill the L2 are fetched once")


def also() -> Iterator[Record]:
    """What the published rows say, predicted; nothing where there is no C compiler."""
    sectors = predict_traffic("flash", _shape(SHORT, 1), SHORT_TILE, "forward").read_bytes
    written = predict_traffic("flash", _shape(SHORT, 1), SHORT_TILE, "forward").kernels
    out = written["flash_forward"]["out", "write"]
    yield _row("rows", SHORT, 1, "l2_requests", (sectors + out) / SECTOR, "sum over the tile loop")
    if not available():
        return
    for order in ORDERS:
        value = misses(_shape(SEQLEN, HEADS), TILE, order)
        yield _row(order, SEQLEN, HEADS, "l2_misses", round(value), "simulated L2")
    yield _row("rows", None, 1, "kv_bytes_at_onset", onset_bytes(), "simulated L2", unit="B")


def _shape(seqlen: int, heads: int) -> AttentionShape:
    return AttentionShape(1, heads, seqlen, seqlen, 64)


def _row(
    order: str, seqlen: int | None, batch: int, metric: str, value: float, tool: str, unit: str = "sectors"
) -> Record:
    shape: dict[str, Any] = {"batch": batch, "heads": 1, "kv_heads": 1}
    return record(
        shape,
        experiment=NAME,
        implementation=order,
        pass_="forward",
        source="predicted",
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=64,
        dtype="fp16",
        causal=False,
        metric=metric,
        value=value,
        unit=unit,
        tool=tool,
    )


EXPERIMENT = Experiment(
    name=NAME, title="FlashAttention's L2 misses on a GB10", cells=cells, predict=predict, also=also
)
