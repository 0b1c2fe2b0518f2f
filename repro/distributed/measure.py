"""Measures what several ranks hold and send. Run it under torchrun::

    torchrun --standalone --nproc-per-node 4 -m repro.distributed.measure OUT.json

gloo on CPUs, NCCL where every rank has a GPU. Rank 0 writes a list of rows; each row says what was
measured on the rank that holds or sends most.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from repro import cli
from repro.attention.validation import DTYPES
from repro.distributed.parallel_layer import ParallelTransformerLayer
from repro.distributed.reduce_to_owner import ReduceToOwner, owners
from repro.distributed.ring_attention import LocalAttention, ring_attention, take_local
from repro.distributed.transport import TransportBytes
from repro.distributed.volume import CollectiveBytes
from repro.instruments.without_products import WithoutProducts
from repro.training.host_optimizer import MasterWeightAdamW
from repro.training.live_bytes import LiveBytes

Row = dict[str, Any]

#: Model states: equal layers, so that shards come out even; as many weights as a GPT-2 small layer.
WIDTH, DEPTH, ROWS = 768, 12, 4
#: Parallel layer: seqlen, batch, hidden, heads.
LAYER = (512, 1, 768, 12)
#: Ring attention: batch, heads, kv_heads, seqlen, head_dim.
RING = (1, 4, 2, 128, 32)
RING_CASES = ((False, "contiguous"), (True, "contiguous"), (True, "zigzag"))
#: Rows that a rank holds, whatever the number of ranks, where its memory is followed.
BLOCK, MEMORY = 64, "contiguous, a block a rank"
ENGINES = ("data-parallel", "torch-zero-1", "zero-2-by-parameter", "fsdp2-zero-2", "fsdp2-zero-3")


def device() -> torch.device:
    """This rank's GPU where there is one for every local rank, else the CPU."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def chain(dtype: torch.dtype) -> nn.Sequential:
    """DEPTH bias-free linear layers of one width: WIDTH² · DEPTH parameters."""
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(DEPTH))
    return nn.Sequential(*layers).to(device())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind these tensors, on this rank."""
    found = {_local(t).untyped_storage() for t in tensors}
    return sum({s._cdata: s.nbytes() for s in found}.values())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Tensors an optimiser holds on this rank."""
    states = getattr(optimizer, "optim", optimizer).state.values()
    return [t for state in states for t in state.values() if isinstance(t, Tensor)]


def model_states(engine: str) -> list[Row]:
    """One training step: bytes of parameters, gradients, optimiser; bytes sent."""
    model: nn.Module
    optimizer: torch.optim.Optimizer
    if engine in ("data-parallel", "torch-zero-1", "zero-2-by-parameter"):
        model = chain(torch.bfloat16)
        if engine == "data-parallel":
            optimizer = MasterWeightAdamW(model.parameters())
        else:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), MasterWeightAdamW)
        if engine == "zero-2-by-parameter":
            assert isinstance(optimizer, ZeroRedundancyOptimizer)
            ReduceToOwner(model, owners(optimizer))
        else:  # gradients are views of the reducer's buckets, not second copies
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        x = torch.randn(ROWS, WIDTH, device=device(), dtype=torch.bfloat16)
    elif engine in ("fsdp2-zero-2", "fsdp2-zero-3"):
        model = chain(torch.float32)
        mesh = init_device_mesh(device().type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for layer in [*model.children(), model]:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=engine == "fsdp2-zero-3")
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(ROWS, WIDTH, device=device())
    else:
        raise ValueError(f"engine must be one of {ENGINES}, got {engine!r}")

    transport = TransportBytes()
    dist.barrier()
    with transport, CollectiveBytes() as sent:
        loss = model(x).float().square().mean()
        after_forward = storage_bytes(model.parameters())
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        gradients = storage_bytes(grads)
        optimizer.step()
    cell = {"experiment": "sharded-states", "implementation": engine}
    ranks = dist.get_world_size()
    rows = {
        "parameter_bytes": storage_bytes(model.parameters()),
        "parameter_bytes_after_forward": after_forward,
        "gradient_bytes": gradients,
        "optimizer_bytes": storage_bytes(optimizer_tensors(optimizer)),
        "sent_bytes": sent.sent_bytes(ranks),
    }
    found = [_row(cell, metric, value) for metric, value in rows.items()]
    return found + transported(cell, transport)


def parallel_layer(sequence_parallel: bool, recompute: str) -> list[Row]:
    """Forward and backward of one transformer layer: bytes it saves, bytes it sends."""
    seqlen, batch, hidden, heads = LAYER
    group = dist.group.WORLD
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layer = ParallelTransformerLayer(
        hidden, heads, group=group, sequence_parallel=sequence_parallel, recompute=recompute
    ).to(device(), torch.bfloat16)
    rows = seqlen // ranks if sequence_parallel else seqlen
    torch.manual_seed(rank if sequence_parallel else 0)
    above = TransportBytes()
    dist.barrier()
    with LiveBytes(layer.parameters()) as live, CollectiveBytes() as forward:
        x = torch.randn(rows, batch, hidden, dtype=torch.bfloat16, device=device())
        x.requires_grad_()
        with above:
            out = layer(x)
        saved = settled(live) - out.nbytes
    below = TransportBytes()
    dist.barrier()
    with below, CollectiveBytes() as backward:
        out.float().square().sum().backward()
    name = "sequence" if sequence_parallel else "tensor"
    if recompute != "none":
        name += f"+{recompute}"
    cell = {"experiment": "parallel-layer", "implementation": name}
    return [
        _row(cell, "saved_bytes", saved),
        _row(cell, "sent_bytes", forward.sent_bytes(ranks), pass_="forward"),
        _row(cell, "sent_bytes", backward.sent_bytes(ranks), pass_="backward"),
        *transported(cell, above, "forward"),
        *transported(cell, below, "backward"),
    ]


def settled(live: LiveBytes) -> int:
    """Live bytes once the communication threads have let go of finished collectives' tensors."""
    dist.barrier()
    readings = []
    for _ in range(20):
        readings.append(live.live_bytes)
        time.sleep(0.01)
    return min(readings)


def ring(causal: bool, placement: str, dtype: torch.dtype, local: LocalAttention | None) -> list[Row]:
    """Ring attention: bytes sent, and the largest difference from one rank's float64 result."""
    batch, heads, kv_heads, seqlen, head_dim = RING
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    whole = [
        torch.randn(batch, h, seqlen, head_dim, generator=generator).to(dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    ]
    q, k, v, dout = (take_local(x, rank, ranks, placement).to(device()) for x in whole)
    for leaf in (q, k, v):
        leaf.requires_grad_()
    above, below = TransportBytes(), TransportBytes()
    dist.barrier()
    with above, CollectiveBytes() as forward:
        out = ring_attention(q, k, v, causal=causal, placement=placement, local=local)
    assert isinstance(out, Tensor)
    dist.barrier()
    with below, CollectiveBytes() as backward:
        out.backward(dout)
    exact = one_rank(causal, *(x.double() for x in whole))
    results = zip((out, q.grad, k.grad, v.grad), exact, strict=True)
    errors = [
        (got.double().cpu() - take_local(want, rank, ranks, placement)).abs().max()
        for got, want in results
        if got is not None
    ]
    cell = {
        "experiment": "ring-attention",
        "implementation": placement,
        "causal": causal,
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "seqlen_q": seqlen,
        "seqlen_k": seqlen,
        "head_dim": head_dim,
        "dtype": DTYPES[dtype],
    }
    return [
        _row(cell, "sent_bytes", forward.full_bytes["send"], pass_="forward"),
        _row(cell, "sent_bytes", backward.full_bytes["send"], pass_="backward"),
        _row(cell, "max_error", float(errors[0]), pass_="forward"),
        _row(cell, "max_error", float(max(errors[1:])), pass_="backward"),
        *transported(cell, above, "forward"),
        *transported(cell, below, "backward"),
    ]


def ring_memory(local: LocalAttention | None) -> list[Row]:
    """Ring attention of ``BLOCK`` rows a rank: the most that a rank has alive in a step."""
    batch, heads, kv_heads, _, head_dim = RING
    leaves = [torch.randn(batch, h, BLOCK, head_dim, device=device()) for h in (heads, kv_heads, kv_heads)]
    for leaf in leaves:
        leaf.requires_grad_()
    with LiveBytes(leaves) as live:
        out = ring_attention(*leaves, causal=False, placement="contiguous", local=local)
        assert isinstance(out, Tensor)
        out.sum().backward()
    seqlen = BLOCK * dist.get_world_size()
    cell = {"experiment": "ring-attention", "implementation": MEMORY, "seqlen_q": seqlen, "seqlen_k": seqlen}
    return [_row(cell, "peak_bytes", live.peak_bytes)]


def one_rank(causal: bool, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, dq, dk, dv of dense attention over the whole sequence, in the inputs' type."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in leaves[1:])
    scores = leaves[0] @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.softmax(scores, -1) @ values
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    return out.detach(), dq, dk, dv


def transported(cell: Row, counted: TransportBytes, pass_: str = "-") -> list[Row]:
    """Bytes at the sockets, sent and received by a rank in the mean: none where tensors do not go
    over sockets."""
    if device().type != "cpu":
        return []
    total = torch.tensor([counted.sent_bytes, counted.received_bytes], dtype=torch.float64)
    dist.all_reduce(total)
    sent, received = (total / dist.get_world_size()).tolist()
    common = cell | {"unit": "B", "pass": pass_}
    return [
        common | {"metric": "transport_bytes", "value": sent},
        common | {"metric": "transport_received_bytes", "value": received},
    ]


def _row(cell: Row, metric: str, value: float, pass_: str = "-") -> Row:
    """The largest value over the ranks."""
    worst = torch.tensor(float(value), dtype=torch.float64, device=device())
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    unit = "1" if metric == "max_error" else "B"
    return cell | {"metric": metric, "value": worst.item(), "unit": unit, "pass": pass_}


def everything(local: LocalAttention | None = None) -> list[Row]:
    """All measurements; ``local`` is the attention inside the ring (default: our operator)."""
    rows: list[Row] = []
    with WithoutProducts():
        for engine in ENGINES:
            rows += model_states(engine)
        for sequence_parallel in (False, True):
            for recompute in ("none", "selective"):
                rows += parallel_layer(sequence_parallel, recompute)
    for causal, placement in RING_CASES:
        rows += ring(causal, placement, torch.float32, local)
    return rows + ring_memory(local)


def main() -> None:
    """Entry point of every rank."""
    where = device()
    torch.set_num_threads(1)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    try:
        rows = everything()
        if dist.get_rank() == 0:
            with open(sys.argv[1], "w", encoding="utf-8") as file:
                json.dump(rows, file)
    finally:
        with suppress(Exception):
            dist.destroy_process_group()


if __name__ == "__main__":
    cli.show_what_can_be_shown()
    main()
