"""Error against float64: FlashAttention-3's Table 3, and ours beside eager attention."""

from __future__ import annotations

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, Part
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.values import pick
from repro.claims.works import FA3, OURS


@claim(
    "FA-3 Table 3",
    "in fp16 with outliers flash errs 1.7x less than standard attention",
    FA3,
    "Table 3",
    experiments=("accuracy", "numerical-error"),
    shown="accuracy",
    conditions="another length and head dimension; ours on the host backend",
    other="the direction alone: the table does not print its shape",
    overturn=(Scale({"implementation": "flash", "dtype": "fp16", "inputs": "outliers"}, 4, only="up"),),
    compared=False,
)
def fa_3_table_3(frame: pandas.DataFrame) -> Finding:
    rows = pick(frame, metric="rmse")

    def value(**wanted: str) -> float:
        found = pick(rows, **wanted)["value"].dropna()
        return float(found.iloc[0]) if len(found) else float("nan")

    published = value(source="published", implementation="fp16 baseline") / value(
        source="published", implementation="flash2"
    )
    here = {"source": "measured", "dtype": "fp16", "inputs": "outliers", "tensor": "out"}
    ratio = value(**here, implementation="standard") / value(**here, implementation="flash")
    return Finding(
        predicted="more than 1x: scores stay in fp32",
        measured=f"{ratio:.1f}x smaller RMSE" if ratio == ratio else NOT_MEASURED,
        published=f"{published:.1f}x",
        parts=[Part(what="standard's RMSE over flash's", value=ratio, low=1.0, evidence=Evidence.COUNTED, form=".2f")],
    )


@claim(
    "accuracy",
    "RMSE of out, dq, dk, dv is at most twice that of eager attention, in every type and kind of input tried",
    OURS,
    experiments=("accuracy", "numerical-error"),
    shown="accuracy",
    conditions="the sm_80 kernels, executed on the host",
    overturn=(Scale({"implementation": "flash"}, 1.4, only="up"),),
    compared=False,
)
def accuracy(frame: pandas.DataFrame) -> Finding:
    rows = pick(frame, metric="rmse")
    table = pick(rows, source="measured").pivot_table(
        index=["dtype", "inputs", "tensor"], columns="implementation", values="value"
    )
    most = float("nan")
    if {"flash", "standard"} <= set(table):
        most = float((table["flash"] / table["standard"]).max())
    return Finding(
        predicted="at most 2",
        measured=f"{most:.2f}" if most == most else NOT_MEASURED,
        parts=[
            Part(what="RMSE over eager attention's, worst", value=most, high=2.0, form=".2f", evidence=Evidence.COUNTED)
        ],
    )
