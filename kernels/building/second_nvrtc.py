"""A process that compiles with another NVRTC than this one has loaded (``nvrtc_server``).

It reads kernels from its standard input and ends with it, so whoever starts it has nothing to wait
for: not even a process that ``multiprocessing`` has started, which does not leave before those that
``multiprocessing`` started for it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import IO

from kernels.building import nvrtc
from kernels.launch import Kernel

SERVER = "kernels.building.nvrtc_server"


class Compiler:
    """Compiles, one kernel after another, with the NVRTC of ``path``."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, nvrtc.VARIABLE: str(path), "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        atexit.register(self.close)

    def compile(self, kernel: Kernel, arch: str) -> tuple[bytes, str]:
        """Cubin and log.

        Raises:
            CompileError, RuntimeError: as ``kernels.building.compile.compile_cubin``; the latter
                also where the process has ended.
        """
        with self._lock:
            questions, answers = self._pipes
            try:
                if questions.closed:
                    raise EOFError
                pickle.dump((kernel, arch), questions)
                questions.flush()
                answer = pickle.load(answers)
            except (EOFError, OSError):
                status = self._process.wait()
                raise RuntimeError(
                    f"the process that compiles with the second NVRTC has ended, status {status}"
                ) from None
        if isinstance(answer, Exception):
            raise answer
        cubin, log = answer
        return cubin, log

    def close(self) -> None:
        """Let the process end, and wait until it has."""
        with contextlib.suppress(OSError):
            self._pipes[0].close()
        self._process.wait()

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


def compiler(path: Path) -> Compiler:
    """The one of this process for a library."""
    return _compiler(path, os.getpid())


@cache
def _compiler(path: Path, pid: int) -> Compiler:
    return Compiler(path)
