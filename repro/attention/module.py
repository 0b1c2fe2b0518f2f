"""The operator as a module: what a model holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from analysis.arguments import probability
from analysis.window import sides
from repro.attention.operator import flash_attention
from repro.attention.options import Options
from repro.attention.validation import resolve

__all__ = ["FlashAttention"]

_NAMES = ("causal", "dropout_p", "scale", "softcap", "deterministic", "tile", "order", "window", "sinks")
USUAL: dict[str, Any] = {name: Options._field_defaults.get(name) for name in _NAMES}
"""Options of a module, and what they are where nothing is said."""


class FlashAttention(nn.Module):
    """:func:`repro.flash_attention` with its options fixed; drops weights in training mode only.

    Args:
        options: those of :func:`repro.flash_attention` that are no tensors: causal, scale, softcap,
            deterministic, tile, order, window, sinks, and dropout_p, which is used while
            ``self.training`` (in eval mode nothing is dropped). Each is an attribute.

    Raises TypeError or ValueError for a wrong one, and TypeError for another name.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        unknown = options.keys() - USUAL.keys()
        if unknown:
            raise TypeError(f"FlashAttention takes no option {', '.join(sorted(unknown))}")
        given = USUAL | options
        window = given.pop("window")
        probability("dropout_p", given["dropout_p"])
        found = resolve(Options(**given), 1)._asdict() | {"window": window and sides(window)}
        if given["scale"] is None:
            found["scale"] = None
        if found["tile"] is not None:
            found["tile"] = tuple(found["tile"])
        for name in USUAL:
            setattr(self, name, found[name])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, **tensors: Any) -> Tensor:
        """(B, H, Nq, D), (B, Hkv, Nk, D) twice → (B, H, Nq, D).

        tensors: others that :func:`repro.flash_attention` takes by name.
        """
        options = {name: getattr(self, name) for name in USUAL}
        if not self.training:
            options["dropout_p"] = 0.0
        out = flash_attention(q, k, v, key_mask=key_mask, **options, **tensors)
        assert isinstance(out, Tensor)
        return out

    def extra_repr(self) -> str:
        """The options that every instance shows, and of the others those that are not as usual."""
        values = {name: getattr(self, name) for name in USUAL}
        return ", ".join(
            f"{name}={value!r}"
            for place, (name, value) in enumerate(values.items())
            if place < 3 or value != USUAL[name]
        )
