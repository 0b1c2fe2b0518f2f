"""Bytes that decoding moves a token: context, heads that share K and V, drafts, and splits.

A step reads the whole cache, so a token costs what its context takes. What lowers it: fewer heads
of K and V, one latent for both, fewer bits, or several tokens of a draft a step, as long as all
rows of a key/value head fit one tile of the kernel (64): beyond that the SMs read the cache again,
and HBM does not, where L2 holds what neighbouring blocks read at the same time.
"""

import matplotlib.pyplot as plt
import pandas

from analysis.hardware import A100_80GB, H200
from figures.common import Drawing, End, curve, devices, finish, key, label_ends, note, pick, powers_of_two
from repro.claims.options.decoding import FIELDS
from repro.experiments.bytes.decode_bytes import DRAFT_CONTEXT, HEADS, SPLITS, WIDTHS

EXPERIMENTS = ("decode-bytes", "gpu-decode", "ceiling", "gpu-ceilings")
MB = 1e6
#: Way to share -> name and colour.
SHARING = {
    "mha": ("MHA, 32 heads", "#D55E00"),
    "gqa": ("GQA, 8 heads", "#0072B2"),
    "gqa-fp8": ("GQA in fp8", "#56B4E9"),
    "mqa": ("MQA, 1 head", "#009E73"),
    "latent-256": ("latent of 256", "#CC79A7"),
    "latent-576": ("latent of 576, 512 values", "#999999"),
}


def totals(frame: pandas.DataFrame) -> pandas.DataFrame:
    """All bytes of a step by source, a row a cell, and ``lowest``: each tensor once."""
    rows = pick(frame, metric="traffic_bytes").dropna(subset=["value"])
    if rows.empty:
        return pandas.DataFrame(columns=[*FIELDS, "value", "lowest", "megabytes"])
    found = rows.groupby(FIELDS, dropna=False)["value"].sum().reset_index()
    bound = pick(frame, metric="compulsory_bytes").set_index(FIELDS[1:])["value"]
    found = found.join(bound.rename("lowest"), on=FIELDS[1:])
    found["megabytes"] = found["value"] / found["seqlen_q"] / MB
    return found


def draw(frame: pandas.DataFrame) -> Drawing:
    """Against the context; against the width of a draft; against the number of splits."""
    found = totals(frame)
    figure, (context, width, splits) = plt.subplots(1, 3, figsize=(12.4, 4.3), layout="constrained")
    one = pick(found, seqlen_q=1, splits=1)
    drafts = pick(found, seqlen_k=DRAFT_CONTEXT, splits=1)
    ends: dict[str, list[End]] = {"seqlen_k": [], "seqlen_q": []}
    for name, (label, colour) in SHARING.items():
        for ax, rows, x in ((context, one, "seqlen_k"), (width, drafts, "seqlen_q")):
            these = pick(rows, sharing=name)
            ends[x] += curve(ax, these, x, label, colour, y="megabytes")
        least = pick(drafts, sharing=name, source="predicted").sort_values("seqlen_q")
        width.plot(
            least["seqlen_q"], least["lowest"] / least["seqlen_q"] / MB, color=colour, linewidth=0.8, linestyle=":"
        )
    finish(
        context,
        "a token reads its whole context",
        x=(256, 2048, 16384, 131072),
        log=True,
        ends=ends["seqlen_k"],
        xlabel="context (keys)",
        ylabel="bytes a token and layer (MB)",
        xlim=(200, 131072 * 22),
    )
    key(context, "counted on the host", published=False, loc="lower right")

    width.set_yscale("log")
    width.set_xticks(WIDTHS)
    width.set(xlabel="tokens of a draft, verified in one step", ylabel="bytes a token (MB)", xlim=(0.7, 13))
    width.set_title(f"drafts share the reading, {DRAFT_CONTEXT} keys")
    label_ends(width, ends["seqlen_q"])

    by_splits = pick(found, sharing="gqa", seqlen_k=DRAFT_CONTEXT, seqlen_q=1).copy()
    by_splits["over"] = by_splits["value"] / by_splits["lowest"]
    colour = SHARING["gqa"][1]
    curve(splits, by_splits, "splits", "splits", colour, y="over")
    splits.axhline(1, color="#999999", linewidth=0.8, linestyle=":")
    powers_of_two(splits, SPLITS)
    splits.set(xlabel="parts that the keys are split into", ylabel="bytes over the lower bound")
    splits.set_title(f"what a split costs, GQA, {DRAFT_CONTEXT} keys")
    gpus = ", ".join(f"{1e6 * MB / gpu.hbm_bandwidth_bytes_per_s:.2f} µs on {gpu.name}" for gpu in (A100_80GB, H200))
    note(
        figure,
        f"{HEADS} query heads of 128 columns, bf16, pages of 64 keys, one sequence, one layer; a "
        "latent is one head of its columns, keys and values at once. SM boundary; dotted: each "
        f"tensor once.\nA MB from HBM takes no less than {gpus} (datasheets). "
        f"{devices(pick(frame, experiment='decode-bytes'))}.",
    )
    kept = [*FIELDS, "value", "lowest"]
    order = ["sharing", "splits", "seqlen_q", "seqlen_k", "source"]
    return Drawing(figure, found[kept].sort_values(order).reset_index(drop=True))
