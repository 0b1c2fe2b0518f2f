"""The operator as a module: what a model holds."""

from __future__ import annotations

from torch import Tensor, nn

from analysis.arguments import flag, probability
from repro.attention.operator import flash_attention
from repro.attention.validation import (
    resolve_order,
    resolve_scale,
    resolve_softcap,
    resolve_tile,
    resolve_window,
)

__all__ = ["FlashAttention"]


class FlashAttention(nn.Module):
    """:func:`repro.flash_attention` with its options fixed; drops weights in training mode only.

    Args:
        causal, scale, softcap, deterministic, tile, order, window, sinks: as in
            :func:`repro.flash_attention`.
        dropout_p: probability used while ``self.training``; in eval mode nothing is dropped.
    """

    def __init__(
        self,
        *,
        causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
        softcap: float | None = None,
        deterministic: bool = False,
        tile: tuple[int, int] | None = None,
        order: str = "rows",
        window: tuple[int | None, int | None] | None = None,
        sinks: int = 0,
    ) -> None:
        super().__init__()
        self.causal = flag("causal", causal)
        self.dropout_p = probability("dropout_p", dropout_p)
        self.scale = None if scale is None else resolve_scale(scale, 1)
        self.softcap = resolve_softcap(softcap)
        self.deterministic = flag("deterministic", deterministic)
        block = resolve_tile(tile)
        self.tile = None if block is None else (block[0], block[1])
        self.order = resolve_order(order)
        left, right, self.sinks = resolve_window(window, sinks)
        self.window = None if window is None else (left, right)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        block_mask: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        bias: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> Tensor:
        """(B, H, Nq, D), (B, Hkv, Nk, D) twice → (B, H, Nq, D)."""
        out = flash_attention(
            q,
            k,
            v,
            causal=self.causal,
            key_mask=key_mask,
            dropout_p=self.dropout_p if self.training else 0.0,
            scale=self.scale,
            block_mask=block_mask,
            softcap=self.softcap,
            alibi_slopes=alibi_slopes,
            bias=bias,
            deterministic=self.deterministic,
            tile=self.tile,
            order=self.order,
            window=self.window,
            sinks=self.sinks,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
        )
        assert isinstance(out, Tensor)
        return out

    def extra_repr(self) -> str:
        """The options that every instance shows, and of the others those that are not as usual."""
        text = f"causal={self.causal}, dropout_p={self.dropout_p}, scale={self.scale}"
        usual = {"softcap": None, "deterministic": False, "tile": None, "order": "rows",
                 "window": None, "sinks": 0}  # fmt: skip
        others = {name: getattr(self, name) for name in usual}
        return text + "".join(
            f", {name}={value!r}" for name, value in others.items() if value != usual[name]
        )
