"""Runs each group of multi-rank tests once per number of ranks (gloo, this CPU), for all its tests."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from repro.distributed import measure
from repro.distributed.parallel_layer import ParallelTransformerLayer
from repro.distributed.reduce_to_owner import ReduceToOwner, owners
from repro.distributed.ring_attention import DenseLocal, ring_attention, take_local
from repro.instruments.without_products import WithoutProducts
from repro.training.host_optimizer import MasterWeightAdamW


@cache
def results(ranks: int, group: str) -> dict[str, Any]:
    """Everything of a group, a key of GROUPS, measured and compared on ``ranks`` processes."""
    with tempfile.TemporaryDirectory() as folder:
        # fork: the children have torch imported already, which is most of the time otherwise
        mp.start_processes(_rank, (ranks, folder, group), nprocs=ranks, start_method="fork")
        return json.loads((Path(folder) / "out.json").read_text())


def rows(ranks: int, group: str, **wanted: object) -> list[dict[str, Any]]:
    """Measured rows with these fields; never empty."""
    found = [r for r in results(ranks, group)["rows"] if all(r[k] == v for k, v in wanted.items())]
    assert found, wanted
    return found


def _rank(rank: int, ranks: int, folder: str, group: str) -> None:
    torch.set_num_threads(1)
    os.environ["REPRO_HOST_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    out = GROUPS[group]()
    if rank == 0:
        (Path(folder) / "out.json").write_text(json.dumps(out))
    dist.destroy_process_group()


def states() -> dict[str, Any]:
    """Model states of every engine."""
    with WithoutProducts():
        measured = [row for engine in measure.ENGINES for row in measure.model_states(engine)]
    return {"rows": measured, "trained alike": trained_alike()}


def layers() -> dict[str, Any]:
    """A sharded transformer layer."""
    kinds = list(product((False, True), ("none", "selective")))
    with WithoutProducts():
        measured = [row for kind in kinds for row in measure.parallel_layer(*kind)]
    return {"rows": measured, "difference": {str(sp): layer_difference(sp) for sp in (False, True)}}


def rings() -> dict[str, Any]:
    """Ring attention on dense attention, and on our operator."""
    measured = [row for case in measure.RING_CASES for row in measure.ring(*case, torch.float32, DenseLocal())]
    return {
        "rows": measured,
        "difference": [ring_difference(*case) for case in RING_CASES],
        "flash": [flash_errors(*case) for case in FLASH_CASES] if dist.get_world_size() == 2 else [],
    }


GROUPS: dict[str, Callable[[], dict[str, Any]]] = {"states": states, "layers": layers, "rings": rings}


def _worst(value: float) -> float:
    worst = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def layer_difference(sequence_parallel: bool) -> float:
    """Largest relative difference of a sharded layer's output and gradients from one rank's."""
    hidden, heads, seqlen, batch = 32, 4, 16, 2
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()

    def build(group: dist.ProcessGroup | None) -> ParallelTransformerLayer:
        torch.manual_seed(7)
        return ParallelTransformerLayer(
            hidden, heads, group=group, sequence_parallel=sequence_parallel, dropout=0.0
        ).double()

    torch.manual_seed(8)
    whole_x = torch.randn(seqlen, batch, hidden, dtype=torch.float64)
    weight = torch.randn_like(whole_x)
    one, many = build(None), build(group)
    x = whole_x.clone().requires_grad_()
    (one(x) * weight).sum().backward()

    def mine(t: Tensor) -> Tensor:
        return t.chunk(ranks)[rank] if sequence_parallel else t

    local = mine(whole_x).clone().requires_grad_()
    out = many(local)
    (out * mine(weight)).sum().backward()
    for parameter in many.sequence_parallel_parameters():
        dist.all_reduce(parameter.grad)
    pairs = [(out, mine(one(x))), (local.grad, mine(x.grad))]
    for name, parameter in many.named_parameters():
        want = one.get_parameter(name).grad
        if name.startswith(("qkv", "up")):
            blocks = 3 if name.startswith("qkv") else 1
            want = want.unflatten(0, (blocks, -1)).chunk(ranks, 1)[rank].flatten(0, 1)
        elif name in ("projection_weight", "down_weight"):
            want = want.chunk(ranks, 1)[rank]
        pairs.append((parameter.grad, want))
    return _worst(max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs))


def trained_alike() -> bool:
    """Three steps with gradients reduced to owners give what data-parallel training gives."""

    def train(by_owner: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model: nn.Module = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), MasterWeightAdamW, lr=0.01)
        run = model
        if by_owner:
            ReduceToOwner(model, owners(optimizer))
        else:
            run = DistributedDataParallel(model)
        for step in range(3):
            torch.manual_seed(100 * step + dist.get_rank())
            run(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
        return list(model.parameters())

    pairs = zip(train(True), train(False), strict=True)
    # Four terms may be summed in another order; two are summed the same way.
    tolerance = 0.0 if dist.get_world_size() == 2 else 1e-6
    return _worst(max(float((a - b).abs().max().detach()) for a, b in pairs)) <= tolerance


#: (causal, placement, q heads, kv heads, local rows a rank)
RING_CASES = [
    (False, "contiguous", 4, 4, 6),
    (False, "zigzag", 4, 1, 6),
    (True, "contiguous", 4, 2, 5),
    (True, "zigzag", 6, 2, 10),
    (True, "contiguous", 1, 1, 1),
]


#: (causal, placement, type) with our operator on each rank
FLASH_CASES = [(True, "zigzag", "fp32"), (True, "contiguous", "bf16")]
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def flash_errors(causal: bool, placement: str, dtype: str) -> dict[str, float]:
    """Errors of ring attention on our operator, forward and backward."""
    found = measure.ring(causal, placement, TYPES[dtype], None)
    return {row["pass"]: row["value"] for row in found if row["metric"] == "max_error"}


def ring_difference(causal: bool, placement: str, heads: int, kv_heads: int, local: int) -> float:
    """Largest difference of ring attention (float64) from one rank: out, lse, dq, dk, dv."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    whole = [torch.randn(2, h, local * ranks, 8, dtype=torch.float64) for h in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (take_local(x, rank, ranks, placement) for x in whole)
    for leaf in (q, k, v):
        leaf.requires_grad_()
    out, lse = ring_attention(q, k, v, causal=causal, placement=placement, local=DenseLocal(), return_lse=True)
    out.backward(dout)
    want = measure.one_rank(causal, *whole)
    _, whole_lse = DenseLocal().forward(*whole[:3], causal, 1 / math.sqrt(8))
    pairs = [
        (got, take_local(expected, rank, ranks, placement))
        for got, expected in zip((out, q.grad, k.grad, v.grad), want, strict=True)
    ]
    pairs.append((lse[..., None], take_local(whole_lse[..., None], rank, ranks, placement)))
    return _worst(max(float((a - b).abs().max().detach()) for a, b in pairs))
