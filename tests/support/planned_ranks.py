"""A case on several processes, under DDP or FSDP2."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from planned_training import REFUSED, Case, same, train
from torch import Tensor, nn


def failure_on_ranks(case: Case) -> str | None:
    """The same on several processes, under a wrapper; the first rank's complaint."""
    with tempfile.TemporaryDirectory() as folder:
        # fork: the children have torch imported already, which is most of the time otherwise
        torch.multiprocessing.start_processes(_rank, (case.ranks, folder, case), nprocs=case.ranks, start_method="fork")
        found: str | None = json.loads((Path(folder) / "out.json").read_text(encoding="utf-8"))
        return found


def _rank(rank: int, ranks: int, folder: str, case: Case) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def sharded(run: nn.Module) -> nn.Module:
        fully_shard(run)
        return run

    wraps: dict[str, Callable[[nn.Module], nn.Module]] = {
        "ddp": DistributedDataParallel,
        "ddp-unused": lambda m: DistributedDataParallel(m, find_unused_parameters=True),
        "ddp-static": lambda m: DistributedDataParallel(m, static_graph=True),
        "fsdp2": sharded,
    }
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    complaint: str | None = None
    results: list[list[dict[str, Tensor]] | str] = []
    for planned in (False, True):
        try:
            case_of_rank = replace(case, restart=0, seed=case.seed + rank)  # other rows on each
            results.append(train(case_of_rank, "cpu", planned=planned, wrap=wraps[case.wrap]))
        except (RuntimeError, ValueError, TypeError) as error:
            results.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    expected, found = results
    if isinstance(expected, str):
        complaint = None  # the wrapper itself refuses this model
    elif isinstance(found, str):
        complaint = None if any(text in found for text in REFUSED) else found
    else:
        for step, (one, other) in enumerate(zip(found, expected, strict=True)):
            for name in one.keys() | other.keys():
                a, b = one.get(name), other.get(name)
                a, b = (getattr(t, "_local_tensor", t) for t in (a, b))
                if complaint is None and (a is None or b is None or not same(a, b)):
                    complaint = f"step {step}: {name} differs on {ranks} ranks"
    if rank == 0:
        (Path(folder) / "out.json").write_text(json.dumps(complaint), encoding="utf-8")
    dist.destroy_process_group()
