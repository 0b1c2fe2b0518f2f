"""Drawn attention problems: results to float64, bytes to their prediction, packed to separate."""

from __future__ import annotations

from typing import Any

import pytest
from attention_case import BIAS_LAYOUTS, LAYOUTS, VALUES, Case, failure
from fuzzing import SECONDS, fuzzed
from hypothesis import find, settings
from hypothesis import strategies as st

from analysis.shapes import Tile
from kernels import dispatch
from kernels.attention import configure
from repro.attention import engine

TILES = ((64, 64), (64, 32), (32, 64), (16, 16), (128, 64), (64, 128))
#: What is compiled into the kernels: a few forms, so that compiling does not take the whole time.
FORMS: list[dict[str, Any]] = [
    {"dtype": "fp32", "head_dim": 32, "deterministic": True},
    {"dtype": "fp32", "head_dim": 32, "causal": True, "key_keep": 0.6},
    {"dtype": "fp16", "head_dim": 64, "causal": True},
    {"dtype": "bf16", "head_dim": 128},
    {"dtype": "fp16", "head_dim": 64, "softcap": 20.0, "alibi": "heads", "key_keep": 0.6},
    {"dtype": "fp16", "head_dim": 64, "causal": True, "windowed": True, "sink_logits": True},
    {"dtype": "fp16", "head_dim": 64, "fp8": True},
    {"dtype": "fp32", "head_dim": 32, "packed": True, "causal": True},
    {"dtype": "bf16", "head_dim": 64, "packed": True, "deterministic": True},
    {"dtype": "bf16", "head_dim": 64, "card": dispatch.HOPPER, "windowed": True},
    {"dtype": "fp16", "head_dim": 64, "card": dispatch.HOPPER, "packed": True},
]
EDGES = st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200])
LENGTH = st.integers(1, 199) | EDGES
SIDE = st.none() | st.sampled_from([0, 1, 15, 16, 64]) | st.integers(0, 199)
NEEDED = [(True, True, True), (True, False, False), (False, True, True)][: None if SECONDS else 2]
MOST_PAIRS = 40_000
"""Scores in all heads of a case together."""


@st.composite
def any_form(draw: st.DrawFn) -> dict[str, Any]:
    """Whatever a kernel can be compiled with; where options exclude each other, some go."""
    maybe = st.booleans()
    form: dict[str, Any] = {
        "dtype": draw(st.sampled_from(["fp16", "bf16", "fp32"])),
        "head_dim": draw(st.sampled_from([32, 64, 128, 256])),
        "causal": draw(maybe),
        "deterministic": draw(maybe),
        "packed": draw(maybe),
        "order": draw(st.sampled_from(["rows", "rows", "sawtooth"])),
        "tile": draw(st.none() | st.sampled_from(TILES)),
        "windowed": draw(maybe),
        "softcap": draw(st.none() | st.sampled_from([0.5, 5.0, 50.0])),
        "alibi": draw(st.sampled_from(["", "heads", "items"])),
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0])),
        "scale": draw(st.sampled_from([None, None, 0.3, 1.0, 0.0, -0.2])),
    }
    if form["tile"] and not _fits(form):
        form["tile"] = None
    if not form["packed"]:
        form["key_keep"] = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9]))
        if form["tile"]:
            form["block_keep"] = draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))
        form["fp8"] = form["dtype"] != "fp32" and draw(maybe)
        form["bias"] = draw(st.none() | st.tuples(st.integers(0, 1), st.integers(0, 1)))
        form["sink_logits"] = draw(maybe)
        form["bias_gradient"] = form["bias"] is not None and not form["fp8"] and draw(maybe)
    elif form["order"] == "sawtooth":
        form["order"] = "rows"
    narrow = form["head_dim"] == 32 or form["dtype"] == "fp32" or form.get("fp8")
    if not narrow and (form["scale"] is None or form["scale"] > 0) and draw(maybe):
        form["card"] = dispatch.HOPPER
        if form["packed"]:  # with anything else its kernels would never run
            form |= {"windowed": False, "softcap": None, "alibi": "", "dropout_p": 0.0, "tile": None}
    return form


def _fits(form: dict[str, Any]) -> bool:
    """Whether both passes have shared memory and threads for the tile."""
    try:
        for pass_ in ("forward", "backward"):
            configure(pass_, form["dtype"], form["head_dim"], tile=Tile(*form["tile"]), key_mask=True)
    except ValueError:
        return False
    return True


@st.composite
def problems(draw: st.DrawFn, form: dict[str, Any]) -> Case:
    """A problem that the kernels of a form run."""
    form = dict(form)
    packed, windowed = form.pop("packed", False), form.pop("windowed", False)
    kv_heads = draw(st.integers(1, 3))
    heads, batch = kv_heads * draw(st.integers(1, 3)), draw(st.integers(1, 3))
    most = MOST_PAIRS // (batch * heads)
    layouts = st.sampled_from(LAYOUTS)
    if windowed:
        form |= {"window": draw(st.tuples(SIDE, SIDE)), "sinks": draw(st.sampled_from([0, 1, 70]))}
    if packed:
        pairs = draw(st.lists(st.tuples(st.just(0) | LENGTH, st.just(0) | LENGTH), max_size=6))
        edge = max(1, int((most // max(1, len(pairs))) ** 0.5))
        pairs = [(min(q, edge), min(k, edge)) for q, k in pairs]
        if not sum(q for q, _ in pairs) * sum(k for _, k in pairs):
            pairs.append((1, 1))  # predictions are of kernels that run
        form |= {"queries": tuple(q for q, _ in pairs), "keys": tuple(k for _, k in pairs)}
        batch = 1
    seqlen_q = min(draw(LENGTH), most)
    unit, width = (16 if form.get("fp8") else 1), form["head_dim"]
    if form.get("card"):  # in memory that TMA reaches
        layouts = layouts.filter(lambda layout: layout != "expanded")
    elif width > 32 or unit > 1:
        form["head_dim"] = unit * draw(st.integers(width // 2 // unit + 1, width // unit))
    if form.get("fp8"):
        form["scale_block"] = draw(st.sampled_from([None, 16, 48, 64, 128]))
    return Case(
        **form,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        seqlen_k=min(draw(LENGTH), max(1, most // seqlen_q)),
        bias_layout=draw(st.sampled_from(BIAS_LAYOUTS)) if form.get("bias") else "plain",
        layout=draw(layouts),
        dout_layout=draw(layouts),
        values=draw(st.sampled_from(VALUES)),
        needed=(False,) * 3 if form.get("fp8") else draw(st.sampled_from(NEEDED)),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


FORM = any_form() if SECONDS else st.sampled_from(FORMS)
#: Cases that share a compiled form: compiling takes a second, a case less.
CASES = FORM.flatmap(lambda form: st.lists(problems(form), min_size=1, max_size=4))


@fuzzed(CASES, examples=14)
def test_any_problem_is_as_exact_as_the_framework(cases: list[Case]) -> None:
    for case in cases:
        wrong = failure(case)
        assert wrong is None, f"{wrong}\n  {case}"


def test_a_fault_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fault planted (the last key is forgotten beyond 20 keys) a small case remains."""
    real = engine.forward

    def forgetful(q: Any, k: Any, v: Any, out: Any, lse: Any, options: Any) -> None:
        if k.shape[2] > 20:
            k, v = k[:, :, :-1], v[:, :, :-1]
        real(q, k, v, out, lse, options)

    engine.forget()
    monkeypatch.setattr(engine, "forward", forgetful)
    small = find(
        problems(FORMS[0]),
        lambda case: failure(case) is not None,
        settings=settings(max_examples=200, deadline=None, derandomize=True, database=None),
    )
    engine.forget()
    assert small.seqlen_k == 21
    assert (small.batch, small.seqlen_q, small.layout) == (1, 1, "bhnd")
