"""Compile the host runtime and kernels with the system's C++ compiler, cached by content."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from analysis.files import CACHE_VARIABLE, cache_dir, find_library, keep_library, private, workshop
from kernels.building.cache import digest, headers, read_all
from kernels.host.globals import variables
from kernels.launch import KERNELS_DIR, Kernel

HOST_DIR = Path(__file__).resolve().parent
KERNEL_HEADERS = ("vocabulary.hpp", "hopper.hpp", "interface.hpp", "fiber.hpp")
CANDIDATES = ("c++", "g++", "clang++")
CURE = f"set {CACHE_VARIABLE} to a folder of your own"
FLAGS = (
    *("-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math"),
)
RUNTIME_FLAGS = (*FLAGS, "-O3", "-pthread", "-Wall", "-Wextra")
# A kernel runs for less time than its compilation takes, and most of that in the runtime. Of -O3,
# small loops unrolled keep fp32 products as fast, and fused multiply-adds (part of "expensive
# optimizations" in GCC) keep the same bits; the rest of it is more than a third of a compilation.
KERNEL_OPTIMIZATION = ("-O1", "-fpeel-loops", "-fexpensive-optimizations")
# A fiber's stack has 64 KiB; a thread with 24 KiB of locals would be absurd on a GPU too.
KERNEL_FLAGS = (*(*FLAGS, *KERNEL_OPTIMIZATION), *("-Werror=frame-larger-than=24576", "-DKERNELS_HOST"))
#: Where the files that a text includes lie, seen from the folder in which it is compiled: a link
#: named "kernels" is put there. So no path is part of what is compiled (some characters in one
#: break the assembler's input), and checkouts share compiled kernels.
SEARCH = ("-Ikernels/include", "-Ikernels")


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
    command = _words(chosen or "")
    if not command:
        found = next((name for name in CANDIDATES if shutil.which(name)), None)
        if found is None:
            raise HostCompileError(f"no C++ compiler: install one ({', '.join(CANDIDATES)}) or set CXX")
        command = (found,)
    elif shutil.which(command[0]) is None:
        raise HostCompileError(f"CXX={chosen}: no such compiler")
    version = _run([*command, "--version"]).stdout.split("\n")[0]
    flags = []
    # The red zone is left free for the context switch; the thread-local pointer is read often.
    for flag in ("-march=native", "-mno-red-zone", "-ftls-model=initial-exec"):
        probe = [*command, flag, "-x", "c++", "-fsyntax-only", os.devnull]
        if _run(probe).returncode == 0:
            flags.append(flag)
    return Compiler(command, version, tuple(flags))


def _words(chosen: str) -> tuple[str, ...]:
    """$CXX as a command: a program (its path may hold spaces), or a program with arguments."""
    try:
        words = [chosen] if shutil.which(chosen) else shlex.split(chosen)
    except ValueError:  # a quote that is never closed
        words = [chosen]
    if words and os.sep in words[0]:
        words[0] = os.path.abspath(words[0])  # it runs in another folder
    return tuple(words)


def _run(command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a compiler in ``folder``, which it also has for its own temporary files: the system's
    folder for them may be full or gone. What is not UTF-8 in its messages is replaced."""
    environment = os.environ if folder is None else {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )


@cache
def cpu_identity() -> str:
    """What -march=native depends on: a cache folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = [platform.processor()]
    wanted = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return platform.machine() + hashlib.sha256("\n".join(sorted(set(wanted))).encode()).hexdigest()


def build(text: str, flags: tuple[str, ...], name: str, depends_on: str) -> Path:
    """Compile C++ ``text`` to a shared library in the cache; at once if a whole one is there.

    Processes may build the same library at the same time: each compiles into a folder of its own
    and renames the result into place.

    Raises:
        HostCompileError: no compiler, the text does not compile, or there is no safe place for it.
    """
    compiler = find_compiler(os.environ.get("CXX"))
    key = digest(text, depends_on, *flags, *compiler.command, compiler.version, *compiler.machine_flags, cpu_identity())
    folder = cache_dir() / "host"
    try:
        place = private(folder) / f"{name}-{key}"
        kept = find_library(place)
        if kept is not None:
            return kept
        with workshop(folder) as draft:
            (draft / "kernels").symlink_to(KERNELS_DIR)
            (draft / f"{name}.cpp").write_text(text, encoding="utf-8")
            command = [*compiler.command, *flags, *SEARCH, *compiler.machine_flags]
            done = _run([*command, f"{name}.cpp", "-o", f"{name}.so"], draft)
            if done.returncode != 0:
                said = done.stderr.strip() or done.stdout.strip()
                said = said or f"exit status {done.returncode}"
                raise HostCompileError(f"{name}: {compiler.command[0]} failed:\n{said}")
            return keep_library(draft / f"{name}.so", place)
    except PermissionError as error:
        said = str(error) if error.errno is None else f"{folder}: {error.strerror}"
        raise HostCompileError(f"cannot keep compiled kernels: {said}; {CURE}") from None
    except OSError as error:
        said = f"{error.filename or folder}: {error.strerror or error}"
        raise HostCompileError(f"cannot keep compiled kernels: {said}; {CURE}") from None


def load(path: Path) -> ctypes.CDLL:
    """Load what :func:`build` returned. HostCompileError where the system's loader refuses it."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        command = " ".join(find_compiler(os.environ.get("CXX")).command)
        raise HostCompileError(
            f"what {command} compiled cannot be loaded: {error} (a C compiler leaves out the C++ "
            "library: set CXX to a C++ compiler such as g++)"
        ) from None


@cache
def runtime_library() -> ctypes.CDLL:
    """The runtime, loaded once per process."""
    sources = [*HOST_DIR.glob("*.hpp"), HOST_DIR / "runtime.cpp"]
    text = '#include "host/runtime.cpp"\n'
    return load(build(text, RUNTIME_FLAGS, "runtime", read_all(sources)))


@dataclass(frozen=True)
class HostKernel:
    """A kernel loaded into this process."""

    library: ctypes.CDLL
    entry: int  # address of host_entry
    runtime_slot: int  # where the kernel keeps its pointer to the runtime's table
    parameter_bytes: tuple[int, ...]


@cache
def load_kernel(kernel: Kernel) -> HostKernel:
    """Compile (or find in the cache) and load ``kernel``.

    Raises:
        HostCompileError: it does not compile, or has variables besides its arguments.
    """
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
    uncounted = variables(path)
    if uncounted:
        listed = ", ".join(f"{each.name} ({each.nbytes} bytes)" for each in uncounted)
        raise HostCompileError(
            f"{kernel.entry}: {listed}: variables outside of the kernel's tensors, so their bytes "
            "would not be counted; pass them as arguments, or make them const"
        )
    library = load(path)
    library.host_runtime_slot.restype = ctypes.c_void_p
    sizes = (ctypes.c_uint * 64)()
    count = library.host_parameters(sizes)
    entry = ctypes.cast(library.host_entry, ctypes.c_void_p).value
    assert entry is not None
    return HostKernel(library, entry, library.host_runtime_slot(), tuple(sizes[:count]))
