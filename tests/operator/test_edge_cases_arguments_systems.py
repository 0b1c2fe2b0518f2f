"""Arguments of training systems, ranks, memory meters and command lines: see
``test_edge_cases_arguments.py`` for the operator and the planners."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from analysis.model_states import largest_model, model_state_bytes, ring_sent_bytes, step_sent_bytes
from figures import __main__ as drawing
from repro import archive, cli, experiments
from repro import measure as measuring
from repro.checkpointing.memory import memory_meter, peak_bytes
from repro.distributed import launch
from repro.distributed.parallel_layer import ParallelTransformerLayer
from repro.distributed.reduce_to_owner import ReduceToOwner, owners
from repro.distributed.ring_attention import merge, parts, ring_attention, take_local
from repro.distributed.volume import CollectiveBytes
from repro.experiments import run as running
from repro.instruments.pools import CupyPool, TorchPool, cupy_pool
from repro.training.accumulation import accumulate_gradients
from repro.training.host_optimizer import AdamW, HostAdamW, MasterWeightAdamW
from repro.training.link import CudaLink, DirectLink, HostLink, Pool
from repro.training.live_bytes import LiveBytes
from repro.training.offload import OffloadSavedTensors, byte_span, saved_view
from repro.training.saved import count_saved
from tests.support.command_support import run

NAN, INF = math.nan, math.inf
SPARSE = torch.ones(2, 2).to_sparse()
BYTES = torch.zeros(4, dtype=torch.uint8)
Q = torch.ones(1, 2, 4, 8)


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


LSE = torch.ones(1, 2, 4)


def lent() -> Pool:
    pool = Pool()
    pool.take(4)
    return pool


def give_twice() -> None:
    pool = Pool()
    buffer = pool.take(4)
    pool.give(buffer)
    pool.give(buffer)


def region(name: Any) -> None:
    with memory_meter("cpu") as meter, meter.region(name):
        pass


def one(**options: Any) -> Any:
    return ring_attention(**{"q": Q, "k": Q, "v": Q, **options})


def accumulate(batches: Any = (1,), loss: Any = lambda _: torch.ones(1), count: Any = lambda _: 1, **more: Any) -> Any:
    return accumulate_gradients(batches, loss, count, **more)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        # accumulation
        (lambda: accumulate(None), TypeError, "micro_batches=None is a NoneType"),
        (lambda: accumulate(x for x in (1, 2)), TypeError, "is a generator, not a sequence"),
        (lambda: accumulate([]), ValueError, "no micro-batches"),
        (lambda: accumulate(loss=None), TypeError, "loss_sum=None"),
        (lambda: accumulate(count=3), TypeError, "count=3 is a int, without __call__"),
        (lambda: accumulate(count=lambda _: NAN), TypeError, "count of a micro-batch=nan"),
        (lambda: accumulate(count=lambda _: -1), ValueError, r"count \[-1\]"),
        (lambda: accumulate(loss=lambda _: 1.0), TypeError, "loss_sum gave 1.0, a float"),
        (lambda: accumulate(scaler=2.0), TypeError, "scaler=2.0 is a float, without scale"),
        # optimisers
        (lambda: AdamW(lr=NAN), ValueError, "lr=nan is not finite"),
        (lambda: AdamW(lr=10**400), ValueError, "lr=inf is not finite"),
        (lambda: AdamW(weight_decay="0"), TypeError, "weight_decay='0'"),  # type: ignore[arg-type]
        (lambda: AdamW(betas=0.9), TypeError, "betas=0.9 is not a pair"),  # type: ignore[arg-type]
        (lambda: AdamW(betas=(0.9, 1.0)), ValueError, r"betas=\(0.9, 1.0\) must lie in \[0, 1\)"),
        (lambda: MasterWeightAdamW(weights(), lr=NAN), ValueError, "lr=nan"),
        (lambda: HostAdamW(None), TypeError, "parameters=None"),  # type: ignore[arg-type]
        (lambda: HostAdamW(["w"]), TypeError, r"parameters\[0\]='w'"),  # type: ignore[list-item]
        (lambda: HostAdamW([]), ValueError, "empty parameter list"),
        (lambda: HostAdamW([torch.ones(2, dtype=torch.int32)]), TypeError, "torch.int32"),
        (lambda: HostAdamW(weights(), 1e-3), TypeError, "adam=0.001"),  # type: ignore[arg-type]
        (lambda: HostAdamW(weights(), bucket_bytes=NAN), ValueError, "bucket_bytes=nan"),
        (lambda: HostAdamW(weights(), link="pcie"), TypeError, "link='pcie' is a str, without"),
        (lambda: HostAdamW(weights(), pool=4), TypeError, "pool=4 is a int, without take, give"),
        # links and pools
        (lambda: Pool(pin="no"), TypeError, "pin='no' is a str"),  # type: ignore[arg-type]
        (lambda: Pool().take(-1), ValueError, "nbytes=-1 is below 0"),
        (lambda: Pool().give(torch.ones(4)), TypeError, "buffer has type torch.float32"),
        (lambda: Pool().give(BYTES), ValueError, "buffer of 4 bytes .* the 0 that this pool has"),
        (lambda: lent().give(BYTES), ValueError, "one of the 1 that this pool .*, 4 bytes in all"),
        (lambda: give_twice(), ValueError, "buffer of 4 bytes .* the 0 that this pool has"),
        (lambda: DirectLink().send(BYTES[:1], BYTES), ValueError, r"source \(1,\), target \(4,\)"),
        (lambda: DirectLink().fetch(torch.ones(4), BYTES), TypeError, "source has type"),
        (lambda: HostLink(NAN), ValueError, "bytes_per_s=nan"),
        (lambda: HostLink("1e9"), TypeError, "bytes_per_s='1e9'"),  # type: ignore[arg-type]
        (lambda: CudaLink(torch.device("cpu")), ValueError, "'cpu' is not a CUDA device"),
        # offload and what autograd keeps
        (lambda: OffloadSavedTensors(None), TypeError, "model=None"),  # type: ignore[arg-type]
        (lambda: OffloadSavedTensors([1]), TypeError, r"model\[0\]=1 is a int, not a Tensor"),
        (lambda: OffloadSavedTensors(min_bytes=None), TypeError, "min_bytes=None"),
        (lambda: OffloadSavedTensors(in_flight_bytes=-1), ValueError, "in_flight_bytes=-1"),
        (lambda: OffloadSavedTensors(select=True), TypeError, "select=True is a bool"),
        (lambda: OffloadSavedTensors(link=1), TypeError, "link=1 is a int, without send, fetch"),
        (lambda: count_saved("net").__enter__(), TypeError, "model='net'"),
        (lambda: saved_view(None), TypeError, "tensor=None"),  # type: ignore[arg-type]
        (lambda: byte_span(SPARSE), TypeError, "layout torch.sparse_coo, not torch.strided"),
        # memory meters
        (lambda: memory_meter(None), TypeError, "device=None"),  # type: ignore[arg-type]
        (lambda: memory_meter("gpu"), ValueError, "device='gpu' is no device that torch knows"),
        (lambda: peak_bytes(None, "cpu"), TypeError, "step=None is a NoneType, without __call__"),  # type: ignore[arg-type]
        (lambda: region(None), TypeError, "name=None is a NoneType, not a str"),
        (lambda: LiveBytes(None), TypeError, "known=None"),  # type: ignore[arg-type]
        (lambda: LiveBytes([Q, 3]), TypeError, r"known\[1\]=3 is a int"),  # type: ignore[list-item]
        (lambda: TorchPool(-1), ValueError, "device=-1"),
        (lambda: TorchPool("cpu"), ValueError, "'cpu' is not a CUDA device"),
        (lambda: CupyPool(object(), "cuda"), TypeError, "device='cuda'"),  # type: ignore[arg-type]
        (lambda: cupy_pool(-1), ValueError, "device=-1"),
        # several ranks
        (lambda: launch.measured(0), ValueError, "ranks=0 is below 1"),
        (lambda: ParallelTransformerLayer(0, 1), ValueError, "hidden=0 is below 1"),
        (lambda: ParallelTransformerLayer(8, 2, dropout=NAN), ValueError, "dropout .* got nan"),
        (lambda: ParallelTransformerLayer(8, 2, recompute=None), ValueError, "got None"),  # type: ignore[arg-type]
        (lambda: ParallelTransformerLayer(8, 2, sequence_parallel="no"), TypeError, "='no'"),  # type: ignore[arg-type]
        (lambda: ParallelTransformerLayer(8, 2, group=2), TypeError, "group=2 is a int"),  # type: ignore[arg-type]
        (lambda: ParallelTransformerLayer(8, 2)(Q[0, 0]), ValueError, r"got shape \(4, 8\)"),
        (lambda: ParallelTransformerLayer(8, 2)(Q[0].to("meta")), TypeError, "x is on meta"),
        (lambda: owners(None), TypeError, "optimizer=None"),  # type: ignore[arg-type]
        (lambda: ReduceToOwner(None, {}), TypeError, "model=None"),  # type: ignore[arg-type]
        (lambda: ReduceToOwner(nn.Linear(1, 1), 0), TypeError, "owner=0"),  # type: ignore[arg-type]
        (lambda: CollectiveBytes().sent_bytes(0), ValueError, "ranks=0"),
        (lambda: parts(2, 2, 4, "contiguous"), ValueError, "rank=2 is above 1"),
        (lambda: parts(0, 1, -2, "zigzag"), ValueError, "local=-2"),
        (lambda: take_local(Q[0], 0, 2), ValueError, r"got shape \(2, 4, 8\)"),
        (lambda: take_local(Q, -1, 2), ValueError, "rank=-1"),
        (lambda: one(v=SPARSE), TypeError, "v is torch.float32, torch.sparse_coo"),
        (lambda: one(k=Q.half()), TypeError, "q and k differ in type: torch.float32 and torch.fl"),
        (lambda: one(v=Q.to("meta")), TypeError, "different devices: cpu, meta"),
        (lambda: one(k=Q[:, :, :, :4], v=Q[:, :, :, :4]), ValueError, r"k \(1, 2, 4, 4\)"),
        (lambda: one(scale="1"), TypeError, "scale='1'"),
        (lambda: one(causal="no"), TypeError, "causal='no'"),
        (lambda: one(local="dense"), TypeError, "local='dense' is a str, without forward"),
        (lambda: one(group=1), TypeError, "group=1"),
        (lambda: one(placement=None), ValueError, "got None"),
        (lambda: merge(None, LSE, Q, LSE), TypeError, "out_a=None"),  # type: ignore[arg-type]
        (lambda: merge(Q, LSE, Q[:, :1], LSE), ValueError, r"out_b \(1, 1, 4, 8\)"),
        (lambda: merge(Q, LSE, Q, LSE.to("meta")), ValueError, "out_b cpu, lse_b meta"),
        (lambda: ring_sent_bytes("reduce", NAN, 2), ValueError, "nbytes=nan is not finite"),
        (lambda: ring_sent_bytes("gather", 1, 2), ValueError, "got 'gather'"),
        (lambda: step_sent_bytes("zero-1", NAN, 2, 2), ValueError, "parameters=nan"),
        (lambda: model_state_bytes("7B"), TypeError, "parameters='7B'"),  # type: ignore[arg-type]
        (lambda: largest_model(INF, 1, 0), ValueError, "memory_bytes=inf"),
        # the machinery of measurements
        (lambda: measuring.measure("speedup"), TypeError, "names='speedup' is a str"),
        (lambda: measuring.measure(["speedup"], into=5), TypeError, "folder of results=5"),  # type: ignore[arg-type]
    ],
)
def test_refused_by_name_before_any_work(
    call: Callable[[], Any], kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("something ran")

    monkeypatch.setattr(running, "measure", work)
    monkeypatch.setattr(launch.subprocess, "run", work)
    monkeypatch.setattr(dist, "get_rank", work)
    monkeypatch.setattr(torch.Tensor, "backward", work)
    with pytest.raises(kind, match=message):
        call()


def test_numbers_of_any_library_are_taken() -> None:
    assert AdamW(lr=np.float32(0.5), betas=[np.float64(0.5), 0.5]) == AdamW(0.5, (0.5, 0.5))  # type: ignore[arg-type]
    assert Pool().take(np.int64(3)).numel() == Pool().take(np.float32(3)).numel() == 3  # type: ignore[arg-type]
    assert ParallelTransformerLayer(np.int64(8), np.int32(2)).head_dim == 4  # type: ignore[arg-type]
    assert torch.equal(take_local(Q, np.int64(1), np.int32(2)), Q[:, :, 2:])  # type: ignore[arg-type]
    assert CollectiveBytes().sent_bytes(np.int64(2)) == 0  # type: ignore[arg-type]
    assert TorchPool(np.int64(1)).device == 1
    assert OffloadSavedTensors(min_bytes=np.int64(0), in_flight_bytes=1e6)  # type: ignore[arg-type]
    w = nn.Parameter(torch.zeros(()))
    assert accumulate_gradients([1, 2], lambda b: w * b, lambda _: np.int64(2)) == 0  # type: ignore[arg-type, return-value]
    assert w.grad == 3 / 4


def test_a_parameter_with_an_owner_that_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("get_rank", 0), ("get_world_size", 2), ("get_process_group_ranks", [0, 1])):
        monkeypatch.setattr(dist, name, lambda *_, value=value: value)
    model = nn.Linear(1, 1, bias=False)
    for owner, kind in ((2, ValueError), (-1, ValueError), (None, TypeError), (True, TypeError)):
        with pytest.raises(kind, match=f"owner of weight={owner}"):
            ReduceToOwner(model, {model.weight: owner})  # type: ignore[dict-item]
    ReduceToOwner(model, {model.weight: np.int64(1)}).remove()  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("doctor", "--json", "yes"), 2, "unexpected extra argument"),
        (("archive", "--to", "x.zip"), 1, "--to x.zip: expected a name ending in .tar.gz"),
        (("archive", "--to", "a.tar.gz", "--drawn", "nowhere"), 1, "no folder 'nowhere'"),
        (("measure", "speedup", "nothing"), 1, "no experiment 'nothing'"),
        (("measure", "speedup", "--into", "../x"), 1, "'../x' cannot be a folder"),
        (("measure", "speedup", "--into", "published"), 1, "'published' holds"),
        (("compare", "host"), 2, "Missing argument"),
        (("compare", "host", "host", "-e", "accuracy", "-e", "no"), 1, "--experiment 'no'"),
        (("compare", "host", "host", "-e", "accuracy", "-m", "rmse", "-m", "no"), 1, "'no'"),
        (("compare", "host", "host", "--json", "--csv"), 1, "--json and --csv exclude each other"),
    ],
)
def test_command_lines_are_refused_before_any_work(
    arguments: tuple[str, ...],
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(running, "measure", None)
    monkeypatch.setattr(archive, "_contents", None)
    monkeypatch.chdir(tmp_path)
    found, out, err = run(capsys, *arguments)
    assert (found, out) == (status, "")
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_an_archive_is_not_written_over_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder, not a file"):
        archive.write(tmp_path, tmp_path)


def test_an_experiment_named_twice_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def measure(one: experiments.Experiment, **_: Any) -> running.Outcome:
        seen.append(one.name)
        return running.Outcome(measured=1)

    monkeypatch.setattr(running, "measure", measure)
    measuring.measure(["speedup", "accuracy", "speedup"])
    assert seen == ["speedup", "accuracy"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("",), 1, "no figure ''"),
        (("accuracy", "nothing"), 1, "no figure 'nothing'"),
        (("--jobs", "0"), 2, "--jobs"),
        (("--jobs", "nan"), 2, "--jobs"),
    ],
)
def test_draw_refuses_before_it_draws(
    arguments: tuple[str, ...],
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drawing, "_draw_here", None)
    monkeypatch.setattr("sys.argv", ["figures", "draw", *arguments])
    assert cli.run(drawing.app, "figures") == status
    assert message in capsys.readouterr().err


def test_a_figure_named_twice_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(drawing, "_draw_here", lambda name: drawn.append(name) or [])
    drawing.draw(["tile_rules", "accuracy", "tile_rules"])
    assert drawn == ["tile_rules", "accuracy"]
