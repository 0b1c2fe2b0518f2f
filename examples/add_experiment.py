"""A new experiment: cells, what formulas expect of each, and what comes out when it runs.

Does it help the forward that query heads share K and V? In the package this file would be
``repro/experiments/bytes/my_experiment.py``; it is found by its name, ``python -m repro measure
my-experiment`` measures it cell by cell, and a figure that names it draws its frame.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pandas

from analysis.shapes import Tile
from repro.experiments import Cell, Context, Experiment, Row, row, run
from repro.experiments.shared.attention import cell, predicted_traffic, shape_of, tile_of, traffic_rows
from repro.measuring import records

HEADS, SEQLEN, HEAD_DIM = 8, 128, 64


def cells() -> list[Cell]:
    """The points: eight query heads on eight, four, two and one heads of K and V."""
    shape = {"seqlen": SEQLEN, "head_dim": HEAD_DIM, "heads": HEADS}
    return [cell("flash", "forward", Tile(64, 64), kv_heads=n, **shape) for n in (8, 4, 2, 1)]


def predict(one: Cell) -> Iterator[Row]:
    """What the formulas of ``analysis`` say, a row a number; the unit follows from the metric."""
    yield from predicted_traffic(one)
    shape = shape_of(one)
    yield row("compulsory_bytes", 2 * shape.query_bytes + 2 * shape.key_bytes, tool="each tensor once")


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """The kernel, executed on the CPU and counted, and its error against float64."""
    import torch

    from repro.attention.reference import attention_reference
    from repro.instruments.run_pass import run_pass

    shape, generator = shape_of(one), torch.Generator().manual_seed(0)
    heads = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
    tensors = {name: torch.randn(1, n, SEQLEN, HEAD_DIM, generator=generator).half() for name, n in heads.items()}
    ran = run_pass("flash", "forward", tensors, context.host(), tile=tile_of(one))
    yield from traffic_rows(ran.traffic.kernels, tool="host backend, counted")
    exact = attention_reference(*tensors.values())
    yield row("max_abs_error", max(ran.errors(exact).values()), tool="against float64")


EXPERIMENT = Experiment("my-experiment", cells, predict, measure, device="host", seconds=2)


def frame(results: Path) -> pandas.DataFrame:
    """Predictions and records in one tidy frame; in the package ``tidy(("my-experiment",))``."""
    run.measure(EXPERIMENT, root=results)  # a second run finds its cells on record
    predicted = [found for one in cells() for found in EXPERIMENT.predicted(one)]
    return records.frame([*predicted, *records.read(results / "local" / "my-experiment.jsonl")])


def main(results: Path) -> None:
    """Bytes predicted and counted."""
    table = frame(results)
    total = table.pivot_table(index="kv_heads", columns=["metric", "source"], values="value", aggfunc="sum")
    print(total[["compulsory_bytes", "traffic_bytes"]].to_string(float_format="{:,.0f}".format))


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
