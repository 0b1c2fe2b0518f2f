"""What this machine can do for the package; for everything that it cannot, the cause and a cure."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from analysis import neighbours
from analysis.files import cache_dir
from repro.measuring import machine
from repro.measuring.records import RESULTS

TOP_LEVEL = ("analysis", "figures", "kernels", "repro")
#: Packages whose attention is timed beside ours where they are installed.
PEERS = ("flash-attn", "flash-attn-4", "xformers", "triton")


@dataclass(frozen=True)
class Finding:
    """One line of the report. Without ``needed`` a missing thing only takes features away."""

    what: str
    ok: bool
    detail: str
    needed: bool = False
    cure: str = ""


def findings() -> Iterator[Finding]:
    """All checks, cheap ones first; none raises."""
    yield Finding(
        "Python",
        sys.version_info >= (3, 11),
        f"{platform.python_version()} (3.11 or newer)",
        needed=True,
        cure="make PYTHON=python3.12 ...",
    )
    yield Finding("CPU", True, machine.cpu())
    yield compiler()
    for package, use in (
        ("torch", "operator, CPU experiments"),
        ("numpy", "theory"),
        ("scipy", "planners"),
        ("sympy", "closed forms"),
        ("pandas", "records"),
        ("seaborn", "figures"),
        ("tabulate", "tables"),
    ):
        found = machine.version(package)
        yield Finding(
            package, found is not None, f"{found or 'not installed'}: {use}", needed=True, cure=f"pip install {package}"
        )
    yield from shadows()
    yield writable("results", RESULTS)
    yield writable("kernel cache", cache_dir())
    yield check(
        "NVRTC", nvrtc, "compile tests without a driver", "pip install cuda-core cuda-bindings nvidia-cuda-nvrtc"
    )
    yield from gpu_findings()
    yield browser()


def compiler() -> Finding:
    """The C++ compiler that the host backend uses, tried on the backend's own runtime."""
    from kernels.host.compiler import HostCompileError, find_compiler, runtime_library

    try:
        found = find_compiler(os.environ.get("CXX"))
        runtime_library()
    except HostCompileError as error:
        return Finding(
            "C++ compiler",
            False,
            " ".join(str(error).split()),
            needed=True,
            cure="apt-get install g++ (or another), or set CXX",
        )
    return Finding("C++ compiler", True, found.version or " ".join(found.command), needed=True)


def shadows() -> Iterator[Finding]:
    """Another distribution, or another folder, in the place of one of our packages.

    ``kernels`` is also the name of a published package; whichever was installed last wins.
    """
    owners = metadata.packages_distributions()
    for name in TOP_LEVEL:
        others = sorted(set(owners.get(name, ())) - {machine.PROJECT})
        instead = neighbours.shadow(name)
        ours = instead is None
        if ours and not others:
            continue
        if others:
            detail = f"the distribution {', '.join(others)} also installs {name!r}"
            cure = f"pip uninstall {' '.join(others)}, or use an environment of its own"
        else:
            detail = f"{instead} is imported in the place of {machine.ROOT / name}"
            cure = "rename it, start Python in another folder, or take it off PYTHONPATH"
        yield Finding(f"package {name}", False, detail, needed=not ours, cure=cure)


def writable(what: str, folder: Path) -> Finding:
    """Whether files can be made there (or in the nearest folder above that exists)."""
    place = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            free = shutil.disk_usage(place).free
    except OSError as error:
        return Finding(
            what,
            False,
            f"cannot write: {error.strerror}",
            needed=True,
            cure="set REPRO_RESULTS / REPRO_CACHE_DIR to a folder of yours",
        )
    enough = free > 200e6
    return Finding(what, enough, f"writable, {free / 1e9:.1f} GB free", needed=True, cure="free some disk space")


def gpu_findings() -> Iterator[Finding]:
    """The card, what drives it, and the tools that look into it."""
    card = machine.gpu()
    yield Finding(
        "NVIDIA GPU",
        card is not None,
        f"{card.name}, driver {card.driver}"
        if card
        else "none found through NVML: kernels run on the host backend, GPU tests skip",
        cure="" if card else _gpu_cure(),
    )
    cupy = machine.cupy_version()
    yield Finding(
        "CuPy",
        cupy is not None,
        cupy or "not installed: only CUDA tensors need it",
        cure='pip install ".[cuda12]" or ".[cuda13]", as the driver has it',
    )
    if card is not None:
        yield check(
            "torch on the GPU",
            torch_on_gpu,
            "time, memory and the operator",
            "install the torch build for this driver's CUDA version",
        )
        if cupy is not None:
            yield check(
                "CuPy on the GPU", cupy_on_gpu, "our kernels", "the CuPy wheel must match the driver: cuda12 or cuda13"
            )
    ncu = shutil.which("ncu")
    yield Finding(
        "Nsight Compute",
        ncu is not None,
        "found" if ncu else "no ncu on PATH: no hardware traffic counters",
        cure="install nsight-compute (part of the CUDA toolkit)",
    )
    yield counters_permission()
    sanitizer = shutil.which("compute-sanitizer")
    yield Finding(
        "compute-sanitizer",
        sanitizer is not None,
        "found" if sanitizer else "not on PATH: no second opinion on memory and races on the device",
        cure="install cuda-sanitizer (part of the CUDA toolkit)",
    )
    found = {name: machine.version(name) for name in PEERS}
    there = [f"{name} {version}" for name, version in found.items() if version]
    absent = [name for name, version in found.items() if not version]
    yield Finding(
        "peers",
        bool(there),
        (f"{', '.join(there)}; " if there else "") + f"not installed: {', '.join(absent) or '-'} "
        "(torch's own are always timed)",
        cure="pip install one of them on a GPU machine",
    )


def _gpu_cure() -> str:
    if shutil.which("nvidia-smi") is None:
        return "no driver here: use recorded data, or `make gpu-run` on a rented machine"
    if machine.version("nvidia-ml-py") is None:
        return "pip install nvidia-ml-py"
    return "nvidia-smi should say why"


def counters_permission(parameters: Path = Path("/proc/driver/nvidia/params"), user: int | None = None) -> Finding:
    """Whether this user may read hardware counters (EC-26: without, ncu counts nothing)."""
    what = "counter permission"
    cure = (
        "run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0 "
        "(in a container: --cap-add SYS_ADMIN)"
    )
    if not parameters.exists():
        return Finding(what, False, "no NVIDIA driver loaded", cure=_gpu_cure())
    match = re.search(r"RmProfilingAdminOnly:\s*(\d)", parameters.read_text(encoding="utf-8", errors="replace"))
    if match is None:
        return Finding(what, False, "the driver does not say who may profile", cure=cure)
    if match[1] == "0":
        return Finding(what, True, "all users")
    if (os.geteuid() if user is None else user) == 0:
        return Finding(what, True, "administrators only, and this is root (a container may differ)")
    return Finding(what, False, "administrators only (ERR_NVGPUCTRPERM)", cure=cure)


def torch_on_gpu() -> str:
    """A tiny product through torch."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} was built for CUDA {torch.version.cuda}")
    ones = torch.ones(16, 16, device="cuda")
    if float((ones @ ones).sum()) != 4096:
        raise RuntimeError("a product of ones is wrong")
    return f"CUDA {torch.version.cuda}"


def cupy_on_gpu() -> str:
    """A tiny sum through CuPy."""
    import cupy

    if int(cupy.arange(4).sum()) != 6:
        raise RuntimeError("0 + 1 + 2 + 3 is not 6")
    return f"runtime {cupy.cuda.runtime.runtimeGetVersion()}"


def browser() -> Finding:
    """The browser that the report's own test uses."""
    found = next((n for n in ("chromium", "google-chrome", "chromium-browser") if shutil.which(n)), None)
    return Finding(
        "Chromium", found is not None, found or "not found: the report's test skips", cure="apt-get install chromium"
    )


def check(what: str, probe: Callable[[], str], use: str, cure: str = "") -> Finding:
    """A probe's answer, or its error in one line."""
    try:
        return Finding(what, True, f"{probe()}: {use}")
    except Exception as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        return Finding(what, False, f"{first}: no {use}", cure=cure)


def nvrtc() -> str:
    """Version of the runtime compiler's library, and where it was chosen by hand."""
    from kernels.building.compile import nvrtc_version
    from kernels.building.nvrtc import VARIABLE, library

    chosen = library()
    return nvrtc_version() + (f" ({VARIABLE}={chosen})" if chosen else "")


def report() -> tuple[str, bool]:
    """The report as text, and whether everything needed is there."""
    found = list(findings())
    return text(found), complete(found)


def text(found: list[Finding]) -> str:
    """A line per finding; under each "no" its cure."""
    width = max(len(f.what) for f in found)
    lines = []
    for f in found:
        mark = "ok" if f.ok else "MISSING" if f.needed else "--"
        lines.append(f"{mark:8}{f.what:{width}}  {f.detail}")
        if not f.ok and f.cure:
            lines.append(f"{'':8}{'':{width}}  -> {f.cure}")
    return "\n".join(lines)


def complete(found: list[Finding]) -> bool:
    """Whether nothing that is needed is missing."""
    return all(f.ok for f in found if f.needed)
