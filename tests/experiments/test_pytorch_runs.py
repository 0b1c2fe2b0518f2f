"""PyTorch's own attention at the papers' shapes, as far as it goes without a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from repro import experiments
from repro.experiments import Cell, Context
from repro.experiments.papers import fig1_right, fig3_memory, fig3_runtime
from repro.experiments.shared.pytorch_runs import EAGER, counter_rows, run
from repro.gpu.plan import on_a_card
from repro.instruments import pytorch_attention, timing
from repro.instruments.counters import METRICS, KernelCount
from repro.instruments.pytorch_attention import NAMES, Attention, padding, single, whole
from repro.measuring.records import load

OF_PAPERS = ("fig1-right", "fig2-left-traffic", "fig2-left-traffic-masked", "fig3-memory", "fig3-runtime")
RECORDED = (*OF_PAPERS, "l2-absorption")
SMALL: dict[str, Any] = {"batch": 2, "heads": 2, "seqlen": 48, "head_dim": 16, "dtype": "fp32"}


def small(name: str, **more: Any) -> Cell:
    return run(name, "forward+backward", **SMALL, **more)


def exact(attention: Attention) -> tuple[torch.Tensor, ...]:
    """out, dq, dk, dv in float64, by one expression."""
    q, k, v = (t.detach().double().requires_grad_() for t in attention.leaves)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    mask = 0.0 if attention.mask is None else attention.mask.double()
    out = torch.softmax(scores + mask, -1) @ v
    return out, *torch.autograd.grad(out, (q, k, v), attention.dout.double())


@pytest.mark.parametrize("name", [EAGER, "standard-eager-checkpointed", "sdpa-flash2"])
@pytest.mark.parametrize("masked", [False, True])
def test_every_way_computes_attention(name: str, masked: bool) -> None:
    one = Cell(**small(name) | {"key_mask": masked and name != "sdpa-flash2"})
    attention = Attention(one, "cpu")
    for got, want in zip(attention.both(), exact(attention), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    out = attention.forward()
    for got, want in zip(attention.backward(out), exact(attention)[1:], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_dropout_and_mask_are_where_the_cell_names_them() -> None:
    masked = Attention(small(EAGER, masked=True), "cpu")
    assert masked.mask is not None
    hidden = torch.isinf(masked.mask).sum(-1)
    assert 0 <= hidden.min() <= hidden.max() <= pytorch_attention.PADDED
    assert hidden.max() > 0
    torch.manual_seed(0)
    dropped = (masked.operation("dropout")(torch.ones(1000)) == 0).float().mean()
    assert 0.05 < dropped < 0.15
    with pytest.raises(ValueError, match="without a mask"):
        Attention(Cell(**small("sdpa-cudnn") | {"key_mask": True}), "cpu").forward()
    short = padding(torch.zeros(4, 1, 2, 8))
    assert (short[..., 0] == 0).all(), "a sequence keeps a key"


def test_one_operation_alone_is_that_of_the_whole() -> None:
    one = small(EAGER, masked=True)
    attention = Attention(one, "cpu")
    q, k, v = (t.detach() for t in attention.leaves)
    scores = q @ k.mT
    torch.testing.assert_close(single(one, "matmul QK^T", "cpu")(), scores)
    torch.testing.assert_close(single(one, "mask", "cpu")(), scores + attention.mask)
    torch.testing.assert_close(single(one, "softmax", "cpu")(), torch.softmax(scores, -1))
    torch.testing.assert_close(single(one, "matmul PV", "cpu")(), torch.softmax(scores, -1) @ v)


@pytest.mark.parametrize("name", RECORDED)
def test_cells_are_those_on_record(name: str) -> None:
    """What a card is asked for again replaces what is recorded of it, cell by cell."""
    found = experiments.experiment(name)
    ids = {one.id for one in found.cells()}
    recorded = [r for r in load([name], local=False) if r.source == "measured" and r.value is not None]
    assert found.device == "cuda"
    assert name in on_a_card()
    assert {r.cell for r in recorded} == ids
    assert {one["implementation"] for one in found.cells()} <= {
        *NAMES,
        *fig1_right.FUSED_TODAY,
        *fig1_right.OPERATIONS.values(),
    }


class _Clock:
    """A device whose events are a second apart."""

    def event(self) -> _Clock:
        return self

    def record(self) -> None:
        pass

    def elapsed_ms(self, end: _Clock) -> float:
        return 1000.0

    def flush_cache(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def test_times_are_rows_of_a_pass_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch_attention, "DEVICE", "cpu")
    monkeypatch.setattr(timing, "TorchDevice", _Clock)
    context = Context(device="cuda")
    for name, passes in ((EAGER, 3), ("standard-eager-checkpointed", 2), ("sdpa-flash2", 3)):
        rows = fig3_runtime.EXPERIMENT.measured(small(name), context)
        assert len({row.pass_ for row in rows}) == len(rows) == passes
        assert {(row.experiment, row.metric, row.value) for row in rows} == {("fig3-runtime", "time_ms", 1000.0)}
    tiny = {"batch": 1, "heads": 1, "kv_heads": 1, "seqlen_q": 32, "seqlen_k": 32, "dtype": "fp32"}
    for one in fig1_right.cells():
        name = str(one["implementation"])
        if name not in ("fused sdpa-cudnn", "fused sdpa-flash2 (dropout 0.1)"):  # a CPU has neither
            (row,) = fig1_right.EXPERIMENT.measured(Cell(**one | tiny), context)
            assert (row.pass_, row.implementation) == ("forward", name)


def test_a_peak_says_what_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch_attention, "DEVICE", "cpu")
    for name in ("empty_cache", "synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 900)
    (row,) = fig3_memory.EXPERIMENT.measured(small(EAGER), Context(device="cuda"))
    assert (row.value, row.extra["allocated_before_bytes"]) == (900, 100)


def test_counters_are_rows_by_level_and_direction() -> None:
    kernels = [KernelCount("a", (1, 1, 1), dict.fromkeys(METRICS, n)) for n in (1, 2)]
    assert {(row["metric"], row["value"]) for row in counter_rows(kernels)} == {
        (f"{level}_{way}_bytes", 3) for level in ("hbm", "sram") for way in ("read", "write")
    }
    each = list(counter_rows(kernels, each=True))
    assert {row["kernel"] for row in each} == {"0: a", "1: a"}
    assert len(each) == 8


def test_a_profiled_pass_is_the_forward_or_both() -> None:
    both = whole(small(EAGER), "cpu")()
    assert isinstance(both, tuple)
    assert len(both) == 4
    assert len(whole(Cell(**small(EAGER) | {"pass": "forward"}), "cpu")()) == 1
