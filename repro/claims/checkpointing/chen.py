"""Chen et al. 2016: bytes of the 1,000-layer ResNet (Fig. 5), time of its plan (Fig. 7)."""

from __future__ import annotations

import pandas

from repro.claims.mutations import RAN, Change, Scale, chosen, setting
from repro.claims.protocol import Evidence, agreement, exponent, less
from repro.claims.register import Finding, claim
from repro.claims.tolerances import HEADLINE, MEMORY, TIME
from repro.claims.values import GB, growth, known, one, text
from repro.claims.works import CHEN

#: Networks of checkpoint-time, by the name of its cells.
NETWORKS = {"resnet": "ResNet of 200 layers", "lstm": "LSTM of 4 x 1024"}


def relative_times(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Measured time of every plan of checkpoint-depth over autograd's, model by model and depth.

    Steps of both took turns where the records name the baseline; in older ones the medians of the
    two cells are divided.
    """
    if "experiment" in frame:
        frame = frame[frame["experiment"] == "checkpoint-depth"]
    turns = known(frame, metric="relative_time", source="measured", against="autograd")
    if len(turns):
        return turns[turns["implementation"] != "autograd"]
    rows = known(frame, metric="time_s", source="measured")
    base = rows[rows["implementation"] == "autograd"].set_index(["model", "depth"])["value"]
    plans = rows[rows["implementation"] != "autograd"].copy()
    keys = pandas.MultiIndex.from_frame(plans[["model", "depth"]])
    plans["value"] = plans["value"].to_numpy() / base.reindex(keys).to_numpy()
    return plans.dropna(subset=["value"])


def executor_overhead(frame: pandas.DataFrame) -> float:
    """Median of the executor storing everything over autograd, on the small chains."""
    rows = relative_times(frame)
    return float(rows.loc[rows["implementation"] == "store-all", "value"].median())


def published_size(frame: pandas.DataFrame, model: str, plan: str) -> float:
    """A plan's time over autograd's in the same turns (checkpoint-time)."""
    where = {"experiment": "checkpoint-time", "source": "measured", "model": model, "implementation": plan}
    own, other = (one(frame, metric=m, **where) for m in ("time_s", "baseline_time_s"))
    return own / other


def published_sizes_at(factor: float) -> Change:
    """The sublinear plan at this multiple of autograd's time in the same turns."""
    where = {"experiment": "checkpoint-time", "implementation": "chen-search", **RAN}

    def change(frame: pandas.DataFrame) -> pandas.DataFrame:
        base = frame[chosen(frame, {**where, "metric": "baseline_time_s"})]
        at = base.set_index("model")["value"]
        return setting(lambda row: factor * at[row["model"]], metric="time_s", **where)(frame)

    return change


@claim(
    "Chen Fig. 5",
    "a 1,000-layer ResNet trains in 7 GB instead of 48 GB",
    CHEN,
    "abstract and Fig. 5",
    experiments=("chen-resnet", "checkpoint-depth", "checkpoint-published"),
    shown="chen-resnet",
    conditions="the network of the authors' example, in PyTorch: what autograd keeps, "
    "counted without data; the plan executed, its peak with weights and "
    "gradients; theirs are of the whole GPU under MXNet's in-place and sharing",
    needs="the network: the paper prints neither its blocks nor their form. With 330 bottlenecks "
    "the form of the authors' example gives the printed 48 GB, the pre-activation form that "
    "section 5.2 cites three quarters of it",
)
def chen_fig_5(frame: pandas.DataFrame) -> Finding:
    """Chen's ResNet of 1,000 layers, 48 GB to below 7 GB, at its own size (chen-resnet)."""
    full = {"experiment": "chen-resnet", "depth": 1000, "batch": 32}
    alive = "alive_after_forward_bytes"

    def kept(source: str, form: str = "autograd") -> float:
        return one(frame, metric=alive, source=source, implementation=form, **full)

    def trained(source: str) -> float:
        """The plan's peak, with weights and their gradients."""
        wanted = {**full, "source": source, "implementation": "chen-search"}
        return one(frame, metric="peak_bytes", **wanted) + 2 * one(frame, metric="parameter_bytes", **wanted)

    small = {**full, "batch": 2, "implementation": "autograd", "metric": alive}
    executed, formula = (one(frame, source=source, **small) for source in ("measured", "predicted"))
    standard, sublinear = (
        one(frame, source="published", metric="total_memory_bytes", implementation=name)
        for name in ("standard", "sublinear")
    )
    grows = growth(frame, experiment="checkpoint-depth", model="resnet", implementation="chen-search")
    pre = "autograd, pre-activation"
    gb = [text(v / GB, ".1f") for v in (kept("measured"), kept("measured", pre), trained("measured"))]
    compared = (
        ("GB of the network without recomputation over the printed ones", kept("measured"), standard, HEADLINE),
        ("bytes counted without data over the formula", kept("measured"), kept("predicted"), MEMORY),
        ("bytes executed with 2 images over the formula", executed, formula, MEMORY),
        ("peak of the executed plan over the simulator's", trained("measured"), trained("predicted"), MEMORY),
    )
    bound = "GB of the network with the sublinear plan over the printed bound"
    return Finding(
        predicted=f"{kept('predicted') / GB:.1f} GB of feature maps "
        f"({kept('predicted', pre) / GB:.1f} with the activation first); with the sublinear plan "
        f"{trained('predicted') / GB:.2f} GB, weights and gradients included",
        measured=f"{gb[0]} GB counted ({gb[1]} with the activation first); with the plan, executed "
        f"at this size, {gb[2]} GB",
        published=f"{standard / GB:.0f} GB and below {sublinear / GB:.0f} GB, whole GPU",
        parts=[
            *(agreement(what, found, told, kind, Evidence.OTHER) for what, found, told, kind in compared),
            less(bound, trained("measured") / sublinear, Evidence.OTHER, ".2f"),
            exponent("slope of the plan's peak in depth", grows, 0.5, Evidence.OTHER),
        ],
    )


@claim(
    "Chen Fig. 7",
    "the sublinear plan costs about 30 % more time",
    CHEN,
    "Fig. 7",
    experiments=("checkpoint-depth", "checkpoint-time"),
    shown="checkpoint_time",
    conditions="the released ResNet of 200 layers with 2 images instead of 32, the LSTM "
    "at its shortest; one CPU core, in turns with autograd",
    overturn=tuple(
        Scale(
            {"experiment": "checkpoint-time", "metric": "time_s", "model": model, "implementation": "chen-search"},
            1.7,  # limits of a factor of 1.5
        )
        for model in NETWORKS
    ),
    as_claimed=published_sizes_at(1.3),
    partial="one depth of each network, the ResNet with 2 images instead of 32",
    compared=False,
)
def chen_fig_7(frame: pandas.DataFrame) -> Finding:
    """Chen's Fig. 7: about 30 % more time than training without recomputation, both networks."""
    small = relative_times(frame)
    small = small[small["implementation"].isin(["sqrt", "chen-search"])]["value"]
    found = {m: [published_size(frame, m, p) for p in ("chen-search", "store-all")] for m in NETWORKS}
    shown = ", ".join(
        f"{text(v)}x ({NETWORKS[m]}; storing everything through the executor {text(w)}x)" for m, (v, w) in found.items()
    )
    aside = (
        f"; where a stage takes a fraction of a millisecond {small.median():.2f}x in the median of {len(small)}, "
        f"of which the executor's own work is {executor_overhead(frame):.2f}x"
    )
    what = "time of the sublinear plan over autograd, over 1.3"
    return Finding(
        predicted="1.33x at most: one more forward where a backward takes two",
        measured=shown + aside if len(small) else shown,
        published="1.3x",
        parts=[agreement(f"{what}, {NETWORKS[m]}", v, 1.3, TIME, Evidence.HARDWARE) for m, (v, _) in found.items()],
    )
