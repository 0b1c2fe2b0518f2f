"""Counts what collectives move, below the engines that issue them.

Every engine here ends in operators of ``torch.ops.c10d``, which a dispatch mode sees whether they
are called by DistributedDataParallel's reducer, by FSDP2 or by our own code.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from analysis.arguments import whole
from analysis.model_states import ring_sent_bytes

_COLLECTIVES = {
    "c10d::allreduce_": "all_reduce",
    "c10d::broadcast_": "broadcast",
    "c10d::reduce_": "reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::send": "send",
}
_SILENT = {"c10d::recv_", "c10d::barrier"}  # recv_ is the other end of a counted send


class CollectiveBytes(TorchDispatchMode):
    """Context that counts bytes of the full tensor each collective works on, by collective.

    An all-gather's full tensor is its output, a reduce-scatter's its input; a send's is what is
    sent. A collective that is not known is an error, so that nothing goes uncounted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.full_bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.name().rsplit(".", 1)[0] if "::" in func.name() else func.name()
        if name.startswith("c10d::") and name not in _SILENT:
            if name not in _COLLECTIVES:
                raise NotImplementedError(f"{name}: not a counted collective")
            collective = _COLLECTIVES[name]
            self.full_bytes[collective] += _full_bytes(name, args)
            self.calls[collective] += 1
        return func(*args, **(kwargs or {}))

    def sent_bytes(self, ranks: int) -> float:
        """Bytes each rank sends when the collectives run as rings; sends count as they are."""
        ranks = whole("ranks", ranks, least=1)
        rings = (ring_sent_bytes(name, nbytes, ranks) for name, nbytes in self.full_bytes.items() if name != "send")
        return sum(rings) + self.full_bytes["send"]


def _full_bytes(name: str, args: tuple[Any, ...]) -> int:
    if name == "c10d::_reduce_scatter_base_":
        return int(args[1].nbytes)
    first = args[0]
    tensors: list[Tensor] = [first] if isinstance(first, torch.Tensor) else list(first)
    return sum(tensor.nbytes for tensor in tensors)
