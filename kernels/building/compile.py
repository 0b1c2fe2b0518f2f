"""Compile a kernel to a cubin with NVRTC. Needs no GPU and no driver.

Used to hold every source to its promise (registers, shared memory, 0 spilled bytes) on machines
without a GPU. Launching goes through :mod:`kernels.launching.cupy_backend`.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

from analysis.arguments import checked
from analysis.files import cache_dir
from kernels.building import nvrtc, second_nvrtc
from kernels.building.cache import digest, headers, read_checked, write_checked
from kernels.launch import INCLUDE_DIR, Kernel

MISSING = (
    "compiling for a GPU without a driver needs cuda-core and the NVRTC wheel: "
    "pip install cuda-core cuda-bindings nvidia-cuda-nvrtc"
)


@dataclass(frozen=True)
class Compiled:
    """A cubin and what ptxas says about its entry point."""

    entry: str
    arch: str
    cubin: bytes
    registers: int  # a thread
    shared_bytes: int  # static; dynamic shared memory is the launch's business
    stack_bytes: int  # a thread, arrays that do not live in registers
    spill_bytes: int  # a thread, stores plus loads
    # ptxas' remarks that it serialised or repaired a wgmma pipeline (C7510 … C7519)
    wgmma_remarks: tuple[str, ...] = ()


class CompileError(RuntimeError):
    """NVRTC refused a source; the message holds its log."""


def _nvrtc() -> tuple[Any, Any, str]:
    try:
        version = nvrtc.load()
        try:
            from cuda.core import Program, ProgramOptions
        except ImportError:  # before cuda-core 0.5
            from cuda.core.experimental import Program, ProgramOptions
    except (ImportError, OSError) as error:
        raise RuntimeError(f"{MISSING} ({error})") from None
    except RuntimeError as error:
        if nvrtc.VARIABLE in str(error):
            raise
        raise RuntimeError(f"{MISSING} ({error})") from None
    return Program, ProgramOptions, version


def nvrtc_version() -> str:
    """Version of the NVRTC library, e.g. ``"13.0"``: which one: :mod:`kernels.building.nvrtc`.

    RuntimeError when there is none.
    """
    return _nvrtc()[2]


@checked
def compile_cubin(kernel: Kernel, arch: str = "sm_80", version: str | None = None) -> Compiled:
    """Compile ``kernel`` for ``arch`` (``"sm_80"``, ``"sm_90"``, ``"sm_90a"``), cached on disk.

    version: of NVRTC, one of :func:`kernels.building.nvrtc.versions`; default: this process's.

    Raises:
        CompileError: the source does not compile; the message is NVRTC's log.
        RuntimeError: cuda-core or NVRTC is not installed.
        ValueError: that version is not at hand.
    """
    here = nvrtc_version()
    version = version or here
    text = kernel.text()
    # Without the entry point: all of a source's kernels share one compilation.
    key = digest(text, headers(text), repr(kernel.macros), arch, version)
    path = cache_dir() / "nvrtc" / f"{_name(kernel)}-{arch}-{key}"
    cubin_path, log_path = (path.with_name(path.name + end) for end in (".cubin", ".log"))
    cubin, kept_log = read_checked(cubin_path), read_checked(log_path)
    if cubin is not None and kept_log is not None:
        return Compiled(cubin=cubin, **parse_ptxas(kept_log.decode(), kernel.entry, arch))

    if version == here:
        cubin, log = compile_here(kernel, arch)
    else:
        library = nvrtc.second_library(version)
        cubin, log = second_nvrtc.compiler(library).compile(kernel, arch)
    compiled = Compiled(cubin=cubin, **parse_ptxas(log, kernel.entry, arch))
    write_checked(cubin_path, cubin)
    write_checked(log_path, log.encode())
    return compiled


def _name(kernel: Kernel) -> str:
    return f"{kernel.entry}.cu" if kernel.path is None else kernel.path.name


def compile_here(kernel: Kernel, arch: str) -> tuple[bytes, str]:
    """Cubin and log, by this process's NVRTC, not cached; errors of :func:`compile_cubin`."""
    program, options, _ = _nvrtc()
    log = io.StringIO()
    try:
        cubin = bytes(
            program(
                kernel.text(),
                "c++",
                options(
                    name=_name(kernel),
                    arch=arch,
                    std="c++17",
                    # NVRTC 13.0 takes a lambda in some templates for a function of the host.
                    device_as_default_execution_space=True,
                    include_path=[str(INCLUDE_DIR)],
                    define_macro=[(macro, str(value)) for macro, value in kernel.macros] or None,
                    ptxas_options=["-v"],
                ),
            )
            .compile("cubin", logs=log)
            .code
        )
    except Exception as error:
        # cuda-core has raised several types for a failed compile over its versions.
        if type(error).__module__.startswith("cuda") or isinstance(error, RuntimeError):
            text_of_log = (log.getvalue() or str(error)).replace("\0", "").strip()
            raise CompileError(f"{_name(kernel)} for {arch}: {text_of_log}") from None
        raise
    return cubin, log.getvalue()


def parse_ptxas(log: str, entry: str, arch: str) -> dict[str, Any]:
    """Registers, shared, stack and spilled bytes of ``entry`` from a ``ptxas -v`` log."""
    start = log.find(f"Compiling entry function '{entry}'")
    if start < 0:
        raise CompileError(f"no entry point {entry!r} in the compiled source; ptxas said: {log}")
    end = log.find("Compiling entry function", start + 1)
    section = log[start : end if end > 0 else len(log)]

    def number(pattern: str) -> int:
        found = re.search(pattern, section)
        return int(found.group(1)) if found else 0

    registers = number(r"Used (\d+) registers")
    if not registers:
        raise CompileError(f"{entry}: no register count in the ptxas log: {log}")
    return {
        "entry": entry,
        "arch": arch,
        "registers": registers,
        "shared_bytes": number(r"(\d+) bytes smem"),
        "stack_bytes": number(r"(\d+) bytes stack frame"),
        "spill_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        "wgmma_remarks": tuple(sorted(set(re.findall(r"\(C75\d\d\)[^\n]*", log)))),
    }
