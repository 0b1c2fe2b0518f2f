"""Processes that may hang: started in a group of their own, and ended with all that they started.

A kernel that never ends keeps its process, and with it the card. So whoever starts such a process
ends its whole group, at a limit and when it is stopped itself, and the process asks the system to
end it too should its parent be killed outright (``die_with_parent``, on Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

#: The moment (``time.monotonic``, the same clock in all processes) at which a stage of a run ends.
ENDS_VARIABLE = "REPRO_STAGE_ENDS"
#: Linux: the option of prctl that names the signal to get when the parent dies.
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the system kill this process when the one that started it dies. Linux only."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signal.SIGKILL)


def time_left(at_most_s: float, margin_s: float = 5.0) -> float:
    """Seconds that may be spent here: ``at_most_s``, or less where the stage of a run ends before.

    margin_s: kept for writing down what was found.
    """
    ends = os.environ.get(ENDS_VARIABLE)
    if ends is None:
        return at_most_s
    return max(1.0, min(at_most_s, float(ends) - time.monotonic() - margin_s))


def start(command: Sequence[str], *, session: bool = False, **options: Any) -> subprocess.Popen[Any]:
    """Start ``command`` in a process group of its own, or in a session of its own.

    options: as for ``subprocess.Popen``. Raises OSError where it cannot be started.
    """
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=session, process_group=None if session else 0, **options
    )


def kill(process: subprocess.Popen[Any]) -> None:
    """End a process of :func:`start`, its group and, if it leads one, its session, at once.

    Returns without waiting for a process that the system cannot end now: the driver may hold it.
    """
    for pid in _session(process.pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def _session(leader: int) -> Iterator[int]:
    """Processes of the session that ``leader`` leads, whatever their group. Linux only."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            status = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has just ended
            continue
        # pid (command, which may hold anything) state parent group session
        fields = status.rpartition(")")[2].split()
        if int(fields[3]) == leader:
            yield int(entry.name)


def run(
    command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` and capture what it prints; its group does not outlive this call.

    Raises subprocess.TimeoutExpired after ``timeout_s`` and OSError where it cannot be started.
    """
    process = start(
        command, env=env, encoding="utf-8", errors="replace", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except BaseException:
        kill(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextlib.contextmanager
def stopped_politely() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that a stopped program ends its children.

    In the main thread only, as Python's signals are.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
