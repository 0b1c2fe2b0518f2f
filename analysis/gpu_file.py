"""Cards described in TOML: those of the package (``gpus.toml``) and a user's own.

A card is a table of the fields of ``analysis.gpu.Gpu``; numbers may have a unit ("40 MiB",
"1.41 GHz"). What is left out comes from ``base``, another card: there the rates follow SMs and
clock unless they are given. What an SM has follows from the compute capability. ``source`` is the
origin of all figures that ``sources`` does not name.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from analysis.gpu import KIB, MIB, Gpu

CARDS = Path(__file__).with_name("gpus.toml")
FIELDS = tuple(field.name for field in dataclasses.fields(Gpu))
REPORTED = "the total that the driver reports (nvidia-smi, rocm-smi), as published by users"
GUIDE = "CUDA C++ programming guide, technical specifications per compute capability"
WHITEPAPERS = "architecture whitepapers, per compute capability"
UNPUBLISHED = "not published"
"""In the place of a number; "none" stands for the compute capability of other makers' cards."""

_OF_GUIDE = (
    "shared_bytes_per_sm",
    "shared_bytes_per_block",
    "shared_reserved_per_block",
    "registers_per_sm",
    "threads_per_sm",
    "blocks_per_sm",
)
_OF_SM = (*_OF_GUIDE, "tensor_flops_per_clock", "fma_flops_per_clock")
_WHOLE = (*_OF_SM, "sms", "l2_bytes", "l2_partitions")
_OPTIONAL = (
    "compute_capability",
    "l2_bandwidth_bytes_per_s",
    "tensor_flops_per_clock",
    "fma_flops_per_clock",
    "load_clocks_hz",
)
_NAMES = ("short_names", "driver_names")
_WITHOUT_SOURCE = ("name", "compute_capability", *_NAMES)
_UNITS = {
    "KiB": KIB,
    "MiB": MIB,
    "GiB": 1024 * MIB,
    "GB": 1e9,
    "MHz": 1e6,
    "GHz": 1e9,
    "GB/s": 1e9,
    "TB/s": 1e12,
    "TFLOP/s": 1e12,
}

Find = Callable[[str], Gpu]


def house_cards() -> dict[str, Gpu]:
    """The package's cards by name, in the order of the file."""
    found: dict[str, Gpu] = {}
    for name, table in _TABLES.items():
        if name != "sm":
            found[name] = card({"name": name, **table}, CARDS.name, found.__getitem__)
    return found


def user_card(path: Path, find: Find) -> Gpu:
    """The card of a user's file. find: a card by the name that ``base`` gives.

    ValueError names the file and the field.
    """
    place = f"--gpu {path}"
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{place}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{place}: {error}") from None
    return card({"name": path.stem, **given}, place, find, said_by=str(path))


def card(given: Mapping[str, Any], place: str, find: Find, said_by: str = "") -> Gpu:
    """A card from its table. place: what an error says it is in. said_by: the source of what the
    table gives without one."""
    unknown = sorted(set(given) - {*FIELDS, "base", "source"})
    if unknown:
        raise ValueError(f"{place}: no field {', '.join(unknown)}; there are base, source, {', '.join(FIELDS)}")
    own = {
        name: _value(place, name, value) for name, value in given.items() if name not in ("base", "source", "sources")
    }
    base = find(str(given["base"])) if "base" in given else None
    fields, sources = _inherited(base, own)
    capability = own.get("compute_capability")
    for name, value in SM.get(capability, {}).items() if capability else ():
        fields[name] = value
        sources[name] = GUIDE if name in _OF_GUIDE else WHITEPAPERS
    fields |= own
    said = given.get("source", said_by)
    sources |= {name: said for name in own if said}
    if "source" in given:
        sources |= {name: said for name in fields if name not in _OF_SM}
        sources["memory_bytes"] = REPORTED
    sources |= {name: UNPUBLISHED for name in _OPTIONAL if fields.get(name) is None}
    for name in _WITHOUT_SOURCE:
        sources.pop(name, None)
    sources |= _value(place, "sources", given.get("sources", {}))
    missing = [name for name in FIELDS if name not in fields and name not in (*_OPTIONAL, *_NAMES, "sources")]
    if missing:
        raise ValueError(f'{place}: {", ".join(missing)} missing, and no base = "..."')
    optional: dict[str, Any] = dict.fromkeys(_OPTIONAL)
    return Gpu(**(optional | fields | {"sources": MappingProxyType(sources)}))


def _inherited(base: Gpu | None, own: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields and sources of the base, its rates as for the SMs and the clock of ``own``."""
    if base is None:
        return {}, {}
    fields = {name: getattr(base, name) for name in FIELDS if name not in _NAMES}
    sources = dict(fields.pop("sources"))
    clock = own.get("boost_clock_hz", base.boost_clock_hz) / base.boost_clock_hz
    sms = own.get("sms", base.sms) / base.sms
    for name, share, by in (
        ("fp16_tensor_flops", sms * clock, "SMs and clock"),
        ("fp32_flops", sms * clock, "SMs and clock"),
        ("l2_bandwidth_bytes_per_s", clock, "clock"),
    ):
        if share != 1 and fields[name] is not None:
            fields[name] *= share
            sources[name] = f"as {base.name}, in proportion to {by}"
    if sms * clock != 1:  # other SMs draw another power
        fields["load_clocks_hz"] = None
    return fields, sources


def _capability(place: str, value: Any) -> tuple[int, int]:
    parts = value if isinstance(value, list) else str(value).split(".")
    if len(parts) == 2 and all(str(part).isdecimal() for part in parts):
        return (int(parts[0]), int(parts[1]))
    raise ValueError(f'{place}: compute_capability = {value!r} is not as "9.0"')


def _value(place: str, name: str, value: Any) -> Any:
    """A field's value. ValueError names place, field and value."""
    if name == "name" and isinstance(value, str):
        return value
    if name in _NAMES and isinstance(value, list):
        return tuple(map(str, value))
    if name == "sources" and isinstance(value, dict):
        return {str(key): str(text) for key, text in value.items()}
    if name == "compute_capability":
        return None if value == "none" else _capability(place, value)
    if name in _OPTIONAL and value == UNPUBLISHED:
        return None
    if name == "load_clocks_hz":
        ends = [_number(end) or 0.0 for end in (value if isinstance(value, list) else [value] * 2)]
        if len(ends) == 2 and 0 < ends[0] <= ends[1]:
            return (ends[0], ends[1])
        raise ValueError(f"{place}: {name} = {value!r} is no clock, nor lowest and highest")
    number = _number(value)
    if number is not None and name in _WHOLE and float(number).is_integer():
        least = 0 if name == "shared_reserved_per_block" else 1
        if number >= least:
            return int(number)
    if number is not None and name not in (*_WHOLE, *_NAMES, "name", "sources") and number > 0:
        return float(number)
    wanted = {"name": "a text", "sources": "a table of texts"} | dict.fromkeys(_NAMES, "a list")
    kind = "a whole number from 1 on" if name in _WHOLE else "a positive number"
    raise ValueError(f"{place}: {name} = {value!r} is not {wanted.get(name, kind)}")


def _number(value: Any) -> float | None:
    """A number, or one with a unit in a text; None for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    found = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z/]+)\s*", value) if isinstance(value, str) else None
    if found is None or found[2] not in _UNITS:
        return None
    unit = _UNITS[found[2]]
    if isinstance(unit, int):
        return float(found[1]) * unit
    return float(f"{found[1]}e{len(str(int(unit))) - 1}")  # as the number is written out


_TABLES = tomllib.loads(CARDS.read_text(encoding="utf-8"))
SM: Mapping[tuple[int, int], Mapping[str, Any]] = MappingProxyType(
    {
        _capability(CARDS.name, capability): {name: _value(CARDS.name, name, value) for name, value in table.items()}
        for capability, table in _TABLES["sm"].items()
    }
)
"""What an SM has, by compute capability."""
