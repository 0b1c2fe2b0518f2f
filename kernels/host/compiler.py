"""Compile the host runtime and kernels with the system's C++ compiler, cached by content."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernels.cache import cache_dir, digest, headers, read_all
from kernels.launch import INCLUDE_DIR, KERNELS_DIR, Kernel

HOST_DIR = Path(__file__).resolve().parent
KERNEL_HEADERS = ("vocabulary.hpp", "hopper.hpp", "interface.hpp", "fiber.hpp")
CANDIDATES = ("c++", "g++", "clang++")
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math"),
)
RUNTIME_FLAGS = (*FLAGS, "-pthread", "-Wall", "-Wextra")
# A fiber's stack has 64 KiB; a thread with 24 KiB of locals would be absurd on a GPU too.
KERNEL_FLAGS = (*FLAGS, "-Werror=frame-larger-than=24576", "-DKERNELS_HOST")
#: Where the files that a text includes lie. Not part of the cache's key, so that checkouts share
#: compiled kernels: what the files hold is part of it.
SEARCH = tuple(f"-I{folder}" for folder in (INCLUDE_DIR, KERNELS_DIR))


class HostCompileError(RuntimeError):
    """There is no C++ compiler, or it refused a source; the message says which."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: command, version line, and flags that suit this machine."""

    command: tuple[str, ...]
    version: str
    machine_flags: tuple[str, ...]


@cache
def find_compiler(chosen: str | None = None) -> Compiler:
    """The compiler named by ``chosen`` (``$CXX``), else the first of c++, g++, clang++.

    Raises:
        HostCompileError: none is installed, or the chosen one is not found.
    """
    if chosen:
        command = tuple(chosen.split())
        if shutil.which(command[0]) is None:
            raise HostCompileError(f"CXX={chosen}: no such compiler")
    else:
        found = next((name for name in CANDIDATES if shutil.which(name)), None)
        if found is None:
            raise HostCompileError(
                f"no C++ compiler: install one ({', '.join(CANDIDATES)}) or set CXX"
            )
        command = (found,)
    version = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, check=False
    ).stdout.split("\n")[0]
    flags = []
    # The red zone is left free for the context switch; the thread-local pointer is read often.
    for flag in ("-march=native", "-mno-red-zone", "-ftls-model=initial-exec"):
        probe = [*command, flag, "-x", "c++", "-fsyntax-only", os.devnull]
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            flags.append(flag)
    return Compiler(command, version, tuple(flags))


@cache
def cpu_identity() -> str:
    """What -march=native depends on: a cache folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    wanted = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return platform.machine() + hashlib.sha256("\n".join(sorted(set(wanted))).encode()).hexdigest()


def build(text: str, flags: tuple[str, ...], name: str, depends_on: str) -> Path:
    """Compile C++ ``text`` to a shared object in the cache; at once if it is there already.

    Processes may build the same object at the same time: each compiles into a temporary file and
    renames it into place.
    """
    compiler = find_compiler(os.environ.get("CXX"))
    key = digest(
        text,
        depends_on,
        *flags,
        *compiler.command,
        compiler.version,
        *compiler.machine_flags,
        cpu_identity(),
    )
    target = cache_dir() / "host" / f"{name}-{key}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=target.parent)
    except OSError as error:
        raise HostCompileError(
            f"cannot keep compiled kernels in {target.parent} ({error.strerror}): "
            "set REPRO_CACHE_DIR to a writable folder"
        ) from None
    with folder as path:
        source, output = Path(path) / f"{name}.cpp", Path(path) / f"{name}.so"
        source.write_text(text)
        command = [*compiler.command, *flags, *SEARCH, *compiler.machine_flags, str(source), "-o"]
        done = subprocess.run([*command, str(output)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise HostCompileError(f"{name}: {compiler.command[0]} failed:\n{done.stderr.strip()}")
        os.replace(output, target)
    return target


@cache
def runtime_library() -> ctypes.CDLL:
    """The runtime, loaded once per process."""
    sources = [*HOST_DIR.glob("*.hpp"), HOST_DIR / "runtime.cpp"]
    text = '#include "host/runtime.cpp"\n'
    return ctypes.CDLL(str(build(text, RUNTIME_FLAGS, "runtime", read_all(sources))))


@dataclass(frozen=True)
class HostKernel:
    """A kernel loaded into this process."""

    library: ctypes.CDLL
    entry: int  # address of host_entry
    runtime_slot: int  # where the kernel keeps its pointer to the runtime's table
    parameter_bytes: tuple[int, ...]


@cache
def load_kernel(kernel: Kernel) -> HostKernel:
    """Compile (or find in the cache) and load ``kernel``."""
    text = kernel.text()
    if kernel.path is None:
        included = f'#line 1 "{kernel.entry}.cu"\n{text}\n#line 1 "entry"\n'
    else:
        included = f'#include "{kernel.source}"\n'
    defines = "".join(f"#define {name} {value}\n" for name, value in kernel.macros)
    vocabulary = read_all(HOST_DIR / name for name in KERNEL_HEADERS)
    path = build(
        f"{defines}{included}HOST_ENTRY({kernel.entry})\n",
        KERNEL_FLAGS,
        kernel.entry,
        digest(text, headers(text), vocabulary),
    )
    library = ctypes.CDLL(str(path))
    library.host_runtime_slot.restype = ctypes.c_void_p
    sizes = (ctypes.c_uint * 64)()
    count = library.host_parameters(sizes)
    entry = ctypes.cast(library.host_entry, ctypes.c_void_p).value
    assert entry is not None
    return HostKernel(library, entry, library.host_runtime_slot(), tuple(sizes[:count]))
