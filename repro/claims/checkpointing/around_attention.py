"""A checkpoint around attention, in bytes of a step."""

from __future__ import annotations

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import exact
from repro.claims.register import Finding, claim
from repro.claims.values import NAN, by
from repro.claims.works import OURS


def attention_step_bytes(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Bytes of a step per head: forward + backward, and the step executed under a checkpoint."""
    rows = frame[(frame["metric"] == "traffic_bytes") & frame["value"].notna()]
    keys = ["implementation", "seqlen_q", "source"]
    total = rows.pivot_table(index=keys, columns="pass", values="value", aggfunc="sum")
    total = total.reindex(columns=["forward", "backward", "step"]).dropna()
    parts = []
    for checkpointed, value in ((False, total["forward"] + total["backward"]), (True, total["step"])):
        parts.append(value.rename("value").reset_index().assign(checkpointed=checkpointed))
    return pandas.concat(parts, ignore_index=True).assign(metric="traffic_bytes")


@claim(
    "checkpoint around flash",
    "a checkpoint around flash attention adds the bytes of one more forward",
    OURS,
    experiments=("checkpoint-attention",),
    shown="checkpoint_attention",
    conditions="passes and the step under torch's checkpoint executed and counted on the host, at the SM boundary",
    overturn=(Scale({"pass": "forward"}), Scale({"pass": "step"}), Scale({"pass": "step"}, source="predicted")),
)
def checkpoint_around_flash(frame: pandas.DataFrame) -> Finding:
    """The checkpoint that flash attention makes redundant (checkpoint-attention)."""
    steps = attention_step_bytes(frame)

    def added(name: str, source: str, seqlen: int) -> float:
        some = by(steps, "checkpointed", implementation=name, source=source, seqlen_q=seqlen)
        return float(some.get(True, NAN) / some.get(False, NAN) - 1)

    names = ("standard", "flash")
    measured = {name: added(name, "measured", 512) for name in names}
    return Finding(
        predicted="N = 4096: " + ", ".join(f"{name} {added(name, 'predicted', 4096):+.0%}" for name in names),
        measured="N = 512: " + ", ".join(f"{name} {value:+.1%}" for name, value in measured.items()),
        parts=[
            exact(f"bytes added around {name}, counted over the sums", measured[name], added(name, "predicted", 512))
            for name in names
        ],
    )
