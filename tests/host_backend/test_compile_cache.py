"""What the key of a cached kernel depends on: all that shapes it, and nothing else."""

from __future__ import annotations

import re

import pytest

from kernels.building import cache
from kernels.launch import INCLUDE_DIR, KERNELS_DIR

SOURCES = sorted(path.relative_to(KERNELS_DIR).as_posix() for path in KERNELS_DIR.rglob("*.cu"))


@pytest.mark.parametrize("source", SOURCES)
def test_the_headers_of_a_source_are_those_that_the_compiler_would_read(source: str) -> None:
    found = set(re.findall(r"^(\w+\.cuh)$", cache.headers((KERNELS_DIR / source).read_text()), re.MULTILINE))
    assert found
    closed = {source: (KERNELS_DIR / source).read_text()}
    closed |= {name: (INCLUDE_DIR / name).read_text() for name in found}
    for name, text in closed.items():
        included = set(re.findall(r'#include "([\w.]+\.cuh)"', text))
        assert included <= found, name


def test_a_header_counts_where_it_is_included_and_nowhere_else(monkeypatch) -> None:
    hopper, plain = ((KERNELS_DIR / f"flash_forward{x}.cu").read_text() for x in ("_sm90", ""))
    before = cache.headers(hopper), cache.headers(plain)
    texts = {path: path.read_text() for path in INCLUDE_DIR.glob("*.cuh")}
    changed = INCLUDE_DIR / "wgmma_ptx.cuh"
    monkeypatch.setattr(cache, "_text", lambda p: texts[p])
    monkeypatch.setattr(
        cache, "read_all", lambda paths: "".join(f"{texts[p]}{'@changed@' * (p == changed)}" for p in sorted(paths))
    )
    after = cache.headers(hopper), cache.headers(plain)
    assert "@changed@" in after[0]
    assert "@changed@" not in after[1]
    assert before[0] != before[1]


def test_a_kernel_compiled_in_one_checkout_serves_another(tmp_path, monkeypatch) -> None:
    """The folder of the sources is no part of the key; what they hold is."""
    from kernels.host import compiler

    try:
        compiler.find_compiler()
    except compiler.HostCompileError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("REPRO_CACHE_DIR", str(tmp_path / "cache"))
    text = 'extern "C" int answer() { return 42; }\n'
    built = compiler.build(text, compiler.KERNEL_FLAGS, "probe", cache.headers(text))
    monkeypatch.setattr(compiler, "SEARCH", ("-I/nowhere",))
    assert compiler.build(text, compiler.KERNEL_FLAGS, "probe", cache.headers(text)) == built
    assert str(KERNELS_DIR) not in " ".join(compiler.KERNEL_FLAGS)
