"""Hostile kernels on the host: what would end or hang the process names kernel and thread."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kernels.host import HostBackend, KernelError
from kernels.host.compiler import HostCompileError, find_compiler, load_kernel
from kernels.launch import Kernel, from_numpy
from tests.support.host_support import one_kernel

ROOT = Path(__file__).resolve().parents[2]
THREADS = 64
TEXT = r"""
#include <cassert>
#include <unistd.h>

#include "device.cuh"
@ENTRY@
#define ME (blockIdx.x * blockDim.x + threadIdx.x)
#define FAULTY (blockIdx.x == 1 && threadIdx.x == 37)

ENTRY(good) { st_global(y + ME, ld_global(x + ME) + ld_global(bytes + ME)); }
ENTRY(plain_read) { st_global(y + ME, FAULTY ? x[ME] : 0.f); }
ENTRY(plain_write) { if (FAULTY) y[ME] = 1; st_global(y + ME, 1.f); }
ENTRY(plain_byte) { st_global(y + ME, FAULTY ? float(bytes[5]) : 0.f); }
ENTRY(plain_copy) {
    float both[2] = {};
    if (FAULTY) __builtin_memcpy(both, x + 2, n);
    st_global(y + ME, both[1]);
}
ENTRY(plain_shared_write) {
    float* const s = reinterpret_cast<float*>(shared_memory());
    if (FAULTY) s[3] = 1;
    st_global(y + ME, 1.f);
}
ENTRY(plain_shared_read) {
    float* const s = reinterpret_cast<float*>(shared_memory());
    st_shared(s + threadIdx.x, 1.f);
    st_global(y + ME, FAULTY ? s[threadIdx.x] : 1.f);
}
ENTRY(nowhere) { if (FAULTY) *reinterpret_cast<float*>(n << 40) = 1; st_global(y + ME, 1.f); }
ENTRY(impossible) { if (FAULTY) *reinterpret_cast<float*>(n << 50) = 1; st_global(y + ME, 1.f); }
ENTRY(division) { st_global(y + ME, float(n / (FAULTY ? n - 8 : 1))); }
ENTRY(modulo) { const int m = int(n); st_global(y + ME, float(m % (FAULTY ? m - 8 : 1))); }
ENTRY(traps) { if (FAULTY) __trap(); st_global(y + ME, 1.f); }
__attribute__((noinline)) float deep(int64 n, float* above) {
    float here[8];
    here[n & 7] = float(n);
    return n == 0 ? above[0] : deep(n - 1, here) + here[3];
}
ENTRY(recursion) {
    float x0[8] = {};
    st_global(y + ME, deep(FAULTY ? n << 20 : n, x0));
}
ENTRY(endless) {
    volatile int go = 1;
    if (FAULTY) while (go) {}
    st_global(y + ME, 1.f);
}
ENTRY(locked) { if (FAULTY) while (pause() == -1) {} st_global(y + ME, 1.f); }
ENTRY(polls) {  // never written by anybody
    if (FAULTY) while (ld_global(x) < 2.f) {}
    st_global(y + ME, 1.f);
}
ENTRY(asserts) { assert(!FAULTY); st_global(y + ME, 1.f); }
ENTRY(throws) { if (FAULTY) throw 5; st_global(y + ME, 1.f); }
ENTRY(mapped) {  // n: the address of memory of a file
    st_global(y + ME, FAULTY ? *reinterpret_cast<const float*>(n) : 1.f);
}
ENTRY(all_fail) {  // the first block long after the others
    for (int i = 0; blockIdx.x == 0 && i < n * 10000; ++i) warp_sync();
    st_global(y + ME, x[ME]);
}
ENTRY(waits_for_a_later_block) {
    if (FAULTY) __trap();
    while (blockIdx.x == 0 && ld_global(x) < 2.f) {}
    st_global(y + ME, 1.f);
}
ENTRY(works_long) {  // many short waits are no endless loop
    float sum = 0;
    for (int i = 0; i < n * 40000; ++i) { sum += ld_global(x + ME); warp_sync(); }
    st_global(y + ME, sum);
}
"""
PARAMETERS = "const float* x, float* y, const uint8* bytes, int64 n"
SOURCE, WHICH = one_kernel(TEXT, "hostile", PARAMETERS)
#: entry -> (kind, tensor, index, words of the message)
HOSTILE = {
    "plain_read": ("uncounted", "x", (101,), "read through a plain pointer"),
    "plain_write": ("uncounted", "y", (101,), "write through a plain pointer"),
    "plain_byte": ("uncounted", "bytes", (5,), "read through a plain pointer"),
    "plain_copy": ("uncounted", "x", (2,), "read through a plain pointer"),
    "plain_shared_write": ("uncounted", None, None, "write of shared memory through a plain"),
    "plain_shared_read": ("uncounted", None, None, "read of shared memory through a plain"),
    "nowhere": ("out of bounds", None, None, "write of address 0x80000000000, which is in no"),
    "impossible": ("out of bounds", None, None, "an address that no memory can have"),
    "division": ("division", None, None, "an integer is divided by zero"),
    "modulo": ("division", None, None, "an integer is divided by zero"),
    "traps": ("trap", None, None, "__trap"),
    "asserts": ("trap", None, None, "abort: a failed assertion"),
    "throws": ("trap", None, None, "an exception that nobody catches"),
    "recursion": ("limit", None, None, "more than 65536 bytes of local variables"),
    "endless": ("endless", None, None, "has run for 0.3 s without coming to a barrier"),
    "locked": ("endless", None, None, "has run for 0.3 s without coming to a barrier"),
    "polls": ("endless", None, None, "has run for 0.3 s without coming to a barrier"),
}
KERNEL = Kernel(SOURCE, "hostile", (), THREADS)
X86 = os.uname().machine == "x86_64"


def launch(entry: str, **options: object) -> tuple[HostBackend, np.ndarray]:
    backend = HostBackend(**options)  # type: ignore[arg-type]
    x, y = np.ones(4 * THREADS, np.float32), np.zeros(4 * THREADS, np.float32)
    args = [
        from_numpy("x", x, "r"),
        from_numpy("y", y, "w"),
        from_numpy("bytes", np.ones(4 * THREADS, np.uint8), "r"),
        np.int64(8),
        np.int32(WHICH.index(entry)),
    ]
    backend.launch(KERNEL, (4, 1, 1), 1024, args)
    return backend, y


@pytest.mark.parametrize("os_threads", [1, 2])
@pytest.mark.parametrize("checks", [True, False], ids=["checks", "no checks"])
@pytest.mark.parametrize("entry", HOSTILE)
def test_kernel_block_and_thread_are_named(entry: str, checks: bool, os_threads: int) -> None:
    kind, tensor, index, words = HOSTILE[entry]
    if kind == "division" and not X86:
        pytest.skip("this processor divides by zero without a word, as a GPU does")
    with pytest.raises(KernelError) as caught:
        launch(entry, checks=checks, os_threads=os_threads, limit_s=0.3)
    error = caught.value
    assert (error.kernel, error.kind, error.tensor, error.index) == ("hostile", kind, tensor, index)
    assert (error.block, error.thread) == ((1, 0, 0), 37)
    assert words in str(error)
    # And the process goes on, with everything counted.
    backend, y = launch("good", checks=checks, os_threads=os_threads)
    assert (y == 2).all()
    assert backend.traffic["hostile"] == {("x", "read"): 1024, ("bytes", "read"): 256, ("y", "write"): 1024}


@pytest.mark.parametrize("os_threads", [1, 2, 4])
def test_of_blocks_that_fail_the_first_is_named(os_threads: int) -> None:
    with pytest.raises(KernelError) as caught:
        launch("all_fail", os_threads=os_threads)
    assert (caught.value.kind, caught.value.block) == ("uncounted", (0, 0, 0))


def test_a_block_that_waits_for_one_that_failed_is_stopped() -> None:
    with pytest.raises(KernelError) as caught:
        launch("waits_for_a_later_block", checks=False, os_threads=2, limit_s=0)
    assert (caught.value.kind, caught.value.block, caught.value.thread) == ("trap", (1, 0, 0), 37)


PAGE = mmap.PAGESIZE


def cut_short(path: Path) -> np.ndarray:
    """4 * THREADS numbers on the last page of a mapped file, which is cut off the file then."""
    path.write_bytes(bytes(2 * PAGE))
    mapped = np.memmap(path, np.float32, "r+")
    os.truncate(path, PAGE)
    return mapped[-4 * THREADS :]


@pytest.mark.parametrize("os_threads", [1, 2])
def test_memory_of_a_file_that_was_cut_short(os_threads: int, tmp_path: Path) -> None:
    """Read by the kernel, copied for it, or written back: an error with a name, no bus error."""
    backend = HostBackend(os_threads=os_threads)
    good = np.ones(4 * THREADS, np.float32)
    some_bytes = from_numpy("bytes", np.ones(4 * THREADS, np.uint8), "r")

    def caught(entry: str, x: np.ndarray, y: np.ndarray, n: int) -> KernelError:
        numbers = (np.int64(n), np.int32(WHICH.index(entry)))
        args = [from_numpy("x", x, "r"), from_numpy("y", y, "w"), some_bytes, *numbers]
        with pytest.raises(KernelError, match="mapped file that was cut short") as error:
            backend.launch(KERNEL, (4, 1, 1), 1024, args)
        assert (error.value.kernel, error.value.kind) == ("hostile", "gone")
        return error.value

    lost = cut_short(tmp_path / "x")
    error = caught("mapped", good, good.copy(), lost.ctypes.data)
    assert (error.tensor, error.block, error.thread) == (None, (1, 0, 0), 37)
    error = caught("good", lost, good.copy(), 0)
    assert (error.tensor, error.index, error.block) == ("x", (0,), None)
    error = caught("good", good, lost, 0)
    assert (error.tensor, error.block) == ("y", None)
    assert error.index is not None
    launch("good", os_threads=os_threads)


def test_other_objects_may_be_damaged(tmp_path: Path) -> None:
    """A launch reads nothing of a loaded library whose file has been emptied since."""
    code = (
        "import ctypes, os, sys\n"
        "from tests.host_backend.test_host_hostile import launch\n"
        "launch('good')\n"
        "kept = ctypes.CDLL(sys.argv[1])\n"
        "os.truncate(sys.argv[1], 0)\n"
        "try:\n"
        "    launch('endless', os_threads=2, limit_s=0.3)\n"
        "except RuntimeError as error:\n"
        "    print(error, flush=True)\n"
        "os._exit(0)\n"  # the system would run the library's own end
    )
    library = tmp_path / "other.so"
    command = find_compiler(os.environ.get("CXX")).command
    subprocess.run(
        [*command, "-x", "c++", "-shared", "-fPIC", "-o", library, "-"],
        input=b'extern "C" int f() { return 1; }',
        check=True,
    )
    done = subprocess.run(
        [sys.executable, "-c", code, library], capture_output=True, encoding="utf-8", check=False, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "endless, block (1, 0, 0), thread 37" in done.stdout


@pytest.mark.parametrize(
    ("declared", "inside", "name"),
    [
        ("__device__ float table[64];", "table[threadIdx.x] = 1;", r"table \(256 bytes\)"),
        ("static int calls = 0;", "calls += 1;", r"calls \(4 bytes\)"),
        ("", "static float kept[2]; kept[ME & 1] = y[0];", r"kept \(8 bytes\)"),
        ("thread_local long mine = 3;", "mine += n;", r"mine \(8 bytes\)"),
        ("namespace a { int deep[3]; }", "a::deep[n % 3] = 1;", r"deep \(12 bytes\)"),
    ],
)
def test_variables_outside_of_tensors_do_not_compile(declared: str, inside: str, name: str) -> None:
    """Their bytes would not be counted. Constants are no memory of a kernel's."""
    head, _, _ = SOURCE.partition("ENTRY(good)")
    body = f"static const float numbers[4] = {{1, 2, 3, 4}};\n{declared}\n"
    body += f'extern "C" __global__ void k({PARAMETERS}) {{ {inside} st_global(y + ME, numbers[n & 3]); }}\n'
    with pytest.raises(HostCompileError, match=f"k: {name}: variables outside .* not be counted"):
        load_kernel(Kernel(head + body, "k", (), THREADS))


def test_what_a_compiler_keeps_for_exceptions_is_no_variable_of_the_kernel() -> None:
    """g++ keeps ``DW.ref.__gxx_personality_v0`` where something is to be cleaned up."""
    head, _, _ = SOURCE.partition("ENTRY(good)")
    clean = "struct Last { float* y; __device__ ~Last() { st_global(y + ME, 1.0f); } } last{y};"
    body = f'extern "C" __global__ void k({PARAMETERS}) {{ {clean} block_sync(); }}\n'
    load_kernel(Kernel(head + body, "k", (), THREADS))


def test_a_loop_that_comes_to_barriers_has_time() -> None:
    started = time.monotonic()
    launch("works_long", checks=False, os_threads=1, limit_s=0.2)
    assert time.monotonic() - started > 0.2


def test_the_limit_can_be_set_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRO_HOST_LIMIT_S", "0.2")
    with pytest.raises(KernelError, match=r"for 0\.2 s .*REPRO_HOST_LIMIT_S"):
        launch("endless", os_threads=1)
    for text in ("", "soon", "-1", "nan", "inf"):
        monkeypatch.setenv("REPRO_HOST_LIMIT_S", text)
        with pytest.raises(ValueError, match="REPRO_HOST_LIMIT_S"):
            HostBackend()
    for limit in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="limit_s"):
            HostBackend(limit_s=limit)


@pytest.mark.parametrize("os_threads", [1, 2])
def test_an_interrupt_ends_a_kernel(os_threads: int) -> None:
    pid = os.getpid()
    # A shell's background jobs ignore Ctrl-C, and Python leaves that as it is.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.3, lambda: os.kill(pid, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            launch("endless", os_threads=os_threads, limit_s=60)
    finally:
        signal.signal(signal.SIGINT, before)
    launch("good")


def test_an_interrupt_that_the_program_takes_itself_is_an_error_of_the_launch() -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        pid = os.getpid()
        threading.Timer(0.3, lambda: os.kill(pid, signal.SIGINT)).start()
        with pytest.raises(KernelError, match="stopped by an interrupt"):
            launch("endless", os_threads=1, limit_s=60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [1]


def test_what_the_process_does_with_signals_is_as_before(tmp_path: Path) -> None:
    """A fault outside a kernel, during a launch or after it, goes where it went before."""
    code = (
        "import ctypes, faulthandler, signal, sys, threading\n"
        "faulthandler.enable()\n"
        "from tests.host_backend.test_host_hostile import launch\n"
        "launch('good')\n"
        "if sys.argv[1] == 'during':\n"
        "    t = threading.Timer(0.3, lambda: ctypes.string_at(8)); t.start()\n"
        "    launch('endless', os_threads=1, limit_s=5)\n"
        "ctypes.string_at(8)\n"
    )
    for when in ("after", "during"):
        done = subprocess.run(
            [sys.executable, "-c", code, when], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60
        )
        assert done.returncode == -signal.SIGSEGV, done.stderr
        assert "Segmentation fault" in done.stderr


def test_a_forked_process_can_launch(tmp_path: Path) -> None:
    launch("good")
    pid = os.fork()
    if pid == 0:
        try:
            launch("endless", os_threads=1, limit_s=0.3)
        except KernelError as error:
            os._exit(0 if error.kind == "endless" else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
