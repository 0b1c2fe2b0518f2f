"""Speed-up over standard attention: K3."""

from __future__ import annotations

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, Part
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.values import pick
from repro.claims.works import H200, RECOMPUTE


def measured(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Standard over FlashAttention-2 on the H200, no mask, no dropout."""
    rows = pick(frame, experiment="fig3-runtime", source="measured", pass_="forward+backward")
    rows = rows[(rows["metric"] == "time_ms") & (rows["dropout"] == 0.0)]
    wide = rows.pivot_table(index="seqlen_q", columns="implementation", values="value")
    if not {"standard-eager", "sdpa-flash2"} <= set(wide.columns):
        return pandas.DataFrame(columns=[*frame.columns])
    ratio = (wide["standard-eager"] / wide["sdpa-flash2"]).dropna()
    return pandas.DataFrame(
        {
            "seqlen_q": ratio.index,
            "value": ratio.to_numpy(),
            "source": "measured",
            "device": "NVIDIA H200",
            "head_dim": 64,
            "dropout": 0.0,
            "key_mask": False,
        }
    )


@claim(
    "K3, speed",
    "flash attention is 2 to 4 times faster overall",
    RECOMPUTE,
    "section 9.2",
    experiments=("speedup", "fig3-runtime"),
    shown="fa1_fig5_8_speedup",
    conditions=H200,
    overturn=(Scale({"implementation": "sdpa-flash2"}, 2.2),),
    compared=False,
)
def k3_speed(frame: pandas.DataFrame) -> Finding:
    """K3's first half: overall speed-up of 2 to 4 times."""
    published = pick(frame, experiment="speedup", source="published", metric="speedup")
    a100 = pick(published, device="NVIDIA A100", head_dim=64)["value"].dropna()
    ours = measured(frame)
    values = ours["value"].dropna() if len(ours) else pandas.Series(dtype=float)
    inside = values.between(2, 4)
    return Finding(
        predicted="see the lines of the figure",
        measured=f"{values.min():.1f} to {values.max():.1f}x, N = {ours['seqlen_q'].min():.0f} "
        f"to {ours['seqlen_q'].max():.0f} (H200)"
        if len(values)
        else NOT_MEASURED,
        published=f"{a100.min():.1f} to {a100.max():.1f}x (A100)" if len(a100) else "-",
        parts=[
            Part(
                what="share of measured lengths with 2 to 4x",
                value=float(inside.mean()) if len(values) else float("nan"),
                low=1.0,
                high=1.0,
                limits=(0.5, 1.0),
                why="not at every length",
                evidence=Evidence.HARDWARE,
            )
        ],
    )
