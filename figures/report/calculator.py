"""The calculator's JavaScript, printed from the expressions of ``analysis.symbolic_kernels``.

No formula of work is typed here: each becomes a function of one object whose properties are the
symbols. What the drivers launch comes as tables (``figures.report.launch_tables``).
"""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from typing import Any

import sympy as sp
from sympy.printing.jscode import JavascriptCodePrinter

from analysis import symbolic_costs as costs
from analysis import symbolic_kernels, symbolic_loop
from analysis.algorithms import find
from analysis.flops import TANH_SPECIALS
from analysis.l2.attention import L2_BYTES_FOR_HEADS
from analysis.loop_model import card
from analysis.shapes import ITEMSIZE
from analysis.symbolic_kernels import BIASES, PLAIN, Options
from analysis.symbolic_loop import PAIRS
from figures.report import launch_tables
from figures.report.launch_tables import PASSES
from kernels.attention import FLASH
from kernels.flash_config import HEAD_DIMS
from kernels.launches import AUTO

GROUPED = (
    AUTO,
    *(name for name in (*costs.ALGORITHMS, symbolic_kernels.HOPPER) if find(name).grouped_heads),
)
"""Algorithms whose kernels take fewer key/value heads than query heads."""
NAMES = (AUTO, symbolic_kernels.HOPPER, *costs.ALGORITHMS)
"""What the calculator offers."""


class _Printer(JavascriptCodePrinter):
    """SymPy's printer, with sums as loops."""

    def _print_Sum(self, expr: sp.Sum) -> str:
        (index, first, last), *more = expr.limits
        if more:
            raise NotImplementedError(f"a sum over {len(more) + 1} indices")
        i, term = self._print(index), self._print(expr.function)
        head = f"let t = 0; for (let {i} = {self._print(first)}; {i} <= {self._print(last)}; {i}++)"
        return f"(() => {{ {head} t += {term}; return t; }})()"

    def _print_choose(self, expr: sp.Expr) -> str:
        x, then, otherwise = (self._print(each) for each in expr.args)
        return f"(({x}) > 0 ? {then} : {otherwise})"


def function(expression: sp.Expr) -> str:
    """``({B_r, N_q}) => ...``: one expression as a JavaScript function of its symbols."""
    expression = sp.sympify(expression)
    names = sorted(str(symbol) for symbol in expression.free_symbols)
    body = _Printer({"contract": False}).doprint(_unroll(expression))
    if isinstance(expression, sp.Piecewise):
        body = f"({' '.join(body.split())})"
    return f"({{{', '.join(names)}}}) => {body}"


def _unroll(expression: sp.Expr) -> sp.Expr:
    """x**2 and x**3 as products, which keeps whole numbers whole."""
    powers = [x for x in expression.atoms(sp.Pow) if x.exp.is_Integer and 1 < x.exp <= 3]
    return expression.xreplace({x: sp.Mul(*[x.base] * int(x.exp), evaluate=False) for x in powers})


class Pool:
    """Functions by their text, each printed once: most kernels share theirs with others."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def use(self, expression: sp.Expr) -> str:
        """What stands for the function of an expression."""
        place = self._places.setdefault(function(expression), len(self._places))
        return f"F[{place}]"

    def script(self) -> str:
        return "const F = [\n" + "".join(f"{text},\n" for text in self._places) + "];\n"


@cache
def script() -> str:
    """``const MODEL``: per algorithm, pass and options the functions; what the drivers launch; the
    GPUs."""
    pool = Pool()
    models = ",\n".join(
        f'  "{" ".join(filter(None, (algorithm, pass_, name)))}": '
        + _model(algorithm, pass_, options, pool)
        for algorithm in symbolic_kernels.ALGORITHMS
        for pass_ in PASSES
        for name, options in variants(algorithm, pass_).items()
    )
    around = ",\n".join(
        f'  "{pass_}": [{_entries(symbolic_kernels.copies(pass_), pool)}]' for pass_ in PASSES
    )
    counts = ",\n".join(
        f'  "{name}": {{'
        + ", ".join(f"{s}: {pool.use(t)}" for s, t in symbolic_loop.totals(causal).items())
        + "}"
        for name, causal in (("dense", False), ("causal", True))
    )
    tables = {
        "GPUS": launch_tables.gpu_rows(),
        "CEILINGS": launch_tables.ceilings(),
        "ITEMSIZE": ITEMSIZE,
        "TANH_SPECIALS": TANH_SPECIALS,
        "GROUPED": GROUPED,
        "FLASH": [name for name in costs.ALGORITHMS if name in FLASH],
        "HEAD_DIMS": HEAD_DIMS,
        "BLOCKS": launch_tables.BLOCKS,
        "REFUSED": launch_tables.refusals(),
        "REFUSED_OPTIONS": launch_tables.refused_options(),
        "REFUSED_ON_HOPPER": launch_tables.refused_on_hopper(),
        "AGAINST_HOPPER": launch_tables.reasons_against_hopper(),
        "PICKS": launch_tables.picks(),
        "THEORY": launch_tables.theories(),
        "DEFAULT_TILES": launch_tables.default_tiles(),
        "LADDER_TILES": launch_tables.ladder_tiles(),
        "BLOCKS_PER_SM": launch_tables.blocks_per_sm(),
        "SHARED_CLOCKS": launch_tables.shared_clocks(),
        "HOPPER": launch_tables.hopper_tables(),
        "AMPERE": launch_tables.ampere_tables(),
        "LAUNCH_S": card.LAUNCH_S,
        "HBM_SUSTAINED": card.HBM_SUSTAINED,
        "L2_BYTES_FOR_HEADS": L2_BYTES_FOR_HEADS,
    }
    return (
        "const shared = (values, places) => Object.fromEntries(\n"
        "  Object.entries(places).map(([key, place]) => [key, values[place]]));\n"
        + pool.script()
        + f"const MODEL = {{\n{models}\n}};\n"
        + f"const COPIES = {{\n{around}\n}};\n"
        + f"const COUNTS = {{\n{counts}\n}};\n"
        + "".join(f"const {name} = {written(table)};\n" for name, table in tables.items())
    )


def written(table: Any) -> str:
    """JSON; where a table says the same of many keys, each value once."""
    plain = json.dumps(table)
    if not isinstance(table, dict):
        return plain
    texts = [json.dumps(value) for value in table.values()]
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    of_key = json.dumps({key: places[t] for key, t in zip(table, texts, strict=True)})
    pooled = f"shared([{', '.join(places)}], {of_key})"
    return min(plain, pooled, key=len)


def variants(algorithm: str, pass_: str) -> dict[str, Options]:
    """What can be done to the scores of an algorithm, by the words that the script asks with."""
    if algorithm == symbolic_kernels.HOPPER:
        return {"": PLAIN, "alibi": Options(alibi=True)}
    if algorithm not in FLASH:
        return {"": PLAIN}
    found = {}
    for alibi, bias in product((False, True), ("", *BIASES)):
        for partial in (False, True) if bias and pass_ == "backward" else (False,):
            words = ("alibi" if alibi else "", bias, "partial" if partial else "")
            found[" ".join(filter(None, words))] = Options(alibi, bias, partial)
    return found


def _model(algorithm: str, pass_: str, options: Options, pool: Pool) -> str:
    """The kernels of a pass, and its memory and useful work."""
    name = algorithm if algorithm in costs.ALGORITHMS else "flash"  # the same useful work
    kernels = ",\n".join(
        f"      {{main: {json.dumps(each.main)}, moved: [{_entries(each.moved, pool)}],\n"
        f"       hbm_read: {pool.use(each.hbm_read)}, hbm_write: {pool.use(each.hbm_write)},\n"
        f"       flops: {pool.use(each.flops)}, exponentials: {pool.use(each.exponentials)},\n"
        f"       alike: {json.dumps(each.alike)},"
        f" blocks: {'null' if each.blocks is None else pool.use(each.blocks)}}}"
        for each in symbolic_kernels.kernels(algorithm, pass_, options)
    )
    return (
        f"{{\n    kernels: [\n{kernels}],\n"
        f"    saved: {pool.use(symbolic_kernels.saved_bytes(algorithm, options.bias))},\n"
        f"    peak: {pool.use(symbolic_kernels.peak_bytes(algorithm, pass_, options.bias))},\n"
        f"    given: {pool.use(symbolic_kernels.given_bytes(algorithm, pass_))},\n"
        f"    flops: {pool.use(costs.useful_flops(name, pass_, PAIRS))}\n  }}"
    )


def _entries(moved: costs.Entries, pool: Pool) -> str:
    return ", ".join(
        f'["{tensor}", "{direction}", {pool.use(expression)}]'
        for (tensor, direction), expression in moved.items()
    )
