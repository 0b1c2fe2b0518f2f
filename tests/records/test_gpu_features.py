"""The experiment on the Hopper kernels' features: right on the host, compiled ahead, registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from analysis.hardware import H200
from analysis.packed import Lengths
from analysis.shapes import AttentionShape
from kernels import dispatch, prebuild
from kernels.launching.plan import Recorder
from repro.attention.reference import attention_reference
from repro.attention.views import array_of
from repro.experiments.gpu import gpu_features
from repro.gpu.register import predictions
from repro.instruments import exact
from repro.instruments.feature_work import FeatureOperands
from repro.measuring import records

#: What a small problem has in the place of a cell's, by the feature.
SMALL: dict[str, dict[str, Any]] = {
    "window": {},
    "softcap": {"softcap": gpu_features.SOFTCAP},
    "alibi": {"alibi": True},
    "packed": {"lengths": Lengths.equal([40, 1, 0, 70])},
}
COVERED = sorted({(str(c["feature"]), str(c["pass"]), int(c["head_dim"])) for c in gpu_features.cells()})


def operands(feature: str, head_dim: int) -> FeatureOperands:
    """One item, two heads, causal, with the feature; 90 rows, or 111 of four sequences."""
    rows = 111 if feature == "packed" else 90
    window = (16, None) if feature == "window" else (None, None)
    shape = AttentionShape(1, 2, rows, rows, head_dim, dtype="bf16", causal=True, window=window)
    return FeatureOperands(shape, **SMALL[feature], device="cpu")


def test_cells_are_what_the_hopper_kernels_cover() -> None:
    every = {(f, p, d) for f in SMALL for p in ("forward", "backward") for d in (64, 128)}
    assert every == set(COVERED)


@pytest.mark.parametrize(("feature", "pass_", "head_dim"), COVERED)
def test_both_are_right_and_leaving_the_feature_out_is_noticed(feature: str, pass_: str, head_dim: int) -> None:
    given = operands(feature, head_dim)
    for name in gpu_features.IMPLEMENTATIONS:
        given.call(name, pass_)
        ours, stored = given.errors(pass_)
        assert ours.beyond([stored]) is None, name
    if feature == "window":
        given.shape = AttentionShape(1, 2, 90, 90, head_dim, dtype="bf16", causal=True)
    given.softcap = given.slopes = given.lengths = None  # the answer now asked for is another
    ours, stored = given.errors(pass_)
    assert ours.beyond([stored]) is not None


@pytest.mark.parametrize("changes", [{}, {"left": 3}, {"softcap": 1.5}, {"slopes": torch.tensor([0.5, 0.1])}])
def test_exact_results_are_those_of_the_reference(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows at a time; more keys than queries, and heads that share them."""
    monkeypatch.setattr(exact, "CHUNK", 2 * 2 * 12)
    generator = torch.Generator().manual_seed(3)
    q, dout = (torch.randn(2, 9, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(1, 12, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    named = {"softcap": changes.get("softcap"), "alibi_slopes": changes.get("slopes")}
    window = (changes["left"], None) if "left" in changes else None
    want = attention_reference(q[None], k[None], v[None], dout[None], causal=True, window=window, **named)
    for name, values in exact.exact_attention(q, k, v, dout, causal=True, **changes).items():
        torch.testing.assert_close(values, getattr(want, name)[0])


class Card:
    """An H200, for whom launches are only written down."""

    multiprocessors, compute_capability = H200.sms, "90"


@pytest.mark.parametrize(("feature", "pass_", "head_dim"), COVERED)
def test_dispatch_picks_hopper_and_all_is_compiled_ahead(feature: str, pass_: str, head_dim: int) -> None:
    given = operands(feature, head_dim)
    arrays = {name: array_of(name, tensor) for name, tensor in given.tensors.items()}
    chosen = dispatch.choose(
        Card(), [arrays[name] for name in ("q", "k", "v", "out")], ["causal", feature], pass_=pass_
    )
    assert chosen.algorithm == gpu_features.HOPPER
    ready = {(kernel.source, kernel.macros) for kernel in prebuild.kernels()}
    for name in gpu_features.IMPLEMENTATIONS:
        recorder = Recorder(Card())
        for each in ("forward", pass_):  # statistics come from the forward
            given.launch(recorder, arrays, name, each)
        launched = {(x.kernel.source, x.kernel.macros) for x in recorder.launches}
        assert launched <= ready


def test_every_predicted_time_is_registered_once_and_is_what_the_model_says() -> None:
    """A model or a kernel that changes by more registers new cells beside these."""
    rows = list(records.read(records.RESULTS / "registered" / f"{gpu_features.EXPERIMENT.name}.jsonl"))
    assert all(row.date and row.commit and row.source == "predicted" for row in rows)
    known = {(row.cell, row.device): row for row in rows}
    assert len(known) == len(rows)
    current = {
        (now.cell, now.device): now
        for cell in gpu_features.cells()
        for now in predictions(gpu_features.EXPERIMENT.name, cell)
    }
    for key, now in current.items():
        assert now.value == pytest.approx(known[key].value, rel=0.05), "python -m repro dev register"
    cells = gpu_features.cells()
    assert {cell for cell, _ in current} == {c.id for c in cells}
    bounds = [row for cell in cells for row in gpu_features.EXPERIMENT.predicted(cell)]
    assert {row.implementation for row in bounds} == {gpu_features.SM80}
    assert all(row.value for row in bounds)
