"""Compile a kernel to a cubin with NVRTC. Needs no GPU and no driver.

Used to hold every source to its promise (registers, shared memory, 0 spilled bytes) on machines
without a GPU. Launching goes through :mod:`kernels.cupy_backend`.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from kernels.cache import cache_dir, digest, headers, write_atomically
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


class CompileError(RuntimeError):
    """NVRTC refused a source; the message holds its log."""


def _nvrtc() -> tuple[Any, Any, str]:
    try:
        from cuda.bindings import nvrtc

        try:
            from cuda.core import Program, ProgramOptions
        except ImportError:  # before cuda-core 0.5
            from cuda.core.experimental import Program, ProgramOptions
        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise RuntimeError(f"{MISSING} ({error})") from None
    return Program, ProgramOptions, f"{major}.{minor}"


def nvrtc_version() -> str:
    """Version of the NVRTC library, e.g. ``"13.0"``. RuntimeError when it is not installed."""
    return _nvrtc()[2]


def compile_cubin(kernel: Kernel, arch: str = "sm_80") -> Compiled:
    """Compile ``kernel`` for ``arch`` (``"sm_80"``, ``"sm_90"``, ``"sm_90a"``), cached on disk.

    Raises:
        CompileError: the source does not compile; the message is NVRTC's log.
        RuntimeError: cuda-core or NVRTC is not installed.
    """
    program, options, version = _nvrtc()
    text = kernel.text()
    key = digest(text, headers(), repr(kernel.macros), kernel.entry, arch, version)
    path = cache_dir() / "cubin" / f"{kernel.entry}-{arch}-{key}"
    try:
        facts = json.loads(path.with_suffix(".json").read_text())
        return Compiled(cubin=path.with_suffix(".cubin").read_bytes(), **facts)
    except FileNotFoundError:
        pass

    log = io.StringIO()
    name = f"{kernel.entry}.cu" if kernel.path is None else kernel.path.name
    try:
        cubin = bytes(
            program(
                text,
                "c++",
                options(
                    name=name,
                    arch=arch,
                    std="c++17",
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
            raise CompileError(f"{name} for {arch}: {log.getvalue() or error}") from None
        raise
    compiled = Compiled(cubin=cubin, **parse_ptxas(log.getvalue(), kernel.entry, arch))
    facts = asdict(compiled)
    del facts["cubin"]
    write_atomically(path.with_suffix(".cubin"), cubin)
    # The description goes last: where it exists, so does the cubin.
    write_atomically(path.with_suffix(".json"), json.dumps(facts).encode())
    return compiled


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
    }
