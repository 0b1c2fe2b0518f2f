"""Compilers and folders as people have them: any path, any $CXX, any state of the disk."""

from __future__ import annotations

import ast
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from analysis import native
from kernels.host import HostCompileError, compiler
from repro import doctor
from repro.attention import launcher
from tests.support.attention_support import BOUNDS

ROOT = Path(__file__).resolve().parents[2]
TEXT = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
GXX = shutil.which("g++")

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")


def answer(text: str = TEXT) -> int:
    built = compiler.build(text, compiler.KERNEL_FLAGS, "probe", "")
    return int(compiler.load(built).answer())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    compiler.runtime_library()  # from the usual cache: it takes seconds to build
    chosen = tmp_path / "cache"
    monkeypatch.setenv("REPRO_CACHE_DIR", str(chosen))
    return chosen


@pytest.mark.parametrize("name", ['a "quoted" name', "it's", "a b", "$HOME", "größe", "a\\b", "#%"])
def test_a_cache_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("REPRO_CACHE_DIR", str(tmp_path / name))
    assert answer() == 42


KERNEL = """
import numpy as np
from kernels.host import HostBackend
from kernels.host import compiler
from kernels.launch import Kernel, from_numpy
out = np.zeros(32, np.float32)
source = '#include "device.cuh"\\nextern "C" __global__ void one(Tensor1<float> out) {'
source += ' st_global(out.data + threadIdx.x, 1.f); }\\n'
HostBackend().launch(Kernel(source, "one", (), 32), (1, 1, 1), 0, [from_numpy("out", out, "w")])
assert out.tolist() == [1] * 32
print(compiler.HOST_DIR)
"""


def test_a_checkout_in_any_folder(tmp_path: Path, folder: Path) -> None:
    place = tmp_path / "a \"b' c $d größe"
    for package in ("analysis", "kernels"):
        shutil.copytree(ROOT / package, place / package, ignore=shutil.ignore_patterns("__pyc*"))
    runtime = Path(compiler.runtime_library()._name).parent  # takes seconds to build
    shutil.copytree(runtime, folder / "host" / runtime.name)
    done = subprocess.run([sys.executable, "-c", KERNEL], cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == place / "kernels" / "host"


@pytest.mark.parametrize("chosen", ["", " ", "\t"])
def test_an_empty_choice_is_none(chosen: str) -> None:
    assert compiler.find_compiler(chosen).command[0] in compiler.CANDIDATES


def test_a_compiler_in_a_folder_with_spaces_or_with_arguments(tmp_path: Path) -> None:
    place = tmp_path / "my tools"
    place.mkdir()
    (place / "g++").symlink_to(str(GXX))
    for chosen, command in (
        (f"{place}/g++", (f"{place}/g++",)),
        (f"'{place}/g++' -O1", (f"{place}/g++", "-O1")),
        ("g++ -O1", ("g++", "-O1")),
        (os.path.relpath(place / "g++"), (f"{place}/g++",)),
    ):
        assert compiler.find_compiler(chosen).command == command
    with pytest.raises(HostCompileError, match="no such compiler"):
        compiler.find_compiler("g++ 'unclosed")


def test_a_library_without_what_it_needs_is_one_clear_error(monkeypatch) -> None:
    """What a C compiler makes of C++: nothing in it says which library holds the rest."""
    text = TEXT + "extern int elsewhere(); int (*volatile needed)() = elsewhere;\n"
    monkeypatch.setenv("CXX", "g++")
    said = r"what g\+\+ compiled cannot be loaded: .*elsewhere.* set CXX to a C\+\+ compiler"
    with pytest.raises(HostCompileError, match=said):
        answer(text)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_c_compiler_is_named_in_a_new_process() -> None:
    code = (
        "from kernels.host import compiler\n"
        "text = 'extern \"C\" int thrower() { throw 1; }\\n'\n"
        "compiler.load(compiler.build(text, compiler.KERNEL_FLAGS, 'probe', ''))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "CXX": "gcc"},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert "what gcc compiled cannot be loaded" in last, done.stderr
    assert "set CXX to a C++ compiler" in last


def test_the_systems_temporary_folder_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere/at/all")
    assert answer() == 42


def test_a_compiler_that_says_nothing_says_its_status(tmp_path: Path, monkeypatch) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexit 7\n")
    silent.chmod(0o755)
    monkeypatch.setenv("CXX", str(silent))
    with pytest.raises(HostCompileError, match=r"failed:\nexit status 7"):
        answer()


def test_a_message_that_is_not_utf8_is_shown(tmp_path: Path, monkeypatch) -> None:
    odd = tmp_path / "odd"
    odd.write_bytes(b"#!/bin/sh\nprintf 'schlie\\337end\\n' >&2; exit 1\n")
    odd.chmod(0o755)
    monkeypatch.setenv("CXX", str(odd))
    with pytest.raises(HostCompileError, match="schlie\ufffdend"):
        answer()


def test_doctor_tries_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = doctor.compiler()
    assert not found.ok
    assert found.detail == "CXX=no-such-compiler: no such compiler"
    monkeypatch.setenv("CXX", "")
    assert doctor.compiler().ok


def test_a_c_compiler_that_does_not_know_its_machine_compiles_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So do some for Apple silicon. What is compiled without the flag counts the same."""
    shy = tmp_path / "shy-cc"
    shy.write_text(
        '#!/bin/sh\ncase " $* " in *" -march=native "*) exit 1 ;; esac\n'
        f'echo asked >> {tmp_path}/calls\nexec {shutil.which("gcc")} "$@"\n'
    )
    shy.chmod(0o755)
    source = tmp_path / "seven.c"
    source.write_text("int seven(void) { return 7; }\n")
    monkeypatch.setenv("CC", str(shy))
    built = native.library(source)
    assert built is not None
    assert built.seven() == 7
    assert (tmp_path / "calls").read_text() == "asked\n"


@pytest.mark.thorough
@pytest.mark.skipif(platform.machine() != "x86_64", reason="about processors of this family")
def test_a_processor_without_avx2_gives_right_results_and_the_same_bytes(tmp_path: Path) -> None:
    """Nor has it instructions for fp16: both are emulated."""
    plain = tmp_path / "plain-g++"
    plain.write_text(
        '#!/bin/sh\nfor a; do shift; [ "$a" = -march=native ] && a=-march=x86-64\n'
        f'set -- "$@" "$a"; done\nexec {GXX} "$@"\n'
    )
    plain.chmod(0o755)
    code = (
        "import torch, repro\n"
        "from repro.attention import launcher\n"
        "from repro.attention.reference import attention_reference, max_error\n"
        "x = torch.randn(4, 1, 2, 80, 64, generator=torch.Generator().manual_seed(0)).half()\n"
        "q, k, v = (t.requires_grad_() for t in x[:3])\n"
        "out = repro.flash_attention(q, k, v, causal=True)\n"
        "out.backward(x[3])\n"
        "exact = attention_reference(*x[:3], x[3], causal=True)\n"
        "got = {'out': out.detach(), 'dq': q.grad, 'dk': k.grad, 'dv': v.grad}\n"
        "print({n: max_error(t, getattr(exact, n)) for n, t in got.items()})\n"
        "print(launcher.backend_of(q.device).traffic)\n"
    )
    said = []
    for chosen in (str(GXX), str(plain)):
        environment = os.environ | {"CXX": chosen, launcher.CHECKS_VARIABLE: "1"}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        said.append(done.stdout.splitlines())
    (native, bytes_native), (emulated, bytes_emulated) = said
    assert bytes_native == bytes_emulated
    assert "flash_forward" in bytes_native
    for errors in map(ast.literal_eval, (native, emulated)):
        assert errors["out"] <= BOUNDS[torch.float16][0]
        assert max(errors[name] for name in ("dq", "dk", "dv")) <= BOUNDS[torch.float16][1]
