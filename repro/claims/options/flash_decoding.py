"""Flash-Decoding 2023: time of a step for as many tokens."""

from __future__ import annotations

import pandas

from analysis.hardware import A100_40GB, A100_80GB
from repro.claims import works
from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, Part, more
from repro.claims.register import Finding, claim
from repro.claims.tolerances import TIME
from repro.claims.values import one, pick
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
    chosen="'about the same' as within half was set with the ratio of 1.38 in sight",
    overturn=(
        Scale({"implementation": "flash-decoding", "batch": 64}, only="up", source="published"),
        Scale({"implementation": "flash-decoding"}, 1.7, only="down", source="published"),
    ),
    compared=False,
)
def flash_decoding(frame: pandas.DataFrame) -> Finding:
    """As much time for as many tokens, and none below what HBM allows."""
    found = with_bound(frame)
    same = found[found["batch"] * found["seqlen_k"] == TOKENS]["value"]
    cards = (A100_40GB.name, A100_80GB.name)
    bounds = [one(frame, metric="time_us", source="predicted", device=c, seqlen_k=TOKENS) for c in cards]
    most = "longest over shortest time of 64k tokens"
    return Finding(
        predicted=f"67.1 MB in every row: at least {bounds[0]:.0f} us or {bounds[1]:.0f} us (A100 40 or 80 GB)",
        published=f"{same.min():.0f} to {same.max():.0f} us, "
        f"{found['rate'].min():.2f} to {found['rate'].max():.2f} TB/s",
        parts=[
            Part(most, same.max() / same.min(), Evidence.PUBLISHED, high=TIME.factor or 1, form=".2f", kind=TIME),
            more("least time over the roofline of the A100 80 GB", found["over"].min(), Evidence.PUBLISHED, ".2f"),
        ],
    )
