"""Flash-Decoding 2023: time of a step for as many tokens."""

from __future__ import annotations

import pandas

from analysis.hardware import A100_40GB, A100_80GB
from repro.claims import works
from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, Part
from repro.claims.register import Finding, claim
from repro.claims.values import pick
from repro.experiments.papers.decode_published import FLASH_DECODING, TOKENS


def with_bound(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Flash-Decoding's rows with ``rate`` in TB/s and ``over``: the 80 GB card's roofline."""
    point = ["batch", "seqlen_k"]
    times = pick(frame, metric="time_us", implementation=FLASH_DECODING, source="published")
    known = pick(frame, metric="compulsory_bytes").set_index(point)["value"]
    least = pick(frame, metric="time_us", source="predicted", device=A100_80GB.name)
    found = times.dropna(subset=["value"]).join(known.rename("bytes"), on=point)
    found = found.join(least.set_index(point)["value"].rename("bound"), on=point)
    return found.assign(rate=found["bytes"] / found["value"] / 1e6, over=found["value"] / found["bound"])


@claim(
    "Flash-Decoding",
    "decoding takes about the same time for 64k tokens, whatever sequences they belong to",
    works.FLASH_DECODING,
    "micro-benchmarks",
    experiments=("decode-published",),
    shown="decode_published",
    conditions="an A100, 40 or 80 GB is not said; nothing of it was run here",
    overturn=(
        Scale({"implementation": "flash-decoding", "batch": 64}, only="up", source="published"),
        Scale({"implementation": "flash-decoding"}, 1.7, only="down", source="published"),
    ),
    compared=False,
)
def flash_decoding(frame: pandas.DataFrame) -> Finding:
    """As much time for as many tokens, and none below what HBM allows."""
    found = with_bound(frame)
    same = found[found["batch"] * found["seqlen_k"] == TOKENS]
    known = bool(len(same))
    spread = float(same["value"].max() / same["value"].min()) if known else float("nan")
    least = float(found["over"].min()) if known else float("nan")
    bounds = [
        pick(frame, metric="time_us", source="predicted", device=card, seqlen_k=TOKENS)
        for card in (A100_40GB.name, A100_80GB.name)
    ]
    return Finding(
        predicted="67.1 MB in every row: at least "
        + " or ".join(f"{row['value'].iloc[0]:.0f} us" for row in bounds)
        + " (A100 40 or 80 GB)",
        published=f"{same['value'].min():.0f} to {same['value'].max():.0f} us, "
        f"{found['rate'].min():.2f} to {found['rate'].max():.2f} TB/s"
        if known
        else "-",
        parts=[
            Part(
                what="longest over shortest time of 64k tokens",
                value=spread,
                high=1.5,
                evidence=Evidence.PUBLISHED,
                form=".2f",
            ),
            Part(
                what="least time over the roofline of the A100 80 GB",
                value=least,
                low=1.0,
                evidence=Evidence.PUBLISHED,
                form=".2f",
            ),
        ],
    )
