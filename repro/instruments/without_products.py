"""Run a model for its bytes alone: matrix products give zeros of the right shape at once.

What is allocated, saved, sent and freed does not depend on the values, and everything but the
products runs as always. A processor without instructions for 16-bit products takes seconds for one
of them; this takes none. The scratch memory that some libraries take inside a product is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Operation -> the places of its two factors among its arguments.
FACTORS = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.baddbmm.default: (1, 2),
}


class WithoutProducts(TorchDispatchMode):
    """Context in which products of matrices are zeros: (..., M, K) x (..., K, N) -> (..., M, N).

    Enter it before a mode that counts, which then sees the products' results as always.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in FACTORS:
            return func(*args, **(kwargs or {}))
        left, right = (args[place] for place in FACTORS[func])
        return left.new_zeros(*left.shape[:-1], right.shape[-1])
