"""Names the machine, the libraries and the code behind a measurement.

Nothing here imports torch or CuPy, which take seconds; their versions come from the installed
packages. The GPU is asked through NVML, if the ``nvidia-ml-py`` package and a driver are there.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from analysis.files import ROOT

#: Whether this is a checkout of the repository rather than an installed package.
CHECKOUT = (ROOT / "pyproject.toml").exists()
#: Where results and figures go unless ``REPRO_RESULTS`` and ``REPRO_FIGURES`` say otherwise: the
#: checkout, or for an installed package the current folder.
HOME = ROOT if CHECKOUT else Path.cwd()
PROJECT = "recompute-repro"
_CODE = {".cu", ".cuh", ".h", ".hpp", ".cpp", ".py"}


@dataclass(frozen=True)
class Gpu:
    """The first visible GPU."""

    name: str
    driver: str
    memory_bytes: int

    @property
    def slug(self) -> str:
        """Folder name: "NVIDIA H200" -> "nvidia-h200"."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@cache
def gpu() -> Gpu | None:
    """The first GPU, or None where there is none (or no way to ask)."""
    try:
        import pynvml
    except ImportError:
        return _gpu_by_command()
    try:
        pynvml.nvmlInit()
        # NVML counts all GPUs of the machine, whatever CUDA is told to see.
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
        if first.startswith("GPU-"):
            handle = pynvml.nvmlDeviceGetHandleByUUID(first)
        else:
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdigit() else 0)
        return Gpu(
            name=str(pynvml.nvmlDeviceGetName(handle)),
            driver=str(pynvml.nvmlSystemGetDriverVersion()),
            memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        )
    except pynvml.NVMLError:
        return None


def _gpu_by_command() -> Gpu | None:
    """The first GPU as ``nvidia-smi``, which comes with the driver, tells of it."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    try:
        done = subprocess.run(
            [
                "nvidia-smi",
                "--id=" + first,
                "--query-gpu=name,driver_version,memory.total",
                "--format=csv,noheader,nounits",
            ],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=30,
            check=True,
        )
        name, driver, mebibytes = done.stdout.splitlines()[0].split(", ")
        return Gpu(name, driver, int(mebibytes) << 20)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


@cache
def cpu() -> str:
    """The processor's model name, with the number of cores this process may use."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith(("model name", "hardware")):
                model = line.split(":", 1)[1].strip()
                break
    return f"{model}, {cores()} cores"


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def version(package: str) -> str | None:
    """Installed version of a package, None where it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def project_version() -> str:
    """This project's version: of the checkout, else of the installed package."""
    if CHECKOUT:
        with open(ROOT / "pyproject.toml", "rb") as file:
            found: str = tomllib.load(file)["project"]["version"]
        return found
    return version(PROJECT) or "unknown"


def cupy_version() -> str | None:
    """Version of whichever CuPy wheel is installed."""
    found = (version(name) for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"))
    return next((v for v in found if v), None)


@cache
def commit() -> str | None:
    """Short commit of this checkout, with ``-dirty`` after local changes; None outside git."""
    return git("describe", "--always", "--dirty", "--exclude=*") or None


def git(*arguments: str) -> str | None:
    """What git says of this checkout; None without git, and where the checkout is not git's.

    A source archive unpacked inside another repository is not part of that one.
    """
    if not CHECKOUT or not (ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def digest(sources: Sequence[str]) -> str:
    """A short hash of the code under these paths (relative to the repository).

    Raises ValueError for a path that does not exist.
    """
    files: list[Path] = []
    for name in sources:
        path = ROOT / name
        if path.is_dir():
            files += [f for f in path.rglob("*") if f.suffix in _CODE]
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"source {name!r} does not exist")
    total = hashlib.sha256()
    for file in sorted(set(files)):
        total.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:12]


def provenance(device: str) -> dict[str, Any]:
    """The machine block of a record measured on ``device`` ("host", "cpu" or "cuda")."""
    block: dict[str, Any] = {
        "device": cpu(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
    }
    if device == "cuda":
        card = gpu()
        if card is None:
            raise RuntimeError("no GPU found through NVML (driver or nvidia-ml-py missing)")
        block |= {"device": card.name, "driver": card.driver, "cupy": cupy_version()}
    return {key: value for key, value in block.items() if value is not None}
