"""Options are said once: ``analysis.features`` has a row for each, everything else reads it.

A signature, a class, a call or a mapping that names six options or more is a list of them again.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Names that options go by, by the one that counts.
OPTIONS = {
    "causal": "causal",
    "window": "window",
    "sinks": "sinks",
    "key_mask": "key_mask",
    "dropout": "dropout",
    "dropout_p": "dropout",
    "block_mask": "block_mask",
    "softcap": "softcap",
    "alibi": "alibi",
    "alibi_slopes": "alibi",
    "bias": "bias",
    "fp8": "fp8",
    "k_scale": "fp8",
    "scale_block": "scale_block",
    "packed": "packed",
    "lengths": "packed",
    "cu_seqlens_q": "packed",
    "order": "order",
    "tile": "tile",
    "deterministic": "deterministic",
}
#: What is left: what users write, how the operator hands it on, the problem, and the drivers' options.
KNOWN = [
    "analysis/problem.py ClassDef Problem",
    "kernels/options.py ClassDef Options",
    "repro/attention/operator.py Call",
    "repro/attention/operator.py FunctionDef flash_attention",
    "repro/attention/options.py ClassDef Options",
]


def names_in(node: ast.AST) -> set[str]:
    """Parameters, fields, keywords or keys of a node that may list options."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        return {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    if isinstance(node, ast.ClassDef):
        fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
        return {each.id for each in fields if isinstance(each, ast.Name)}
    if isinstance(node, ast.Call):
        return {each.arg for each in node.keywords if each.arg is not None}
    if isinstance(node, ast.Dict):
        return {str(each.value) for each in node.keys if isinstance(each, ast.Constant)}
    return set()


def places() -> list[str]:
    """ "file kind name" of every list of options in the package."""
    found = []
    for folder in ("analysis", "kernels", "repro", "figures"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if len({counts for name, counts in OPTIONS.items() if name in text}) < 6:
                continue
            for node in ast.walk(ast.parse(text)):
                named = {OPTIONS[name] for name in names_in(node) if name in OPTIONS}
                if len(named) >= 6:
                    name = getattr(node, "name", "")
                    place = path.relative_to(ROOT)
                    found.append(f"{place} {type(node).__name__} {name}".rstrip())
    return found


def test_no_place_lists_the_options_again() -> None:
    assert sorted(places()) == sorted(KNOWN)
