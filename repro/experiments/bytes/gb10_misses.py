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

from analysis.algorithms import ORDERS
from analysis.hardware import GPUS
from analysis.l2 import L2, available, simulate
from analysis.l2.attention import query_tiles_outside
from analysis.shapes import AttentionShape, Tile
from analysis.traffic import predict_traffic
from repro.experiments import Cell, Experiment, Row, row
from repro.experiments.shared.attention import cell, shape_of

GB10 = GPUS["GB10"]
SECTOR = 32
SEQLEN, HEADS, TILE = 131072, 8, Tile(64, 64)
#: The sequence of the sectors that cross from L2 to the SMs.
SHORT, SHORT_TILE = 32768, Tile(80, 80)
#: Where misses begin: K and V of one head, and how much more than compulsory counts as begun.
ONSET_TILE, BEGUN, MIB = Tile(80, 80), 1.05, 1 << 20


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


def published() -> list[Cell]:
    """What the published rows say; without a length, where misses begin."""
    short = cell("rows", "forward", seqlen=SHORT, head_dim=64)
    if not available():  # there is no C compiler
        return [short]
    onset = Cell(**{name: value for name, value in short.items() if not name.startswith("seqlen")})
    long = [cell(order, "forward", seqlen=SEQLEN, head_dim=64, batch=HEADS) for order in ORDERS]
    return [short, *long, onset]


def predict(one: Cell) -> Iterator[Row]:
    """Requests of the SMs, misses, or the K and V from which on there are more than compulsory."""
    if "seqlen_q" not in one:
        yield row("kv_bytes_at_onset", onset_bytes(), unit="B", tool="simulated L2")
    elif one["seqlen_q"] == SHORT:
        traffic = predict_traffic("flash", shape_of(one), SHORT_TILE, "forward")
        moved = traffic.read_bytes + traffic.kernels["flash_forward"]["out", "write"]
        yield row("l2_requests", moved / SECTOR, unit="sectors", tool="sum over the tile loop")
    else:
        found = misses(_shape(SEQLEN, HEADS), TILE, str(one["implementation"]))
        yield row("l2_misses", round(found), unit="sectors", tool="simulated L2")


def _shape(seqlen: int, heads: int) -> AttentionShape:
    return AttentionShape(1, heads, seqlen, seqlen, 64)


EXPERIMENT = Experiment("gb10-misses", predict=predict, also=published)
