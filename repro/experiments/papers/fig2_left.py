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
from repro.experiments import Cell, Context, Experiment
from repro.experiments.shared.attention import cell, predicted_traffic
from repro.measuring.records import Record, Scalar, record

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
    return [
        cell(name, pass_, tile, seqlen=1024, head_dim=64, batch=64, heads=16) for (name, pass_), tile in TILES.items()
    ]


def predict(one: Cell) -> list[Record]:
    """The exact sums."""
    return list(predicted_traffic(NAME, one))


def measure(one: Cell, context: Context) -> list[Record]:
    """The kernels, executed and counted."""
    from repro.experiments.shared.host import counted_traffic

    return list(counted_traffic(NAME, one, context))


def also() -> Iterator[Record]:
    """Standard attention as pass lists, and the FLOPs of six and seven matrix products."""
    both: dict[str, Scalar] = {
        "experiment": NAME,
        "source": "predicted",
        "pass": "forward+backward",
        "batch": SHAPE.batch,
        "heads": SHAPE.heads,
        "kv_heads": SHAPE.kv_heads,
        "seqlen_q": SHAPE.seqlen_q,
        "seqlen_k": SHAPE.seqlen_k,
        "head_dim": SHAPE.head_dim,
        "dtype": SHAPE.dtype,
        "causal": SHAPE.causal,
    }
    for variant, kernels in IMPLEMENTATIONS.items():
        yield record(
            both,
            implementation="standard",
            metric="hbm_bytes",
            unit="B",
            level="hbm",
            value=total_bytes(kernels, SHAPE),
            variant=variant,
            tool="whole-tensor passes",
        )
    # PyTorch copies out and dout to the kernel's layout before the backward: 4 Nd on top.
    fused = 4 * SHAPE.query_bytes
    for pass_ in ("forward", "backward"):
        hbm = predict_hbm("flash", SHAPE, TILES["flash", pass_], pass_, H200, blocks_per_sm=2)
        fused += hbm.read_bytes + hbm.write_bytes
    yield record(
        both, implementation="sdpa-flash2", metric="hbm_bytes", unit="B", level="hbm", value=fused, tool="simulated L2"
    )
    for name, recompute in (("standard", False), ("flash1", True)):
        flops = useful_flops(SHAPE, "forward") + useful_flops(SHAPE, "backward", recompute=recompute)
        yield record(both, implementation=name, metric="flops", unit="FLOP", value=flops, tool="matrix products")


EXPERIMENT = Experiment(
    name=NAME,
    title="FLOPs and traffic, forward + backward",
    cells=cells,
    predict=predict,
    measure=measure,
    device="host",
    also=also,
    seconds=30,
)
