"""Store, recompute or offload, by the link's bandwidth."""

from __future__ import annotations

import pandas

from analysis.offload import Action, HostLinkModel, LayerCost, step_timeline
from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, Part, agreement
from repro.claims.register import Finding, claim
from repro.claims.tolerances import COUNT, TIME
from repro.claims.values import NAN, formula, known, pick, worst
from repro.claims.works import OURS
from repro.experiments.checkpointing.offload import ACTIONS, DEPTH, ROWS, SAVED_BYTES, WIDTH


def steps(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Measured and predicted seconds a step: a row per bandwidth and action."""
    measured = pick(frame, source="measured")
    table = measured.pivot_table(index="link_mb_s", columns="metric", values="value")
    rows = []
    for bandwidth, found in table.iterrows():
        # the fastest forward and backward come from different steps: together they take one step
        share = found["store_step_s"] / (found["forward_s"] + found["backward_s"]) / DEPTH
        cost = LayerCost(
            SAVED_BYTES, found["forward_s"] * share, found["backward_s"] * share, input_bytes=4 * ROWS * WIDTH
        )
        link = HostLinkModel(float(bandwidth) * 1e6)
        for action in ACTIONS:
            plan: list[Action] = [action] * DEPTH
            step = step_timeline([cost] * DEPTH, plan, link)
            common = {"link_mb_s": bandwidth, "action": action, "unit": "s"}
            relative = found["store_step_s"]
            value = found[f"{action}_step_s"]
            rows += [
                common | {"source": "predicted", "value": step.total_s / relative},
                common | {"source": "measured", "value": value / relative},
            ]
    columns = ["source", "link_mb_s", "action", "value", "unit"]
    return pandas.DataFrame(rows, columns=columns)


@claim(
    "offload crossover",
    "offloading beats recomputing above a link bandwidth of bytes / 2f; times by replay",
    OURS,
    experiments=("offload",),
    shown="offload_crossover",
    conditions="an emulated link on a CPU",
    overturn=(Scale({"metric": "moved_bytes"}), Scale({"metric": "offload_step_s"})),
    partial="times repeat within 40 % beside other programs, and one chain on one emulated link was run",
)
def offload_crossover(frame: pandas.DataFrame) -> Finding:
    """Bytes, times and the crossover."""
    table = steps(frame)
    wide = table.pivot_table(index=["action", "link_mb_s"], columns="source", values="value")
    wide = wide.reindex(columns=["measured", "predicted"]).dropna()
    moves, again = (pick(wide.reset_index(), action=name).set_index("link_mb_s") for name in ("offload", "recompute"))
    off, count = worst(moves["measured"] / formula(moves["predicted"], 2)), len(moves)
    same = (moves["measured"] < again["measured"]) == (moves["predicted"] < again["predicted"])
    seen, told = (set(known(frame, metric="moved_bytes", source=s)["value"]) for s in ("measured", "predicted"))
    what = "share of bandwidths on the predicted side"
    return Finding(
        predicted=f"bytes exact, same side at {count} bandwidths",
        measured=f"time within {abs(off - 1):.0%}, same side at {same.sum()}",
        parts=[
            Part(
                "numbers of bytes moved that differ from the formula",
                float(len(seen ^ told)) if seen else NAN,
                Evidence.COUNTED,
                low=0,
                high=0,
                kind=COUNT,
            ),
            agreement("step time over the replay, worst bandwidth", off, 1, TIME, Evidence.HARDWARE),
            Part(what, float(same.mean()), Evidence.HARDWARE, low=1.0, high=1.0, kind=COUNT),
        ],
    )
