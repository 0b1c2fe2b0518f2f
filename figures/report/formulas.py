"""Every closed form of ``analysis``, typeset as MathML (which browsers show without any script)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import sympy as sp
from sympy.printing.mathml import mathml

from analysis import symbolic
from analysis.checkpointing import closed_forms

FA1 = "FlashAttention (Dao et al. 2022)"
FA2 = "FlashAttention-2 (Dao 2023)"
SOURCES = {
    ("standard", "forward"): f"{FA1}, Alg. 0, in tiles of B_r × B_c",
    ("standard", "backward"): f"{FA1}, Alg. 3, in tiles of B_r × B_c",
    ("flash1-literal", "forward"): f"{FA1}, Alg. 1 and 2",
    ("flash1-literal", "backward"): f"{FA1}, Alg. 4",
    ("flash1-skip-first", "forward"): f"{FA1}, Alg. 2; the first K tile reads no O, l, m",
    ("flash1-skip-first", "backward"): f"{FA1}, Alg. 4; the first K tile reads no dQ and keeps D",
    ("flash1-released", "forward"): f"{FA1}, released code: an unfinished O in fp32",
    ("flash1-released", "backward"): f"{FA1}, released code: an unfinished dQ in fp32",
    ("flash", "forward"): f"{FA2}, Alg. 1",
    ("flash", "backward"): f"{FA2}, Alg. 2, dQ by atomic additions in fp32",
    ("flash-deterministic", "backward"): f"{FA2}, Alg. 2, dQ as one fp32 partial per key tile",
}


@dataclass(frozen=True)
class Formula:
    """``label = expression``, with where it comes from."""

    label: str
    expression: sp.Expr
    source: str

    def math(self) -> str:
        """MathML of the right-hand side."""
        return typeset(self.expression)


@dataclass(frozen=True)
class Section:
    """A heading, a sentence, and its formulas."""

    title: str
    text: str
    formulas: tuple[Formula, ...]


@cache
def typeset(expression: sp.Expr) -> str:
    """A ``<math>`` element."""
    body = mathml(sp.sympify(expression), printer="presentation", mul_symbol="&#x2062;")
    return f'<math display="inline">{body}</math>'


def sections() -> list[Section]:
    """All of them, in the order of the report."""
    return [*traffic(), *wholes(), paper_machine(), checkpointing()]


def traffic() -> Iterator[Section]:
    """The per-tensor forms."""
    for (algorithm, pass_), form in symbolic.FORMS.items():
        source = SOURCES[algorithm, pass_]
        rows = [
            Formula(f"{tensor}, {direction}", expression, source) for (tensor, direction), expression in form.items()
        ]
        yield Section(
            f"Traffic of {algorithm}, {pass_}", f"Bytes of one head at the SM boundary. {source}.", tuple(rows)
        )


def wholes() -> Iterator[Section]:
    """Their sums, for the masks that have a closed form."""
    kinds = (
        ("every pair visited", symbolic.dense, "V = T_r·T_c"),
        ("causal, N_q = N_k = N, square tiles", symbolic.causal, "V = T(T + 1)/2, T = N/B_r"),
        ("block-sparse, density s", symbolic.block_sparse, f"{FA1}, Prop. 4: V = s·T_r·T_c"),
    )
    for title, specialise, source in kinds:
        rows = []
        for algorithm, pass_ in symbolic.FORMS:
            if algorithm == "standard" and "sparse" in title:
                continue
            total = specialise(symbolic.total_form(algorithm, pass_))
            rows.append(Formula(f"{algorithm}, {pass_}", tidy(total), source))
        yield Section(f"Total traffic, {title}", "All tensors of one head, row statistics included.", tuple(rows))


def tidy(expression: sp.Expr) -> sp.Expr:
    """Common factors in front."""
    return sp.factor_terms(sp.expand(expression))


def paper_machine() -> Section:
    """Elements, the paper's tile, growth, best tiles."""
    rows = []
    for algorithm, pass_ in symbolic.FORMS:
        name, source = f"{algorithm}, {pass_}", SOURCES[algorithm, pass_]
        elements = symbolic.accesses(algorithm, pass_)
        rows.append(Formula(f"elements, {name}", tidy(elements), source))
    with_tile = symbolic.with_paper_tile(symbolic.accesses("flash1-literal", "forward"))
    rule = f"{FA1}, Alg. 1, line 1, and Theorem 2"
    rows.append(Formula("elements, flash1-literal, forward, paper's tile", with_tile, rule))
    rows.append(Formula("growth in N", symbolic.growth(with_tile, symbolic.N), rule))
    tile, reads = symbolic.square_product_tile()
    saha = "Saha & Ye 2024; Hong & Kung 1981"
    rows.append(Formula("best square tile of QKᵀ: B_r", tile, saha))
    rows.append(Formula("its reads", reads, saha))
    tallest, accesses = symbolic.tallest_query_tile()
    ours = "derivative of the query-outer form"
    rows.append(Formula("tallest query tile: B_r", tallest, ours))
    rows.append(Formula("its accesses", accesses, ours))
    return Section("The papers' machine", "One fast memory of M elements, N_q = N_k = N, matrices only.", tuple(rows))


def checkpointing() -> Section:
    """Peak and forward runs of the textbook strategies."""
    rows = []
    for form in closed_forms.ALL:
        source = f"Chen et al. 2016; exact for {form.exact_for}"
        rows.append(Formula(f"{form.name}: peak", form.peak, source))
        rows.append(Formula(f"{form.name}: forward runs", form.forwards, source))
    rows += [
        Formula("best number of segments", closed_forms.best_segments(), "Chen et al. 2016, Eq. 1"),
        Formula("its peak", closed_forms.best_uniform_peak(), "Chen et al. 2016, §4"),
        Formula(
            "extra forward work of k segments", closed_forms.uniform_overhead(), "counted; the study notes have 1/k"
        ),
    ]
    return Section(
        "Checkpointing a chain of L equal stages",
        "In units of one output; s is what a stage saves beyond it, k the number of segments.",
        tuple(rows),
    )
