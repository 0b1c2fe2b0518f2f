"""NVRTC without a driver: what a compiled kernel reports, its cache, its errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kernels.compile import CompileError, compile_cubin, nvrtc_version, parse_ptxas
from kernels.launch import Kernel

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and the NVRTC wheel")

VOCABULARY = (Path(__file__).resolve().parents[1] / "vocabulary.cu").read_text()
ENTRIES = ("convert", "multiply", "matrices", "lanes", "functions", "widths")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
@pytest.mark.parametrize("dtype", [0, 1])
def test_vocabulary_compiles_without_cuda_headers(dtype: int, arch: str) -> None:
    compiled = {
        entry: compile_cubin(Kernel(VOCABULARY, entry, (("DTYPE", dtype),), 64), arch)
        for entry in (ENTRIES if arch == "sm_80" else ENTRIES[:1])
    }
    for entry, facts in compiled.items():
        assert facts.cubin[:4] == b"\x7fELF"
        assert (facts.entry, facts.arch) == (entry, arch)
        assert 0 < facts.registers <= 128
        assert facts.spill_bytes == 0
        assert facts.shared_bytes == 0  # all of it is dynamic


def test_the_second_compile_comes_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPRO_CACHE_DIR", str(tmp_path))
    text = 'extern "C" __global__ void nothing(float* p) { p[threadIdx.x] = SCALE; }\n'
    first = compile_cubin(Kernel(text, "nothing", (("SCALE", 2),), 32))
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert len(files) == 2
    assert compile_cubin(Kernel(text, "nothing", (("SCALE", 2),), 32)) == first
    assert {path: path.stat().st_mtime_ns for path in files} == files
    other = compile_cubin(Kernel(text, "nothing", (("SCALE", 3),), 32))
    assert other.cubin != first.cubin
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 4


def test_spills_and_shared_memory_are_reported() -> None:
    text = """
    extern "C" __global__ void __launch_bounds__(1024, 2) crowded(float* p) {
        __shared__ float s[256];
        float x[96];
        for (int i = 0; i < 96; ++i) x[i] = p[i * 1024 + threadIdx.x];
        s[threadIdx.x % 256] = x[5];
        __syncthreads();
        for (int k = 0; k < 9; ++k)
            #pragma unroll
            for (int i = 0; i < 96; ++i) x[i] = x[i] * s[(k + i) % 256] + x[(i * 7 + 1) % 96];
        for (int i = 0; i < 96; ++i) p[i * 1024 + threadIdx.x] = x[i];
    }
    """
    facts = compile_cubin(Kernel(text, "crowded", (), 1024))
    assert facts.registers <= 32
    assert facts.shared_bytes == 1024
    assert facts.spill_bytes > 0


def test_errors_name_the_source() -> None:
    with pytest.raises(CompileError, match=r'broken.cu\(2\): error: identifier "nonsense"'):
        compile_cubin(
            Kernel('extern "C" __global__ void broken() {\nnonsense; }\n', "broken", (), 32)
        )
    with pytest.raises(CompileError, match="no entry point 'absent'"):
        compile_cubin(Kernel('extern "C" __global__ void present() {}\n\n', "absent", (), 32))


def test_the_log_is_read_for_the_entry_that_is_asked_for() -> None:
    log = """
ptxas info    : Compiling entry function 'one' for 'sm_80'
ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 2048 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'two' for 'sm_80'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, 400 bytes cmem[0]
"""
    one, two = (parse_ptxas(log, entry, "sm_80") for entry in ("one", "two"))
    assert (one["registers"], one["shared_bytes"], one["stack_bytes"], one["spill_bytes"]) == (
        40, 2048, 16, 12,
    )  # fmt: skip
    assert (two["registers"], two["shared_bytes"], two["spill_bytes"]) == (12, 0, 0)


def test_without_nvrtc_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert int(nvrtc_version().split(".")[0]) >= 12
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(
        RuntimeError, match=r"pip install cuda-core cuda-bindings nvidia-cuda-nvrtc"
    ):
        nvrtc_version()
