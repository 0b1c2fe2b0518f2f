"""A step of decoding: its bytes, and its time."""

from __future__ import annotations

import pandas

from analysis.hardware import find_gpu
from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, agreement, exact
from repro.claims.register import Finding, claim
from repro.claims.tolerances import TIME
from repro.claims.values import NAN, against_sums, known, off, pick, worst
from repro.claims.works import OURS
from repro.experiments.gpu.gpu_decode import RULE

#: What is measured of HBM: copies and reads of what L2 cannot hold.
HBM_CEILINGS = ("copy", "hbm-copy", "hbm-read")
FIELDS = ["source", "sharing", "kv_heads", "head_dim", "seqlen_q", "seqlen_k", "splits"]


def _card(device: object) -> str | None:
    found = find_gpu(str(device))
    return found.name if found else None


def _bandwidth_shares(frame: pandas.DataFrame) -> dict[str, float]:
    """Card -> its best measured bandwidth of HBM over the datasheet's."""
    rows = pick(
        frame, experiment=["ceiling", "gpu-ceilings"], source="measured", unit="TB/s", implementation=HBM_CEILINGS
    )
    shares: dict[str, float] = {}
    for device, value in zip(rows["device"], rows["value"], strict=True):
        gpu = find_gpu(str(device))
        if gpu is not None and value == value:
            share = value * 1e12 / gpu.hbm_bandwidth_bytes_per_s
            shares[gpu.name] = max(share, shares.get(gpu.name, 0.0))
    return shares


@claim(
    "decoding",
    "a step of decoding reads the cache once for the heads of a group; a split adds fp32 parts",
    OURS,
    experiments=("decode-bytes",),
    shown="decode_bytes",
    conditions="executed on the host; no time and no card's counter yet",
    overturn=(
        Scale({"metric": "traffic_bytes", "tensor": "k", "sharing": "gqa"}),
        Scale({"metric": "traffic_bytes", "tensor": "part_out"}),
    ),
)
def decoding(frame: pandas.DataFrame) -> Finding:
    ratio = against_sums(pick(frame, metric="traffic_bytes"), [*FIELDS[1:], "kernel", "tensor", "direction"])
    errors = known(frame, metric="max_abs_error", source="measured")["value"]
    return Finding(
        predicted="sums over the tile loop, by tensor and direction",
        measured=f"{len(ratio)} tensors of {len(errors)} steps, {off(worst(ratio))}; "
        f"out within {errors.max():.1e} of float64",
        parts=[exact("counted over predicted, worst tensor", worst(ratio))],
    )


@claim(
    "decode time",
    "a step of decoding takes the time that HBM needs for the cache, within a tenth",
    OURS,
    experiments=("decode-bytes", "gpu-decode", "ceiling", "gpu-ceilings"),
    shown="decode_bytes",
    conditions="the bandwidth to be measured on the same card",
    no_records="tests/experiments/test_decode_experiment.py",
)
def decode_time(frame: pandas.DataFrame) -> Finding:
    """Time of a step over that of its bytes at the card's own bandwidth, where both are known."""
    # The kernel of the wide latent makes every score twice: not a case for HBM's roofline.
    rows = known(frame, experiment="gpu-decode", metric="time_ms", splits=RULE).query("sharing != 'latent-576'")
    point = ["sharing", "batch", "seqlen_q", "seqlen_k", "card"]
    measured = pick(rows, source="measured").copy()
    measured["card"] = [_card(device) for device in measured["device"]]
    bounds = pick(rows, source="predicted").rename(columns={"device": "card"})
    both = measured.merge(bounds[[*point, "value"]], on=point, suffixes=("", "_bound"))
    share = both["card"].map(_bandwidth_shares(frame))
    ratio = (both["value"] * share / both["value_bound"]).dropna()
    median = float(ratio.median()) if len(ratio) else NAN
    return Finding(
        predicted="the cache, q and out once at the bandwidth measured on the same card",
        measured=f"{ratio.min():.2f} to {ratio.max():.2f} of it, median {median:.2f}",
        parts=[agreement("median time over the roofline", median, 1, TIME, Evidence.HARDWARE)],
    )
