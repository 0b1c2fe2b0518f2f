"""Where the bytes go: per tensor, what is compulsory, read again, statistics, or padding avoided.

N = 1000 rather than 1024, so that the last tile is ragged: kernels move real rows only, and what a
kernel that pads to whole tiles would move on top is a prediction beside it.
"""

from collections.abc import Iterator

from analysis.shapes import Tile
from repro.experiments import Cell, Experiment
from repro.experiments.shared.attention import cell, predicted_traffic
from repro.experiments.shared.host import counted_traffic

SEQLEN = 1000
#: The tiles of the paper's literal form with 16k elements, of the released kernels, and ours.
TILES = {
    ("standard", "forward"): Tile(128, 128),
    ("standard", "backward"): Tile(128, 128),
    ("flash1-literal", "forward"): Tile(64, 64),
    ("flash1-literal", "backward"): Tile(64, 64),
    ("flash1-released", "forward"): Tile(16, 256),
    ("flash1-released", "backward"): Tile(16, 256),
    ("flash", "forward"): Tile(128, 64),
    ("flash", "backward"): Tile(64, 128),
}


def cells() -> list[Cell]:
    """Forward and backward of each algorithm, and the causal form of the fast one."""
    return [
        cell(name, pass_, tile, seqlen=SEQLEN, head_dim=64, causal=causal)
        for (name, pass_), tile in TILES.items()
        for causal in ((False, True) if name == "flash" else (False,))
    ]


def also() -> Iterator[Cell]:
    """The same with every length rounded up to whole tiles, as a kernel that pads would move."""
    for one in cells():
        whole = max(int(one["block_m"]), int(one["block_n"]))
        padded = -(-SEQLEN // whole) * whole
        yield Cell(**{**one, "seqlen_q": padded, "seqlen_k": padded, "padded_from": SEQLEN})


EXPERIMENT = Experiment(
    "traffic-attribution", cells, predicted_traffic, counted_traffic, device="host", also=also, seconds=35
)
