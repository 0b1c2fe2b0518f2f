"""What must overturn every claim: changes of the records, by the claim's name.

``OVERTURN`` has, for every claim, changes each of which must change the verdict: measured records
scaled by 1.5 up or down (more where the claim is one-sided and its margin is larger, and the factor
says so), a slope mirrored, published records scaled. For a refuted claim ``AS_CLAIMED`` has the
records as they would have to be for the claim to be right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas

Change = Callable[[pandas.DataFrame], pandas.DataFrame]


def chosen(frame: pandas.DataFrame, where: dict[str, Any]) -> pandas.Series:
    """Which rows have these values; a callable judges a value itself."""
    mask = frame["value"].notna()
    for column, wanted in where.items():
        if column not in frame:
            return pandas.Series(False, index=frame.index)
        if callable(wanted):
            mask &= frame[column].map(lambda v, test=wanted: bool(test(v)))
        elif isinstance(wanted, tuple):
            mask &= frame[column].isin(wanted)
        else:
            mask &= frame[column] == wanted
    return mask


@dataclass(frozen=True)
class Scale:
    """Multiply a column of some rows by a factor, or divide: one of the two must change the
    verdict."""

    where: dict[str, Any] = field(default_factory=dict)
    factor: float = 1.5
    source: str = "measured"
    column: str = "value"

    def both(self, frame: pandas.DataFrame) -> list[pandas.DataFrame]:
        """The frame with the rows scaled up, and with them scaled down."""
        mask = chosen(frame, {"source": self.source, **self.where})
        assert mask.any(), f"no {self.source} record with {self.where}"
        found = []
        for factor in (self.factor, 1 / self.factor):
            changed = frame.copy()
            changed.loc[mask, self.column] = changed.loc[mask, self.column].astype(float) * factor
            found.append(changed)
        return found


@dataclass(frozen=True)
class Mirror:
    """Turn a slope over: each value becomes (first value)² / value, over the sorted column."""

    over: str
    where: dict[str, Any] = field(default_factory=dict)

    def both(self, frame: pandas.DataFrame) -> list[pandas.DataFrame]:
        """The frame with the opposite slope."""
        mask = chosen(frame, {"source": "measured", **self.where})
        rows = frame[mask].sort_values(self.over)
        assert rows[self.over].nunique() > 1, f"no slope over {self.over} in {self.where}"
        changed = frame.copy()
        changed.loc[mask, "value"] = rows["value"].iloc[0] ** 2 / changed.loc[mask, "value"]
        return [changed]


PUBLISHED = "published"
MEASURED = (Scale(),)
OVERTURN: dict[str, tuple[Scale | Mirror, ...]] = {
    # papers
    "Chen Fig. 5": (
        Scale({"experiment": "chen-resnet", "implementation": "autograd", "batch": 32}),
        Scale({"experiment": "chen-resnet", "implementation": "autograd", "batch": 2}),
        Scale({"implementation": "chen-search", "metric": "peak_bytes", "batch": 32}),
        Scale({"metric": "total_memory_bytes", "implementation": "standard"}, source=PUBLISHED),
        # its margin: 5.2 of 7 GB
        Scale({"metric": "total_memory_bytes", "implementation": "sublinear"}, source=PUBLISHED),
        Mirror("depth", {"model": "resnet", "implementation": "chen-search",
                         "metric": "peak_bytes"}),
    ),
    "Chen Fig. 7": (
        *(Scale({"experiment": "checkpoint-time", "metric": "time_s", "model": model,
                 "implementation": "chen-search"}, 1.3) for model in ("resnet", "lstm")),
    ),
    "FA-1 20x memory": (Scale({"implementation": "sdpa-flash2"}),),
    "FA-1 9x accesses": (Scale({"implementation": "sdpa-flash2"}),),
    "FA-1 Fig. 1 right": (Scale({"implementation": "fused sdpa-flash2 (dropout 0.1)"}),),
    "FA-1 Fig. 2 left, standard": (
        Scale({"experiment": "fig2-left-traffic-masked"}),
        Scale({"metric": "hbm_bytes", "implementation": "standard"}, source=PUBLISHED),
    ),
    "FA-1 Fig. 2 left, flash": (
        Scale({"experiment": "fig2-left", "implementation": "flash1-skip-first"}),
        Scale({"experiment": "fig2-left", "implementation": "flash1-released"}),
        Scale({"metric": "hbm_bytes", "implementation": "flash1"}, source=PUBLISHED),
    ),
    "Flash-Decoding": (
        Scale({"implementation": "flash-decoding", "batch": 64}, source=PUBLISHED),
        Scale({"implementation": "flash-decoding"}, factor=2, source=PUBLISHED),
    ),
    "FA-1 Fig. 2 middle": (*MEASURED, Scale(source=PUBLISHED), Mirror("block_n")),
    "FA-1 Fig. 2 right": (Scale({"implementation": "flash1-block-sparse"}, source=PUBLISHED),),
    "FA-1 Fig. 3 left": (Scale({"implementation": "sdpa-flash2"}),),
    "FA-1 Fig. 3 right": (Scale(), Scale({"implementation": "flash1"}, source=PUBLISHED)),
    "FA-1 Theorem 2": (
        Scale({"sweep": "seqlen", "seqlen_q": 1024}), Mirror("seqlen_q", {"sweep": "seqlen"}),
        Mirror("head_dim", {"sweep": "head_dim"}), Mirror("on_chip", {"sweep": "on_chip"}),
    ),
    "FA-1 Prop. 4": MEASURED,
    "FA-2 throughput": (Scale({"implementation": "flash2"}, source=PUBLISHED),),
    # its margin: 3.3 times less error, where less at all is what decides
    "FA-3 Table 3": (Scale({"implementation": "flash"}, 4),),
    "FA-3 throughput": (Scale({"implementation": "flash3"}, source=PUBLISHED),),
    "Korthikanti 4 %": (Scale({"metric": "time_overhead"}, source=PUBLISHED),),
    "Korthikanti 5x": MEASURED,
    "Korthikanti Eq. 1": MEASURED,
    "Korthikanti Table 2": MEASURED,
    "Korthikanti collectives": (Scale({"metric": "sent_bytes"}),
                                Scale({"metric": "transport_bytes"})),
    "ZeRO Table 1": (Scale(), Scale({"experiment": "zero-table"}, source=PUBLISHED)),
    "ZeRO states": MEASURED,
    "ZeRO volume": (Scale({"metric": "sent_bytes"}), Scale({"metric": "transport_bytes"})),
    "Rabe & Staats": (
        Scale({"implementation": "chunked", "pass": "forward"}),
        Scale({"implementation": "chunked", "pass": "forward+backward"}),
        Scale({"metric": "overhead_ratio", "pass": "forward"}, source=PUBLISHED),
        Scale({"metric": "overhead_ratio", "pass": "forward+backward"}, source=PUBLISHED),
    ),
    "ring attention": (
        Scale({"metric": "sent_bytes"}), Scale({"metric": "transport_bytes"}),
        Scale({"metric": "max_error"}, 10),
    ),
    # study notes
    "K3, speed": (Scale({"implementation": "sdpa-flash2"}),),
    "K5": (Scale({"implementation": "flash"}),),
    "K6": (
        Scale({"model": "mlp", "depth": 256, "metric": "peak_bytes"}),
        Scale({"model": "mlp", "metric": "stage_forwards"}),
        Mirror("depth", {"model": "mlp", "implementation": "store-all", "metric": "peak_bytes"}),
        Mirror("depth", {"model": "mlp", "implementation": "sqrt", "metric": "peak_bytes"}),
    ),
    # the published tiles decide: they stand among the rules, which are rows of predictions
    "K9": (Scale({"note": "rule: released, FlashAttention-2"}, 4, "predicted", "block_m"),),
    "K12": MEASURED,
    "K13": (Scale({"implementation": "unfused"}),),
    # from last bits to a part in a thousand is "slightly"
    "K15": (Scale({"metric": "gradient_relative_difference"}, 1e4),),
    # its margin: the backward takes 0.40 to 0.46 of the time
    "K16": (Scale({"implementation": "sdpa-flash2", "pass": "backward"}, 3),),
    "gradient accumulation": MEASURED,
    "matrix product levels": MEASURED,
    "matrix product misses": MEASURED,
    "optimiser on the host": MEASURED,
    # this package
    "HBM behind L2": MEASURED,
    "SM boundary": (*MEASURED, Mirror("seqlen_q")),
    "SM ceilings": MEASURED,
    "accuracy": (Scale({"implementation": "flash"}),),
    "checkpoint around flash": (Scale({"pass": "forward"}), Scale({"pass": "step"})),
    "checkpoint peak": (Scale({"metric": "peak_bytes"}),),
    "checkpointed attention": (Scale({"implementation": "standard-checkpointed"}),),
    "decoding": (
        Scale({"metric": "traffic_bytes", "tensor": "k", "sharing": "gqa"}),
        Scale({"metric": "traffic_bytes", "tensor": "part_out"}),
    ),
    "determinism": MEASURED,
    "sliding window": (
        Scale({"metric": "traffic_bytes", "tensor": "k", "way": "window"}),
        Scale({"metric": "traffic_bytes", "way": "stored mask"}),
    ),
    "packed sequences": (
        Scale({"metric": "traffic_bytes", "tensor": "k", "way": "packed"}),
        Scale({"metric": "traffic_bytes", "way": "longest", "source": "measured"}),
    ),
    "fusion by torch.compile": MEASURED,
    "fusion of longer chains": MEASURED,
    "granularity": MEASURED,
    "mixed precision": MEASURED,
    "offload crossover": MEASURED,
    "optimal plans": (Scale({"metric": "peak_bytes"}),),
    "optimiser on the host, time": (Scale({"metric": "step_s"}),),
    "optimistic softmax": (Scale({"implementation": "flash-sm90-optimistic"}),),
    "peak memory, lists": MEASURED,
    "standard attention, passes": MEASURED,
    "stored bias": (
        Scale({"metric": "traffic_bytes", "tensor": "bias"}),
        Scale({"metric": "traffic_bytes", "tensor": "alibi_slopes"}),
    ),
    "variants": MEASURED,
}  # fmt: skip


def setting(value: Any, column: str = "value", **where: Any) -> Change:
    """Give the matching rows a value, or what a function of the row says."""

    def change(frame: pandas.DataFrame) -> pandas.DataFrame:
        mask = chosen(frame, where)
        assert mask.any(), f"no record with {where}"
        changed = frame.copy()
        new = changed[mask].apply(value, axis=1) if callable(value) else value
        changed.loc[mask, column] = new
        return changed

    return change


def times(factor: float, **where: Any) -> Change:
    """Scale the matching rows."""
    return setting(lambda row: row["value"] * factor, **where)


def every(*changes: Change) -> Change:
    """One change after the other."""

    def change(frame: pandas.DataFrame) -> pandas.DataFrame:
        for one in changes:
            frame = one(frame)
        return frame

    return change


def like(name: str, other: str, factor: float, **where: Any) -> Change:
    """One implementation's values as a multiple of another's at the same length."""

    def change(frame: pandas.DataFrame) -> pandas.DataFrame:
        base = frame[chosen(frame, {"implementation": other, **where})]
        at = base.groupby("seqlen_q")["value"].median()
        return setting(lambda row: factor * at.get(row["seqlen_q"], np.nan), implementation=name,
                       **where)(frame)  # fmt: skip

    return change


RAN = {"source": "measured"}
PLAIN = {"source": "measured", "dropout": 0.0, "key_mask": False}
PEAK = {"source": "measured", "metric": "peak_bytes"}


def published_sizes_at(factor: float) -> Change:
    """The sublinear plan at this multiple of autograd's time in the same turns."""
    where = {"experiment": "checkpoint-time", "implementation": "chen-search", **RAN}

    def change(frame: pandas.DataFrame) -> pandas.DataFrame:
        base = frame[chosen(frame, {**where, "metric": "baseline_time_s"})]
        at = base.set_index("model")["value"]
        return setting(lambda row: factor * at[row["model"]], metric="time_s", **where)(frame)

    return change


def _deep_chains_at(share: float) -> Change:
    """All chains of K8 and K11 at this share of memory; their work stays as it was run."""
    chains: list[Change] = []
    for model, depth, plan in (("resnet", 1024, "chen-search"), ("lstm", 2048, "chen-search"),
                               ("mlp", 256, "sqrt")):  # fmt: skip
        where = {"experiment": "checkpoint-depth", "source": "measured", "model": model,
                 "depth": depth}  # fmt: skip

        def change(frame: pandas.DataFrame, where: Any = where, plan: str = plan) -> Any:
            where = {**where, "metric": "peak_bytes"}
            base = chosen(frame, {**where, "implementation": "autograd"})
            value = float(frame.loc[base, "value"].iloc[0]) * share
            return setting(value, **where, implementation=plan)(frame)

        chains.append(change)

    def pareto(frame: pandas.DataFrame) -> pandas.DataFrame:
        where = {"experiment": "checkpoint-pareto", **PEAK}
        base = frame[chosen(frame, {**where, "implementation": "store-all"})]["value"].iloc[0]
        return setting(base * share, **where, implementation="optimal")(frame)

    return every(*chains, pareto)


AS_CLAIMED: dict[str, Change] = {
    "Chen Fig. 7": published_sizes_at(1.3),
    "FA-1 Fig. 2 left, GFLOPs": every(
        times(824.6 / 66.6, source="published", metric="flops", implementation="standard"),
        times(962.1 / 75.2, source="published", metric="flops", implementation="flash1"),
    ),
    "ZeRO volume, torch P_os": times(2 / 3, metric="transport_bytes", implementation="torch-zero-1",
                                     **RAN),
    "K1": every(
        setting(
            lambda row: (3 * row["seqlen_q"] * row["head_dim"] + 2 * row["seqlen_q"] ** 2) * 4,
            metric="saved_bytes", implementation="standard", **RAN,
        ),
        setting(
            lambda row: (4 * row["seqlen_q"] * row["head_dim"] + 2 * row["seqlen_q"]) * 4,
            metric="saved_bytes", implementation="flash", **RAN,
        ),
    ),
    "K2": like("sdpa-flash2", "standard-eager", 1.4, **{"pass": "backward"}, **PLAIN),
    "K3, memory": like("sdpa-flash2", "standard-eager", 1 / 10, metric="peak_memory_bytes",
                       **PLAIN),
    "K4": times(0.6, implementation="standard-eager-checkpointed",
                seqlen_q=lambda n: n > 2048, **PLAIN),
    "K7": setting(1e6, implementation="exponential", model="mlp", **PEAK),
    "K8": every(
        like("sdpa-flash2", "standard-eager", 0.1, metric="peak_memory_bytes", **PLAIN),
        _deep_chains_at(0.05),
    ),
    "K10": setting(257 * (1 + 1 / 16), metric="stage_forwards", model="mlp", depth=256,
                   implementation="sqrt", **RAN),
    "K11": _deep_chains_at(1 / 4.5),
    "K14": every(
        times(0.1, metric="saved_bytes_per_layer", implementation="each block", mode="new", **RAN),
        times(0.2, metric="saved_bytes_per_layer", implementation="each block", mode="reentrant",
              **RAN),
    ),
    "F1": setting(1e-15, fault="F1", implementation="as noted", **RAN),
    "F2": setting(1e-15, fault="F2", implementation="as noted", **RAN),
    "F3": setting(0.0, fault="F3", implementation="as noted", **RAN),
    "F4": setting(lambda row: np.log2(row["depth"]), fault="F4", implementation="as noted", **RAN),
    "F5": setting(lambda row: 1 / row["segments"], fault="F5", implementation="correct", **RAN),
    "F6": times(2, metric="saved_bytes_per_layer", implementation="each block", mode="reentrant",
                **RAN),
    "F7": setting(96, fault="F7", implementation="as noted", **RAN),
    "Note hierarchy": setting(1.5, experiment="ceiling", implementation="copy", **RAN),
    "checkpoint each operation": times(0.5, metric="saved_bytes_per_layer",
                                       implementation="each operation", **RAN),
}  # fmt: skip

#: Claims whose quantity nobody has measured: what a record would do is tested where it says.
NO_RECORDS = {
    "decode time": "tests/experiments/test_decode_experiment.py",
    "Hopper forward": "tests/theory/test_distance_from_bound.py",
    "Hopper backward": "tests/theory/test_distance_from_bound.py",
}
