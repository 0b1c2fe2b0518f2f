"""The cards that the package knows, by name. Each is a table in ``gpus.toml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from analysis.gpu import EXP_PER_CLOCK_PER_SM, KIB, MIB, SHARED_BYTES_PER_CLOCK_PER_SM, Gpu
from analysis.gpu_file import house_cards

__all__ = [
    "A100_40GB",
    "A100_80GB",
    "EXP_PER_CLOCK_PER_SM",
    "GPUS",
    "H100_SXM",
    "H200",
    "KIB",
    "MIB",
    "RTX_3090",
    "SHARED_BYTES_PER_CLOCK_PER_SM",
    "SHORT_NAMES",
    "T4",
    "Gpu",
    "find_gpu",
    "gpu_named",
]

GPUS: Mapping[str, Gpu] = MappingProxyType(house_cards())

A100_40GB = GPUS["A100-SXM4-40GB"]
A100_80GB = GPUS["A100-SXM4-80GB"]
H100_SXM = GPUS["H100-SXM5-80GB"]
H200 = GPUS["H200"]
T4 = GPUS["T4"]
RTX_3090 = GPUS["GeForce RTX 3090"]

SHORT_NAMES: Mapping[str, Gpu] = MappingProxyType({short: gpu for gpu in GPUS.values() for short in gpu.short_names})
"""Other names of cards, for people who type them."""

#: Words of a driver's name that tell nothing: makers, series, and sizes that a card has anyway.
_SILENT = frozenset(
    {
        "NVIDIA",
        "TESLA",
        "GEFORCE",
        "RTX",
        "AMD",
        "INSTINCT",
        "GRAPHICS",
        "DEVICE",
        "SXM",
        "SXM4",
        "SXM5",
        "HBM3",
        "HBM3E",
    }
)
#: The words that are left -> the card. Others (a Ti, a laptop) are not known.
_WORDS: Mapping[frozenset[str], Gpu] = MappingProxyType(
    {frozenset(words.split()): gpu for gpu in GPUS.values() for words in gpu.driver_names}
)


def find_gpu(device_name: str) -> Gpu | None:
    """The entry for a name as the driver reports it ("NVIDIA H200"), or None for other cards.

    Whole words are compared: a GH200 is no H200, an A10G no A10.
    """
    words = {word for word in re.split(r"[^A-Z0-9]+", device_name.upper()) if word}
    return _WORDS.get(frozenset(words - _SILENT))


def gpu_named(name: str) -> Gpu:
    """The entry for a name of ``GPUS`` or ``SHORT_NAMES``, in any case, or a driver's name.

    Raises ValueError that lists the names.
    """
    wanted = name.strip().casefold()
    for table in (GPUS, SHORT_NAMES):
        for known, gpu in table.items():
            if known.casefold() == wanted:
                return gpu
    found = find_gpu(name)
    if found is None:
        raise ValueError(f"no GPU {name!r}; known are {', '.join(GPUS)}")
    return found
