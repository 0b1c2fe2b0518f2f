"""The calculator's JavaScript, printed from the expressions of ``analysis.symbolic_costs``.

No formula is typed here: each becomes a function of one object whose properties are the symbols.
"""

from __future__ import annotations

import json
from itertools import product

import sympy as sp
from sympy.printing.jscode import JavascriptCodePrinter

from analysis import symbolic_costs as costs
from analysis.algorithms import find
from analysis.hardware import GPUS
from analysis.shapes import ITEMSIZE, AttentionShape, Tile
from analysis.time_model import datasheet_ceilings
from kernels.attention import FLASH, configure
from kernels.flash_config import HEAD_DIMS
from repro.prediction import predict

PASSES = ("forward", "backward")
GROUPED = tuple(name for name in costs.ALGORITHMS if find(name).grouped_heads)
"""Algorithms whose kernels take fewer key/value heads than query heads."""


BLOCKS = tuple(range(16, 257, 16))
"""Rows and keys that a tile of the flash kernels can have."""


def refusals() -> dict[str, dict[str, str]]:
    """GPU -> "algorithm dtype" -> why ``repro.predict`` refuses it there, whatever the shape."""
    found: dict[str, dict[str, str]] = {}
    for gpu in GPUS.values():
        for algorithm in costs.ALGORITHMS:
            for dtype in ITEMSIZE:
                shape = AttentionShape(1, 1, 64, 64, 64, dtype=dtype)
                try:
                    predict(algorithm, shape, "forward", gpu)
                except ValueError as error:
                    found.setdefault(gpu.name, {})[f"{algorithm} {dtype}"] = str(error)
    return found


def fitting_tiles() -> dict[str, str]:
    """ "pass dtype columns limit" -> a bit for each tile of BLOCKS x BLOCKS that the flash kernels
    can be compiled for within that much shared memory, in hexadecimal, block_m outside."""
    limits = {gpu.shared_bytes_per_block for gpu in GPUS.values()}
    found = {}
    for pass_, dtype, columns, limit in product(PASSES, ITEMSIZE, HEAD_DIMS, sorted(limits)):
        bits = 0
        for m, n in product(BLOCKS, BLOCKS):
            bits = bits << 1 | _fits(pass_, dtype, columns, Tile(m, n), limit)
        found[f"{pass_} {dtype} {columns} {limit}"] = f"{bits:0{len(BLOCKS) ** 2 // 4}x}"
    return found


def _fits(pass_: str, dtype: str, columns: int, tile: Tile, limit: int) -> bool:
    try:
        configure(pass_, dtype, columns, tile=tile, limit=limit)
    except ValueError:
        return False
    return True


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


def script() -> str:
    """``const MODEL``: per algorithm and pass the functions, and the GPUs' figures."""
    models = []
    for algorithm in costs.ALGORITHMS:
        for pass_ in PASSES:
            moved = costs.traffic(algorithm, pass_)
            reads, writes = costs.compulsory(algorithm, pass_)
            entries = ",\n".join(
                f'      ["{tensor}", "{direction}", {function(expression)}]'
                for (tensor, direction), expression in moved.items()
            )
            times = ",\n".join(
                f"      {json.dumps(name)}: {function(expression)}"
                for name, expression in costs.times(algorithm, pass_).items()
            )
            models.append(
                f'  "{algorithm} {pass_}": {{\n'
                f"    traffic: [\n{entries}],\n"
                f"    hbm_read: {function(reads)},\n"
                f"    hbm_write: {function(writes)},\n"
                f"    saved: {function(costs.saved_bytes(algorithm))},\n"
                f"    peak: {function(costs.peak_bytes(algorithm, pass_))},\n"
                f"    flops: {{dense: {function(costs.useful_flops(algorithm, pass_, False))},\n"
                f"            causal: {function(costs.useful_flops(algorithm, pass_, True))}}},\n"
                f"    times: {{\n{times}}}\n  }}"
            )
    totals = ",\n".join(
        f'  "{name}": {{'
        + ", ".join(f"{s}: {function(t)}" for s, t in costs.row_totals(causal).items())
        + "}"
        for name, causal in (("dense", False), ("causal", True))
    )
    gpus = {}
    for name, gpu in GPUS.items():
        rates = datasheet_ceilings(gpu)
        gpus[name] = {
            "F": rates.tensor_flops,
            "X": rates.exp_per_s,
            "S": rates.sm_boundary_bytes_per_s,
            "W": rates.hbm_bytes_per_s,
            "memory": gpu.memory_bytes,
            "shared": gpu.shared_bytes_per_block,
        }
    return (
        f"const MODEL = {{\n{','.join(chr(10) + m for m in models)}\n}};\n"
        f"const ROWS = {{\n{totals}\n}};\n"
        f"const GPUS = {json.dumps(gpus)};\n"
        f"const ITEMSIZE = {json.dumps(ITEMSIZE)};\n"
        f"const GROUPED = {json.dumps(GROUPED)};\n"
        f"const FLASH = {json.dumps([a for a in costs.ALGORITHMS if a in FLASH])};\n"
        f"const HEAD_DIMS = {json.dumps(HEAD_DIMS)};\n"
        f"const BLOCKS = {json.dumps(BLOCKS)};\n"
        f"const REFUSED = {json.dumps(refusals())};\n"
        f"const TILES = {json.dumps(fitting_tiles())};\n"
    )
