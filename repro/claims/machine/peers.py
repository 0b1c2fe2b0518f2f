"""Measured attention beside the time model's bound, and ours beside the best peer."""

from __future__ import annotations

import pandas

from analysis.flops import paper_flops
from analysis.hardware import find_gpu
from analysis.time_model import SHARED_MEMORY
from repro.claims import works
from repro.claims.protocol import Evidence, more
from repro.claims.register import Finding, claim
from repro.claims.values import NAN, pick
from repro.experiments.gpu.gpu_throughput import cells, time_bound
from repro.experiments.shared.attention import shape_of

OURS = "flash-sm90"
KERNELS = ("flash", OURS, "flash-sm90-optimistic")
#: The best of these a shape is the peer to be measured against.
PEERS = ("flash-attn-4 4.0.0b36 (Hopper path)", "sdpa-cudnn", "sdpa-flash2", "sdpa-flash", "sdpa-math")
SHAPE = ["pass", "head_dim", "causal", "seqlen_q"]
#: What our kernels are to reach: geometric mean over all shapes, beside the best peer.
GOAL = 1.0


def bounds(card: str) -> pandas.DataFrame:
    """A row per shape: TFLOP/s at the bound and at that without shared memory, and what binds."""
    gpu = find_gpu(card)
    assert gpu is not None
    rows = []
    for cell in cells():
        bound, _ = time_bound(cell, OURS, gpu)
        without, _ = time_bound(cell, OURS, gpu, without=(SHARED_MEMORY,))
        flops = paper_flops(shape_of(cell), str(cell["pass"]))
        rows.append(
            {k: cell[k] for k in SHAPE}
            | {
                "bound_tflops": flops / bound.seconds / 1e12,
                "without_shared_tflops": flops / without.seconds / 1e12,
                "binding": bound.binding,
            }
        )
    return pandas.DataFrame(rows)


def distances(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Measured rows with their time over the bound's, with and without shared memory in it."""
    rows = of_one_card(tflops(frame))
    rows = rows[(rows["source"] == "measured") & rows["tflops"].notna()]
    rows = rows[rows["implementation"].isin([*KERNELS, *PEERS]) & (rows["dtype"] == "bf16")]
    if rows.empty:
        return rows.assign(bound_tflops=[], binding=[], distance=[], distance_without_shared=[])
    keys = ["implementation", *SHAPE]
    rows = rows.groupby(keys, as_index=False).agg({"tflops": "median", "source": "first", "device": "first"})
    rows["causal"] = rows["causal"].astype(bool)
    found = rows.merge(bounds(str(rows["device"].iloc[0])), on=SHAPE)
    found["distance"] = found["bound_tflops"] / found["tflops"]
    found["distance_without_shared"] = found["without_shared_tflops"] / found["tflops"]
    return found.sort_values(keys)


def tflops(frame: pandas.DataFrame) -> pandas.DataFrame:
    """All rows as TFLOP/s; times are converted with the papers' FLOP count (FA-2, §4.1)."""
    rows = frame[frame["metric"].isin(["throughput_tflops", "time_ms"])].copy()
    flops = 4.0 * rows["batch"] * rows["heads"] * rows["seqlen_q"] ** 2 * rows["head_dim"]
    flops = flops.where(rows["causal"] != True, flops / 2)  # noqa: E712  object column
    flops = flops.where(rows["pass"] != "backward", flops * 2.5)
    is_time = rows["metric"] == "time_ms"
    rows["tflops"] = rows["value"].where(~is_time, flops / rows["value"] / 1e9)
    # An implementation timed in turn with ours has both rows; one of them is enough.
    return rows.sort_values("metric").drop_duplicates(
        ["source", "implementation", "pass", "seqlen_q", "head_dim", "causal", "dtype", "experiment", "device"],
        keep="last",
    )


def of_one_card(rows: pandas.DataFrame) -> pandas.DataFrame:
    """The measured and predicted rows of one card, the one that ours were measured on if any."""
    measured = pick(rows, source="measured")
    measured = measured[measured["tflops"].notna()]
    ours = pick(measured, experiment="gpu-throughput", implementation=("flash", "flash-sm90"))
    known = (ours if len(ours) else measured)["device"].dropna()
    card = find_gpu(str(known.iloc[-1])) if len(known) else find_gpu("NVIDIA H200")

    def elsewhere(device: object) -> bool:
        return isinstance(device, str) and find_gpu(device) != card

    other = rows["source"].isin(["measured", "predicted"]) & rows["device"].map(elsewhere)
    return rows[~other]


def _beside_the_best_peer(frame: pandas.DataFrame, pass_: str) -> Finding:
    """Ours beside the best peer, in the geometric mean over all shapes of a pass."""
    rows = pick(distances(frame), pass_=pass_)
    peers, ours = (pick(rows, implementation=names) for names in (list(PEERS), OURS))
    ratio = (ours.set_index(SHAPE)["tflops"] / peers.groupby(SHAPE)["tflops"].max()).dropna()
    mean = float(ratio.prod() ** (1 / len(ratio))) if len(ratio) else NAN
    least = peers.groupby(SHAPE)["distance"].min()
    away = f"best peer {least.min():.1f} to {least.max():.1f}x our tiles' bound"
    distance = ours["distance"]
    shown = (
        f"{mean:.2f}x over {len(ratio)} shapes ({ratio.min():.2f} to {ratio.max():.2f}); "
        f"ours {distance.min():.1f} to {distance.max():.1f}x the bound"
    )
    return Finding(
        predicted=f"{GOAL:.2f}x or more",
        measured=f"{shown if len(ratio) else 'ours not timed yet'}; {away}",
        parts=[more("our TFLOP/s over the best peer's, geometric mean", mean, Evidence.HARDWARE, ".2f")],
    )


def _as_fast(name: str) -> None:
    @claim(
        f"Hopper {name}",
        f"the Hopper {name} is as fast as the best peer, over all shapes",
        works.OURS,
        experiments=("throughput", "throughput-peers", "gpu-throughput"),
        shown="distance_from_bound",
        conditions="to be timed on one card, in turns with the peers",
        no_records="tests/theory/test_distance_from_bound.py",
    )
    def judge(frame: pandas.DataFrame) -> Finding:
        return _beside_the_best_peer(frame, name)


_as_fast("forward")
_as_fast("backward")
