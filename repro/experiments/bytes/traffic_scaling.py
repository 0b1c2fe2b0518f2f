"""How traffic grows with N, d and M: the theorem's exponents, summed and counted.

FlashAttention 2022, Theorem 2: with Bc = ceil(M / 4d) and Br = min(Bc, d) the accesses are
Θ(N² d² / M), so log-log slopes 2 in N, 2 in d and -1 in M (M in elements). Standard attention is
Θ(N d + N²): 2 in N, below 1 in d, 0 in M. Each sweep varies one of the three. The points that the
host backend executes stop at N = 1024; the sums go on. M is small (4k elements where it is fixed),
so that those points have many key tiles, where the theorem's exponents hold: the count is
proportional to 3 Tc + 3, and with Tc tiles the exponent in N is 1 + Tc / (Tc + 1). Of the backward
(Theorem 5) the algorithm as printed is executed over the same points.
"""

from collections.abc import Iterator

from analysis.shapes import Tile
from repro.experiments import Cell, Experiment
from repro.experiments.shared.attention import cell, predicted_traffic
from repro.experiments.shared.host import counted_traffic

PRINTED = "flash1-literal"
ALGORITHMS = ("standard", PRINTED, "flash1-skip-first", "flash")
#: Values of the fixed variables: d where N or M varies, M in elements where N or d varies.
HEAD_DIM, ON_CHIP = 64, 4096
EXECUTED = {"seqlen": (128, 256, 512, 1024), "head_dim": (32, 64, 128), "on_chip": (2048, 4096, 8192, 16384)}
SUMMED = {
    "seqlen": (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    "head_dim": (32, 64, 128, 256),
    "on_chip": (2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144),
}
#: Sequence length of the sweeps over d and M: executed, and for the sums far inside d <= M <= Nd.
SHORT, LONG = 1024, 16384


def papers_tile(algorithm: str, on_chip_elements: int, head_dim: int) -> Tile:
    """Bc = ceil(M / 4d), Br = min(Bc, d) (FlashAttention 2022, Alg. 1, line 1).

    The form with queries outside swaps the two: its large block is of queries.
    """
    large = -(-on_chip_elements // (4 * head_dim))
    small = min(large, head_dim)
    return Tile(large, small) if algorithm == "flash" else Tile(small, large)


def point(algorithm: str, sweep: str, value: int, seqlen: int, pass_: str = "forward") -> Cell:
    """One pass, with ``value`` for the swept variable."""
    head_dim = value if sweep == "head_dim" else HEAD_DIM
    on_chip = value if sweep == "on_chip" else ON_CHIP
    return cell(
        algorithm,
        pass_,
        papers_tile(algorithm, on_chip, head_dim),
        seqlen=value if sweep == "seqlen" else seqlen,
        head_dim=head_dim,
        sweep=sweep,
        on_chip=on_chip,
    )


def _on_tensor_cores(sweep: str, value: int) -> bool:
    """Whether the form with queries outside can run the paper's tile: 16 rows and keys at least."""
    tile = papers_tile("flash", value if sweep == "on_chip" else ON_CHIP, value if sweep == "head_dim" else HEAD_DIM)
    return min(tile.block_m, tile.block_n) >= 16


def cells() -> list[Cell]:
    """The points that are executed."""
    points = [(sweep, value) for sweep, values in EXECUTED.items() for value in values]
    forward = [
        point(algorithm, sweep, value, SHORT)
        for sweep, value in points
        for algorithm in ALGORITHMS
        if sweep == "seqlen" or algorithm != "flash1-skip-first"  # enough for the skipped first read
        if algorithm != "flash" or _on_tensor_cores(sweep, value)
    ]
    return forward + [point(PRINTED, sweep, value, SHORT, "backward") for sweep, value in points]


def also() -> Iterator[Cell]:
    """The sums where nothing is executed: longer sequences, larger M."""
    known = {one.id for one in cells()}
    for sweep, values in SUMMED.items():
        for value in values:
            for algorithm in ALGORITHMS:
                one = point(algorithm, sweep, value, LONG)
                if one.id not in known:
                    yield one


EXPERIMENT = Experiment(
    "traffic-scaling", cells, predicted_traffic, counted_traffic, device="host", also=also, seconds=60
)
