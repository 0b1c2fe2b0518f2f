"""A process that forks while another of its threads runs a kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.host import HostCompileError, compiler

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, sys, threading, time
import numpy as np
from kernels.host import HostBackend
from kernels.launch import Kernel, from_numpy

source = '''#include "device.cuh"
extern "C" __global__ void work(Tensor1<float> out, int rounds) {
    float sum = 0;
    for (int i = 0; i < rounds; ++i) sum = sum * 0.5f + 1.0f;
    st_global(out.data + blockIdx.x * 32 + threadIdx.x, rounds ? sum : 0.0f);
}
'''
kernel = Kernel(source, "work", (), 32)

def run(rounds):
    out = np.zeros(64 * 32, np.float32)
    HostBackend(os_threads=2).launch(
        kernel, (64, 1, 1), 0, [from_numpy("out", out, "w"), np.int32(rounds)])
    return out

run(1)
stop = threading.Event()
def others():
    while not stop.is_set():
        run(3000)
threads = [threading.Thread(target=others) for _ in range(2)]
for thread in threads: thread.start()
for _ in range(8):
    child = os.fork()
    if child == 0:
        os._exit(0 if (run(1) == 1).all() and (run(2) == 1.5).all() else 3)
    assert os.waitpid(child, 0)[1] == 0
    assert (run(2) == 1.5).all()
stop.set()
for thread in threads: thread.join()
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_neither_side_hangs_or_computes_with_the_others_workers() -> None:
    try:
        compiler.find_compiler(os.environ.get("CXX"))
    except HostCompileError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
