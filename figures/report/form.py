"""The calculator's form, and which options of ``python -m repro predict`` it has."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping

from analysis.algorithms import ALGORITHMS, ORDERS
from analysis.hardware import GPUS
from analysis.shapes import ITEMSIZE
from figures.report import calculator
from figures.report.launch_tables import CEILINGS, PASSES
from repro.commands.predict import BIASES

COVERED: Mapping[str, tuple[str, ...]] = {
    "algorithm": ("algorithm",),
    "pass_": ("pass",),
    "batch": ("batch",),
    "heads": ("heads",),
    "kv_heads": ("kv_heads",),
    "seqlen": ("seqlen_q",),
    "seqlen_k": ("seqlen_k",),
    "head_dim": ("head_dim",),
    "dtype": ("dtype",),
    "mask": ("causal",),
    "causal": ("causal",),
    "softcap": ("softcap",),
    "alibi": ("alibi",),
    "bias": ("bias",),
    "window": ("window_left", "window_right"),
    "sinks": ("sinks",),
    "tile": ("block_m", "block_n"),
    "order": ("order",),
    "gpu": ("gpu",),
    "ceilings": ("ceilings",),
}
"""Parameter of the command -> the fields of the form that stand for it."""
NOT_COVERED: Mapping[str, str] = {
    "kv_dtype": "keys and values in fp8 (--kv-dtype e4m3)",
    "scale_block": "their scales (--scale-block)",
    "deterministic": "a gradient of Q in a fixed order (--deterministic)",
    "seqlens": "packed sequences of different lengths (--seqlens)",
    "l2": "what L2 has to fetch again (--l2 simulated, --l2 waves)",
    "as_json": "--json",
    "as_csv": "--csv",
    "markdown": "--markdown",
    "latex": "--latex",
}
"""Parameter of the command -> what the form lacks, in the page's words."""
ALGORITHMS_NOT_COVERED = tuple(name for name in ALGORITHMS if name not in calculator.NAMES)
VALUES_NOT_COVERED = (
    *(f"-a {name}" for name in ALGORITHMS_NOT_COVERED),
    "several values in a field",
    "GPUs of one's own (--gpu file.toml)",
)
"""Values that the command takes in fields that the form has, in the page's words."""


def section() -> str:
    """The form; its numbers come from functions printed from SymPy."""
    lacks = ", ".join([*NOT_COVERED.values(), *VALUES_NOT_COVERED])
    return (
        "<p>One pass of attention: the kernel that runs, traffic, memory, a lower bound of its "
        "time and, where the kernel's machine code has been followed, the predicted time. "
        "Exact for ragged tiles; <code>auto</code> is the kernel that dispatch picks. The same as "
        "<code>python -m repro predict --l2 once</code>, refusals included: each tensor crosses to "
        f"HBM once. Only the command has: {html.escape(lacks)}.</p>"
        f'<form id="calculator-form">{"".join(_fields())}</form>'
        '<p id="calculator-message" role="alert"></p>'
        '<div class="scroll" role="region" tabindex="0" aria-label="Result">'
        '<table id="calculator-output"><tbody aria-live="polite"></tbody></table></div>'
        "<noscript><p>The calculator needs JavaScript; the formulas below do not.</p></noscript>"
    )


def _fields() -> list[str]:
    return [
        _select("algorithm", "algorithm", calculator.NAMES, "auto"),
        _select("pass", "pass", PASSES, "forward"),
        _select("gpu", "GPU", GPUS, "H200"),
        _select("dtype", "dtype", ITEMSIZE, "bf16"),
        _number("batch", "batch", 1),
        _number("heads", "heads", 16),
        _number("kv_heads", "key/value heads", 16),
        _number("seqlen_q", "seqlen_q", 4096),
        _number("seqlen_k", "seqlen_k", 4096),
        _number("head_dim", "head_dim", 128),
        _optional("block_m", "auto", least=1),
        _optional("block_n", "auto", least=1),
        _optional("window_left", "all", least=0),
        _optional("window_right", "all", least=0),
        _number("sinks", "sinks", 0, least=0),
        _select("bias", "bias", BIASES, "none"),
        _select("order", "order", ORDERS, "rows"),
        _select("ceilings", "ceilings", CEILINGS, "datasheet"),
        _check("causal"),
        _check("softcap"),
        _check("alibi"),
    ]


def _select(name: str, label: str, values: Iterable[str], chosen: str) -> str:
    options = "".join(
        f"<option{' selected' if v == chosen else ''}>{html.escape(v)}</option>" for v in values
    )
    return f'<label>{label}<select name="{name}">{options}</select></label>'


def _number(name: str, label: str, value: int, *, least: int = 1) -> str:
    return (
        f'<label>{label}<input name="{name}" type="number" min="{least}" step="1" '
        f'value="{value}" inputmode="numeric" required></label>'
    )


def _optional(name: str, unset: str, *, least: int) -> str:
    return (
        f'<label>{name}<input name="{name}" type="number" min="{least}" step="1" '
        f'inputmode="numeric" placeholder="{unset}"></label>'
    )


def _check(name: str) -> str:
    return f'<label class="check"><input name="{name}" type="checkbox" value="1"> {name}</label>'
