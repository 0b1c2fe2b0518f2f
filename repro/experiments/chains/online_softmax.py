"""Softmax of rows, alone and with top-k: how often each form touches memory, counted.

Milakov & Gimelshein 2018, Algorithms 1 to 4, on rows of two lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

from repro.experiments import Cell, Context, Experiment, Row, row

ROWS, COLUMNS, K = 4, (1000, 4000), 5
#: Form -> its kernels, by their names in kernels/beside/online_softmax.py.
FORMS: dict[str, tuple[str, ...]] = {
    "naive": ("naive",),
    "safe": ("safe",),
    "online": ("online",),
    "safe, top-k": ("safe", "topk"),
    "online, top-k": ("online", "topk"),
    "online with top-k": ("online-topk",),
}
#: Bytes of an answer of top-k: a value and an index each.
ANSWER = 8 * K * ROWS


def cells() -> list[Cell]:
    """Every form at both lengths."""
    return [Cell(implementation=form, rows=ROWS, columns=n, dtype="fp32") for n in COLUMNS for form in FORMS]


def predict(cell: Cell) -> Iterator[Row]:
    """Accesses an element times the elements, and the answer of top-k."""
    from kernels.beside.online_softmax import predict_bytes

    parts = FORMS[str(cell["implementation"])]
    value = sum(predict_bytes(part, ROWS, int(cell["columns"]), "fp32", K) for part in parts)
    yield row("global_bytes", value, level="sm")


def measure(cell: Cell, context: Context) -> Iterator[Row]:
    """The kernels, executed and counted on the host backend; probabilities and indices are checked."""
    import numpy as np

    from kernels.beside import online_softmax
    from kernels.launch import from_numpy

    x = np.random.default_rng(0).standard_normal((ROWS, int(cell["columns"]))).astype(np.float32)
    wide = np.exp(x.astype(np.float64))
    exact = wide / wide.sum(axis=1, keepdims=True)
    backend, found = context.host(), np.full_like(x, np.nan)
    values, places = np.zeros((ROWS, K), np.float32), np.zeros((ROWS, K), np.int32)
    answers = from_numpy("values", values, "w"), from_numpy("indices", places, "w")
    first, *rest = FORMS[str(cell["implementation"])]
    if first == "online-topk":
        online_softmax.softmax_topk(backend, from_numpy("x", x, "r"), *answers)
    else:
        online_softmax.softmax(backend, first, from_numpy("x", x, "r"), from_numpy("y", found, "w"))
        if not np.allclose(found, exact, rtol=1e-5):
            raise RuntimeError(f"{first}: the probabilities are wrong")
    if rest:
        online_softmax.topk(backend, from_numpy("y", found, "r"), *answers)
    if "top-k" in str(cell["implementation"]) and not np.array_equal(places, np.argsort(-exact)[:, :K]):
        raise RuntimeError(f"{cell['implementation']}: the largest are others")
    value = sum(count for entries in backend.traffic.values() for count in entries.values())
    yield row("global_bytes", value, level="sm", tool="host backend, counted")


EXPERIMENT = Experiment(
    "online-softmax",
    cells,
    predict,
    measure,
    device="host",
    sources=("kernels/beside/online_softmax.py", "kernels/beside/online_softmax.cu", "kernels/include", "kernels/host"),
    seconds=5,
)
