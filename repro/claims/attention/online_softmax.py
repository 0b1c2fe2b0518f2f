"""Milakov and Gimelshein 2018: how often softmax and top-k touch memory."""

from __future__ import annotations

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import exact
from repro.claims.register import Finding, claim
from repro.claims.values import NAN, known
from repro.claims.works import MILAKOV
from repro.experiments.chains.online_softmax import ANSWER, FORMS, ROWS

#: Accesses an element, as the paper's sections 3 and 4 count them.
TOLD = dict(zip(FORMS, (3, 4, 3, 5, 4, 1), strict=True))


@claim(
    "Milakov accesses",
    "online softmax reads and writes 3 times an element instead of 4; with top-k 1 instead of 5",
    MILAKOV,
    "sections 3 and 4",
    experiments=("online-softmax",),
    shown="online-softmax",
    conditions="our kernels of its algorithms, executed and counted on the host in fp32; "
    "the answer of top-k, a value and an index each, is taken off",
    overturn=(Scale(),),
    compared=False,
)
def accesses(frame: pandas.DataFrame) -> Finding:
    rows = known(frame, metric="global_bytes", source="measured")
    answer = rows["implementation"].str.contains("top-k") * ANSWER
    found = ((rows["value"] - answer) / (4 * ROWS * rows["columns"])).groupby(rows["implementation"])
    least, most = found.min(), found.max()
    return Finding(
        predicted="a count of loads and stores in each algorithm",
        measured=", ".join(f"{name} {most.get(name, NAN):g}" for name in FORMS),
        published=", ".join(f"{name} {told}" for name, told in TOLD.items()),
        parts=[
            exact(f"accesses an element, {name}, over {told}", end.get(name, NAN), told)
            for name, told in TOLD.items()
            for end in ([least] if least.get(name) == most.get(name) else [least, most])
        ],
    )
