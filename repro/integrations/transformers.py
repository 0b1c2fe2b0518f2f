"""Attention of Hugging Face models by this package's kernels.

    from repro.integrations import transformers
    transformers.register()
    model = AutoModel.from_config(config, attn_implementation="repro")

Needs ``transformers`` 4.53 or newer, which is no dependency of this package.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from repro.attention.sdpa import scaled_dot_product_attention

__all__ = ["attention", "register"]

#: What a model may hand on that changes no result here: masks hold windows and packed positions.
_HANDLED = ("position_ids", "cache_position", "sliding_window", "is_causal", "use_cache")


def register(name: str = "repro") -> None:
    """Make ``attn_implementation=name`` known to transformers; ImportError where it is missing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query (B, H, L, D), key and value (B, Hkv, S, D) -> (B, L, H, D).

    Raises ValueError for an option that would change the result and that no kernel takes.
    """
    for name, given in others.items():
        if given is not None and name not in _HANDLED and not isinstance(given, bool):
            raise ValueError(f"attn_implementation='repro' takes no {name}")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=causal and attention_mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=True,
        softcap=softcap,
    )
    return out.transpose(1, 2).contiguous(), None
