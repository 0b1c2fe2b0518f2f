"""What every option of attention is held to in this folder: one row an option.

A row is what the option changes in a plain :class:`attention_case.Case`. Sizes are ragged, heads
share keys, and the few types and widths are those that all rows share, so that little is compiled.
"""

from __future__ import annotations

from typing import Any

from attention_case import Case

#: Two items of two heads that share keys, in tiles of which the last is ragged.
SIZES: dict[str, Any] = {"batch": 2, "heads": 2, "kv_heads": 1, "seqlen_q": 70, "seqlen_k": 91}
FORWARD: dict[str, Any] = {"needed": (False, False, False)}
PACKED: dict[str, Any] = {"batch": 1, "queries": (33, 0, 1, 70, 16, 0), "keys": (50, 20, 1, 90, 0, 0)}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (20, 33), "sinks": 5},
    "key mask": {"key_keep": 0.6},
    "block mask": {"block_keep": 0.6, "tile": (32, 32)},
    "dropout": {"dropout_p": 0.3},
    "scale below 0": {"scale": -0.3},
    "softcap": {"softcap": 2.0},
    "ALiBi": {"alibi": "items"},
    "bias": {"bias": (1, 1), "bias_gradient": True},
    "shared bias": {"bias": (0, 1), "bias_gradient": True},
    "sink logits": {"sink_logits": True},
    "fp8": {"fp8": True, **FORWARD},
    "fp8 in blocks": {"fp8": True, "scale_block": 48, **FORWARD},
    "packed": PACKED,
    "sawtooth": {"order": "sawtooth"},
}
SIXTEEN_BITS = ("fp8", "fp8 in blocks")
"""Those that fp32 does not have."""


def case_of(feature: str, **changes: Any) -> Case:
    return Case(**{**SIZES, **FEATURES[feature], **changes})


def small(feature: str, **changes: Any) -> Case:
    """In a form that repeats to the bit, which the tests of the operator share."""
    dtype = "fp16" if feature in SIXTEEN_BITS else "fp32"
    return case_of(feature, dtype=dtype, head_dim=32, deterministic=True, **changes)


def together(**changes: Any) -> Case:
    """Every option that goes with every other."""
    return Case(
        **{
            **SIZES,
            "seqlen_q": 130,
            "seqlen_k": 150,
            "head_dim": 40,
            "dtype": "fp16",
            "causal": True,
            "window": (60, 9),
            "sinks": 5,
            "key_keep": 0.7,
            "block_keep": 0.7,
            "tile": (32, 32),
            "dropout_p": 0.2,
            "softcap": 4.0,
            "alibi": "heads",
            "bias": (1, 0),
            "bias_gradient": True,
            "sink_logits": True,
            **changes,
        }
    )
