"""GPUs by name, by a file that describes one, or from a module of the user's."""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

from analysis.hardware import GPUS, Gpu, gpu_named

_FIELDS = {field.name: field for field in dataclasses.fields(Gpu)}
_WHOLE = ("sms", "l2_bytes", "l2_partitions", "shared_bytes_per_sm", "shared_bytes_per_block",
          "shared_reserved_per_block", "registers_per_sm", "threads_per_sm", "blocks_per_sm",
          "tensor_flops_per_clock")  # fmt: skip
_OPTIONAL = ("compute_capability", "l2_bandwidth_bytes_per_s", "tensor_flops_per_clock")


def find(text: str) -> Gpu:
    """A GPU by its name ("H100", "NVIDIA L40S", "4090"), a file.toml, or module:NAME.

    A file has the fields of ``analysis.hardware.Gpu``; with ``base = "H100"`` those left out are as
    there. ValueError says what is wrong and what there is.
    """
    if text.endswith(".toml"):
        return from_file(Path(text))
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


def from_file(path: Path) -> Gpu:
    """A GPU described in TOML. ValueError names the field."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--gpu {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--gpu {path}: {error}") from None
    base = given.pop("base", None)
    unknown = sorted(set(given) - set(_FIELDS))
    if unknown:
        raise ValueError(f"--gpu {path}: no field {', '.join(unknown)}; there are "
                         f"base, {', '.join(_FIELDS)}")  # fmt: skip
    fields: dict[str, Any] = {}
    if base is not None:
        fields = {name: getattr(gpu_named(str(base)), name) for name in _FIELDS}
        fields["sources"] = dict(fields["sources"])
    fields.setdefault("name", path.stem)
    for name, value in given.items():
        fields[name] = _value(path, name, value)
    if base is not None:  # what the file gives has the file for a source, unless it says more
        fields["sources"] |= {name: str(path) for name in given if name != "sources"}
        fields["sources"] |= given.get("sources", {})
    fields.setdefault("sources", {name: str(path) for name in _FIELDS})
    missing = [name for name in _FIELDS if name not in fields and name not in _OPTIONAL]
    if missing:
        raise ValueError(f'--gpu {path}: {", ".join(missing)} missing, and no base = "..."')
    absent: dict[str, Any] = dict.fromkeys(_OPTIONAL)
    return Gpu(**(absent | fields))


def _value(path: Path, name: str, value: Any) -> Any:
    if name == "name" and isinstance(value, str):
        return value
    if name == "sources" and isinstance(value, dict):
        return {str(key): str(text) for key, text in value.items()}
    if name == "compute_capability":
        parts = value if isinstance(value, list) else str(value).split(".")
        if len(parts) == 2 and all(str(part).isdecimal() for part in parts):
            return (int(parts[0]), int(parts[1]))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and name in _WHOLE and float(value).is_integer():
        least = 0 if name == "shared_reserved_per_block" else 1
        if value >= least:
            return int(value)
    if number and name not in (*_WHOLE, "name", "sources", "compute_capability") and value > 0:
        return float(value)
    wanted = {"name": "a text", "sources": "a table of texts", "compute_capability": 'as "9.0"'}
    kind = "a whole number from 1 on" if name in _WHOLE else "a positive number"
    raise ValueError(f"--gpu {path}: {name} = {value!r} is not {wanted.get(name, kind)}")


def names() -> list[str]:
    """Names for completion and help: the table's and the short ones."""
    from analysis.hardware import SHORT_NAMES

    return [*SHORT_NAMES, *GPUS]
