"""NVRTC without a driver: what a compiled kernel reports, its cache, its errors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.building import nvrtc, second_nvrtc
from kernels.building.compile import CompileError, compile_cubin, nvrtc_version, parse_ptxas
from kernels.launch import Kernel

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and the NVRTC wheel")

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = (ROOT / "tests" / "support" / "vocabulary.cu").read_text()
ENTRIES = ("convert", "multiply", "matrices", "lanes", "functions", "widths")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_vocabulary_compiles_without_cuda_headers(arch: str) -> None:
    entries = [(entry, 0) for entry in ENTRIES] + [("convert", 1)]
    for entry, dtype in entries if arch == "sm_80" else entries[-1:]:
        facts = compile_cubin(Kernel(VOCABULARY, entry, (("DTYPE", dtype),), 64), arch)
        assert facts.cubin[:4] == b"\x7fELF"
        assert (facts.entry, facts.arch) == (entry, arch)
        assert 0 < facts.registers <= 128
        assert facts.spill_bytes == 0
        assert facts.shared_bytes == 0  # all of it is dynamic


def test_the_second_compile_comes_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        compile_cubin(Kernel('extern "C" __global__ void broken() {\nnonsense; }\n', "broken", (), 32))
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
    assert (one["registers"], one["shared_bytes"], one["stack_bytes"], one["spill_bytes"]) == (40, 2048, 16, 12)
    assert (two["registers"], two["shared_bytes"], two["spill_bytes"]) == (12, 0, 0)


def test_without_nvrtc_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert int(nvrtc_version().split(".")[0]) >= 12
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(RuntimeError, match=r"pip install cuda-core cuda-bindings nvidia-cuda-nvrtc"):
        nvrtc_version()


def _version_in_a_new_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/maps")
def test_the_library_named_by_the_environment_is_the_one_that_compiles(tmp_path: Path) -> None:
    from cuda.pathfinder import load_nvidia_dynamic_lib

    usual = Path(load_nvidia_dynamic_lib("nvrtc").abs_path).resolve()
    below = tmp_path / "nvidia" / "lib"
    below.mkdir(parents=True)
    for file in usual.parent.glob("libnvrtc*"):
        shutil.copy(file, below / file.name)
    named = below / usual.name
    code = (
        "from kernels.building.compile import compile_cubin\n"
        "from kernels.launch import Kernel\n"
        "text = 'extern \"C\" __global__ void one(float* p) { p[0] = 1; }\\n'\n"
        "assert compile_cubin(Kernel(text, 'one', (), 32), 'sm_80').registers\n"
        "maps = open('/proc/self/maps').read()\n"
        "print({line.split(None, 5)[5] for line in maps.splitlines() if 'libnvrtc.so' in line})\n"
    )
    for choice in (tmp_path, named):
        cache = tmp_path / f"cache-{choice.name}"
        done = _version_in_a_new_process(code, REPRO_NVRTC=str(choice), REPRO_CACHE_DIR=str(cache))
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str({str(named)})


def test_a_wrong_choice_of_library_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "libnvrtc.so.13").write_bytes(b"not a library")
    code = "from kernels.building.compile import nvrtc_version\nprint(nvrtc_version())"
    for choice, said in (
        (tmp_path / "absent", "neither a file nor a folder with libnvrtc.so.*"),
        (tmp_path, "cannot be loaded"),
    ):
        done = _version_in_a_new_process(code, REPRO_NVRTC=str(choice))
        last = done.stderr.splitlines()[-1]
        assert last.startswith(f"RuntimeError: REPRO_NVRTC={choice}"), done.stderr
        assert said in last


def test_a_second_library_is_found_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = nvrtc_version()
    monkeypatch.delenv(nvrtc.SECOND, raising=False)
    assert nvrtc.versions() == (here,)
    nothing = Kernel("\n", "nothing", (), 32)
    with pytest.raises(ValueError, match=rf"NVRTC 1.2 is not at hand, only {here}: {nvrtc.SECOND}"):
        compile_cubin(nothing, version="1.2")
    monkeypatch.setenv(nvrtc.SECOND, str(tmp_path))
    with pytest.raises(RuntimeError, match=f"{nvrtc.SECOND}=.*neither a file nor a folder"):
        nvrtc.versions()
    (tmp_path / "libnvrtc.so.13").touch()
    with pytest.raises(RuntimeError, match=r"0 files libnvrtc-builtins.so.\* beside it, not one"):
        nvrtc.versions()
    builtins = tmp_path / "libnvrtc-builtins.so.1.2"
    builtins.touch()
    assert nvrtc.versions() == (here, "1.2")
    builtins.rename(tmp_path / f"libnvrtc-builtins.so.{here}")
    assert nvrtc.versions() == (here,)  # the same one again


def test_the_second_library_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own. Where there is one library only, a copy of it plays the second."""
    here = nvrtc_version()
    version = nvrtc.second_version()
    if version in (None, here):
        from cuda.pathfinder import load_nvidia_dynamic_lib

        version = "0.1"
        path = nvrtc.library() or Path(load_nvidia_dynamic_lib("nvrtc").abs_path).resolve()
        monkeypatch.setattr(nvrtc, "second_version", lambda: version)
        monkeypatch.setenv(nvrtc.SECOND, str(path))
    monkeypatch.setenv("REPRO_CACHE_DIR", str(tmp_path / "cache"))
    text = """extern "C" __global__ void v(int* p) {
        *p = 100 * __CUDACC_VER_MAJOR__ + __CUDACC_VER_MINOR__;
    }
    """
    kernel = Kernel(text, "v", (), 32)
    mine, other = compile_cubin(kernel), compile_cubin(kernel, version=version)
    assert other.cubin[:4] == b"\x7fELF"
    assert (mine.cubin != other.cubin) == (version != "0.1")  # the source names the compiler
    assert len(list(tmp_path.rglob("*.cubin"))) == 2
    # The second time both come from disk, without that process.
    monkeypatch.setattr(nvrtc, "second_version", lambda: None)
    assert compile_cubin(kernel, version=version) == other


def test_workers_that_compile_with_a_second_library_come_to_their_end(tmp_path: Path) -> None:
    """A process that multiprocessing has started must not wait for the one that compiles for it."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    program = tmp_path / "workers.py"
    program.write_text(
        """
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from kernels.building import second_nvrtc
from kernels.building.compile import CompileError
from kernels.launch import Kernel


def work(text):
    compiler = second_nvrtc.compiler(Path(sys.argv[1]))
    try:
        return compiler.compile(Kernel(text, "one", (), 32), "sm_80")[0][:4]
    except CompileError as error:
        return str(error)


if __name__ == "__main__":
    good = 'extern "C" __global__ void one(float* p) { p[0] = 1; }\\n'
    for _ in range(2):
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            assert list(pool.map(work, [good] * 4)) == [b"\\x7fELF"] * 4
    print(work(good.replace("1;", "nonsense;")))
"""
    )
    library = load_nvidia_dynamic_lib("nvrtc").abs_path
    done = subprocess.run(
        [sys.executable, str(program), str(library)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert 'identifier "nonsense" is undefined' in done.stdout


def test_a_second_compiler_that_has_ended_is_an_error(tmp_path: Path) -> None:
    """As one that cannot load its library."""
    (tmp_path / "libnvrtc.so.13").write_bytes(b"not a library")
    compiler = second_nvrtc.Compiler(tmp_path)
    with pytest.raises(RuntimeError, match=f"REPRO_NVRTC={tmp_path}.* cannot be loaded"):
        compiler.compile(Kernel("\n", "nothing", (), 32), "sm_80")
    compiler.close()
    with pytest.raises(RuntimeError, match="has ended, status 0"):
        compiler.compile(Kernel("\n", "nothing", (), 32), "sm_80")
