"""GPUs by name, by a file that describes one, or from a module of the user's."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from analysis.gpu_file import user_card
from analysis.hardware import GPUS, SHORT_NAMES, Gpu, gpu_named


def find(text: str) -> Gpu:
    """A GPU by its name ("H100", "NVIDIA L40S", "4090"), a file.toml, or module:NAME.

    A file describes a card as ``analysis/gpus.toml`` does (``analysis.gpu_file``). ValueError says
    what is wrong and what there is.
    """
    if text.endswith(".toml"):
        return user_card(Path(text), gpu_named)
    if ":" in text:
        return from_module(text)
    try:
        return gpu_named(text)
    except ValueError as error:
        raise ValueError(
            f'--gpu {text!r}: {error}; another one: --gpu file.toml (base = "H100" and what '
            "differs) or --gpu module:NAME"
        ) from None


def from_module(text: str) -> Gpu:
    """``module:NAME``, looked up in the current folder too."""
    module, _, name = text.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--gpu {text!r}: {error}") from None
    if not isinstance(found, Gpu):
        raise ValueError(f"--gpu {text!r} is a {type(found).__name__}, not an analysis Gpu")
    return found


def names() -> list[str]:
    """Names for completion and help: the table's and the short ones."""
    return [*SHORT_NAMES, *GPUS]
