"""The counted traffic of the attention experiments: exact, linear in batch and heads, committed."""

import numpy as np
import pytest

from analysis.shapes import Tile
from kernels import attention
from kernels.host import HostBackend
from kernels.launch import from_numpy
from repro.experiments import experiment
from repro.experiments.bytes.traffic_scaling import papers_tile
from repro.measuring import records

COUNTED = ("fig2-left", "fig2-middle", "traffic-scaling", "traffic-attribution")
ALGORITHMS = ("standard", "flash1-literal", "flash1-skip-first", "flash")


def counted(batch, heads, algorithm):
    """Bytes per kernel, tensor and direction of one forward pass on B x H heads."""
    shape = (batch, heads, 40, 32)
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for _ in range(3))
    out, lse = np.empty_like(q), np.empty(shape[:3], np.float32)
    backend = HostBackend()
    operands = [from_numpy(n, x, "r") for n, x in (("q", q), ("k", k), ("v", v))]
    stats = {"lse": from_numpy("lse", lse, "w")} if algorithm == "flash" else {}
    attention.forward(backend, algorithm, *operands, from_numpy("out", out, "w"), stats, scale=1.0, tile=Tile(16, 32))
    return backend.traffic


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_traffic_is_linear_in_batch_and_heads(algorithm):
    """So that one head may be executed and multiplied."""
    one, six = counted(1, 1, algorithm), counted(2, 3, algorithm)
    assert six == {kernel: {key: 6 * count for key, count in entries.items()} for kernel, entries in one.items()}


@pytest.mark.parametrize("name", COUNTED)
def test_committed_counts_equal_todays_predictions_to_the_byte(name):
    """Stale records or a changed formula show up here, whichever it is."""
    one = experiment(name)
    keys = ("kernel", "tensor", "direction")

    def table(rows):
        return {
            (r.cell, *(getattr(r, k) for k in keys)): r.value for r in rows if r.metric == "traffic_bytes" and r.cell
        }

    committed = table(records.read(records.RESULTS / "host" / f"{name}.jsonl"))
    predicted = table(r for c in one.cells() for r in one.predicted(c))
    assert committed, f"results/host/{name}.jsonl has no counts"
    assert committed == predicted


def test_the_papers_tiles():
    assert papers_tile("flash1-literal", 16384, 64) == Tile(64, 64)
    assert papers_tile("flash1-literal", 65536, 64) == Tile(64, 256)
    assert papers_tile("flash1-literal", 4096, 128) == Tile(8, 8)
    assert papers_tile("flash", 65536, 64) == Tile(256, 64)
