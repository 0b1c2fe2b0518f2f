"""What shapes a call of the operator beside q, k and v."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from analysis.window import Sides

__all__ = ["DIFFERENTIABLE", "SCHEMA", "VALUES", "Options"]


class Options(NamedTuple):
    """The operator's arguments behind q, k and v, in the order of its schema: values, then tensors.

    As in :func:`repro.flash_attention`, whose ``window`` is (left, right) here. scale: None for
    1/sqrt(D).
    """

    causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    tile: Sequence[int] | None = None
    deterministic: bool = False
    order: str = "rows"
    softcap: float | None = None
    left: int | None = None
    right: int | None = None
    sinks: int = 0
    scale_block: int | None = None
    key_mask: Tensor | None = None
    block_mask: Tensor | None = None
    seed: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    sink_logits: Tensor | None = None

    @property
    def window(self) -> Sides:
        """Keys to the left and right of the diagonal that a query sees; None: all."""
        return self.left, self.right

    @property
    def fp8(self) -> bool:
        """Whether k and v are e4m3; then there are scales, and no backward."""
        return self.k_scale is not None

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Those that are tensors, None where there is none."""
        return self[VALUES:]


DIFFERENTIABLE = ("bias", "sink_logits")
"""Options that have a gradient."""
VALUES = 11
"""How many fields stand before the tensors."""
_KINDS = {
    "Tensor | None": "Tensor?",
    "bool": "bool",
    "float": "float",
    "int": "int",
    "str": "str",
    "float | None": "float?",
    "int | None": "int?",
    "Sequence[int] | None": "int[]?",
}
SCHEMA = ", ".join(f"{_KINDS[str(kind.__forward_arg__)]} {name}" for name, kind in Options.__annotations__.items())
"""The fields as torch declares arguments."""
