"""Standard attention beside FlashAttention on one card, by sequence length."""

from __future__ import annotations

import math

import pandas

from repro.claims import values
from repro.claims.protocol import Evidence, Part, share_of
from repro.claims.register import NOT_MEASURED
from repro.claims.tolerances import EDGE

#: Standard attention and the framework's FlashAttention-2, on the same card in the same run.
STANDARD, FLASH = "standard-eager", "sdpa-flash2"
CHECKPOINTED = "standard-eager-checkpointed"
_SHOWN = (128, 256, 512, 2048, 4096)


def ratio(
    frame: pandas.DataFrame,
    metric: str,
    pass_: str,
    *,
    source: str = "measured",
    over: str = STANDARD,
    under: str = FLASH,
) -> pandas.Series:
    """over / under by sequence length, without mask and dropout."""
    rows = frame[(frame["dropout"].fillna(0) == 0) & ~frame["key_mask"].fillna(False).astype(bool)]
    return values.over(rows, over, under, "seqlen_q", metric=metric, pass_=pass_, source=source)


def share_of_octaves(what: str, series: pandas.Series, low: float, high: float) -> Part:
    """The share of measured lengths, each twice the one before, whose ratio lies in [low, high].

    A ratio that grows as N can pass only as often as the range has octaves, and one length more:
    half of that is within limits, by the rule for shares. The ends have an edge as other ranges.
    """
    right = series.between(low * (1 - EDGE), high * (1 + EDGE))
    most = min(1.0, (int(math.log2(high / low)) + 1) / max(len(series), 1))
    where = [f"{n:g}" for n in series.index[right]]
    why = f"N = {' to '.join(dict.fromkeys([where[0], where[-1]]))} only" if where else "nowhere"
    return share_of(f"share of measured lengths with {what}", right, Evidence.OTHER, why, ask=most)


def span(series: pandas.Series, form: str = ".2f") -> str:
    """Least to most, and for which lengths; "not measured" without any."""
    if series.empty:
        return NOT_MEASURED
    low, high = (f"{v:{form}}" for v in (series.min(), series.max()))
    return f"{low} to {high}, N = {series.index.min():g} to {series.index.max():g}"


def by_length(series: pandas.Series) -> str:
    """A few of the ratios with their lengths."""
    return ", ".join(f"{v:.1f}x at {n:g}" for n, v in series.items() if n in _SHOWN) or NOT_MEASURED
