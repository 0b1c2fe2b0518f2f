"""FlashAttention 2022, Fig. 2 left: FLOPs and memory traffic of one forward + backward.

N = 1024, d = 64, 16 heads, batch 64, fp16. The paper prints one number per algorithm without the
list of kernels behind it. Predicted here: standard attention as lists of whole-tensor passes (what
a machine without L2 moves), and our kernels' exact sums, counted by running them.
"""

from collections.abc import Iterator

from analysis.flops import useful_flops
from analysis.hardware import H200
from analysis.hbm import predict_hbm
from analysis.shapes import AttentionShape, Tile
from analysis.standard_passes import IMPLEMENTATIONS, total_bytes
from repro.experiments import Cell, Experiment, Row, row
from repro.experiments.shared.attention import cell_of, predicted_traffic
from repro.experiments.shared.host import counted_traffic

NAME = "fig2-left"
SHAPE = AttentionShape(64, 16, 1024, 1024, 64)
#: The released FlashAttention 2022 kernels use Br = 16 and Bc = 256 at this shape.
TILES = {
    ("standard", "forward"): Tile(128, 128),
    ("standard", "backward"): Tile(128, 128),
    ("flash1-skip-first", "forward"): Tile(16, 256),
    ("flash1-skip-first", "backward"): Tile(16, 256),
    ("flash1-released", "forward"): Tile(16, 256),
    ("flash1-released", "backward"): Tile(16, 256),
    ("flash", "forward"): Tile(128, 64),
    ("flash", "backward"): Tile(64, 128),
}


def cells() -> list[Cell]:
    """Forward and backward of each algorithm."""
    return [cell_of(SHAPE, name, pass_, tile) for (name, pass_), tile in TILES.items()]


def also() -> list[Cell]:
    """Both passes together, of whatever implementation."""
    return [cell_of(SHAPE, None, "forward+backward")]


def predict(one: Cell) -> Iterator[Row]:
    """The exact sums; of both passes, pass lists and the FLOPs of six and seven matrix products."""
    if "implementation" in one:
        yield from predicted_traffic(one)
        return
    for variant, kernels in IMPLEMENTATIONS.items():
        known = {"implementation": "standard", "variant": variant, "tool": "whole-tensor passes"}
        yield row("hbm_bytes", total_bytes(kernels, SHAPE), level="hbm", **known)
    # PyTorch copies out and dout to the kernel's layout before the backward: 4 Nd on top.
    fused = 4 * SHAPE.query_bytes
    for pass_ in ("forward", "backward"):
        hbm = predict_hbm("flash", SHAPE, TILES["flash", pass_], pass_, H200, blocks_per_sm=2)
        fused += hbm.read_bytes + hbm.write_bytes
    yield row("hbm_bytes", fused, implementation="sdpa-flash2", level="hbm", tool="simulated L2")
    for name, recompute in (("standard", False), ("flash1", True)):
        flops = useful_flops(SHAPE, "forward") + useful_flops(SHAPE, "backward", recompute=recompute)
        yield row("flops", flops, implementation=name, tool="matrix products")


EXPERIMENT = Experiment("fig2-left", cells, predict, counted_traffic, device="host", also=also, seconds=30)
