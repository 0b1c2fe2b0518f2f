"""Bytes of attention against N with a stored bias, with ALiBi's computed, and without either.

FlashAttention never stores what is N x N, and from HBM it takes little more than its operands. A
stored bias is N x N: read in each pass, and its gradient written. Computed distances (ALiBi) are 4
bytes a tile. FlexAttention's point, in bytes.
"""

import matplotlib.pyplot as plt
import pandas

from figures.common import Drawing, End, curve, devices, finish, key, note, pick
from repro.claims.options.bias import FIELDS, MB, totals
from repro.experiments.bytes.bias_bytes import DTYPE, HEAD_DIM, HEADS, PASSES, SUMMED

EXPERIMENTS = ("bias-bytes",)
#: (implementation, scores) -> name, colour, line.
WAYS = {
    ("standard", "bias"): ("standard, bias", "#999999", "--"),
    ("flash", "bias"): ("stored bias", "#D55E00", "-"),
    ("flash", "alibi"): ("ALiBi, computed; no bias", "#0072B2", "-"),
    ("flash", "plain"): ("no bias", "#009E73", ":"),
}


def draw(frame: pandas.DataFrame) -> Drawing:
    """SM boundary forward and backward, and what HBM moves at least in both together."""
    found = totals(frame)
    figure, axes = plt.subplots(1, 3, figsize=(12.4, 4.3), layout="constrained")
    for ax, pass_ in zip(axes, PASSES, strict=False):
        _lines(ax, pick(found, **{"pass": pass_}))
        ax.set(ylabel="bytes across the SM boundary (MB)" if pass_ == "forward" else "")
        ax.set_title(f"{pass_}, SM boundary")
    both = pick(found, source="predicted").groupby([*FIELDS[:3], "seqlen_q"], as_index=False)
    once = both["lowest"].sum()
    once["megabytes"] = once["lowest"] / MB
    _lines(axes[2], once, counted=False)
    axes[2].set(ylabel="each tensor of each kernel once (MB)")
    axes[2].set_title("both passes, the least that HBM can move")
    key(axes[0], "counted on the host", published=False, loc="lower right")
    note(
        figure,
        f"{HEADS} heads of {HEAD_DIM} columns, {DTYPE}, a bias a head with its gradient, the "
        "kernels' own tiles. Standard attention reads the bias where S is made; its dS is the "
        "gradient. "
        f"{devices(frame)}.",
    )
    kept = [*FIELDS, "value", "lowest"]
    return Drawing(figure, found[kept].sort_values(FIELDS[1:] + FIELDS[:1]).reset_index(drop=True))


def _lines(ax: plt.Axes, rows: pandas.DataFrame, *, counted: bool = True) -> None:
    """A line a way, and the points that were executed; standard attention was not."""
    ends: list[End] = []
    for (implementation, scores), (label, colour, line) in WAYS.items():
        these = pick(rows, implementation=implementation, scores=scores)
        sources = ("predicted", "measured") if counted and implementation == "flash" else ("predicted",)
        end = curve(ax, these, "seqlen_q", label, colour, y="megabytes", sources=sources, line={"linestyle": line})
        if scores != "plain":  # whose line lies under ALiBi's
            ends += end
    limits = (SUMMED[0] / 1.3, SUMMED[-1] * 100)
    finish(ax, x=SUMMED[::2], log=True, ends=ends, xlabel="sequence length N", xlim=limits)
