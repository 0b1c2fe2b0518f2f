"""The calculator's JavaScript, printed from the expressions of ``analysis.symbolic_kernels``.

No formula of work is typed here: each becomes a function of one object whose properties are the
symbols. What the drivers launch comes as tables (``figures.report.launch_tables``).
"""

from __future__ import annotations

import json
from functools import cache

import sympy as sp
from sympy.printing.jscode import JavascriptCodePrinter

from analysis import symbolic_costs as costs
from analysis import symbolic_kernels
from analysis.algorithms import find
from analysis.hardware import GPUS
from analysis.l2.attention import L2_BYTES_FOR_HEADS
from analysis.loop_model import card
from analysis.shapes import ITEMSIZE
from analysis.time_model import datasheet_ceilings
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
    return expression.replace(
        lambda x: x.is_Pow and x.exp.is_Integer and 1 < x.exp <= 3,
        lambda x: sp.Mul(*[x.base] * int(x.exp), evaluate=False),
    )


@cache
def script() -> str:
    """``const MODEL``: per algorithm and pass the functions; what the drivers launch; the GPUs."""
    models = ",\n".join(
        f'  "{algorithm} {pass_}": {_model(algorithm, pass_)}'
        for algorithm in symbolic_kernels.ALGORITHMS
        for pass_ in PASSES
    )
    around = ",\n".join(
        f'  "{pass_}": [{_entries(symbolic_kernels.copies(pass_))}]' for pass_ in PASSES
    )
    totals = ",\n".join(
        f'  "{name}": {{'
        + ", ".join(f"{s}: {function(t)}" for s, t in costs.row_totals(causal).items())
        + "}"
        for name, causal in (("dense", False), ("causal", True))
    )
    gpus = launch_tables.gpu_rows()
    for gpu in GPUS.values():
        rates = datasheet_ceilings(gpu)
        gpus[gpu.name] |= {
            "F": rates.tensor_flops, "X": rates.exp_per_s, "S": rates.sm_boundary_bytes_per_s,
            "W": rates.hbm_bytes_per_s,
        }  # fmt: skip
    tables = {
        "GPUS": gpus,
        "ITEMSIZE": ITEMSIZE,
        "GROUPED": GROUPED,
        "FLASH": [name for name in costs.ALGORITHMS if name in FLASH],
        "HEAD_DIMS": HEAD_DIMS,
        "BLOCKS": launch_tables.BLOCKS,
        "REFUSED": launch_tables.refusals(),
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
        f"const MODEL = {{\n{models}\n}};\n"
        f"const COPIES = {{\n{around}\n}};\n"
        f"const ROWS = {{\n{totals}\n}};\n"
        + "".join(f"const {name} = {json.dumps(table)};\n" for name, table in tables.items())
    )


def _model(algorithm: str, pass_: str) -> str:
    """The kernels of a pass, and its memory and useful work."""
    name = algorithm if algorithm in costs.ALGORITHMS else "flash"  # the same saved and useful
    kernels = ",\n".join(
        f"      {{main: {json.dumps(each.main)}, moved: [{_entries(each.moved)}],\n"
        f"       hbm_read: {function(each.hbm_read)}, hbm_write: {function(each.hbm_write)},\n"
        f"       flops: {function(each.flops)}, exponentials: {function(each.exponentials)},\n"
        f"       blocks: {'null' if each.blocks is None else function(each.blocks)}}}"
        for each in symbolic_kernels.kernels(algorithm, pass_)
    )
    return (
        f"{{\n    kernels: [\n{kernels}],\n"
        f"    saved: {function(costs.saved_bytes(name))},\n"
        f"    peak: {function(symbolic_kernels.peak_bytes(algorithm, pass_))},\n"
        f"    given: {function(symbolic_kernels.given_bytes(algorithm, pass_))},\n"
        f"    flops: {{dense: {function(costs.useful_flops(name, pass_, False))},\n"
        f"            causal: {function(costs.useful_flops(name, pass_, True))}}}\n  }}"
    )


def _entries(moved: costs.Entries) -> str:
    return ", ".join(
        f'["{tensor}", "{direction}", {function(expression)}]'
        for (tensor, direction), expression in moved.items()
    )
